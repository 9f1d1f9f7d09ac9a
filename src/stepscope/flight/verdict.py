"""What came out: the verdict and all that a report draws, as one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.records.hang import Frame, HangKind, StackGroup, WaitingIn

__all__ = ["SCHEMA", "Accused", "Grid", "Side", "Split", "Verdict", "Wait"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Accused:
    rank: int
    reason: str
    """A sentence without its full stop, without the rank: ``has not called all_reduce 7``."""
    at: Frame | None = None
    """The line of the user's code where it is, by its stack or its last call."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Ranks that did the same at one sequence number."""

    ranks: tuple[int, ...]
    op: str | None
    """None: they called nothing."""
    sizes: str = ""
    dtypes: str = ""
    at: Frame | None = None
    frames: tuple[Frame, ...] = ()
    """The call site, innermost first, as far as it is worth showing."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The first place at which ranks parted."""

    group: str
    description: str
    sequence: int
    differs: str
    """``operation``, ``size``, ``dtype``, ``call site`` or ``missing``."""
    ranks: tuple[int, ...]
    """Those that left; empty when it cannot be told which side did."""
    call_sites: tuple[Side, ...]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Some ranks wait for others: edges of the wait-for graph with the same collective and the same ends."""

    waiters: tuple[int, ...]
    waited: tuple[int, ...]
    group: str
    description: str
    sequence: int
    op: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rank by sequence number, for the group in question; ranks with the same row together."""

    group: str
    description: str
    sequences: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks and one mark per number: ``c`` completed, ``s`` started, ``w`` waiting, ``x`` waiting in another collective
    than the rest, ``d`` completed but another, ``m`` not called, ``-`` no longer in the ring, ``?`` no dump."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    healthy: bool
    kind: HangKind | None
    title: str
    """One sentence with its full stop."""
    culprits: tuple[Accused, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    suspects: tuple[int, ...] = ()
    """Where it is undecidable: among these."""
    group: str | None = None
    description: str = ""
    sequence: int | None = None
    """Where it went wrong; where the victims wait is in ``waiting_in``."""
    waiting_in: WaitingIn | None = None
    first_divergence: Split | None = None
    wait_for: tuple[Wait, ...] = ()
    cycle: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    missing: tuple[dict[str, Any], ...] = ()
    """Of each rank that did not come: what it was doing."""
    grid: Grid | None = None
    stacks: tuple[StackGroup, ...] = ()
    evidence: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """Ranks that have a dump."""
    world: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The document of ``--json``: every other form is drawn from it alone."""
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "kind": self.kind,
            "title": self.title,
            "culprits": [one.rank for one in self.culprits],
            "victims": list(self.victims),
            "undecidable": self.undecidable,
            "suspects": list(self.suspects),
            "group": self.group,
            "description": self.description,
            "sequence": self.sequence,
            "waiting_in": asdict(self.waiting_in) if self.waiting_in else None,
            "first_divergence": _plain(self.first_divergence) if self.first_divergence else None,
            "reasons": [_plain(one) for one in self.culprits],
            "wait_for": [_plain(one) for one in self.wait_for],
            "cycle": list(self.cycle),
            "groups": list(self.groups),
            "missing": list(self.missing),
            "grid": _plain(self.grid) if self.grid else None,
            "stacks": [_plain(one) for one in self.stacks],
            "evidence": list(self.evidence),
            "problems": list(self.problems),
            "ranks": list(self.ranks),
            "world": self.world,
        }


def _plain(record: Any) -> Any:
    return _listed(asdict(record))


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
