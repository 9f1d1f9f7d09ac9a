"""What one rank's Flight Recorder held, in a form that all versions of its dumps are brought into.  No I/O.

Columns instead of an object per entry: a thousand ranks have two million entries, and most of them are looked at by
number only.  What repeats (operations, call sites) is kept once per dump and referred to by index.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.records.hang import Frame

__all__ = ["DONE", "P2P", "SCHEDULED", "STARTED", "Dump", "GroupKey", "Operation", "Status", "Trace"]

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
