"""How much a step time changed between runs, and how far chance could have moved that figure.

Three things make two runs of the same job differ, and each has its own treatment:

- Steps scatter, and neighbors depend on each other.  The error of a run's mean is widened by that dependence.
- Steps have a pattern of their own: a long batch, a checkpoint, a slow start.  Another run of the job repeats it, so
  steps are compared by number, and the pattern drops out.
- Runs differ from each other by more than their steps show: another node, a warmer room, another job on the host.  No
  number of steps within a run averages this out.  Several baselines show it.  With one baseline it is estimated from
  the slow wander within the runs, with constants learned from repeated runs of real jobs (``PRIOR``).

The mean is compared, not the median: a job pays for every step, and a slowdown of every tenth step must be seen.
Single unusual steps are the exception: they are replaced by those around them and reported separately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.judge import thresholds
from stepscope.judge.statistics import local_median, spread

__all__ = [
    "ASSUMED_AT_MOST",
    "CONFIDENCE",
    "MARGIN",
    "PRIOR",
    "Change",
    "Judgment",
    "Level",
    "Needed",
    "Prior",
    "Series",
    "Verdict",
    "assumed_spread",
    "change_between",
    "is_recurring",
    "judge",
    "level_of",
    "needed_to_decide",
    "ordinary",
    "unusual_steps",
    "verdict_of",
]

Floats = NDArray[np.float64]
Verdict = Literal["faster", "slower", "same", "cannot_tell"]

CONFIDENCE = 0.99
"""Of the interval, on both sides together: one in two hundred pairs of equal runs may seem slower by chance."""
MARGIN = 0.01
"""Two runs are the same if the interval lies within this share of the step time, on both sides."""
UNUSUAL_SHARE = 0.05
"""Share of the typical step by which an unusual one differs, and SPIKE_SPREADS: less does not disturb a mean."""
RECURRING = thresholds.RECURRING_SPIKES
"""From this many in one run on, unusual steps are how the job behaves, and count …"""
RECURRING_SHARE = 0.1
"""… or from this share of its steps on, in a short run."""
STRETCHES = 8
"""Long stretches of a run whose means show its slow wander …"""
STRETCH_STEPS = 4
"""… each of at least this many steps."""
LAGS_SHARE = 4
"""Dependence of steps is followed over this fraction of the run."""
COMMON_SHARE = 0.5
"""Steps are compared by number if the runs share this part of the shorter one."""
RUNS_AT_MOST = 20
"""More baselines than this are not suggested."""
RUN_COST = 5
"""Starting a run takes as long as this many times its steps."""
STEPS_AT_MOST = 20
"""More than this many times the steps are not suggested either."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is assumed about the spread between runs before several of them are seen; relative to the step time."""

    floor: float
    """The spread of runs that show no wander at all."""
    per_wander: float
    """Times the wander within the runs."""
    per_noise: float
    """Times the scatter of single steps."""
    freedom: float
    """How far the assumption is trusted: as much as so many runs more than one."""


ASSUMED_AT_MOST = 0.08
"""However uneven the steps are, the means of equal runs are not assumed to differ by more.  Otherwise the steps of a
busy machine would hide that a run takes three times as long."""
PRIOR = Prior(floor=0.0027, per_wander=0.7, per_noise=0.1, freedom=4.0)
"""Learned by ``make league-compare`` from half of its repeated runs, checked on the rest: docs/compare-reference.md."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Step times of one run, steady steps only."""

    numbers: NDArray[np.int64]
    """Ascending; steps with the same number did the same in every run of the job."""
    values: Floats


@dataclass(frozen=True, kw_only=True)
class Level:
    """The mean of a run and what is known about its error, all but the mean relative to it."""

    mean: float
    error: float
    """Standard error, widened by the dependence of neighboring steps."""
    freedom: float
    wander: float
    noise: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Change:
    change: float
    """Relative; positive: slower."""
    low: float
    high: float
    before: float
    after: float
    """Means of the compared steps."""
    within: float
    """Standard error of the change that the steps alone explain."""
    between: float
    """Assumed or measured spread of single runs."""
    freedom: float
    steps: int
    """Compared steps of the candidate."""
    baselines: int
    paired: bool
    """Whether steps were compared by number."""


@dataclass(frozen=True, kw_only=True)
class Judgment:
    verdict: Verdict
    change: Change
    unusual: tuple[int, ...]
    """Unusual steps of each run, the candidate last."""
    ordinary: bool
    """Whether unusual steps are left out of the change."""
    all_steps: Change | None
    """The change with them, where they recur and yet are left out because they hide it."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What would decide an undecided comparison, if the runs continue as they are; None: more than is sensible."""

    steps: int | None
    """More steady steps in each run."""
    runs: int | None
    """More baseline runs."""
    both: bool
    """Whether it takes both; else either of them is enough."""


