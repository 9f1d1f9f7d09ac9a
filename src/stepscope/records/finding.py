"""A finding as plain data: one thing that is wrong (or worth knowing), with its numbers, its cost and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stepscope.records.text import for_two_ranks

__all__ = [
    "SEVERITIES",
    "Finding",
    "Severity",
    "as_remark",
    "highest",
    "lowest",
    "status_severity",
    "with_current_kinds",
    "worded_for",
]

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""From least to most."""
OLD_KINDS = {"low_gpu_utilisation": "low_gpu_utilization"}
"""What kinds were called in the files of earlier versions."""
STATUS_SEVERITIES: dict[str, Severity] = {
    "running": "info",
    "finished": "info",
    "interrupted": "warning",
    "unfinished": "warning",
}


def worded_for(finding: Finding, ranks: int) -> Finding:
    """The finding in the words for a job of so many ranks."""
    if ranks != 2:
        return finding
    return replace(finding, title=for_two_ranks(finding.title), advice=tuple(map(for_two_ranks, finding.advice)))


def status_severity(status: str) -> Severity:
    """How bad a run's ``status`` is; one that is not known counts as a failure."""
    return STATUS_SEVERITIES.get(status, "critical")


def with_current_kinds(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with findings (``summary.json``, ``findings.json``, a baseline) with today's names of kinds."""
    findings = document.get("findings")
    lists = findings if isinstance(findings, list) else []
    for row in (*lists, document.get("verdict")):
        if isinstance(row, dict) and isinstance(row.get("kind"), str):
            row["kind"] = OLD_KINDS.get(row["kind"], row["kind"])
    return document


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: str
    """snake_case; part of the interface."""
    severity: Severity
    title: str
    """The one sentence that people read first."""
    ranks: tuple[int, ...] = ()
    """The culprits; empty when all ranks are alike."""
    phase: str | None = None
    steps: tuple[int, int] | None = None
    """First and last step the finding covers."""
    cost: dict[str, Any] = field(default_factory=dict)
    """``share`` of step time, ``seconds`` and ``rank_hours`` lost so far, ``if_fixed``."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the verdict."""
    advice: tuple[str, ...] = ()
    confidence: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The form in ``summary.json`` (docs/schema.md)."""
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


def highest(severity: Severity, *others: Severity) -> Severity:
    """The most severe of them."""
    return max(severity, *others, key=SEVERITIES.index)


def lowest(severity: Severity, *others: Severity) -> Severity:
    """The least severe of them."""
    return min(severity, *others, key=SEVERITIES.index)


def as_remark(finding: Finding) -> Finding:
    """The same finding as ``info``: it follows from another one, or is not certain."""
    return replace(finding, severity="info")
