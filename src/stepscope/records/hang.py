"""A job that stopped: who holds it up, who waits, where each of them is.  What the watchdog writes and reports show.

One file per hang in ``hangs/`` of the run directory, rewritten when something about it changes (the job came back, it
was ended).  ``finding_of`` in ``hangs/`` makes the finding from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.records.decode import decoded, encoded

__all__ = [
    "Culprit",
    "Frame",
    "HangKind",
    "HangPart",
    "HangRecord",
    "RankThere",
    "StackGroup",
    "ThreadStack",
    "WaitingIn",
]

SCHEMA = 1

HangKind = Literal[
    "hang_missing_collective",
    "hang_mismatch",
    "hang_deadlock",
    "hang_input",
    "hang_host",
    "hang_device",
    "hang_unknown",
    "rank_crashed",
    "rank_lost",
]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of Python, as in a traceback."""

    file: str
    line: int
    """0 where it is not known."""
    function: str


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    main: bool
    name: str = ""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """The stacks of processes that are at the same place."""

    ranks: tuple[int, ...]
    threads: tuple[ThreadStack, ...] = ()
    workers_of: bool = False
    """Whether these are not the ranks themselves but their DataLoader workers."""


@dataclass(frozen=True, kw_only=True)
class WaitingIn:
    """The collective a rank waits in."""

    group: str
    """Its name in torch."""
    description: str = ""
    sequence: int | None = None
    op: str = ""
    sizes: str = ""
    """As people write them: ``[512]``, ``[4, 128] [128]``."""
    dtypes: str = ""
    peer: int | None = None
    """Of a send or recv."""


@dataclass(frozen=True, kw_only=True)
class RankThere:
    """What was found about one rank."""

    rank: int
    pid: int
    alive: bool = True
    step: int | None = None
    """The step under way."""
    phase: str = ""
    since_s: float = 0.0
    """For how long nothing has been heard of it."""
    process_state: str = ""
    """The kernel's letter: R, S, D (waits for a disk), T (stopped), Z."""
    cpu_share: float | None = None
    """Of one core, while it was watched."""
    gil_held: bool | None = None
    waiting_in: WaitingIn | None = None
    at: Frame | None = None
    """The innermost line of the user's own code."""
    workers: tuple[dict[str, Any], ...] = ()
    """Child processes that matter: pid, state, what they are and where."""
    host: str = ""
    """Where several hosts were judged together, its own; else empty."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    rank: int
    reason: str
    """A sentence without its full stop, without the rank: ``has not called all_reduce; it sleeps in train.py:41``."""
    at: Frame | None = None


@dataclass(frozen=True, kw_only=True)
class HangPart:
    """What the watchdog of one host made of a standstill that several hosts were then judged together on."""

    host: str
    number: int
    kind: HangKind
    title: str


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    number: int
    """1 for the first of the run on this host."""
    host: str
    kind: HangKind
    title: str
    """One sentence with its full stop: who, what, where."""
    declared_wall_ns: int
    stopped_wall_ns: int
    """When the last rank was heard of."""
    threshold_s: float
    step_s: float | None = None
    """The usual length of a step before."""
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    collective: WaitingIn | None = None
    """What the victims wait in."""
    cycle: tuple[str, ...] = ()
    """Of a deadlock: ``rank 3 waits for rank 1 in tp (all_reduce 4)`` …, closing where it began."""
    evidence: tuple[str, ...] = ()
    """Sentences: what led to the verdict, what speaks against the alternatives."""
    ranks: tuple[RankThere, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    flight: dict[str, Any] = field(default_factory=dict)
    """What the Flight Recorders said, by ``flight/``: the verdict and per group who came how far."""
    over: Literal["recovered", "ended", "aborted"] | None = None
    over_wall_ns: int | None = None
    action: str = ""
    """What ``--on-hang`` did."""
    hosts: tuple[str, ...] = ()
    """Where the evidence of several hosts was judged together (``hangs/joined.py``), or one of them is lost: all of
    them; else empty."""
    parts: tuple[HangPart, ...] = ()
    """… and what the watchdogs of these had said, each for itself."""

    def to_dict(self) -> dict[str, Any]:
        """The form of its file (docs/schema.md)."""
        return {"schema": SCHEMA, **encoded(self)}

    @classmethod
    def from_dict(cls, raw: object) -> HangRecord:
        """Read what ``to_dict`` gave, as JSON has it; ValueError for anything else.  Keys not known are passed."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError("not the record of a hang")
        return decoded(cls, raw)
