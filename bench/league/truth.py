"""What is known of a run because it was put there, and what a tool claims about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Case", "Claim", "Truth", "claim_of"]


@dataclass(frozen=True, kw_only=True)
class Truth:
    kinds: frozenset[str] = frozenset()
    """Any of them names the fault; none: the run is healthy."""
    ranks: tuple[int, ...] | None = None
    """The culprits; None: nobody in particular."""
    phases: frozenset[str] = frozenset()
    """Any of them names the place; none: not asked."""
    start: int | None = None
    """The first step that is hit; steps until detected are counted from there."""
    step: int | None = None
    """The step that a finding must name."""
    period: int | None = None
    also_true: frozenset[str] = frozenset()
    """Kinds that are right as well: consequences of the fault."""

    @property
    def healthy(self) -> bool:
        return not self.kinds


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: ``league_job.py`` with these arguments on so many ranks."""

    id: str
    """FAMILY/RANKS/NAME."""
    truth: Truth
    ranks: int = 1
    args: tuple[str, ...] = ()
    device: str = "cpu"
    two_hosts: bool = False
    """Half of the ranks see another host name; needs root, and a launcher that is not torchrun."""
    burn: int = 0
    """Busy processes beside the job."""

    @property
    def family(self) -> str:
        return self.id.split("/", maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One finding of a tool."""

    kinds: tuple[str, ...]
    """More than one where a tool's word may stand for several of ours."""
    severity: str
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    steps: tuple[int, int] | None = None
    period: float | None = None
    title: str = ""

    @property
    def warned(self) -> bool:
        return self.severity in ("warning", "critical")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def claim_of(row: Mapping[str, Any]) -> Claim:
    """From a finding of ``summary.json``, or from a claim's own ``to_dict``."""
    evidence = row.get("evidence") or {}
    period = row.get("period") or next((evidence[key] for key in evidence if key.startswith("period")), None)
    steps = row.get("steps")
    if isinstance(evidence.get("step"), int):
        steps = (evidence["step"], evidence["step"])
    return Claim(
        kinds=tuple(row["kinds"]) if "kinds" in row else (row["kind"],),
        severity=row["severity"],
        ranks=tuple(row.get("ranks") or ()),
        phase=row.get("phase"),
        steps=(steps[0], steps[1]) if steps else None,
        period=period if isinstance(period, int | float) else None,
        title=row.get("title", ""),
    )
