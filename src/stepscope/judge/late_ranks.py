"""Late ranks: which ranks the others wait for, in which intervals, and what they cost; for runs and traces alike.

An *interval* is what ranks do between two points at which they wait for each other: a step of a run, or the way to a
collective in a trace.  All arrays are ``[rank, interval]``, nan where a rank did not take part.  *Work* is what a rank
does in an interval (in a trace its arrival, of which only differences count), *wait* how long it then waits for the
last rank.  Ranks are compared with their peers: ranks that do as much work.

Two tests say that a rank is late, because a run and a trace know different things.

*By excess* (``excesses``): a rank works longer than its peers.  The excess must matter and be significant, after
correction for the number of comparisons: over all intervals, where it must also exceed slow wander, or in one stretch
of them against the rest.  A single step is noisy, but a run has hundreds.

*By order* (``late_by_order``): a rank arrives last more often than chance explains.  That needs three intervals and no
estimate of the noise, which a trace of a few steps does not have; it cannot tell since when.

The cost is the same for both (``savings_ns``): all intervals once more, with the late ranks as fast as their peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.judge import thresholds
from stepscope.judge.statistics import (
    chance_of_at_least,
    local_median,
    longest,
    lower_median_rank,
    median,
    median_of,
    median_rank,
    one_sided_z,
    persistence_z,
    shortest,
    stretch_z,
    z_needed,
)

__all__ = [
    "Excess",
    "Intervals",
    "LateRanks",
    "excesses",
    "last_ranks",
    "late_by_order",
    "peers_typical_ns",
    "savings_ns",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = Sequence[int] | NDArray[np.intp]
"""Indices of ranks."""


# -- cost -------------------------------------------------------------------------------------------------------------


def savings_ns(work_ns: Floats, late: Rows, typical_ns: Floats | float) -> Floats:
    """[I]; by how much each interval would have been shorter had the late ranks taken at most ``typical_ns``.

    The length of an interval is the work of its slowest rank plus what is common to all; the common part does not
    change.  ``typical_ns``: [late, I], or −inf to leave these ranks out.
    """
    late = np.asarray(late, np.intp)
    replaced = work_ns.copy()
    # A rank that has ended takes no time; nothing replaces it, not even the typical time.
    replaced[late] = np.where(np.isnan(replaced[late]), np.nan, np.fmin(replaced[late], typical_ns))
    return longest(work_ns) - longest(replaced)


def peers_typical_ns(work_ns: Floats, late: NDArray[np.intp], groups: NDArray[np.intp]) -> Floats:
    """[late, I]; the median of the peers that are not late; if none is left, what the best of the late ones took."""
    out = np.empty((len(late), work_ns.shape[1]))
    for group in np.unique(groups[late]):
        members = np.flatnonzero(groups == group)
        typical = median_rank(work_ns[np.setdiff1d(members, late)])
        out[groups[late] == group] = np.where(np.isnan(typical), shortest(work_ns[members]), typical)
    return out


def last_ranks(work_ns: Floats) -> NDArray[np.intp]:
    """[I]; the rank with most work; of several, the first."""
    return np.asarray(np.where(np.isnan(work_ns), -np.inf, work_ns).argmax(axis=0), np.intp)


# -- by excess --------------------------------------------------------------------------------------------------------

MEAN_TO_SIGMA = 1.2533
"""From the mean absolute deviation of a normal distribution to its standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A rank that works longer than its peers."""

    rank: int
    """Index into the ranks."""
    at: slice
    """The intervals."""
    excess_ns: float
    """In the median interval."""
    z: float
    """How certain it is; inf: no test is needed."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    least_ns: float
    noise_ns: float
    """By how much the typical rank deviates from its peers."""
    comparisons: int
    stretch: int
    """Intervals in the shortest stretch."""


def excesses(excess_ns: Floats, *, least_ns: float, comparisons: int, stretch: int) -> Iterator[Excess]:
    """Find the ranks whose excess over their peers is significant, and where.

    ``excess_ns``: from ``peer_deviation``.  ``least_ns``: what matters at all.  ``comparisons``: how many are made in
    all, this one included.  ``stretch``: how many intervals make a stretch.
    """
    noise_ns = _typical_noise(excess_ns)
    test = _Test(least_ns=least_ns, noise_ns=noise_ns, comparisons=comparisons, stretch=stretch)
    for rank in _candidates(excess_ns, noise_ns, least_ns, comparisons):
        there = ~np.isnan(excess_ns[rank])
        own = excess_ns[rank][there]
        if len(own) < thresholds.MIN_STEPS:
            continue
        at, z = _lasting(own, test) or _passing(own, test) or (None, 0.0)
        if at is not None:
            columns = np.flatnonzero(there)
            at = slice(int(columns[at.start]), int(columns[at.stop - 1]) + 1)
            yield Excess(rank=int(rank), at=at, excess_ns=median_of(excess_ns[rank, at]), z=z)


