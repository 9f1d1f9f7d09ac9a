"""Statistics that a few wild steps cannot move, over arrays ``[rank, step]`` in which nan means "not there".

All of it is vectorised over ranks: 1,024 x 1,000 is one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds

__all__ = [
    "block_medians",
    "long_block",
    "longest",
    "lower_median",
    "mean_rank",
    "median_rank",
    "medians",
    "peer_deviation",
    "persistence_z",
    "shortest",
    "spread",
    "stretch_z",
    "z_needed",
]

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of a normal distribution to its standard deviation."""
MANY_RANKS = 64
"""From here on a rank's own value hardly moves the median, and leaving it out costs three times as much."""
MEDIAN_ERROR = 1.2533
"""Error of a median in units of a mean's, of a normal distribution."""
CLIP_SPREADS = 4.0
"""Beyond it a step is a stall or the like, and tells neither the level nor the dependence of its neighbours."""
MEMORY_STEPS = 30
"""Dependence is followed over so many steps."""
TREND_BLOCKS = 5
TREND_AGREES = 0.8
"""Kendall's tau: wander of a rank hardly ever rises in nine of ten pairs of stretches."""
MEMORY_AT_MOST = 0.95
"""Bound of the estimated dependence of neighbouring stretches: beyond it the estimate means nothing."""

Floats = NDArray[np.float64]


def spread(values: Floats) -> float:
    """Robust standard deviation."""
    if not len(values):
        return 0.0
    return float(MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))


def longest(values: Floats) -> Floats:
    """[S]; the largest over the ranks that are there."""
    return np.asarray(np.fmax.reduce(values, axis=0), np.float64) if len(values) else np.zeros(values.shape[1])


def shortest(values: Floats) -> Floats:
    """[S]; the smallest over the ranks that are there."""
    return np.asarray(np.fmin.reduce(values, axis=0), np.float64) if len(values) else np.zeros(values.shape[1])


def mean_rank(values: Floats) -> Floats:
    """[S]; the mean over the ranks that are there; zero where nobody is."""
    counts = (~np.isnan(values)).sum(axis=0)
    return np.asarray(np.nansum(values, axis=0) / np.maximum(counts, 1), np.float64)


