"""Trends: ``drift`` (slowly slower), ``change_point`` (slower from a step on), ``throughput_drop`` (for a while).

The series of step times is cut into stretches of one level each; a line that fits better than one change is a drift.
Each needs an effect (a share of the step) and must stand out from the wander of the machine's speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.processor_wait import levels_of, without_waiting
from stepscope.diagnosis.engine.view import View, cost_of, lower_median_rank
from stepscope.diagnosis.rules.spikes import Place, by_phase_ms, locate, typical_phase_ns, where_text
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.statistics import Trend, between_z, levels, shortest, trend, z_needed, z_of_t
from stepscope.records.finding import Finding
from stepscope.records.steps import COMPUTE_PHASES
from stepscope.records.text import ms_text, number_text, share_text

__all__ = ["find_trends"]

Floats = NDArray[np.float64]
STRETCHES_SHOWN = 3
GROWTH_ADVICE = (
    say(
        "Batches take longer and longer to get: a list that grows in the dataset, longer samples later, a cache.",
        phase="input",
    ),
    say(
        "The exchange takes longer and longer: other jobs on the network, or a rank that drifts behind.",
        phase="comm",
    ),
    say(
        "Look for a graph or a list that grows: losses kept without .detach() or .item(), longer sequences.",
        phase=("forward", "backward"),
    ),
    say(
        "Look for something the loop keeps adding to: a history of losses, hooks added in it, a longer log.",
        phase=("other", "optimizer"),
    ),
    say("All phases grow: a machine that gets slower (heat, other jobs), or memory that fills up.", phase=None),
    say("Look at what grows in the phase {phase!r}."),
)
SLOW_STRETCH_ADVICE = (
    say(
        "Making the batches took longer{where}: other data, longer samples, or other programs on its cores.",
        phase="input",
        in_process=True,
    ),
    say(
        "The data came more slowly{where}: other files, longer samples, workers that got less CPU, slow reads.",
        phase="input",
    ),
    say("The exchange was slower: other jobs on the network, a link that fell back to a lower speed.", phase="comm"),
    say(
        "Look for what changed{where}: other jobs on the same cores or device, clocks, batch or model size.",
        phase=(None, *COMPUTE_PHASES),
    ),
    say("Look for what changed{where} in {phase}: logging or metrics switched on, other data."),
)
"""``in_process``: batches are made in the training process itself."""


@dataclass(frozen=True, kw_only=True)
class _SlowStretch:
    """A stretch of steps, as indices into the view, that is slower than the one before it."""

    first: int
    end: int
    before_ns: float
    level_ns: float

    @property
    def extra_ns(self) -> float:
        return self.level_ns - self.before_ns

    @property
    def share(self) -> float:
        return self.extra_ns / self.before_ns if self.before_ns else 0.0

    def whole(self, explained_ns: Floats) -> _SlowStretch:
        """The same for whole steps, including what is already explained: the lengths that everything else shows."""
        usual_ns = float(np.median(explained_ns[max(self.first - thresholds.BESIDE_STEPS, 0) : self.first]))
        now_ns = float(np.median(explained_ns[self.first : self.end]))
        return replace(self, before_ns=self.before_ns + usual_ns, level_ns=self.level_ns + now_ns)

    def is_rest(self, explained_ns: Floats) -> bool:
        """Whether most of the change is already explained, or the steps themselves hardly show it.

        The rest of an explained change is not a separate cause.  And where something explained ends at that step, such
        as a rank that is no longer late, the rest grows while the steps become shorter.
        """
        whole_ns = self.whole(explained_ns).extra_ns
        return (
            self.extra_ns < thresholds.EXPLAINS_SHARE * whole_ns or whole_ns < thresholds.EXPLAINS_SHARE * self.extra_ns
        )


def find_trends(view: View, left_ns: Floats) -> list[Claim]:
    """``left_ns`` [S]: the steps without what is already explained."""
    if len(view.steps) < thresholds.TREND_STEPS or not view.ranks or float(np.median(left_ns)) <= 0:
        return []
    found = _trends(view, left_ns)
    calm = without_waiting(view)
    if calm is None:
        return found
    return _trends_without_waiting(view, calm) or [claim for claim in found if _shows(view, calm, claim)]


def _trends(view: View, left_ns: Floats) -> list[Claim]:
    starts, own = levels(left_ns, least_change=thresholds.GROWTH_SHARE * float(np.median(left_ns)))
    line = trend(left_ns)
    if _drifts(left_ns, line, starts):
        return [_drift(view, left_ns, line)]
    explained_ns = view.step_ns - left_ns
    drops, change = _slow_stretches(left_ns, starts)
    drops = [slow for slow in drops if not slow.is_rest(explained_ns)]
    if change is not None and change.is_rest(explained_ns):
        change = None
    claims = [_change_point(view, change, explained_ns, own.scatter)] if change is not None else []
    return [*claims, *([_throughput_drop(view, drops, explained_ns)] if drops else [])]


# -- next to other programs -------------------------------------------------------------------------------------------
# Where ranks wait for a processor, that is subtracted, second by second.  What is left is steady, but has few points.


def _trends_without_waiting(view: View, calm: View) -> list[Claim]:
    """At most one: the step, the stretch or the line that fits best, if chance explains none of them."""
    # Of two ranks the faster one: a late rank is not what changes for all of them.
    work_ns = lower_median_rank(calm.work_ns)
    values = work_ns + float(np.median(calm.step_ns - work_ns))
    starts, heights, counts = levels_of(values)
    fits = [*_steps_that_fit(starts, heights, counts), *_line_that_fits(starts, heights, counts)]
    best = min(fits, key=lambda fit: fit.error, default=None)
    if best is None or best.z < z_needed(len(heights), thresholds.ANY_REMARK):
        return []
    explained_ns = np.zeros(len(values))
    if best.line is not None:
        claim = _drift(calm, values, best.line)
    elif best.slow.end == len(values):
        claim = _change_point(calm, best.slow, explained_ns, best.error)
    else:
        claim = _throughput_drop(calm, [best.slow], explained_ns)
    title = f"{claim.finding.title[:-1]}, not counting the wait for processors."
    cost = cost_of(view, claim.explained_ns)
    if cost["share"] < thresholds.OPPORTUNITY_SHARE:
        return []
    return [replace(claim, finding=replace(claim.finding, title=title, cost=cost))]


def _shows(view: View, calm: View, claim: Claim) -> bool:
    """Whether the work shows a change as well, or the exchange itself; otherwise it is the other programs' doing."""
    hit = claim.explained_ns > 0
    if hit.all() or not hit.any():
        return False
    if claim.finding.phase == "comm":
        more_ns, exchange_ns = (
            float(each[hit].mean() - each[~hit].mean()) for each in (view.step_ns, shortest(view.phase("comm")))
        )
        return exchange_ns >= thresholds.EXPLAINS_SHARE * more_ns
    work_ns = lower_median_rank(calm.work_ns)
    more, more_work = (float(each[hit].mean() / each[~hit].mean()) - 1 for each in (view.step_ns, work_ns))
    return more_work >= thresholds.EXPLAINS_SHARE * more


