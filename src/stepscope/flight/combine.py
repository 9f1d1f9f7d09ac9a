"""Several Flight Recorders of one rank as one dump.

Torch has a recorder per backend: gloo's, NCCL's, and from 2.15 on one for each backend that records through a hook
(``nccl2``).  A job with CPU offload, or with a gloo group beside NCCL, writes into two of them.  ``combined`` puts
their answers into one document, ``merged`` makes one ``Dump`` of it:

    {"recorders": [{…NCCL's dump…}, {…gloo's dump…}]}

A process group may have both backends (``cpu:gloo,cuda:nccl``), and each numbers its own collectives from one: there
gloo's collectives become a group of their own, ``default_pg (gloo)``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stepscope.flight.entries import Dump, GroupKey, Trace

__all__ = ["HOST_BACKENDS", "OF_GLOO", "RECORDERS", "combined", "merged", "with_same_groups"]

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
        first = _joined(first, other)
    return first


def with_same_groups(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps with gloo's half of a group under the same name everywhere, also where NCCL's recorder is missing."""
    halves = {key for dump in dumps for key in dump.groups if key[1].endswith(OF_GLOO)}
    return [_renamed(dump, {key for key in dump.groups if _of_gloo(key) in halves}) for dump in dumps]


def _joined(first: Dump, other: Dump) -> Dump:
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