def median_rank(values: Floats) -> Floats:
    """[S]; the median over the ranks that are there, the mean of the middle two; nan where nobody is."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis=0), np.float64)
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
            out[index] = np.median(there)
    return out


def lower_median(values: Floats) -> float:
    """The lower of two middle values: with two ranks, the one that has less of it."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def peer_deviation(values: Floats, groups: NDArray[np.intp] | None = None) -> Floats:
    """How much more a rank took than the median of the *other* ranks of its group, step by step; nan without any."""
    if groups is not None and len(groups) and (groups != groups[0]).any():
        out = np.full_like(values, np.nan)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            out[members] = peer_deviation(values[members])
        return out
    if len(values) >= MANY_RANKS and not np.isnan(values).any():
        return np.asarray(values - np.median(values, axis=0), np.float64)
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

    ``values`` has no nan.  B is 0 when there are too few steps for a single block.
    """
    ranks, steps = values.shape
    count = steps // length
    if not count:
        return np.zeros((ranks, 0))
    return np.asarray(np.median(values[:, steps - count * length :].reshape(ranks, count, length), axis=2), np.float64)


def long_block(steps: int) -> int:
    """How long the stretches are between which wander is judged, in a window of so many steps."""
    return max(thresholds.BLOCK_STEPS, -(-steps // thresholds.WANDER_BLOCKS))


def _short_block(steps: int) -> int:
    """How long those are that a test counts: rounded to the nearest.

    Were it rounded up, 41 steps would make 13 of them where 40 make 20, and a test over them would find less.
    """
    return max(thresholds.BLOCK_STEPS, round(steps / thresholds.BLOCKS))


def persistence_z(deviation: Floats) -> float:
    """How sure it is that a rank's deviation [S] is above zero for good, as a z; 0.0 for no evidence, inf for clear.

    A t test over the medians of stretches, its spread widened by their dependence on each other; what does not stand
    out from the scatter of long stretches is no evidence.  A deviation that only ever grows is not held against itself.
    """
    typical = float(np.median(deviation))
    mostly = float((deviation > 0).mean()) >= thresholds.CLEAR_SHARE
    noise = spread(deviation)
    if len(deviation) >= thresholds.CLEAR_STEPS and mostly and typical > thresholds.CLEAR_SPREADS * noise:
        return float("inf")
    # Blocks of a short run have two steps, whose median is not deaf to a stall in one of them.
    deviation = np.clip(deviation, typical - CLIP_SPREADS * noise, typical + CLIP_SPREADS * noise)
    long_blocks = _without_trend(block_medians(deviation[None, :], long_block(len(deviation)))[0])
    if typical < thresholds.SPREADS_APART * spread(long_blocks):
        return 0.0
    blocks = _without_trend(block_medians(deviation[None, :], _short_block(len(deviation)))[0])
    count = len(blocks)
    if count < 2 or blocks.mean() <= 0:
        return 0.0
    centred = blocks - blocks.mean()
    squares = float(centred @ centred)
    if squares == 0:
        return float("inf")
    widened = math.sqrt(squares / (count - 1)) * _widening(centred)
    return _z_of_t(float(blocks.mean()) / widened * math.sqrt(count), count - 1)


def stretch_z(deviation: Floats, at: slice) -> float:
    """How sure it is that a stretch of a rank's deviation is above the rest of it, as a z.

    The medians of the two parts are compared; their scatter is that of single steps within the parts, widened by their
    dependence on each other.  A stretch was sought: the places where it might have been count among the comparisons.
    """
    inside, outside = deviation[at], np.delete(deviation, at)
    if not len(outside):
        return persistence_z(inside)
    gap = float(np.median(inside) - np.median(outside))
    centred = np.concatenate((inside - np.median(inside), outside - np.median(outside)))
    wander = spread(block_medians(outside[None, :], long_block(len(outside)))[0])
    if gap < thresholds.SPREADS_APART * wander:
        return 0.0
    noise = max(spread(inside), spread(outside))
    if noise == 0:
        return float("inf") if gap > 0 else 0.0
    calm = np.clip(centred, -CLIP_SPREADS * noise, CLIP_SPREADS * noise)
    error = MEDIAN_ERROR * noise * _long_widening(calm) * math.sqrt(1 / len(inside) + 1 / len(outside))
    return max(gap / error, 0.0)


def _widening(centred: Floats) -> float:
    """By how much the dependence of neighbours widens the error of a mean."""
    squares = float(centred @ centred)
    if squares == 0:
        return 1.0
    memory = float(centred[1:] @ centred[:-1]) / squares
    # The estimate is too low by about (1 + 4 memory) / count.
    memory = min(max(memory + (1 + 4 * max(memory, 0.0)) / len(centred), 0.0), MEMORY_AT_MOST)
    return math.sqrt((1 + memory) / (1 - memory))


def _long_widening(centred: Floats) -> float:
    """The same for single steps, whose dependence may be faint and long: all of it is added up."""
    squares = float(centred @ centred)
    if squares == 0:
        return 1.0
    total = 1.0
    for lag in range(1, min(MEMORY_STEPS, len(centred) // 4) + 1):
        memory = float(centred[lag:] @ centred[:-lag]) / squares
        if memory <= 0:
            break
        total += 2 * memory
    return math.sqrt(total)


def _without_trend(blocks: Floats) -> Floats:
    """The blocks about their median slope when they grow all the way; else as they are."""
    count = len(blocks)
    if count < TREND_BLOCKS:
        return blocks
    late, early = np.triu_indices(count, 1)[::-1]
    rises = (blocks[late] - blocks[early]) / (late - early)
    if float(np.sign(rises).mean()) < TREND_AGREES:
        return blocks
    return np.asarray(blocks - np.median(rises) * (np.arange(count) - (count - 1) / 2), np.float64)


def z_needed(comparisons: int) -> float:
    """The z at which one of so many comparisons of healthy ranks fires with probability ANY_FALSE_ALARM."""
    return NormalDist().inv_cdf(1 - thresholds.ANY_FALSE_ALARM / max(comparisons, 1))


def _z_of_t(t: float, freedom: int) -> float:
    """The z of the same probability as a positive t (Wallace's approximation)."""
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))


def _row_medians(values: Floats) -> Floats:
    """``np.median`` along the last axis without its second look for nan, which costs as much as the median."""
    middle = values.shape[-1] // 2
    if values.shape[-1] % 2:
        return np.asarray(np.partition(values, middle, axis=-1)[..., middle], np.float64)
    ordered = np.partition(values, (middle - 1, middle), axis=-1)
    return np.asarray((ordered[..., middle - 1] + ordered[..., middle]) / 2, np.float64)


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
    low, centre, high = ordered[middle - 1], ordered[middle], ordered[middle + 1]
    without_centre = (low + high) / 2
    below, above = values < centre, values > centre
    medians_ = np.where(below, (centre + high) / 2, np.where(above, (low + centre) / 2, without_centre))
    return np.asarray(medians_, np.float64)
