"""Robust statistics over ranks and steps, and of one series over time.

A few wild steps cannot move them.  They work on arrays ``[rank, step]`` in which nan means "not there", and are
vectorized over ranks: 1,024 x 1,000 is one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stepscope.judge import thresholds

__all__ = [
    "Fold",
    "Rhythm",
    "Trend",
    "between_z",
    "block_medians",
    "chance_of_at_least",
    "fold",
    "levels",
    "local_median",
    "longest",
    "lower_median",
    "lower_median_rank",
    "mean_rank",
    "median",
    "median_of",
    "median_rank",
    "medians",
    "one_sided_z",
    "peer_deviation",
    "persistence_z",
    "rhythm",
    "shortest",
    "spread",
    "stretch_z",
    "trend",
    "wander",
    "z_needed",
    "z_of_t",
]


# -- over ranks -------------------------------------------------------------------------------------------------------

MAD_TO_SIGMA = 1.4826
"""From the median absolute deviation of a normal distribution to its standard deviation."""
MANY_RANKS = 64
"""From this many on a rank's own value hardly moves the median, and leaving it out costs three times as much."""
MEDIAN_ERROR = 1.2533
"""Error of a median relative to that of a mean, for a normal distribution."""

SHORT = 1_000
"""Up to this many values, sorting all of them is faster than ``np.median``."""

Floats = NDArray[np.float64]


def median(values: Floats) -> float:
    """As ``np.median``, which takes ten times as long for a short series; rules need thousands of them."""
    count = len(values)
    if not 0 < count <= SHORT:
        return float(np.median(values))
    ordered = np.sort(values)
    if np.isnan(ordered[-1]):
        return float("nan")
    middle = count // 2
    return float(ordered[middle]) if count % 2 else float((ordered[middle - 1] + ordered[middle]) / 2)


def spread(values: Floats) -> float:
    """Robust standard deviation."""
    if not len(values):
        return 0.0
    return MAD_TO_SIGMA * median(np.abs(values - median(values)))


def longest(values: Floats) -> Floats:
    """[S]; the largest over the ranks present."""
    return np.asarray(np.fmax.reduce(values, axis=0), np.float64) if len(values) else np.zeros(values.shape[1])


def shortest(values: Floats) -> Floats:
    """[S]; the smallest over the ranks present."""
    return np.asarray(np.fmin.reduce(values, axis=0), np.float64) if len(values) else np.zeros(values.shape[1])


def mean_rank(values: Floats) -> Floats:
    """[S]; the mean over the ranks present; zero without any."""
    counts = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nansum(values, axis=0) / np.maximum(counts, 1), np.float64)


