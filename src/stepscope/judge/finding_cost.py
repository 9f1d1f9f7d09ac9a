"""What a finding costs, how severe that is, and which finding leads."""

from __future__ import annotations

import math
from typing import Any

from stepscope.records.finding import SEVERITIES, Finding, Severity

__all__ = [
    "CRITICAL_SHARE",
    "WARNING_FLOOR_NS",
    "WARNING_SHARE",
    "cost_document",
    "finding_order",
    "severity_by_cost",
]


# -- Cost -------------------------------------------------------------------------------------------------------------


def cost_document(
    *, share: float, seconds: float, ranks: int, step_ns: float | None, digits: int = 3
) -> dict[str, Any]:
    """``Finding.cost``, for live runs and traces alike.

    ``share`` of the time that a remedy saves; ``seconds`` in all, with so many digits; ``step_ns``: the length of a
    step now, None without steps.
    """
    left = 1 - share
    return {
        "share": round(share, 4),
        "seconds": round(seconds, digits),
        "rank_hours": round(seconds * ranks / 3600, 4),
        "if_fixed": {
            "step_ms": None if step_ns is None else round(step_ns * left / 1e6, 3),
            "speedup": round(1 / left, 3) if left > 0 and step_ns else None,
        },
    }


WARNING_SHARE = 0.05
"""Share of the step time that a finding must cost to deserve attention."""
CRITICAL_SHARE = 0.20
"""A fifth of the machines' time: to be fixed before anything else."""
WARNING_FLOOR_NS = 200_000
"""Below a fifth of a millisecond per step there is nothing to fix in Python: reported, but not as a warning."""


def severity_by_cost(share: float, per_step_ns: float = float("inf")) -> Severity:
    """Severity by cost: share of all time, and time per affected step (tiny costs cannot be fixed)."""
    if share < WARNING_SHARE or per_step_ns < WARNING_FLOOR_NS:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


# -- Order ------------------------------------------------------------------------------------------------------------

UPPER_BOUND_COUNTS = 0.5
"""Share of a gain that is known as "at most" which findings are ordered by: the real gain is somewhere below it."""
LATE_FOR_CERTAIN = 0.75
"""The confidence from which a late rank counts with the time for which others wait for it: while they wait, making
anything else faster gains nothing."""
WRONG_NUMBERS = frozenset({"loss_nan", "nan_gradients", "replica_desync", "no_gradient_exchange"})
"""Kinds that say that training computes something other than it should: however fast, its result is of no use."""
ENDS_THE_JOB = frozenset({"memory_creep", "ram_pressure"})
"""Kinds that say that the job will end before it is done.  Device memory that is full but does not grow is not one."""


def finding_order(finding: Finding) -> tuple[int, int, float]:
    """Sort by this, the largest first: severity; within one, what ruins the result, what ends the job, what slows it.

    Of several that end the job the one that does so first; of several that slow it the one that costs most time.
    """
    severity = SEVERITIES.index(finding.severity)
    if severity > 0 and finding.kind in WRONG_NUMBERS:
        return severity, 2, _expected_gain(finding)
    if severity > 0 and finding.kind in ENDS_THE_JOB:
        ends_in_s = finding.evidence.get("runs_out_in_s")
        return severity, 1, -math.inf if ends_in_s is None else -float(ends_in_s)
    return severity, 0, _expected_gain(finding)


def _expected_gain(finding: Finding) -> float:
    """The share of the time that a remedy saves, times how sure we are."""
    share = float(finding.cost.get("share", 0.0))
    if finding.confidence >= LATE_FOR_CERTAIN:  # only findings of traces have it; live ones cost what peers wait
        share = max(share, float(finding.evidence.get("waited_share", 0.0)))
    return share * finding.confidence * (UPPER_BOUND_COUNTS if finding.cost.get("up_to") else 1.0)
