"""A finding: one thing that is wrong (or worth knowing), with its numbers, its price and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["SEVERITIES", "Finding", "Severity"]

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""From least to most."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: str
    """snake_case; part of the interface."""
    severity: Severity
    title: str
    """The one sentence that a person reads first."""
    ranks: tuple[int, ...] = ()
    """The culprits; empty when all ranks are alike."""
    phase: str | None = None
    steps: tuple[int, int] | None = None
    """First and last step the finding speaks of."""
    cost: dict[str, Any] = field(default_factory=dict)
    """``share`` of step time, ``seconds`` and ``rank_hours`` lost so far, ``if_fixed``."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The numbers the verdict rests on."""
    advice: tuple[str, ...] = ()
    confidence: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The form of ``summary.json`` (docs/schema.md)."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "title": self.title,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "steps": list(self.steps) if self.steps else None,
            "cost": self.cost,
            "evidence": self.evidence,
            "advice": list(self.advice),
            "confidence": round(self.confidence, 3),
        }
