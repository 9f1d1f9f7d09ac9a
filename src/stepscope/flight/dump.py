"""The contents of a Flight Recorder: one form for all versions of torch, merged from the recorders of a rank.

What one rank's Flight Recorder held, in a form that all versions of its dumps are brought into.  No I/O.

Columns instead of an object per entry: a thousand ranks have two million entries, and most of them are looked at by
number only.  What repeats (operations, call sites) is kept once per dump and referred to by index.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.records.finding import Frame

__all__ = [
    "DONE",
    "HOST_BACKENDS",
    "MAX_RANK",
    "OF_GLOO",
    "P2P",
    "RECORDERS",
    "SCHEDULED",
    "STARTED",
    "Dump",
    "GroupKey",
    "Operation",
    "Status",
    "Trace",
    "combined",
    "merged",
    "operation_name",
    "parse_ranks",
    "peers_of",
    "rank_or",
    "with_same_groups",
]


# -- entries ----------------------------------------------------------------------------------------------------------

SCHEDULED = 0
STARTED = 1
DONE = 2

GroupKey = tuple[str, str]
"""Name and description, as torch has them.  The name is unique in the job."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What was asked for: two ranks that mean the same collective have the same, up to what the roots differ in."""

    name: str
    """``all_reduce``, ``all_gather`` …: one for all spellings of torch; several, in a coalesced call, with ``+``."""
    backend: str = ""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class P2P:
    """A send or recv that has not ended; ranks are those within the group."""

    source: int
    target: int
    sending: bool
    sequence: int
    created_ns: int
    operation: Operation


@dataclass(frozen=True, kw_only=True)
class Status:
    """A group's counters as torch kept them; of sends and recvs too, where a group has both."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The collectives of one group on one rank, by rising sequence number; sends and recvs apart."""

    sequences: Sequence[int] = field(default_factory=lambda: array("q"))
    operations: Sequence[int] = field(default_factory=lambda: array("l"))
    """Index into ``Dump.operations``."""
    sites: Sequence[int] = field(default_factory=lambda: array("l"))
    """Index into ``Dump.sites``; -1: not told."""
    states: Sequence[int] = field(default_factory=lambda: array("b"))
    created_ns: Sequence[int] = field(default_factory=lambda: array("q"))
    p2p: tuple[P2P, ...] = ()
    """Those not ended, in order."""
    mixed: bool = False
    """Whether sends or recvs were seen in this group: its ``Status`` then counts both."""
    status: Status | None = None