@dataclass(frozen=True, kw_only=True)
class _Fit:
    error: float
    """Spread of the points about it."""
    z: float
    line: Trend | None = None
    slow: _SlowStretch = field(default_factory=lambda: _SlowStretch(first=0, end=0, before_ns=0.0, level_ns=0.0))


def _steps_that_fit(starts: NDArray[np.intp], heights: Floats, counts: Floats) -> Iterator[_Fit]:
    """Slower from some second on, or for some seconds; those in which it begins or ends are in between."""
    points = len(heights)
    for begin in range(points - 1):
        for end in range(begin + 2, points + 1):
            inside = np.arange(begin + 1, end)
            outside = np.concatenate((np.arange(begin), np.arange(min(end + 1, points), points)))
            least = (
                (thresholds.LEAST_SECONDS, thresholds.LEAST_SECONDS)
                if end == points
                else (1, thresholds.LEAST_SECONDS + 1)
            )
            if len(inside) < least[0] or len(outside) < least[1] or end == points - 1:
                continue
            high, low = (float(np.average(heights[at], weights=counts[at])) for at in (inside, outside))
            freedom = len(inside) + len(outside) - 2
            if low <= 0 or high < (1 + thresholds.GROWTH_SHARE) * low:
                continue
            if begin == 0 and heights[0] > (low + high) / 2:
                continue  # a start that is slow did not become slow
            rest = np.concatenate((heights[inside] - high, heights[outside] - low))
            first = starts[begin] + counts[begin] * np.clip((high - heights[begin]) / (high - low), 0.0, 1.0)
            last = float(starts[-1] + counts[-1])
            if end < points:
                last = starts[end] + counts[end] * np.clip((heights[end] - low) / (high - low), 0.0, 1.0)
            slow = _SlowStretch(first=round(float(first)), end=round(float(last)), before_ns=low, level_ns=high)
            yield _Fit(error=_error(rest, freedom), z=between_z(heights[inside], heights[outside]), slow=slow)


