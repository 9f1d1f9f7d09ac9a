"""The contents of a Flight Recorder: one form for all versions of torch, merged from the recorders of a rank. No I/O.

The data is in columns instead of an object per entry: a thousand ranks have two million entries, most of which are
accessed by number only. Repeated data (operations, call sites) is stored once per dump and referenced by index.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.records.hang import Frame

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
"""Name and description, as in torch. The name is unique in the job."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """The request: equal on all ranks of a collective, except for what differs on the root."""

    name: str
    """``all_reduce``, ``all_gather`` …: one name for all spellings of torch; a coalesced call joins several with ``+``.
    """
    backend: str = ""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class P2P:
    """A send or recv that has not ended; ranks are positions in the group."""

    source: int
    target: int
    sending: bool
    sequence: int
    created_ns: int
    operation: Operation


@dataclass(frozen=True, kw_only=True)
class Status:
    """A group's counters as kept by torch; they include sends and recvs if a group has both."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The collectives of one group on one rank, by rising sequence number; sends and recvs are separate."""

    sequences: Sequence[int] = field(default_factory=lambda: array("q"))
    operations: Sequence[int] = field(default_factory=lambda: array("l"))
    """Indexes into ``Dump.operations``."""
    sites: Sequence[int] = field(default_factory=lambda: array("l"))
    """Indexes into ``Dump.sites``; -1: unknown."""
    states: Sequence[int] = field(default_factory=lambda: array("b"))
    created_ns: Sequence[int] = field(default_factory=lambda: array("q"))
    p2p: tuple[P2P, ...] = ()
    """Those that have not ended, in order."""
    mixed: bool = False
    """Whether sends or recvs occurred in this group: its ``Status`` then counts both."""
    status: Status | None = None


@dataclass(frozen=True, kw_only=True)
class Dump:
    rank: int
    source: str = ""
    """Where the dump came from, for people."""
    version: str = ""
    groups: Mapping[GroupKey, Trace] = field(default_factory=dict)
    members: Mapping[GroupKey, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of the groups for which the dump lists them."""
    world_hint: tuple[int, ...] = ()
    """Ranks that exist, from a group without a name (gloo)."""
    operations: tuple[Operation, ...] = ()
    sites: tuple[tuple[Frame, ...], ...] = ()
    """Call sites: stacks, innermost frame first."""
    complete: bool = True
    """Whether everything missing here was never called: nothing was overwritten or left out."""
    active_only: bool = False
    """Whether the dump has only entries that had not ended."""
    newest_ns: int = 0
    """The latest time of any entry, on the wall clock."""


# -- recorders of one rank --------------------------------------------------------------------------------------------
# torch has a recorder per backend: gloo's, NCCL's and, from 2.15 on, one for each backend that records through a hook
# (``nccl2``). A job with CPU offload, or with a gloo group in addition to NCCL, writes to two of them. ``combined``
# puts their answers into one document, and ``merged`` makes one ``Dump`` of it:
#
#     {"recorders": [{…NCCL's dump…}, {…gloo's dump…}]}
#
# A process group may have both backends (``cpu:gloo,cuda:nccl``), each of which numbers its collectives from one. Then
# gloo's collectives become a separate group, ``default_pg (gloo)``.

RECORDERS = "recorders"
HOST_BACKENDS = ("gloo", "mpi", "ucc", "")
"""Backends whose collectives run on the host; the name is empty in dumps of old versions."""
OF_GLOO = " (gloo)"

_CALLS = re.compile(rb'"entries"\s*:')
_NO_GROUPS = re.compile(rb'"pg_config"\s*:\s*\{\s*\}')


def combined(*answers: bytes) -> bytes:
    """One document from the answers of a rank's recorders, device recorders first; empty without answers.

    An unused recorder is left out. A recorder with groups but no calls yet is kept if there is another, because it
    gives the groups the same names on all ranks.
    """
    given = [answer for answer in answers if answer]
    if not any(map(_has_calls, given)):
        return next((answer for answer in given if not _NO_GROUPS.search(answer)), given[0] if given else b"")
    used = [answer for answer in given if _has_calls(answer) or not _NO_GROUPS.search(answer)]
    while used and not _has_calls(used[-1]):
        used.pop()  # gloo's, which has a group in most NCCL jobs but names no groups
    return used[0] if len(used) == 1 else b'{"' + RECORDERS.encode() + b'":[' + b",".join(used) + b"]}"


def _has_calls(answer: bytes) -> bool:
    return _CALLS.search(answer) is not None


def merged(parts: Sequence[Dump]) -> Dump:
    """Merge the dumps of one rank."""
    first, *others = sorted(parts, key=_on_host)
    for other in others:
        first = _merged_pair(first, other)
    return first


def with_same_groups(dumps: Sequence[Dump]) -> list[Dump]:
    """Give gloo's half of a group the same name in all dumps, also where NCCL's recorder is missing."""
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
    """Mark those of these groups that belong to gloo in their names."""
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
# Normalize torch's spellings of operations, peers and lists of ranks.

MAX_RANK = 1 << 17
"""No job is that large. Ranks have no gaps, so a claimed rank of a billion would mean a billion ranks to examine."""

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
    """For a send or recv: sender and receiver as positions in the group, and whether it is the send."""
    name = wording.rpartition(":")[2]
    if sent := _SEND.fullmatch(name):
        return int(sent[1]), int(sent[2]), True
    if received := _RECV.fullmatch(name):
        return int(received[2]), int(received[1]), False
    return None


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Parse ``"[0, 1, 2]"`` or a list; empty for anything else."""
    if isinstance(value, str):
        value = [int(number) for number in _NUMBER.findall(value[: 16 * MAX_RANK])]
    if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
        return ()
    ranks = [rank for rank in value if type(rank) is int and 0 <= rank < MAX_RANK]
    return tuple(dict.fromkeys(ranks)) if len(ranks) == len(value) else ()


def rank_or(number: int, default: int) -> int:
    return number if 0 <= number < MAX_RANK else default