@dataclass(frozen=True, kw_only=True)
class Dump:
    rank: int
    source: str = ""
    """Where it came from, for people."""
    version: str = ""
    groups: Mapping[GroupKey, Trace] = field(default_factory=dict)
    members: Mapping[GroupKey, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of the groups that the dump names them for."""
    world_hint: tuple[int, ...] = ()
    """Ranks that exist, of a group whose name is not told (gloo)."""
    operations: tuple[Operation, ...] = ()
    sites: tuple[tuple[Frame, ...], ...] = ()
    """Call sites: stacks, innermost frame first."""
    complete: bool = True
    """Whether what is not in here was never called: nothing has been overwritten, nothing left out."""
    active_only: bool = False
    """Whether only what had not ended was dumped."""
    newest_ns: int = 0
    """The latest instant of any entry, of the wall clock."""


# -- combine ----------------------------------------------------------------------------------------------------------
# Several Flight Recorders of one rank as one dump.
#
# Torch has a recorder per backend: gloo's, NCCL's, and from 2.15 on one for each backend that records through a hook
# (``nccl2``).  A job with CPU offload, or with a gloo group beside NCCL, writes into two of them.  ``combined`` puts
# their answers into one document, ``merged`` makes one ``Dump`` of it:
#
#     {"recorders": [{…NCCL's dump…}, {…gloo's dump…}]}
#
# A process group may have both backends (``cpu:gloo,cuda:nccl``), and each numbers its own collectives from one: there
# gloo's collectives become a group of their own, ``default_pg (gloo)``.

RECORDERS = "recorders"
HOST_BACKENDS = ("gloo", "mpi", "ucc", "")
"""Backends whose collectives run on the host; the name is empty in dumps of old versions."""
OF_GLOO = " (gloo)"

_CALLS = re.compile(rb'"entries"\s*:')
_NO_GROUPS = re.compile(rb'"pg_config"\s*:\s*\{\s*\}')


def combined(*answers: bytes) -> bytes:
    """One document for what the recorders of one rank answered, those of devices first; empty where none did.

    A recorder that is not used is left out.  One that has groups and no calls yet is kept beside another: by it the
    groups of all ranks get the same names.
    """
    given = [answer for answer in answers if answer]
    if not any(map(_has_calls, given)):
        return next((answer for answer in given if not _NO_GROUPS.search(answer)), given[0] if given else b"")
    used = [answer for answer in given if _has_calls(answer) or not _NO_GROUPS.search(answer)]
    while used and not _has_calls(used[-1]):
        used.pop()  # gloo's, which has a group in most jobs on NCCL, and whose groups name nothing
    return used[0] if len(used) == 1 else b'{"' + RECORDERS.encode() + b'":[' + b",".join(used) + b"]}"


def _has_calls(answer: bytes) -> bool:
    return _CALLS.search(answer) is not None


def merged(parts: Sequence[Dump]) -> Dump:
    """One dump of those of one rank."""
    first, *others = sorted(parts, key=_on_host)
    for other in others:
        first = _merged_pair(first, other)
    return first


def with_same_groups(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps with gloo's half of a group under the same name everywhere, also where NCCL's recorder is missing."""
    halves = {key for dump in dumps for key in dump.groups if key[1].endswith(OF_GLOO)}
    return [_renamed(dump, {key for key in dump.groups if _of_gloo(key) in halves}) for dump in dumps]


def _merged_pair(first: Dump, other: Dump) -> Dump:
    known = {*first.groups, *first.members}
    if _on_host(other):
        other = _renamed(other, {key for key in other.groups if key in known})
    members = {**other.members, **first.members}
    by_name = {name: ranks for (name, _), ranks in members.items()}
    members |= {key: by_name[key[0]] for key in other.groups if key[0] in by_name}
    shifted = {
        key: replace(
            trace,
            operations=array("l", (number + len(first.operations) for number in trace.operations)),
            sites=array("l", (number if number < 0 else number + len(first.sites) for number in trace.sites)),
        )
        for key, trace in other.groups.items()
    }
    return replace(
        first,
        groups={**shifted, **first.groups},
        members=members,
        world_hint=first.world_hint or other.world_hint,
        operations=first.operations + other.operations,
        sites=first.sites + other.sites,
        complete=first.complete and other.complete,
        active_only=first.active_only or other.active_only,
        newest_ns=max(first.newest_ns, other.newest_ns),
    )


def _renamed(dump: Dump, keys: set[GroupKey]) -> Dump:
    """Those of these groups that are gloo's get a name that says so."""
    names = {key: _of_gloo(key) for key in keys if _backend(dump, dump.groups[key]) in HOST_BACKENDS}
    if not names:
        return dump
    members: Mapping[GroupKey, tuple[int, ...]] = {names.get(key, key): ranks for key, ranks in dump.members.items()}
    return replace(dump, groups={names.get(key, key): trace for key, trace in dump.groups.items()}, members=members)


def _of_gloo(key: GroupKey) -> GroupKey:
    return key[0], f"{key[1] or key[0]}{OF_GLOO}"


def _on_host(dump: Dump) -> bool:
    return all(operation.backend in HOST_BACKENDS for operation in dump.operations) and not dump.members


def _backend(dump: Dump, trace: Trace) -> str:
    numbers = trace.operations
    return dump.operations[numbers[-1]].backend if numbers else trace.p2p[-1].operation.backend if trace.p2p else ""


# -- spelling ---------------------------------------------------------------------------------------------------------
# How torch spells operations, peers and lists of ranks, and one spelling for each.  Pure.

MAX_RANK = 1 << 17
"""No job is that large; ranks have no gaps, so whoever claims one of a billion would have a billion looked for."""

OPERATION_NAMES = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_coalesced": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "all_reduce_barrier": "barrier",
    "allreduce_barrier": "barrier",
}

_SEND = re.compile(r"send (\d{1,8})->(\d{1,8})")
_RECV = re.compile(r"recv (\d{1,8})<-(\d{1,8})")
_NUMBER = re.compile(r"\d{1,9}")


def operation_name(wording: str) -> tuple[str, str]:
    """``nccl:_all_gather_base`` → ``nccl``, ``all_gather``."""
    backend, colon, name = wording.partition(":")
    if not colon:
        backend, name = "", wording
    word = name.split(" ")[0].lower()
    return backend[:32].lower(), OPERATION_NAMES.get(word, word)[:128] or "unknown"


def peers_of(wording: str) -> tuple[int, int, bool] | None:
    """Of a send or recv: the sender, the receiver, both by their place in the group, and whether this is the send."""
    name = wording.rpartition(":")[2]
    if sent := _SEND.fullmatch(name):
        return int(sent[1]), int(sent[2]), True
    if received := _RECV.fullmatch(name):
        return int(received[2]), int(received[1]), False
    return None


def parse_ranks(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"``, or a list of them; nothing for anything else."""
    if isinstance(value, str):
        value = [int(number) for number in _NUMBER.findall(value[: 16 * MAX_RANK])]
    if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
        return ()
    ranks = [rank for rank in value if type(rank) is int and 0 <= rank < MAX_RANK]
    return tuple(dict.fromkeys(ranks)) if len(ranks) == len(value) else ()


def rank_or(number: int, default: int) -> int:
    return number if 0 <= number < MAX_RANK else default