def _line_that_fits(starts: NDArray[np.intp], heights: Floats, counts: Floats) -> Iterator[_Fit]:
    freedom = len(heights) - 2
    if freedom < thresholds.LEAST_SECONDS:
        return
    middles = starts + (counts - 1) / 2
    slope, start = np.polyfit(middles, heights, 1, w=np.sqrt(counts))
    error = _error(heights - start - slope * middles, freedom)
    if slope * (starts[-1] + counts[-1] - 1) < thresholds.GROWTH_SHARE * float(np.median(heights)):
        return
    t = float(slope) * float(np.sqrt(((middles - middles.mean()) ** 2).sum())) / error
    z = z_of_t(t, freedom)
    p = NormalDist().cdf(-z)
    yield _Fit(error=error, z=z, line=Trend(slope=float(slope), start=float(start), p=p, p_line=p, wander=error))


def _error(rest: Floats, freedom: int) -> float:
    return max(float(np.sqrt(float(rest @ rest) / freedom)), 1.0)


# -- drift ------------------------------------------------------------------------------------------------------------


def _drifts(values: Floats, line: Trend, starts: list[int]) -> bool:
    """Whether growth is steady, large enough, significant, and not a single change seen from afar."""
    growth = line.slope * (len(values) - 1)
    least = max(thresholds.GROWTH_SHARE * float(np.median(values)), thresholds.SPREADS_APART * line.wander)
    if growth < least or line.p > thresholds.TREND_CHANCE or float(np.median(values[: _tenth(values)])) <= 0:
        return False  # nothing is left of the first steps, so there is nothing that grows
    best = min((_apart(values, start) for start in starts[1:]), default=float("inf"))
    return bool(np.abs(values - line.line(len(values))).sum() < best)