def _candidates(excess_ns: Floats, noise_ns: float, least_ns: float, comparisons: int) -> NDArray[np.intp]:
    """Ranks that may have an excess at all; a sieve that passes too many, never too few.

    A stretch of n intervals that passes the test below has, in some window of 2^k <= n < 2^(k+1) intervals, a mean that
    is high compared with the noise of the typical rank.  Single wild intervals are clipped first.
    """
    known = np.nan_to_num(excess_ns) if np.isnan(excess_ns).any() else excess_ns
    ceiling = 3 * max(least_ns, noise_ns)
    sums = np.zeros((known.shape[0], known.shape[1] + 1))
    np.clip(known, -ceiling, ceiling, out=sums[:, 1:])
    np.cumsum(sums[:, 1:], axis=1, out=sums[:, 1:])
    found = np.zeros(len(known), np.bool_)
    width = thresholds.STRETCH_STEPS
    while True:
        width = min(width, known.shape[1])
        stride = max(1, width // thresholds.STRETCH_STEPS)
        means = (sums[:, width::stride] - sums[:, : sums.shape[1] - width : stride]) / width
        places = 1 if width == known.shape[1] else max(known.shape[1] // thresholds.STRETCH_STEPS, 1)
        needed = z_needed(comparisons * places)
        sigmas = max(needed * thresholds.SIEVE_SHARE - thresholds.SIEVE_SLACK, 0.0)
        found |= means.max(axis=1) >= max(least_ns / 2, sigmas * noise_ns / np.sqrt(width))
        if width == known.shape[1]:
            return np.flatnonzero(found)
        width *= 2


def _typical_noise(excess_ns: Floats) -> float:
    """Of two ranks each deviates as much as the other: then it is as large as any excess."""
    some = np.nan_to_num(excess_ns[:, :: max(1, excess_ns.shape[1] // thresholds.NOISE_STEPS)])
    return median(np.abs(some).mean(axis=1)) * MEAN_TO_SIGMA


def _lasting(own: Floats, test: _Test) -> tuple[slice, float] | None:
    """An excess over all intervals, or from the one where it began."""
    if median(own) < test.least_ns:
        return None
    z = float("inf") if _always_above(own, test) else max(persistence_z(own), one_sided_z(own, test.least_ns))
    if z < z_needed(test.comparisons):
        return None
    at = _longest_stretch(own, test)
    if at is not None:
        outside = np.delete(own, at)
        if len(outside) >= test.stretch and median(outside) < test.least_ns / 2:
            return at, z
    return slice(0, len(own)), z


def _always_above(own: Floats, test: _Test) -> bool:
    """Whether nearly every interval is further above zero than the typical rank ever is.

    A rank that shares its cores is slower by an amount that wanders widely, which no test of its mean survives.
    """
    if len(own) < thresholds.CLEAR_STEPS:
        return False
    least_ns = max(test.least_ns, thresholds.ALWAYS_NOISES * test.noise_ns)
    return float((own > least_ns).mean()) >= thresholds.ALWAYS_SHARE


def _passing(own: Floats, test: _Test) -> tuple[slice, float] | None:
    """An excess in one stretch, judged against the rest."""
    at = _longest_stretch(own, test)
    if at is None or len(own) - (at.stop - at.start) < thresholds.MIN_STEPS:
        return None
    z = stretch_z(own, at)
    # Any stretch might have been the one; those that share most of their intervals count as one.
    return (at, z) if z >= z_needed(test.comparisons * len(own) // test.stretch) else None


def _longest_stretch(own: Floats, test: _Test) -> slice | None:
    """The longest stretch where the running median stays above; a short dip does not end it."""
    least_ns = test.least_ns
    above = local_median(own, thresholds.SMOOTHED_STEPS) >= least_ns
    edges = np.flatnonzero(np.diff(np.concatenate(([False], above, [False])).astype(np.int8)))
    joined: list[list[int]] = []
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if joined and start - joined[-1][1] <= thresholds.DIP_STEPS:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    first, stop = max(joined, key=lambda stretch: stretch[1] - stretch[0], default=[0, 0])
    while first < stop and own[first] < least_ns:
        first += 1
    while first < stop and own[stop - 1] < least_ns:
        stop -= 1
    return slice(first, stop) if stop - first >= test.stretch else None


# -- by order ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The work and wait of ranks that are each other's peers."""

    work_ns: Floats
    wait_ns: Floats
    counts: Bools
    """[I]; whether its last rank is late by itself, and not because it was delayed elsewhere before."""

    @cached_property
    def last(self) -> NDArray[np.intp]:
        return last_ranks(self.work_ns)

    @cached_property
    def early_ns(self) -> Floats:
        """How long before the last rank each is done."""
        return longest(self.work_ns) - self.work_ns

    @cached_property
    def late_by_ns(self) -> Floats:
        """[I]; how much longer the last rank works than the median of the others."""
        return self.of_others(self.early_ns)

    def of_others(self, values: Floats) -> Floats:
        """[I]; the median of all ranks except the last."""
        others = values.copy()
        others[self.last, np.arange(len(self.last))] = np.nan
        return lower_median_rank(others)

    def waits_for(self, late: Rows) -> Bools:
        """[I]; whether these are the ones that the others wait for."""
        return np.isin(self.last, late) & self.counts

    def late_ns(self, late: Rows) -> Floats:
        """[late, I]; how much longer these ranks work than the median of the others; 0 if they do not."""
        others = np.delete(self.early_ns, late, axis=0)
        return np.nan_to_num(np.maximum(lower_median_rank(others) - self.early_ns[np.asarray(late, np.intp)], 0.0))

    def lost_ns(self, late: Rows) -> int:
        """The time that each of the others waits for these on average."""
        others = np.delete(self.wait_ns[:, self.waits_for(late)], late, axis=0)
        count = np.maximum((~np.isnan(others)).sum(axis=0), 1)
        return int((np.nansum(others, axis=0) / count).sum()) if others.size else 0


@dataclass(frozen=True, kw_only=True)
class LateRanks:
    ranks: tuple[int, ...]
    """Indices, the one that is last most often first."""
    judged: Bools
    """[I]; the intervals they are judged by: all of them, or those with nearly all of the waiting."""


def late_by_order(intervals: Intervals) -> Iterator[LateRanks]:
    """Yield the ranks that are late by all intervals, then by the few that account for nearly all of the waiting.

    A rank that is late once per step is on time for the rest of it.  Ranks that arrive just before the late ones are
    added to them.
    """
    for judged in (intervals.counts, intervals.counts & _heavy(intervals)):
        often = _often_last(intervals, judged)
        if not often:
            continue
        late = _with_near(intervals, often)
        by_ns = intervals.late_ns(late)[:, intervals.waits_for(late)].max(axis=0, initial=0).sum()
        # Otherwise most of the others are just as late: a few ranks arrive early and wait for all of them.
        if by_ns >= thresholds.EXPLAINS_SHARE * intervals.lost_ns(late):
            yield LateRanks(ranks=late, judged=judged)


def _heavy(intervals: Intervals) -> Bools:
    """[I]; the intervals with nearly all of the waiting, longest first."""
    waits = np.nansum(intervals.wait_ns, axis=0)
    order = np.argsort(-waits, kind="stable")
    before = np.cumsum(waits[order]) - waits[order]
    out = np.zeros(len(waits), np.bool_)
    out[order] = (before < thresholds.HEAVY_SHARE * waits.sum()) & (waits[order] > 0)
    return out


def _often_last(intervals: Intervals, judged: Bools) -> tuple[int, ...]:
    """The ranks that are last too often for chance, if together in most intervals; else empty."""
    ranks, of = len(intervals.work_ns), int(judged.sum())
    counts = np.bincount(intervals.last[judged], minlength=ranks)
    chance = min(thresholds.LAST_TIMES_CHANCE / ranks, thresholds.LAST_AT_MOST)
    if of < thresholds.ARRIVALS_AT_LEAST:
        return ()
    if of < thresholds.ARRIVALS_FEW:
        late_by_ns = intervals.late_by_ns[judged]
        even = late_by_ns.max() > 0 and late_by_ns.min() >= thresholds.EVENLY * late_by_ns.max()
        return (int(counts.argmax()),) if counts.max() == of and even else ()
    often = [
        rank
        for rank in np.argsort(-counts, kind="stable").tolist()
        if counts[rank] >= chance * of
        and ranks * chance_of_at_least(int(counts[rank]), of, 1 / ranks) < thresholds.BY_CHANCE
    ][: max(ranks // 2, 1)]
    needed = max(thresholds.LAST_SHARE, min(len(often) * chance, thresholds.LAST_AT_MOST))
    return tuple(often) if often and counts[often].sum() >= needed * of else ()


def _with_near(intervals: Intervals, late: tuple[int, ...]) -> tuple[int, ...]:
    """Add ranks nearly as late in most of the same intervals, unless that makes it most of the group."""
    early_ns = intervals.early_ns[:, intervals.waits_for(late)]
    late_ns = lower_median_rank(np.delete(early_ns, late, axis=0))
    near = [
        rank
        for rank in range(len(early_ns))
        if rank not in late
        and (early_ns[rank] < late_ns / 2).mean() > thresholds.LAST_SHARE
        and np.nansum(early_ns[rank]) < np.nansum(late_ns) / 2
    ]
    return (*late, *near) if len(late) + len(near) <= len(early_ns) // 2 else late