# -- unusual steps ----------------------------------------------------------------------------------------------------


def unusual_steps(values: Floats) -> NDArray[np.bool_]:
    """Mark steps far outside of the scatter of those around them: a stall, a checkpoint, a short batch."""
    usual = local_median(values)
    rest = values - usual
    limit = np.maximum(UNUSUAL_SHARE * usual, thresholds.SPIKE_SPREADS * spread(rest))
    return np.asarray(np.abs(rest) > limit, np.bool_)


def is_recurring(unusual: NDArray[np.bool_]) -> bool:
    """Whether a run has unusual steps so often that they are part of what a step costs."""
    count = int(unusual.sum())
    return count >= RECURRING or count >= max(RECURRING_SHARE * len(unusual), 2)


def ordinary(values: Floats, unusual: NDArray[np.bool_]) -> Floats:
    """Replace unusual steps by the median of those around them."""
    return np.where(unusual, local_median(values), values) if unusual.any() else values


# -- one run ----------------------------------------------------------------------------------------------------------


def level_of(values: Floats) -> Level:
    mean = float(values.mean())
    error, freedom = _mean_error(values / mean)
    return Level(
        mean=mean,
        error=error,
        freedom=freedom,
        wander=_wander(values / mean),
        noise=spread(values / mean),
        steps=len(values),
    )


