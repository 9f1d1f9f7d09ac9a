"""Trends: ``drift`` (slowly slower), ``change_point`` (slower from a step on), ``throughput_drop`` (for a while).

The series of step times is cut into stretches of one level each; a line that fits better than one change is a drift.
Each needs an effect (a share of the step) and must stand out from the wander of the machine's speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.spikes import Place, by_phase_ms, locate, typical_phase_ns, where_text
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import Trend, levels, shortest, trend
from stepscope.records.finding import Finding
from stepscope.records.finding_cost import severity_by_cost
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


# -- drift ------------------------------------------------------------------------------------------------------------


def _drifts(values: Floats, line: Trend, starts: list[int]) -> bool:
    """Whether growth is steady, large enough, significant, and not a single change seen from afar."""
    growth = line.slope * (len(values) - 1)
    least = max(thresholds.GROWTH_SHARE * float(np.median(values)), thresholds.SPREADS_APART * line.wander)
    if growth < least or line.p > thresholds.TREND_CHANCE:
        return False
    best = min((_apart(values, start) for start in starts[1:]), default=float("inf"))
    return bool(np.abs(values - line.line(len(values))).sum() < best)


def _apart(values: Floats, start: int) -> float:
    """Sum of absolute deviations from two levels."""
    return float(sum(np.abs(part - np.median(part)).sum() for part in (values[:start], values[start:])))


def _drift(view: View, values: Floats, line: Trend) -> Claim:
    count = len(values)
    tenth = max(count // 10, 2)
    first_ns, last_ns = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
    explained_ns = float(np.median((view.step_ns - values)[:tenth]))
    whole_first, whole_last = (first_ns + explained_ns) / 1e6, (last_ns + explained_ns) / 1e6
    growth_share = line.slope * (count - 1) / first_ns
    saved = np.clip(line.line(count) - first_ns, 0.0, None)
    excess = typical_phase_ns(view, np.arange(count - tenth, count)) - typical_phase_ns(view, np.arange(tenth))
    place = locate(view, excess, last_ns - first_ns)
    cost = cost_of(view, saved)
    severity = severity_by_cost(cost["share"], last_ns - first_ns)
    steady = line.p <= thresholds.TREND_WARNING_CHANCE
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
    shown = [f"{view.steps[slow.first]} to {view.steps[slow.end - 1]}" for slow in drops[:STRETCHES_SHOWN]]
    more = f" and {len(drops) - len(shown)} more stretches" if len(drops) > len(shown) else ""
    return f"Steps {', '.join(shown)}{more} were"


def _per_second(step_ns: float) -> str:
    return number_text(1e9 / step_ns)
