"""What a rule answers: a finding, and which part of which step's time it explains.

Rules are asked in order, the most telling first, and each works on what those before it have left: a rank that is late
from step 40 on also makes every step longer from there on, and that is one cause, not two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.passes import longer_by_passes
from stepscope.diagnosis.view import View
from stepscope.records.finding import Finding, Severity

__all__ = ["Claim", "severity_of", "unexplained"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Claim:
    finding: Finding
    saved_ns: Floats
    """[S] of the view; what each step would be shorter by without it.  Zeros: it explains no time."""


def unexplained(view: View, claims: Iterable[Claim]) -> Floats:
    """[S]; the length of each step without what the claims explain, and without what it has more to do than most."""
    left = view.step_ns - longer_by_passes(view)
    for claim in claims:
        left -= np.clip(claim.saved_ns, 0.0, np.maximum(left, 0.0))
    return np.asarray(left, np.float64)


def severity_of(share: float, per_step_ns: float = float("inf")) -> Severity:
    """By what it costs: share of all time, and per step that is hit (tiny ones cannot be helped)."""
    if share < thresholds.WARNING_SHARE or per_step_ns < thresholds.WARNING_FLOOR_NS:
        return "info"
    return "critical" if share >= thresholds.CRITICAL_SHARE else "warning"