def _tenth(values: Floats) -> int:
    """Steps at each end of a run that show how long a step is there."""
    return max(len(values) // 10, 2)


def _apart(values: Floats, start: int) -> float:
    """Sum of absolute deviations from two levels."""
    return float(sum(np.abs(part - np.median(part)).sum() for part in (values[:start], values[start:])))


def _drift(view: View, values: Floats, line: Trend) -> Claim:
    count = len(values)
    tenth = _tenth(values)
    first_ns, last_ns = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
    explained_ns = float(np.median((view.step_ns - values)[:tenth]))
    whole_first, whole_last = (first_ns + explained_ns) / 1e6, (last_ns + explained_ns) / 1e6
    growth_share = line.slope * (count - 1) / first_ns
    saved = np.clip(line.line(count) - first_ns, 0.0, None)
    excess = typical_phase_ns(view, np.arange(count - tenth, count)) - typical_phase_ns(view, np.arange(tenth))
    place = locate(view, excess, last_ns - first_ns)
    cost = cost_of(view, saved)
    severity = severity_by_cost(cost["share"], last_ns - first_ns)
    steady = min(line.p, line.p_line) <= thresholds.TREND_WARNING_CHANCE
    where = where_text(place, view)
    return Claim(
        finding=Finding(
            kind="drift",
            severity=severity if steady and growth_share >= thresholds.GROWTH_WARNING_SHARE else "info",
            title=(
                f"Steps grow by {_slope_text(line.slope)}: {ms_text(whole_first)} at first, "
                f"{ms_text(whole_last)} now; the growth is {where.strip() if where else 'in no single phase'}."
            ),
            ranks=place.ranks(view),
            phase=place.phase,
            steps=view.span,
            cost=cost,
            evidence={
                "clock": view.clock,
                "ms_per_1000_steps": round(line.slope * 1000 / 1e6, 4),
                "growth_share": round(growth_share, 4),
                "first_ms": round(whole_first, 3),
                "last_ms": round(whole_last, 3),
                "p": line.p,
                "wander_ms": round(line.wander / 1e6, 3),
                "extra_ms_by_phase": by_phase_ms(view, excess, place.row),
                "steps_used": count,
            },
            advice=(
                *advice_for(GROWTH_ADVICE, phase=place.phase),
                "Compare a profile of early steps with one of late ones.",
            ),
            confidence=0.9 if place.phase else 0.8,
        ),
        explained_ns=saved,
    )


def _slope_text(slope_ns: float) -> str:
    """Per step where that gives a readable figure."""
    if slope_ns >= thresholds.EXCESS_FLOOR_NS / 5:
        return f"{number_text(slope_ns / 1e6)} ms each step"
    return f"{ms_text(slope_ns * 1000 / 1e6)} in 1,000 steps"


# -- levels -----------------------------------------------------------------------------------------------------------


def _slow_stretches(values: Floats, starts: list[int]) -> tuple[list[_SlowStretch], _SlowStretch | None]:
    """Stretches that were slower and recovered, and the one that did not."""
    ends = [*starts[1:], len(values)]
    level = [float(np.median(values[start:end])) for start, end in zip(starts, ends, strict=True)]
    drops: list[_SlowStretch] = []
    at = 1
    while at < len(starts):
        before_ns = level[at - 1]
        until = at
        while until < len(starts) and level[until] >= (1 + thresholds.GROWTH_SHARE) * before_ns:
            until += 1
        if until == at:
            at += 1
            continue
        first, end = starts[at], ends[until - 1]
        slow = _SlowStretch(first=first, end=end, before_ns=before_ns, level_ns=float(np.median(values[first:end])))
        if until == len(starts):
            return drops, _lasting(values, slow)
        long_enough = end - first >= thresholds.DROP_STEPS
        if long_enough and slow.share >= thresholds.DROP_SHARE and _all_slower(values, slow):
            drops.append(slow)
        at = until
    return drops, None


def _lasting(values: Floats, slow: _SlowStretch) -> _SlowStretch | None:
    """Require it to be slower than everything before, too: the end of a fast stretch is not a change for the worse."""
    before_ns = max(slow.before_ns, float(np.median(values[: slow.first])))
    found = _SlowStretch(first=slow.first, end=slow.end, before_ns=before_ns, level_ns=slow.level_ns)
    return found if found.share >= thresholds.GROWTH_SHARE and _all_slower(values, found) else None


def _all_slower(values: Floats, slow: _SlowStretch) -> bool:
    """Whether the fast ones among the steps are slower, too: where half of all steps are disturbed, a median may jump
    between the disturbed ones and the others."""
    before = values[max(slow.first - thresholds.BESIDE_STEPS, 0) : slow.first]
    rise = np.quantile(values[slow.first : slow.end], 0.25) - np.quantile(before, 0.25)
    return bool(rise >= thresholds.EXPLAINS_SHARE * slow.extra_ns)


def _change_point(view: View, slow: _SlowStretch, explained_ns: Floats, wander_ns: float) -> Claim:
    saved = _saved(view, [slow])
    place, excess = _place(view, slow)
    shown = slow.whole(explained_ns)
    cost = cost_of(view, saved)
    step = int(view.steps[slow.first])
    where = where_text(place, view)
    ranks = place.ranks(view)
    warns = _warns(slow, wander_ns, len(view.steps)) and not _passed_around(view, slow, place)
    return Claim(
        finding=Finding(
            kind="change_point",
            severity="warning" if warns else "info",
            title=(
                f"From step {step} on, steps take {ms_text(shown.level_ns / 1e6)} instead of "
                f"{ms_text(shown.before_ns / 1e6)} (+{share_text(shown.share)}){',' if where else ''}{where}."
            ),
            ranks=ranks,
            phase=place.phase,
            steps=(step, int(view.steps[-1])),
            cost=cost,
            evidence={
                **_levels_evidence(view, shown, excess, place),
                "wander_ms": round(wander_ns / 1e6, 3),
                "steps_since": slow.end - slow.first,
            },
            advice=(
                *_slow_stretch_advice(view, place),
                "The machine samples in the report show what started at that time.",
            ),
            confidence=0.9 if slow.end - slow.first >= 2 * thresholds.MIN_STEPS else 0.75,
        ),
        explained_ns=saved,
    )


def _throughput_drop(view: View, drops: list[_SlowStretch], explained_ns: Floats) -> Claim:
    worst = max(drops, key=lambda slow: slow.extra_ns * (slow.end - slow.first))
    saved = _saved(view, drops)
    place, excess = _place(view, worst)
    shown = worst.whole(explained_ns)
    cost = cost_of(view, saved)
    where = where_text(place, view)
    ranks = place.ranks(view)
    return Claim(
        finding=Finding(
            kind="throughput_drop",
            severity="info" if _passed_around(view, worst, place) else severity_by_cost(cost["share"], worst.extra_ns),
            title=(
                f"{_stretches_text(view, drops)} slower: {_per_second(shown.level_ns)} steps/s instead of "
                f"{_per_second(shown.before_ns)}{',' if where else ''}{where}; then the pace recovered."
            ),
            ranks=ranks,
            phase=place.phase,
            steps=(int(view.steps[drops[0].first]), int(view.steps[drops[-1].end - 1])),
            cost=cost,
            evidence={
                **_levels_evidence(view, shown, excess, place),
                "stretches": [[int(view.steps[slow.first]), int(view.steps[slow.end - 1])] for slow in drops],
                "steps_per_second_before": round(1e9 / shown.before_ns, 3),
                "steps_per_second_during": round(1e9 / shown.level_ns, 3),
            },
            advice=(
                *_slow_stretch_advice(view, place),
                "It recovered: compare with what else ran at that time.",
            ),
            confidence=0.85,
        ),
        explained_ns=saved,
    )


def _warns(slow: _SlowStretch, wander_ns: float, steps: int) -> bool:
    """Whether it is large enough, with enough steps on both sides: the first and last few of a run often differ."""
    # The wander of a short run is poorly known.
    spreads = thresholds.CHANGE_SPREADS if steps >= 2 * thresholds.TREND_STEPS else thresholds.CLEAR_SPREADS
    return (
        slow.share >= thresholds.GROWTH_WARNING_SHARE
        and slow.extra_ns >= max(thresholds.WARNING_FLOOR_NS, spreads * wander_ns)
        and min(slow.first, slow.end - slow.first) >= thresholds.MIN_STEPS
    )


def _saved(view: View, stretches: list[_SlowStretch]) -> Floats:
    saved = np.zeros(len(view.steps))
    for slow in stretches:
        saved[slow.first : slow.end] = slow.extra_ns
    return saved


def _passed_around(view: View, slow: _SlowStretch, place: Place) -> bool:
    """Whether ranks wait for a different rank each time; a slower exchange would affect the last rank as well."""
    if place.phase != "comm" or not view.comm_measured:
        return False
    exchange_ns = shortest(view.phase("comm")[:, max(slow.first - thresholds.BESIDE_STEPS, 0) : slow.end])
    before = min(slow.first, thresholds.BESIDE_STEPS)
    rise = np.median(exchange_ns[before:]) - np.median(exchange_ns[:before])
    return bool(rise < thresholds.EXPLAINS_SHARE * slow.extra_ns)


def _slow_stretch_advice(view: View, place: Place) -> tuple[str, ...]:
    loader, host = view.facts.get("loader"), view.hosts[place.row] if place.row is not None else ""
    return advice_for(
        SLOW_STRETCH_ADVICE,
        phase=place.phase,
        in_process=isinstance(loader, dict) and loader.get("num_workers") == 0,
        where=f" on {host}" if host else "",
    )


def _place(view: View, slow: _SlowStretch) -> tuple[Place, Floats]:
    during = np.arange(slow.first, min(slow.end, slow.first + thresholds.BESIDE_STEPS))
    before = np.arange(max(slow.first - thresholds.BESIDE_STEPS, 0), slow.first)
    excess = typical_phase_ns(view, during) - typical_phase_ns(view, before)
    place = locate(view, excess, slow.extra_ns)
    if place.phase is not None and _all_phases_slower(view, place.phase, before, excess):
        place = replace(place, phase=None)
    return place, excess


def _all_phases_slower(view: View, phase: str, before: NDArray[np.intp], excess: Floats) -> bool:
    """Whether the other phases became slower in proportion, too: then it is the machine, not what this phase does."""
    at = view.phases.index(phase)
    others = [index for index, name in enumerate(view.phases) if name not in (phase, "comm")]
    usual = np.nan_to_num(typical_phase_ns(view, before)).mean(axis=1)
    more = np.nan_to_num(excess).mean(axis=1)
    usual_ns, more_ns = float(usual[others].sum()), float(more[others].sum())
    if usual_ns < thresholds.OTHERS_USUAL_SHARE * float(usual.sum()) or usual[at] <= 0:
        return False
    return more_ns / usual_ns >= thresholds.EXPLAINS_SHARE * float(more[at]) / float(usual[at])


def _levels_evidence(view: View, slow: _SlowStretch, excess: Floats, place: Place) -> dict[str, Any]:
    return {
        "clock": view.clock,
        "before_ms": round(slow.before_ns / 1e6, 3),
        "after_ms": round(slow.level_ns / 1e6, 3),
        "change_share": round(slow.share, 4),
        "extra_ms_by_phase": by_phase_ms(view, excess, place.row),
        "steps_used": len(view.steps),
    }


def _stretches_text(view: View, drops: list[_SlowStretch]) -> str:
    ends = [(int(view.steps[slow.first]), int(view.steps[slow.end - 1])) for slow in drops[:STRETCHES_SHOWN]]
    shown = [f"{first} to {last}" if last > first else str(first) for first, last in ends]
    if len(drops) == 1 and ends[0][0] == ends[0][1]:  # judged by the second, a stretch may be one long step
        return f"Step {shown[0]} was"
    more = f" and {len(drops) - len(shown)} more stretches" if len(drops) > len(shown) else ""
    return f"Steps {', '.join(shown)}{more} were"


def _per_second(step_ns: float) -> str:
    return number_text(1e9 / step_ns)
