"""A hang as plain data: which rank blocks the job, which ranks wait, and where each of them is.

The watchdog writes one file per hang in ``hangs/`` of the run directory, and rewrites it when something changes (the
job recovered, it was ended).  ``finding_of`` (``hangs/report.py``) turns it into a finding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.records.dataclass_json import decoded, encoded

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
    """0 if unknown."""
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
    """Whether these are DataLoader workers of the ranks instead of the ranks themselves."""


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
    """For a send or recv."""


@dataclass(frozen=True, kw_only=True)
class RankThere:
    """What was found about one rank."""

    rank: int
    pid: int
    alive: bool = True
    step: int | None = None
    """The step in progress."""
    phase: str = ""
    since_s: float = 0.0
    """Time since the last sign of activity."""
    process_state: str = ""
    """The kernel's letter: R, S, D (waits for a disk), T (stopped), Z."""
    cpu_share: float | None = None
    """Share of one core while it was watched."""
    gil_held: bool | None = None
    waiting_in: WaitingIn | None = None
    at: Frame | None = None
    """The innermost line of the user's own code."""
    workers: tuple[dict[str, Any], ...] = ()
    """Relevant child processes: pid, state, what they are and where."""
    host: str = ""
    """Its host, if several hosts were judged together; else empty."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    rank: int
    reason: str
    """A sentence without rank and period: ``has not called all_reduce; it sleeps in train.py:41``."""
    at: Frame | None = None


@dataclass(frozen=True, kw_only=True)
class HangPart:
    """What the watchdog of one host reported on a hang that was later judged across several hosts."""

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
    """One sentence with its period: who, what, where."""
    declared_wall_ns: int
    stopped_wall_ns: int
    """Time of the last activity of any rank."""
    threshold_s: float
    step_s: float | None = None
    """The usual length of a step before the hang."""
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    collective: WaitingIn | None = None
    """What the victims wait in."""
    cycle: tuple[str, ...] = ()
    """For a deadlock: ``rank 3 waits for rank 1 in tp (all_reduce 4)`` …, ending where it began."""
    evidence: tuple[str, ...] = ()
    """Sentences: what led to the verdict, and what rules out the alternatives."""
    ranks: tuple[RankThere, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    flight: dict[str, Any] = field(default_factory=dict)
    """What the Flight Recorders show about this verdict (``hangs/flight_document.py``): progress per group, waits."""
    over: Literal["recovered", "ended", "aborted"] | None = None
    over_wall_ns: int | None = None
    action: str = ""
    """What ``--on-hang`` did."""
    hosts: tuple[str, ...] = ()
    """All hosts, if their evidence was judged together (``hangs/multi_host.py``) or one of them is lost; else empty."""
    parts: tuple[HangPart, ...] = ()
    """… and what the watchdog of each of these had reported on its own."""

    def to_dict(self) -> dict[str, Any]:
        """The form in its file (docs/schema.md)."""
        return {"schema": SCHEMA, **encoded(self)}

    @classmethod
    def from_dict(cls, raw: object) -> HangRecord:
        """Read the parsed JSON of ``to_dict``; ValueError for anything else.  Unknown keys are ignored."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError("not the record of a hang")
        return decoded(cls, raw)