def _mean_error(values: Floats) -> tuple[float, float]:
    """Standard error of the mean of dependent values, and its degrees of freedom.

    The larger of two estimates: positive dependence of neighbors summed up until it ends, and the scatter of long
    stretches, which also shows what depends too faintly to be seen from one step to the next.
    """
    count = len(values)
    if count < 2:
        return math.inf, 1.0
    centered = values - values.mean()
    squares = float(centered @ centered)
    if squares == 0:
        return 0.0, count - 1.0
    total = 1.0
    for lag in range(1, count // LAGS_SHARE + 1):
        # The estimate is too low by about 1 / count, because the mean was estimated from the same steps.
        memory = float(centered[lag:] @ centered[:-lag]) / squares + 1 / count
        if memory <= 0:
            break
        total += 2 * memory
    variance = squares / (count - 1) / count * total
    freedom = max(count / total - 1, 2.0)
    means = _stretch_means(values)
    if len(means) >= STRETCHES and (of_stretches := float(means.var(ddof=1)) / len(means)) > variance:
        return math.sqrt(of_stretches), max(min(freedom, len(means) - 1.0), 2.0)
    return math.sqrt(variance), freedom


def _wander(values: Floats) -> float:
    """Scatter of long stretches beyond what independent steps would show."""
    means = _stretch_means(values)
    if len(means) < 2:
        return 0.0
    by_chance = float(values.var()) * len(means) / len(values)
    return math.sqrt(max(float(means.var(ddof=1)) - by_chance, 0.0))


def _stretch_means(values: Floats) -> Floats:
    count = min(STRETCHES, len(values) // STRETCH_STEPS)
    return np.array([part.mean() for part in np.array_split(values, count)]) if count >= 2 else np.zeros(0)


# -- two or more runs -------------------------------------------------------------------------------------------------


def change_between(
    baselines: Sequence[Series | Level],
    candidate: Series | Level,
    *,
    prior: Prior = PRIOR,
    part_of: float | None = None,
) -> Change:
    """Compare a run with one or several baselines.

    A ``Level`` stands for a run whose steps are not known.  ``part_of``: the values are parts of a step that takes this
    long; the change is then relative to that, a part may be zero, and all runs must be series.
    """
    runs = [*baselines, candidate]
    series = [run for run in runs if isinstance(run, Series)]
    common = _common(series) if len(series) == len(runs) else None
    if common is not None:
        seen = _paired(common[:-1], common[-1], part_of)
    elif part_of is not None:
        seen = _parts_unpaired(series[:-1], series[-1], part_of)
    else:
        levels = [level_of(run.values) if isinstance(run, Series) else run for run in runs]
        seen = _unpaired(levels[:-1], levels[-1])
    return _with_spread_of_runs(seen, prior)


def _common(series: Sequence[Series]) -> Floats | None:
    """[runs, steps]; the steps that all runs have; None if they share too few."""
    numbers = series[0].numbers
    for run in series[1:]:
        numbers = np.intersect1d(numbers, run.numbers, assume_unique=True)
    shortest = min(len(run.numbers) for run in series)
    if not len(numbers) or len(numbers) < COMMON_SHARE * shortest:
        return None
    return np.stack([run.values[np.searchsorted(run.numbers, numbers)] for run in series])


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """What the steps of the runs show, relative to the step time."""

    change: float
    ratio: float
    """By which errors grow with the candidate's step time."""
    before: float
    after: float
    error: float
    freedom: float
    wander: float
    noise: float
    share: float
    """Of the step, in which the assumed spread of runs lies."""
    means: Floats
    """Of the baselines."""
    steps: int
    paired: bool
    part: bool = False
    """Whether it is a part of the step, which may be zero, and not the step itself."""


def _paired(before: Floats, after: Floats, part_of: float | None) -> _Observed:
    usual = before.mean(axis=0)
    first, last = float(usual.mean()), float(after.mean())
    level = first if part_of is None else part_of
    ratio = last / level if part_of is None else 1.0
    # Of steps, each run relative to itself: then it does not matter which of the two is the baseline.
    rest = (after - usual) / level if part_of is not None else after / last - usual / first
    error, freedom = _mean_error(rest)
    # One baseline contributes as much to the rest as the candidate; several contribute less.
    alone = _alone(len(before))
    return _Observed(
        change=(last - first) / level,
        ratio=ratio,
        before=first,
        after=last,
        error=error * max(ratio, 1.0),
        freedom=freedom,
        wander=_wander(rest) * alone,
        noise=spread(rest) * alone,
        share=min(max(first, last) / level, 1.0),
        means=before.mean(axis=1) / level,
        steps=len(after),
        paired=True,
        part=part_of is not None,
    )


def _unpaired(before: Sequence[Level], after: Level) -> _Observed:
    runs = (*before, after)
    level = sum(run.mean for run in before) / len(before)
    ratio = after.mean / level
    of_before = math.sqrt(sum((run.error * run.mean / level) ** 2 for run in before)) / len(before)
    return _Observed(
        change=ratio - 1,
        ratio=ratio,
        before=level,
        after=after.mean,
        error=math.hypot(of_before, after.error) * max(ratio, 1.0),
        freedom=min(run.freedom for run in runs),
        wander=math.sqrt(sum(run.wander**2 for run in runs) / len(runs)),
        noise=max(run.noise for run in runs),
        share=1.0,
        means=np.array([run.mean for run in before]) / level,
        steps=after.steps,
        paired=False,
    )


def _parts_unpaired(before: Sequence[Series], after: Series, part_of: float) -> _Observed:
    """As ``_unpaired``, for parts of a step, which may be zero."""
    runs = [run.values / part_of for run in (*before, after)]
    errors = [_mean_error(run) for run in runs]
    means = np.array([run.mean() for run in runs])
    usual = float(means[:-1].mean())
    return _Observed(
        change=float(means[-1]) - usual,
        ratio=1.0,
        before=usual * part_of,
        after=float(means[-1]) * part_of,
        error=math.hypot(math.sqrt(sum(error**2 for error, _ in errors[:-1])) / len(before), errors[-1][0]),
        freedom=min(freedom for _, freedom in errors),
        wander=math.sqrt(sum(_wander(run) ** 2 for run in runs) / len(runs)),
        noise=max(spread(run) for run in runs),
        share=min(float(means.max()), 1.0),
        means=means[:-1],
        steps=len(after.values),
        paired=False,
        part=True,
    )


def assumed_spread(run: Level, prior: Prior = PRIOR) -> float:
    """How far the mean of a run may be off, relative to it, before other runs are seen: between and within runs."""
    return math.hypot(_assumed(prior, run.wander, run.noise, 1.0), run.error)


def _assumed(prior: Prior, wander: float, noise: float, share: float) -> float:
    """The spread of single runs before several were seen; ``share``: of the step, in which the floor lies."""
    found = math.sqrt((prior.floor * share) ** 2 + (prior.per_wander * wander) ** 2 + (prior.per_noise * noise) ** 2)
    return min(found, ASSUMED_AT_MOST)


def _alone(baselines: int) -> float:
    """The part of one run in the error of a difference between a run and the mean of the baselines."""
    return 1 / math.sqrt(1 + 1 / baselines)


def _with_spread_of_runs(seen: _Observed, prior: Prior) -> Change:
    """Add the spread between runs, as assumed and as the baselines show it, to the error within them."""
    runs = len(seen.means)
    assumed = _assumed(prior, seen.wander, seen.noise, seen.share) ** 2
    # The means of the baselines scatter by both: by the spread of runs, and by the error within each.
    within_run = (seen.error * _alone(runs)) ** 2
    trusted = prior.freedom + runs - 1
    shown = float(seen.means.var(ddof=1)) if runs > 1 else 0.0
    between = max((prior.freedom * (assumed + within_run) + (runs - 1) * shown) / trusted - within_run, 0.0)
    of_runs, of_steps = between * (1 + 1 / runs) * max(seen.ratio, 1.0) ** 2, seen.error**2
    total = of_runs + of_steps
    freedom = total**2 / (of_runs**2 / trusted + of_steps**2 / seen.freedom) if total > 0 else seen.freedom
    low, high = _interval(seen, t_quantile(freedom) * math.sqrt(total))
    return Change(
        change=seen.change,
        low=min(low, seen.change),  # rounding
        high=max(high, seen.change),
        before=seen.before,
        after=seen.after,
        within=seen.error,
        between=math.sqrt(between),
        freedom=freedom,
        steps=seen.steps,
        baselines=runs,
        paired=seen.paired,
    )


def _interval(seen: _Observed, half: float) -> tuple[float, float]:
    """A ratio is as uncertain upwards as downwards in proportion: three times as long, or a third of it."""
    if seen.part:
        return seen.change - half, seen.change + half
    factor = math.exp(half / max(seen.ratio, 1.0))
    return seen.ratio / factor - 1, seen.ratio * factor - 1


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t (Wallace's approximation, a few percent too wide for small freedom)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


# -- decision ---------------------------------------------------------------------------------------------------------


def verdict_of(change: Change, *, margin: float = MARGIN) -> Verdict:
    """``same`` needs an interval within the margin; a mere lack of evidence is ``cannot_tell``."""
    if -margin <= change.low and change.high <= margin:
        return "same"
    if change.low > 0:
        return "slower"
    return "faster" if change.high < 0 else "cannot_tell"


def judge(
    baselines: Sequence[Series | Level], candidate: Series | Level, *, margin: float = MARGIN, prior: Prior = PRIOR
) -> Judgment:
    """Compare ordinary steps, or all steps if any run has unusual ones time and again.

    Recurring unusual steps can hide a change of all others.  If all steps do not decide it, ordinary steps may show
    that the run is slower or faster, but never that it is the same.
    """
    runs = [*baselines, candidate]
    unusual = [unusual_steps(run.values) if isinstance(run, Series) else np.zeros(0, np.bool_) for run in runs]
    counts = tuple(int(mask.sum()) for mask in unusual)
    calm = [
        replace(run, values=ordinary(run.values, mask)) if isinstance(run, Series) else run
        for run, mask in zip(runs, unusual, strict=True)
    ]
    without = change_between(calm[:-1], calm[-1], prior=prior)
    verdict = verdict_of(without, margin=margin)
    if not any(is_recurring(mask) for mask in unusual if len(mask)):
        return Judgment(verdict=verdict, change=without, unusual=counts, ordinary=True, all_steps=None)
    whole = change_between(baselines, candidate, prior=prior)
    of_all = verdict_of(whole, margin=margin)
    agree = without.change * whole.change > 0
    if of_all == "cannot_tell" and verdict in ("slower", "faster") and agree:
        return Judgment(verdict=verdict, change=without, unusual=counts, ordinary=True, all_steps=whole)
    return Judgment(verdict=of_all, change=whole, unusual=counts, ordinary=False, all_steps=None)


def needed_to_decide(change: Change, half: float, *, prior: Prior = PRIOR) -> Needed:
    """What would narrow the interval to ``half`` on either side."""
    if half <= 0 or not math.isfinite(change.within):
        return Needed(steps=None, runs=None, both=False)
    times = next((n for n in range(2, STEPS_AT_MOST + 1) if _half(change, prior, steps=n) <= half), None)
    runs = next((n for n in range(1, RUNS_AT_MOST + 1) if _half(change, prior, runs=n) <= half), None)
    both = False
    if times is None and runs is None:
        ways = [
            ((n + RUN_COST) * (m + 1 + change.baselines), n, m)
            for n in range(2, STEPS_AT_MOST + 1)
            for m in range(1, RUNS_AT_MOST + 1)
            if _half(change, prior, steps=n, runs=m) <= half
        ]
        if ways:
            _, times, runs = min(ways)
            both = True
    return Needed(steps=None if times is None else _rounded_up(change.steps * (times - 1)), runs=runs, both=both)


def _half(change: Change, prior: Prior, *, steps: int = 1, runs: int = 0) -> float:
    """Half the interval with so many times the steps, and so many more baselines."""
    count = change.baselines + runs
    error = change.within**2 / steps * (1 + 1 / count) / (1 + 1 / change.baselines)
    between = change.between**2 * (1 + 1 / count) * max(1 + change.change, 1.0) ** 2
    total = between + error
    if total <= 0:
        return 0.0
    trusted = prior.freedom + count - 1
    freedom = total**2 / (between**2 / trusted + error**2 / max(change.freedom * steps, 2.0))
    return t_quantile(freedom) * math.sqrt(total)


def _rounded_up(count: int) -> int:
    """To two digits; the estimate is no better."""
    size = int(10 ** max(len(str(count)) - 2, 0))
    return -(-count // size) * size