def median_rank(values: Floats) -> Floats:
    """[S]; the median over the ranks present, the mean of the middle two; nan without any."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    if not np.isnan(values).any():
        return _column_medians(values)
    ordered = np.sort(values, axis=0)  # nan last
    counts = (~np.isnan(values)).sum(axis=0)
    columns = np.arange(values.shape[1])
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, len(values) - 1)
    return np.asarray((ordered[low, columns] + ordered[high, columns]) / 2, np.float64)


def medians(values: Floats) -> Floats:
    """Median over the steps, by rank."""
    if not values.shape[1]:
        return np.full(values.shape[0], np.nan)
    if not np.isnan(values).any():
        return _row_medians(values)
    out = np.full(values.shape[0], np.nan)
    for index, row in enumerate(values):
        there = row[~np.isnan(row)]
        if len(there):
            out[index] = median(there)
    return out


def lower_median(values: Floats) -> float:
    """The lower of two middle values: with two ranks, the one that has less."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def lower_median_rank(durations_ns: Floats) -> Floats:
    """[S]; value of the median rank (the lower middle one), so that a wait of few ranks is not counted for all."""
    if not np.isnan(durations_ns).any():
        middle = (len(durations_ns) - 1) // 2
        return np.asarray(np.partition(durations_ns, middle, axis=0)[middle], np.float64)
    ordered = np.sort(durations_ns, axis=0)  # nan last
    counts = (~np.isnan(ordered)).sum(axis=0)
    return np.asarray(ordered[np.maximum(counts - 1, 0) // 2, np.arange(ordered.shape[1])], np.float64)


def median_of(values: Floats) -> float:
    """The median of the values that are there; 0 without any."""
    there = values[~np.isnan(values)]
    return median(there) if len(there) else 0.0


def peer_deviation(values: Floats, groups: NDArray[np.intp] | None = None) -> Floats:
    """Each rank's excess over the median of the *other* ranks of its group, step by step; nan without any."""
    if groups is not None and len(groups) and (groups != groups[0]).any():
        out = np.full_like(values, np.nan)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            out[members] = peer_deviation(values[members])
        return out
    if len(values) >= MANY_RANKS and not np.isnan(values).any():
        return np.asarray(values - _column_medians(values), np.float64)
    out = np.full_like(values, np.nan)
    for there, columns in _by_presence(values):
        if there.all() and len(there) > 1 and len(columns) == values.shape[1]:
            return values - _without_self(values)
        if there.sum() > 1:
            block = np.ix_(there, columns)
            out[block] = values[block] - _without_self(values[block])
    return out


def block_medians(values: Floats, length: int) -> Floats:
    """[R, B]: medians of stretches of ``length`` steps; the oldest steps that do not fill one are left out.

    ``values`` has no nan.  B is 0 if there are too few steps for a single block.
    """
    ranks, steps = values.shape
    count = steps // length
    if not count:
        return np.zeros((ranks, 0))
    return np.asarray(np.median(values[:, steps - count * length :].reshape(ranks, count, length), axis=2), np.float64)


def long_block(steps: int) -> int:
    """Length of the stretches whose scatter shows wander, in a window of this many steps."""
    return max(thresholds.BLOCK_STEPS, -(-steps // thresholds.WANDER_BLOCKS))


def _short_block(steps: int) -> int:
    """Length of the stretches that a test counts, rounded to the nearest.

    Rounded up, 41 steps would make 13 stretches where 40 make 20, and the test would find less.
    """
    return max(thresholds.BLOCK_STEPS, round(steps / thresholds.BLOCKS))


def persistence_z(deviation: Floats) -> float:
    """Certainty, as a z, that a rank's deviation [S] is above zero for good; 0.0: no evidence, inf: clear.

    A t test over the medians of stretches, its spread widened by their dependence on each other.  A deviation that is
    within the scatter of long stretches is no evidence.  Steady growth does not count as scatter.
    """
    typical = median(deviation)
    mostly = float((deviation > 0).mean()) >= thresholds.CLEAR_SHARE
    noise = spread(deviation)
    if len(deviation) >= thresholds.CLEAR_STEPS and mostly and typical > thresholds.CLEAR_SPREADS * noise:
        return float("inf")
    # Blocks of a short run have two steps, so a stall in one of them moves their median.
    deviation = np.clip(
        deviation, typical - thresholds.STEP_CLIP_SPREADS * noise, typical + thresholds.STEP_CLIP_SPREADS * noise
    )
    long_blocks = _without_trend(block_medians(deviation[None, :], long_block(len(deviation)))[0])
    if typical < thresholds.SPREADS_APART * spread(long_blocks):
        return 0.0
    blocks = _without_trend(block_medians(deviation[None, :], _short_block(len(deviation)))[0])
    count = len(blocks)
    if count < 2 or blocks.mean() <= 0:
        return 0.0
    centered = blocks - blocks.mean()
    squares = float(centered @ centered)
    if squares == 0:
        return float("inf")
    widened = math.sqrt(squares / (count - 1)) * _widening(centered)
    return z_of_t(float(blocks.mean()) / widened * math.sqrt(count), count - 1)


def one_sided_z(deviation: Floats, least: float) -> float:
    """Certainty, as a z, that a deviation which wanders widely does not change sides; 0.0: no evidence.

    On a busy machine extra work takes one to three times as long, so an excess wanders in proportion to itself, and no
    test of its mean survives that.  Nearly every step must be above ``least``.  Its sign then counts as often as there
    are independent steps, and its wander is compared with its distance from ``least`` on the scale of its logarithm.
    """
    if float((deviation > least).mean()) < thresholds.ALWAYS_SHARE:
        return 0.0
    logs = np.log(np.maximum(deviation, least / 2))
    typical = median(logs)
    if typical - math.log(least) < thresholds.SPREADS_APART * spread(
        block_medians(logs[None, :], long_block(len(logs)))[0]
    ):
        return 0.0
    independent = int(len(logs) / _long_widening(logs - typical) ** 2)
    hits = round(independent * float((deviation > least).mean()))
    p = chance_of_at_least(hits, independent, 0.5)
    return -NormalDist().inv_cdf(max(p, 1e-300))


def stretch_z(deviation: Floats, at: slice) -> float:
    """Certainty, as a z, that a stretch of a rank's deviation is above the rest of it.

    The medians of the two parts are compared; their scatter is that of single steps within the parts, widened by their
    dependence on each other.  The caller searched for the stretch, so it must count its possible places as comparisons.
    """
    inside, outside = deviation[at], np.delete(deviation, at)
    if not len(outside):
        return persistence_z(inside)
    inside_level, outside_level = median(inside), median(outside)
    gap = inside_level - outside_level
    centered = np.concatenate((inside - inside_level, outside - outside_level))
    wander = spread(block_medians(outside[None, :], long_block(len(outside)))[0])
    if gap < thresholds.SPREADS_APART * wander:
        return 0.0
    noise = max(spread(inside), spread(outside))
    if noise == 0:
        return float("inf") if gap > 0 else 0.0
    calm = np.clip(centered, -thresholds.STEP_CLIP_SPREADS * noise, thresholds.STEP_CLIP_SPREADS * noise)
    error = MEDIAN_ERROR * noise * _long_widening(calm) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return max(gap / error, 0.0)


def between_z(inside: Floats, outside: Floats) -> float:
    """Certainty, as a z, that the mean of ``inside`` is above that of ``outside``; above zero if that is empty."""
    freedom = len(inside) + len(outside) - (2 if len(outside) else 1)
    if freedom < 2:
        return 0.0
    squares = sum(float(((part - part.mean()) ** 2).sum()) for part in (inside, outside) if len(part))
    gap = float(inside.mean() - (outside.mean() if len(outside) else 0.0))
    error = math.sqrt(squares / freedom * (1 / len(inside) + (1 / len(outside) if len(outside) else 0.0)))
    if gap <= 0:
        return 0.0
    return z_of_t(gap / error, freedom) if error > 0 else float("inf")


def _widening(centered: Floats) -> float:
    """By how much the dependence of neighbors widens the error of a mean."""
    squares = float(centered @ centered)
    if squares == 0:
        return 1.0
    memory = float(centered[1:] @ centered[:-1]) / squares
    # The estimate is too low by about (1 + 4 memory) / count.
    memory = min(max(memory + (1 + 4 * max(memory, 0.0)) / len(centered), 0.0), thresholds.DEPENDENCE_AT_MOST)
    return math.sqrt((1 + memory) / (1 - memory))


def _long_widening(centered: Floats) -> float:
    """The same for single steps, whose dependence may be faint and long: all of it is summed."""
    squares = float(centered @ centered)
    if squares == 0:
        return 1.0
    total = 1.0
    for lag in range(1, min(thresholds.DEPENDENCE_STEPS, len(centered) // 4) + 1):
        memory = float(centered[lag:] @ centered[:-lag]) / squares
        if memory <= 0:
            break
        total += 2 * memory
    return math.sqrt(total)


def _without_trend(blocks: Floats) -> Floats:
    """Remove the median slope from blocks that grow throughout; leave others unchanged."""
    count = len(blocks)
    if count < thresholds.RISE_BLOCKS:
        return blocks
    late, early = np.triu_indices(count, 1)[::-1]
    rises = (blocks[late] - blocks[early]) / (late - early)
    if float(np.sign(rises).mean()) < thresholds.RISE_AGREES:
        return blocks
    return np.asarray(blocks - median(rises) * (np.arange(count) - (count - 1) / 2), np.float64)


def z_needed(comparisons: int, chance: float = thresholds.ANY_FALSE_ALARM) -> float:
    """The z at which one of this many comparisons of healthy ranks fires with this probability."""
    return NormalDist().inv_cdf(1 - chance / max(comparisons, 1))


def z_of_t(t: float, freedom: int) -> float:
    """The z with the same probability as a positive t (Wallace's approximation)."""
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))


def _row_medians(values: Floats) -> Floats:
    """``np.median`` along the last axis, for values without nan.

    Without its second check for nan, which costs as much as the median.  Of an even number, the lower middle one is the
    largest of those below the other: to find it takes half as long as a partition at both.
    """
    middle = values.shape[-1] // 2
    ordered = np.partition(values, middle, axis=-1)
    if values.shape[-1] % 2:
        return np.asarray(ordered[..., middle], np.float64)
    return np.asarray((ordered[..., :middle].max(axis=-1) + ordered[..., middle]) / 2, np.float64)


def _column_medians(values: Floats) -> Floats:
    """``np.median`` along the first axis, for values without nan."""
    return _row_medians(np.ascontiguousarray(values.T))


def _by_presence(values: Floats) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.intp]]]:
    """Stretches of steps with the same ranks present; ranks only ever leave, so there are few."""
    if not values.shape[1]:
        return
    there = ~np.isnan(values)
    if there.all():
        yield there[:, 0], np.arange(values.shape[1])
        return
    changes = np.flatnonzero((there[:, 1:] != there[:, :-1]).any(axis=0)) + 1
    for columns in np.split(np.arange(values.shape[1]), changes):
        yield there[:, columns[0]], columns


def _without_self(values: Floats) -> Floats:
    """The median of the others for each element of each column, from one partial sort of the columns."""
    count = values.shape[0]
    middle = count // 2
    if count % 2 == 0:
        ordered = np.partition(values, (middle - 1, middle), axis=0)
        low, high = ordered[middle - 1], ordered[middle]
        return np.asarray(np.where(values <= low, high, low), np.float64)
    ordered = np.partition(values, (middle - 1, middle, middle + 1), axis=0)
    low, center, high = ordered[middle - 1], ordered[middle], ordered[middle + 1]
    without_center = (low + high) / 2
    below, above = values < center, values > center
    medians_ = np.where(below, (center + high) / 2, np.where(above, (low + center) / 2, without_center))
    return np.asarray(medians_, np.float64)


# -- over time --------------------------------------------------------------------------------------------------------
# Statistics of one series over time ``[S]``: local level, trend, levels between changes, rhythm.
#
# They are robust (medians, clipping) and account for the dependence of neighboring steps: a slow wander of a machine's
# speed is neither a trend nor a change.  Long series are reduced to at most ``POINTS`` medians, so that the cost stays
# bounded.

POINTS = 500
"""Change points are searched among at most this many points, then refined in the steps around each one found."""
CHUNK = 50_000
"""Steps whose windows are laid out at once: 8 MB."""
EXACT_TRIES = 200
"""With more, the terms of a binomial sum are computed by their logarithms: they no longer fit into a float."""
FOLD_STEPS = 5_000
"""Only the last steps are folded, up to this many: a rhythm that needs more to show costs nothing."""


def local_median(values: Floats, width: int = thresholds.LOCAL_STEPS) -> Floats:
    """[S]; the median of the ``width`` steps around each step; fewer at the ends."""
    count, half = len(values), width // 2
    if count <= half + 1:
        return np.full(count, median(values)) if count else values.copy()
    out = np.empty(count)
    padded = np.concatenate((np.full(half, np.nan), values, np.full(half, np.nan)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    whole = not np.isnan(values).any()
    for start in range(half, max(count - half, half), CHUNK):
        end = min(start + CHUNK, count - half)
        out[start:end] = _row_medians(windows[start:end]) if whole else np.median(windows[start:end], axis=1)
    for at in [*range(min(half, count)), *range(max(count - half, half), count)]:
        out[at] = median(values[max(at - half, 0) : at + half + 1])
    return out


# -- slow growth ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trend:
    slope: float
    """Theil–Sen, per step."""
    start: float
    """Value of the line at the first step."""
    p: float
    """Chance that a series without trend rises like this (Mann–Kendall, one-sided)."""
    p_line: float
    """Chance that it lies on a rising line like this (t-test of the slope, one-sided).  However steep a line is, ``p``
    counts only pairs that rise, and so depends on the accidental memory of the few stretches."""
    wander: float
    """Scatter of long stretches about the line."""

    def line(self, count: int) -> Floats:
        return np.asarray(self.start + self.slope * np.arange(count), np.float64)


def trend(values: Floats) -> Trend:
    """Fit a trend to the medians of stretches; their dependence about the line widens the test."""
    blocks, centers = _blocks(values, thresholds.BLOCKS)
    count = len(blocks)
    if count < thresholds.TREND_BLOCKS:
        level = median(values) if len(values) else 0.0
        return Trend(slope=0.0, start=level, p=1.0, p_line=1.0, wander=0.0)
    later, earlier = np.tril_indices(count, -1)
    rises = blocks[later] - blocks[earlier]
    slope = median(rises / (centers[later] - centers[earlier]))
    start = median(blocks - slope * centers)
    rest = blocks - (start + slope * centers)
    ties = _ties(blocks)
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18.0
    if variance <= 0:
        return Trend(slope=slope, start=start, p=1.0, p_line=1.0, wander=0.0)
    score = float(np.sign(rises).sum())
    memory = _memory(rest)
    longer = (1 + memory) / (1 - memory)  # by which dependence widens the variance
    z = max(score - 1, 0.0) / math.sqrt(variance * longer)
    about_line = values - (start + slope * np.arange(len(values)))
    long = block_medians(about_line[None, :], long_block(len(values)))[0]
    p_line = _chance_of_slope(blocks, centers, longer)
    return Trend(slope=slope, start=start, p=NormalDist().cdf(-z), p_line=p_line, wander=spread(long))


def _chance_of_slope(values: Floats, at: Floats, longer: float) -> float:
    """One-sided, by Student's t of the least-squares slope, as a quantile of the normal distribution (Wallace)."""
    apart, freedom = at - at.mean(), len(values) - 2
    squares = float(apart @ apart)
    slope = float(apart @ values) / squares
    rest = values - values.mean() - slope * apart
    error = math.sqrt(float(rest @ rest) / freedom / squares * longer)
    if slope <= 0:
        return 1.0
    if error == 0:
        return 0.0
    z = math.sqrt(freedom * math.log1p((slope / error) ** 2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return NormalDist().cdf(-z)


def _blocks(values: Floats, most: int) -> tuple[Floats, Floats]:
    """Medians of stretches of at least two steps, and the positions of their middles."""
    count = max(min(most, len(values) // thresholds.BLOCK_STEPS), 1)
    parts = np.array_split(np.arange(len(values)), count)
    medians = np.array([median(values[part]) for part in parts if len(part)])
    return medians, np.array([part.mean() for part in parts if len(part)])


def _memory(rest: Floats) -> float:
    """Correlation of neighbors, corrected for the bias of a short series."""
    centered = rest - rest.mean()
    squares = float(centered @ centered)
    if squares == 0:
        return 0.0
    memory = float(centered[1:] @ centered[:-1]) / squares
    return min(max(memory + (1 + 4 * max(memory, 0.0)) / len(rest), 0.0), thresholds.DEPENDENCE_AT_MOST)


def _ties(blocks: Floats) -> float:
    _, counts = np.unique(blocks, return_counts=True)
    return float((counts * (counts - 1) * (2 * counts + 5)).sum())


# -- sudden changes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Wander:
    """How much the level of a stretch of ``steps`` steps varies without a cause."""

    scatter: float
    steps: int
    memory: float
    """Correlation of neighboring stretches."""

    @property
    def per_step(self) -> float:
        """For large n, the variance of a mean over n steps is this divided by n."""
        return self.scatter**2 * self.steps * (1 + self.memory) / (1 - self.memory)

    @property
    def scatter_of_neighbors(self) -> float:
        """The same assuming independence; a change does not disturb it."""
        return self.scatter**2 * self.steps * (1 - self.memory)


def wander(values: Floats, apart: Sequence[int] = ()) -> Wander:
    """Estimate the wander from differences between medians of stretches, skipping pairs with a change in between.

    A steady slope affects all differences alike.  If neighbors differ less than stretches further apart, they depend on
    each other.
    """
    steps = max(min(thresholds.SHORT_STRETCH_STEPS, len(values) // thresholds.BLOCKS), 1)
    count = len(values) // steps
    floor = thresholds.LEAST_SPREAD_SHARE * abs(median(values)) if len(values) else 0.0
    if count < 2:
        return Wander(scatter=floor, steps=steps, memory=0.0)
    blocks = np.median(values[: count * steps].reshape(count, steps), axis=1)
    level = np.searchsorted(np.sort(np.asarray(apart, np.intp)), (np.arange(count) + 0.5) * steps)
    variances = []
    for lag in sorted({1, 2, 4, count // 10} - {0}):
        within = level[lag:] == level[:-lag]
        if lag <= max(count // 5, 1) and (lag == 1 or within.sum() >= thresholds.TREND_BLOCKS):
            variances.append(spread((blocks[lag:] - blocks[:-lag])[within]) ** 2 / 2)
    # The scatter of independent steps is known better than the difference of a few stretches.
    white = (MEDIAN_ERROR * spread(np.diff(values))) ** 2 / 2 / steps
    near, far = max(variances[0], white), float(np.mean(variances[1:] or variances))
    memory = min(max(1 - near / far, 0.0), thresholds.DEPENDENCE_AT_MOST) if far > 0 else 0.0
    return Wander(scatter=max(math.sqrt(max(near, far)), floor), steps=steps, memory=memory)


def levels(values: Floats, *, least_change: float) -> tuple[list[int], Wander]:
    """Where the level changes (first steps of the stretches, beginning with 0), and the wander, changes included.

    The best cut into stretches by squares of the clipped series.  Each cut must be worth more than wander would be over
    as many steps, by a z that holds for any place in the series.  The wander is measured between the largest changes of
    a first cut, which knows of no changes yet.  Then cuts whose levels differ by less than ``least_change``, or by less
    than the wander allows, are dropped, the weakest first.
    """
    if len(values) < 2 * thresholds.LEVEL_STEPS:
        return [0][: len(values)], wander(values)
    group = -(-len(values) // POINTS)
    count = len(values) // group
    points = np.median(values[: count * group].reshape(count, group), axis=1)
    local = local_median(points, max(2 * thresholds.LEVEL_STEPS // group - 1, 3) | 1)
    reach = thresholds.POINT_CLIP_SPREADS * max(
        spread(points - local), thresholds.LEAST_SPREAD_SHARE * abs(median(points))
    )
    calm = np.clip(points, local - reach, local + reach)
    z = NormalDist().inv_cdf(1 - thresholds.CHANGE_CHANCE / len(points))
    least = max(thresholds.LEVEL_STEPS // group, 2)
    at_first = wander(calm)
    own = wander(calm, _largest(calm, _cut(calm, worth=z * z * at_first.scatter_of_neighbors, least=least)))
    cuts = _cut(calm, worth=z * z * own.per_step, least=least)
    starts = [_exactly(values, cut * group, 2 * group + thresholds.LEVEL_STEPS // 2) if cut else 0 for cut in cuts]
    return _merged(values, sorted(set(starts)), max(least_change, thresholds.SPREADS_APART * own.scatter)), at_first


def _largest(values: Floats, starts: list[int]) -> list[int]:
    """The few cuts with the largest change of level."""
    level = np.array([median(part) for part in np.split(values, starts[1:])])
    order = np.argsort(-np.abs(np.diff(level)), kind="stable")
    return [starts[index + 1] for index in order[: thresholds.CHANGES_AT_MOST]]


def _cut(values: Floats, *, worth: float, least: int) -> list[int]:
    """Optimal partitioning: starts of stretches of at least ``least`` points that minimize squares + worth * cuts."""
    count = len(values)
    # Centered on the median: sums of squares of large numbers would lose the differences.
    values = values - median(values)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    squares = np.concatenate(([0.0], np.cumsum(values * values)))
    best = np.full(count + 1, np.inf)
    best[0] = -worth
    cut_before = np.zeros(count + 1, np.intp)
    lengths = np.arange(count, 0, -1.0)
    for end in range(least, count + 1):
        begins = slice(end - least + 1)
        sums_within = sums[end] - sums[begins]
        length = lengths[count - end : count - least + 1]
        price = best[begins] + squares[end] - squares[begins] - sums_within * sums_within / length + worth
        at = int(price.argmin())
        best[end], cut_before[end] = price[at], at
    starts, end = [], count
    while end > 0:
        end = int(cut_before[end])
        starts.append(end)
    return starts[::-1]


def _exactly(values: Floats, about: int, reach: int) -> int:
    """The step near a cut that separates the two levels best, by absolute deviations."""
    low, high = max(about - 4 * reach, 0), min(about + 4 * reach, len(values))
    before, after = median(values[low : max(about, low + 1)]), median(values[min(about, high - 1) : high])
    first, last = max(about - reach, low + 1), min(about + reach, high - 1)
    if first > last:
        return about
    gain = np.concatenate(([0.0], np.cumsum(np.abs(values[low:high] - after) - np.abs(values[low:high] - before))))
    places = np.arange(first, last + 1)
    return int(places[gain[places - low].argmax()])


def _merged(values: Floats, starts: list[int], least_change: float) -> list[int]:
    while len(starts) > 1:
        ends = [*starts[1:], len(values)]
        level = np.array([median(values[start:end]) for start, end in zip(starts, ends, strict=True)])
        steps = np.abs(np.diff(level))
        weakest = int(steps.argmin())
        if steps[weakest] >= least_change:
            break
        del starts[weakest + 1]
    return starts


# -- rhythm -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    period: int
    """In steps."""
    regular: float
    """Share of the events that keep to it."""
    p: float


def rhythm(events: Sequence[int]) -> Rhythm | None:
    """The period that most events keep, within a step, some missing; None if chance explains it as well.

    Each event is expected a multiple of the period after the last one that kept to it.  Two events fix the period; each
    of the others would keep to it by chance with a probability of allowed steps over period.  ``events`` are step
    numbers: loops count ``step % n``, so multiples of the period (or the steps before them) are stronger evidence.
    """
    if len(events) < thresholds.PERIODIC_SPIKES:
        return None
    at = np.asarray(events, np.int64)
    best: Rhythm | None = None
    candidates = _likely_periods(at)
    for period in candidates:
        for slack in (0, 1) if period >= 5 else (0,):
            for first in range(min(3, len(at) - 2)):
                on_beat, beats, last = _keeping(at, first, period, slack)
                if on_beat < thresholds.REGULAR_SHARE * len(at):
                    continue
                if on_beat < thresholds.BEATS_SHARE * (beats + 1):
                    continue
                p = chance_of_at_least(on_beat - 2, len(at) - 2, (2 * slack + 1) / period) * 2 * len(candidates)
                if slack == 0 and at[first] % period in (0, period - 1):
                    p *= 2 / period
                if best is None or p < best.p:
                    mean = round((last - int(at[first])) / beats)
                    best = Rhythm(period=mean, regular=on_beat / len(at), p=min(p, 1.0))
    return best if best is not None and best.p <= thresholds.RHYTHM_CHANCE else None


def _likely_periods(at: NDArray[np.int64]) -> list[int]:
    """The most common distances from an event to the next and to the one after."""
    distances = np.concatenate((np.diff(at), at[2:] - at[:-2]))
    found, counts = np.unique(distances[distances > 1], return_counts=True)
    return [int(gap) for gap in found[np.argsort(-counts, kind="stable")][:5]]


def _keeping(at: NDArray[np.int64], first: int, period: int, slack: int) -> tuple[int, int, int]:
    """How many events keep to the period from ``first`` on, over how many periods, and the last such event."""
    on_beat, passed, last = 1, 0, int(at[first])
    for place in at[first + 1 :].tolist():
        beats = round((place - last) / period)
        if beats >= 1 and abs(place - last - beats * period) <= slack:
            on_beat, passed, last = on_beat + 1, passed + beats, place
    return on_beat, passed, last


def chance_of_at_least(hits: int, tries: int, chance: float) -> float:
    """Probability of at least this many hits."""
    hits = max(hits, 0)
    if tries <= EXACT_TRIES or not 0 < chance < 1:
        return sum(math.comb(tries, k) * chance**k * (1 - chance) ** (tries - k) for k in range(hits, tries + 1))
    if hits > tries:
        return 0.0
    counts = np.arange(hits, tries)
    first = math.lgamma(tries + 1) - math.lgamma(hits + 1) - math.lgamma(tries - hits + 1)
    first += hits * math.log(chance) + (tries - hits) * math.log1p(-chance)
    ratios = np.log((tries - counts) / (counts + 1)) + math.log(chance) - math.log1p(-chance)
    return float(np.exp(first + np.append(0.0, np.cumsum(ratios))).sum())


@dataclass(frozen=True, kw_only=True)
class Fold:
    period: int
    at: NDArray[np.intp]
    """The steps that stand out."""
    excess: float
    """Median excess of the highest place in the period over the others."""
    usual: float
    """Median of the other places."""
    agrees: float
    """Share of the periods in which that place is at least half as high."""
    z: float


def fold(rest: Floats, comparisons: int = 1) -> Fold | None:
    """Find a rhythm of steps too small to see one by one: fold the series (about its local level) at every period.

    The median of each place over the periods is compared with that of the other places, in units of the scatter around
    each place's own median.  With heavy tails that says little, so steps half as high are counted, too: they must be
    rarer elsewhere than chance allows.  Both tests correct for all periods and places tried, and for ``comparisons``,
    the number of series.
    """
    skipped = max(len(rest) - FOLD_STEPS, 0)
    rest = rest[skipped:]
    longest = min(thresholds.LONGEST_PERIOD, len(rest) // thresholds.FOLDS)
    chance = thresholds.ANY_FALSE_ALARM / max(longest * (longest + 1) / 2, 1) / comparisons
    best: Fold | None = None
    least_z = NormalDist().inv_cdf(1 - chance)
    for period in range(2, longest + 1):
        folded, places, error = _folded(rest, period)
        high = int(places.argmax())
        usual = median(np.concatenate((places[:high], places[high + 1 :])))
        excess = float(places[high]) - usual
        if error <= 0 or excess / error <= (best.z if best else least_z):
            continue
        hits = folded > usual + excess / 2
        here = int(hits[:, high].sum())
        elsewhere = (int(hits.sum()) - here + 1) / (hits.size - len(hits) + 1)
        if (
            here < thresholds.REGULAR_SHARE * len(hits)
            or chance_of_at_least(here, len(hits), min(elsewhere, 1.0)) > chance
        ):
            continue
        out = [high, *np.flatnonzero((places - usual) / error >= thresholds.CLEAR_SPREADS)]
        at = skipped + np.flatnonzero(np.isin(np.arange(len(rest)) % period, out))
        best = Fold(period=period, at=at, excess=excess, usual=usual, agrees=here / len(hits), z=excess / error)
    return best


def _folded(rest: Floats, period: int) -> tuple[Floats, Floats, float]:
    """[periods, place], the median of each place, and the error of such a median."""
    cycles = len(rest) // period
    folded = rest[: cycles * period].reshape(cycles, period)
    places = _row_medians(folded.T)
    noise = spread((folded - places).ravel()) * math.sqrt(cycles / (cycles - 1))
    return folded, places, MEDIAN_ERROR * noise / math.sqrt(cycles)
