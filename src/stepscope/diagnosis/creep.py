"""Does memory rise for good?  Statistics of growth over arrays ``[rank, step]`` in which nan means "not sampled".

What counts is the *floor*: the level below which memory never falls again.  A leak lifts it all the time; a sawtooth
(garbage that is collected now and then, a cache that is emptied each epoch) does not, and of a cache that fills up it
stops rising.  The run is cut into stretches and their lowest points are compared (Theil–Sen for the slope, Mann–Kendall
for the significance).  A run with a few samples only must show a rise that is large and even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import z_needed

__all__ = ["Rise", "rise_of_samples", "rise_of_steps"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rise:
    """By rank [R]."""

    rises: Bools
    """Grows for good, by enough to matter."""
    judged: Bools
    """There were samples to tell by."""
    per_step: Floats
    """Bytes; here and below nan where not judged."""
    first: Floats
    """Bytes at ``first_step``, on the line that has this pace …"""
    last: Floats
    """… and at ``last_step``: as much more as the steps between make at that pace."""
    first_step: Floats
    last_step: Floats
    samples: int
    """Of the typical rank."""
    sure: bool
    """By the test; else by the size of a few samples."""


def rise_of_steps(values: Floats, steps: NDArray[np.int64], begin: int, comparisons: int) -> Rise:
    """``values`` [R, S] at the ends of ``steps``; the first ``begin`` steps are warm-up."""
    left_out = max(begin, int(np.ceil(thresholds.CREEP_LEFT_OUT * len(steps))))
    count = _typical_count(values[:, left_out:])
    if count < thresholds.CREEP_SAMPLES:
        order = np.argsort(np.isnan(values[:, begin:]), axis=1, kind="stable")
        return _few(
            np.broadcast_to(steps[begin:].astype(np.float64), order.shape)[np.arange(len(order))[:, None], order],
            np.take_along_axis(values[:, begin:], order, axis=1),
        )
    blocks = _blocks(count)
    starts = np.linspace(left_out, len(steps), blocks, endpoint=False).astype(np.intp)
    ends = np.append(starts[1:], len(steps))
    centres = (steps[starts] + steps[ends - 1]) / 2.0
    lowest = np.fmin.reduceat(values, starts, axis=1)
    spans = zip(starts, ends, lowest.T, strict=True)
    within = np.stack([(values[:, first:end] == least[:, None]).argmax(axis=1) for first, end, least in spans], axis=1)
    at = np.where(np.isnan(lowest), centres, steps[starts + within])
    return _steady(lowest, at, centres, count, comparisons)


def rise_of_samples(values: Floats, at: Floats, begin: float, comparisons: int) -> Rise:
    """``values`` [R, T] taken ``at`` step numbers [R, T], in order; those before the step ``begin`` are warm-up."""
    values = np.where(at >= begin, values, np.nan)
    there = ~np.isnan(values)
    if not there.any():
        return _few(at, values)
    low, high = float(at[there].min()), float(at[there].max())
    start = low + thresholds.CREEP_LEFT_OUT * (high - low)
    count = _typical_count(np.where(at >= start, values, np.nan))
    if count < thresholds.CREEP_SAMPLES or high <= start:
        order = np.argsort(~there, axis=1, kind="stable")
        return _few(np.take_along_axis(at, order, axis=1), np.take_along_axis(values, order, axis=1))
    blocks = _blocks(count)
    rows, columns = np.nonzero(there & (at >= start))
    block = np.minimum(((at[rows, columns] - start) / (high - start) * blocks).astype(np.intp), blocks - 1)
    order = np.lexsort((values[rows, columns], block, rows))
    rows, columns, block = rows[order], columns[order], block[order]
    first = np.append(True, (np.diff(rows) != 0) | (np.diff(block) != 0))
    rows, columns, block = rows[first], columns[first], block[first]
    centres = start + (np.arange(blocks) + 0.5) * (high - start) / blocks
    lowest, where = np.full((len(values), blocks), np.nan), np.tile(centres, (len(values), 1))
    lowest[rows, block], where[rows, block] = values[rows, columns], at[rows, columns]
    return _steady(lowest, where, centres, count, comparisons)


def _typical_count(values: Floats) -> int:
    """Samples of the median rank that has any."""
    counts = (~np.isnan(values)).sum(axis=1)
    return int(np.median(counts[counts > 0])) if (counts > 0).any() else 0


def _blocks(count: int) -> int:
    """Two samples in each if that leaves enough of them for a test."""
    return min(thresholds.CREEP_BLOCKS, max(thresholds.CREEP_SAMPLES, count // 2))


def _steady(lowest: Floats, at: Floats, centres: Floats, samples: int, comparisons: int) -> Rise:
    """By the lowest points [R, B] of stretches, the steps they are ``at``, and the middles [B] of the stretches.

    What grows is lowest where its stretch begins: taken for the middle's, the whole line would lie half a stretch late.
    """
    lowest = lowest.copy()
    for column in range(1, lowest.shape[1]):  # a stretch without a sample shows no growth
        gap = np.isnan(lowest[:, column])
        lowest[gap, column] = lowest[gap, column - 1]
    judged: Bools = np.asarray(~np.isnan(lowest).any(axis=1), np.bool_)
    known = np.where(judged[:, None], lowest, 0.0)
    floor = np.minimum.accumulate(known[:, ::-1], axis=1)[:, ::-1]
    growth = floor[:, -1] - floor[:, 0]
    blocks = lowest.shape[1]
    thirds = np.rint(np.linspace(0, blocks - 1, 4)).astype(np.intp)
    even = np.diff(thirds) / (blocks - 1) * growth[:, None]
    goes_on = (np.diff(floor[:, thirds], axis=1) >= thresholds.CREEP_THIRD_SHARE * even).all(axis=1)
    early, late = np.triu_indices(blocks, 1)
    differences = known[:, late] - known[:, early]
    per_step = np.median(differences / (at[:, late] - at[:, early]), axis=1)
    z = (np.sign(differences).sum(axis=1) - 1) / np.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    # A level that wanders goes far too, but its single moves are large against the way it came.
    moves = np.diff(known, axis=1)
    drifts = growth >= thresholds.CREEP_DRIFT_T * np.sqrt(blocks - 1) * moves.std(axis=1)
    level = np.median(known - per_step[:, None] * at, axis=1)
    steadily = judged & goes_on & drifts & (per_step > 0) & (z >= z_needed(comparisons))
    return _rise(
        steadily,
        _grew(floor[:, 0], growth, thresholds.CREEP_SHARE, thresholds.CREEP_FLOOR_BYTES),
        growth,
        judged=judged,
        per_step=per_step,
        level=level,
        between=(np.full(len(known), centres[0]), np.full(len(known), centres[-1])),
        samples=samples,
        sure=True,
    )


def _few(at: Floats, values: Floats) -> Rise:
    """By rows whose samples stand first, in the order of time, with nan behind them."""
    counts = (~np.isnan(values)).sum(axis=1)
    judged = counts >= thresholds.CREEP_FEW_SAMPLES
    if not judged.any():
        nothing = np.full(len(values), np.nan)
        none = dict.fromkeys(("per_step", "first", "last", "first_step", "last_step"), nothing)
        return Rise(rises=judged, judged=judged, **none, samples=0, sure=False)
    rows, end = np.arange(len(values)), np.maximum(counts - 1, 0)
    first, last = values[:, 0], values[rows, end]
    growth = np.where(judged, last - first, 0.0)
    steps = np.where(judged, at[rows, end] - at[:, 0], 0.0)
    rises = np.diff(values, axis=1)
    least = thresholds.CREEP_FEW_EVEN * growth / np.maximum(end, 1)
    even = ((rises >= least[:, None]) | np.isnan(rises)).all(axis=1)
    per_step = np.where(steps > 0, growth / np.where(steps > 0, steps, 1.0), np.nan)
    return _rise(
        judged & even & (growth > 0) & (steps > 0),
        _grew(np.where(judged, first, 0.0), growth, thresholds.CREEP_FEW_SHARE, thresholds.CREEP_FEW_BYTES),
        growth,
        judged=judged,
        per_step=per_step,
        level=first - per_step * at[:, 0],
        between=(at[:, 0], at[rows, end]),
        samples=_typical_count(values),
        sure=False,
    )


def _grew(first: Floats, growth: Floats, share: float, least_bytes: float) -> Bools:
    return np.asarray((growth >= share * first) & (growth >= least_bytes), np.bool_)


def _rise(
    steadily: Bools,
    enough: Bools,
    growth: Floats,
    *,
    judged: Bools,
    per_step: Floats,
    level: Floats,
    between: tuple[Floats, Floats],
    samples: int,
    sure: bool,
) -> Rise:
    """With the ranks that have the same leak as those beyond the line and are just short of it.

    ``level``: of the line with this pace at step 0; ``between``: the places that it was laid through.
    """
    rises = steadily & enough
    if rises.any():
        rises |= steadily & (growth >= thresholds.CREEP_ALIKE_SHARE * np.median(growth[rises]))
    hidden = np.where(judged, 0.0, np.nan)
    first_step, last_step = (np.rint(at + hidden) for at in between)
    return Rise(
        rises=rises,
        judged=judged,
        per_step=per_step + hidden,
        first=level + per_step * first_step,
        last=level + per_step * last_step,
        first_step=first_step,
        last_step=last_step,
        samples=samples,
        sure=sure,
    )
