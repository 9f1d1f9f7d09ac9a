"""``slow_collective`` over time: the same collective, with the same bytes, takes much longer than it did before.

The least over the ranks is looked at, so it is the exchange and no wait for a rank; if the ranks' own work became
slower at the same time, the machine is to blame and other rules say so.  DDP's all-reduce is not looked at here: how
much of it shows depends on what hides it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim, severity_of
from stepscope.diagnosis.communication import Communication
from stepscope.diagnosis.communication_flows import Flow
from stepscope.diagnosis.communication_groups import group_text
from stepscope.diagnosis.robust import median_rank
from stepscope.diagnosis.series_stats import levels
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding
from stepscope.records.units import ms_text, rate_text

__all__ = ["find_slow_collective"]

Floats = NDArray[np.float64]
SEEN_SHARE = 0.9
"""Of the steps: what is called now and then has no level."""
SPREAD_QUANTILES = (0.1, 0.9)
"""Between them lies any stretch worth telling of: a sieve before the search for it."""


@dataclass(frozen=True, kw_only=True)
class _Drop:
    flow: Flow
    at: slice
    """Columns of the view."""
    before_ns: float
    level_ns: float
    bytes: float

    @property
    def lost_ns(self) -> float:
        return (self.level_ns - self.before_ns) * len(range(self.at.start, self.at.stop))


def find_slow_collective(view: View, exchanges: Communication, known: Collection[str]) -> list[Claim]:
    """``known``: names of groups of which something was found already."""
    if len(view.steps) < thresholds.TREND_STEPS:
        return []
    drops = [
        drop
        for flow in exchanges.flows
        if flow.device or (flow.group.blocking and view.clock == "host")
        if flow.group.name not in known and len(flow.rows) > 1
        for drop in _drops(view, flow, _steps_known(view, exchanges, flow))
    ]
    if not drops:
        return []
    claim = _claim(view, drops)
    return [claim] if claim.finding.severity != "info" else []


def _steps_known(view: View, exchanges: Communication, flow: Flow) -> int:
    """Of the view's steps, those in which it would have been seen: on the device not all may have been read."""
    if not flow.device or exchanges.measured is None:
        return len(view.steps)
    return int(exchanges.measured.places[view.columns].sum())


def _drops(view: View, flow: Flow, steps_known: int) -> list[_Drop]:
    least_ns = flow.least_ns[view.columns].astype(np.float64)
    seen = np.flatnonzero(~np.isnan(least_ns))
    if len(seen) < max(SEEN_SHARE * steps_known, thresholds.TREND_STEPS):
        return []
    values, sent = least_ns[seen], flow.bytes_by_step[view.columns][seen]
    low, high = np.quantile(values, SPREAD_QUANTILES)
    floor_ns = max(thresholds.WARNING_SHARE * view.median_step_ns, thresholds.EXCHANGE_FLOOR_NS)
    if high - low < floor_ns or high < thresholds.EXCHANGE_RATIO * low:
        return []
    starts, _ = levels(values, least_change=floor_ns)
    ends = [*starts[1:], len(values)]
    level = [float(np.median(values[start:end])) for start, end in zip(starts, ends, strict=True)]
    found = []
    for index in range(1, len(starts)):
        before = int(np.argmin(level[:index]))
        earlier, at = slice(starts[before], ends[before]), slice(starts[index], ends[index])
        sizes = float(np.median(sent[earlier])), float(np.median(sent[at]))
        alike = max(sizes) <= thresholds.BYTES_ALIKE * min(sizes)
        slower = level[index] >= max(thresholds.EXCHANGE_RATIO * level[before], level[before] + floor_ns)
        if alike and slower and at.stop - at.start >= thresholds.MIN_STEPS:
            columns = slice(int(seen[at.start]), int(seen[at.stop - 1]) + 1)
            drop = _Drop(flow=flow, at=columns, before_ns=level[before], level_ns=level[index], bytes=sizes[1])
            if _work_as_before(view, drop, slice(int(seen[earlier.start]), int(seen[earlier.stop - 1]) + 1)):
                found.append(drop)
    return found


def _work_as_before(view: View, drop: _Drop, earlier: slice) -> bool:
    work_ns = median_rank(view.work_ns)
    rise = np.nanmedian(work_ns[drop.at]) - np.nanmedian(work_ns[earlier])
    return bool(rise < thresholds.EXPLAINS_SHARE * (drop.level_ns - drop.before_ns))


def _claim(view: View, drops: list[_Drop]) -> Claim:
    worst = max(drops, key=lambda drop: drop.lost_ns)
    flow, at = worst.flow, worst.at
    saved_ns = np.zeros(len(view.steps))
    for drop in drops:
        if drop.flow.op == flow.op and drop.flow.group.kind == flow.group.kind:  # side by side with the worst
            extra = drop.level_ns - drop.before_ns
            saved_ns[drop.at] = np.maximum(saved_ns[drop.at], extra)
    cost = cost_of(view, saved_ns)
    extra_ns = worst.level_ns - worst.before_ns
    over = at.stop < len(view.steps) - thresholds.STRETCH_STEPS
    when = (
        f"in steps {view.steps[at.start]} to {view.steps[at.stop - 1]}"
        if over
        else f"since step {view.steps[at.start]}"
    )
    rates = [rate_text(worst.bytes / ns * 1e9) for ns in (worst.before_ns, worst.level_ns) if ns > 0]
    finding = Finding(
        kind="slow_collective",
        severity=severity_of(cost["share"], extra_ns),
        title=(
            f"{flow.op} in {group_text(flow.group)} takes {ms_text(worst.level_ns / 1e6)} of a step {when}, before it "
            f"took {ms_text(worst.before_ns / 1e6)}, on all ranks alike."
        ),
        phase="comm",
        steps=(int(view.steps[at.start]), int(view.steps[at.stop - 1])),
        cost=cost,
        evidence={
            "group": flow.group.name,
            "group_kind": flow.group.kind,
            "op": flow.op,
            "before_ms": round(worst.before_ns / 1e6, 3),
            "after_ms": round(worst.level_ns / 1e6, 3),
            "ratio": round(worst.level_ns / max(worst.before_ns, 1.0), 3),
            "bytes_per_step": round(worst.bytes),
            "groups_slow": len({drop.flow.group.name for drop in drops}),
            "steps_used": len(view.steps),
        },
        advice=(
            f"The same bytes went at {', now at '.join(rates)}: other traffic, or a link at a lower speed than before?",
            "All ranks wait alike, so no rank is to blame.",
        ),
        confidence=0.85,
    )
    return Claim(finding=finding, saved_ns=saved_ns)
