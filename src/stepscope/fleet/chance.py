"""How likely a count is by chance, and statistics of groups of values without loops over them."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALPHA", "corrected", "group_medians", "group_spreads", "least_chance", "median_interval", "middle_excess"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ALPHA = 0.01
"""Probability that a fleet without faults has any suspect: the bound on false alarms, over all that is tested."""
ENOUGH = 1e-18
"""Terms of a sum that are smaller than this share of it do not matter."""
TO_SPREAD = 1.4826
"""From the median deviation to the standard deviation of a normal distribution."""


def least_chance(count: int, trials: int, mean: float) -> float:
    """Probability of so many successes or more, in trials of which ``mean`` are expected to succeed.

    Exact if all trials have the same probability.  Otherwise an upper bound from one above the mean on (Hoeffding,
    1956): unequal probabilities make a sum less spread.
    """
    if count <= 0 or trials <= 0:
        return 1.0
    share = min(mean / trials, 1.0)
    if count > trials or share <= 0:
        return 0.0
    if count < mean + 1 or share >= 1:
        return 1.0
    log = (
        math.lgamma(trials + 1)
        - math.lgamma(count + 1)
        - math.lgamma(trials - count + 1)
        + count * math.log(share)
        + (trials - count) * math.log1p(-share)
    )
    total, term, ratio = 1.0, 1.0, share / (1 - share)
    for at in range(count, trials):
        term *= (trials - at) / (at + 1) * ratio
        total += term
        if term < ENOUGH * total:
            break
    return min(math.exp(log) * total, 1.0)


def corrected(chance: float, tested: int) -> float:
    """The same for the best of so many that were tested (Bonferroni)."""
    return min(chance * max(tested, 1), 1.0)


def group_medians(values: Floats, groups: Integers) -> Floats:
    """For each value the median of its group; ``groups`` may be in any order."""
    if not len(values):
        return np.zeros(0)
    order = np.lexsort((values, groups))
    first, last = _bounds(groups[order])
    middle = (first + last) / 2
    ordered = values[order]
    medians = (ordered[np.floor(middle).astype(int)] + ordered[np.ceil(middle).astype(int)]) / 2
    out = np.empty(len(values))
    out[order] = medians
    return out


def middle_excess(values: Floats, groups: Integers) -> Floats:
    """How far each value is above the middle of its group; of two values, above the other.  NaN if it is alone."""
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    excess = values - group_medians(values, groups)
    size = sizes[group] if len(values) else np.zeros(0, np.int64)
    return np.where(size > 2, excess, np.where(size == 2, 2 * excess, np.nan))


def _bounds(ordered: Integers) -> tuple[Integers, Integers]:
    """For each element of grouped values, the first and last place of its group."""
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[starts, len(ordered)])
    first = np.repeat(starts, sizes)
    return first, first + np.repeat(sizes, sizes) - 1


def group_spreads(values: Floats, groups: Integers) -> Floats:
    """For each value its group's standard deviation as the median deviation from zero shows it: outliers do not move
    it.
    """
    return group_medians(np.abs(values), groups) * TO_SPREAD


def median_interval(values: Floats, confidence: float = 0.95) -> tuple[float, float, float]:
    """The median and an interval for it, by the ranks of the values."""
    ordered = np.sort(values)
    count = len(ordered)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - half), 0)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[count - 1 - low])
