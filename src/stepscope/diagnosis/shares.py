"""How much of the time something takes that all ranks have in common: what the rules about bottlenecks rest on.

Shares are of the sum over steps, not of a median step: workers that fall behind make every fourth step wait four times
as long, and the median step would know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import lower_median
from stepscope.diagnosis.view import View
from stepscope.records.slot import FLAG_EPOCH_START

__all__ = [
    "Part",
    "common",
    "epoch_starts",
    "having",
    "is_even",
    "ordinary_steps",
    "part_of",
    "stretches_with",
    "where_stopped",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What some durations are of the step."""

    share: float
    """Of the median rank's time."""
    mean_ns: float
    """Per step, of the same rank."""
    by_rank: Floats


def epoch_starts(view: View) -> Bools:
    return np.asarray(((view.flags & FLAG_EPOCH_START) > 0).any(axis=0), np.bool_)


def ordinary_steps(view: View) -> tuple[Bools, bool]:
    """[S]; without rare epoch starts and the longest steps; and whether epoch starts are in (they are the rhythm)."""
    starts = epoch_starts(view)
    if bool(starts.mean() > thresholds.EPOCH_STARTS_SHARE):
        return np.ones(len(view.steps), np.bool_), True
    used: Bools = ~starts
    used[np.argsort(view.step_ns)[::-1][: int(np.ceil(thresholds.STALLS_SHARE * len(view.steps)))]] = False
    return used, False


def part_of(view: View, durations_ns: Floats, used: Bools) -> Part:
    totals, counts = _sums(view.wall_ns, used)
    there = totals > 0
    sums, _ = _sums(durations_ns, used)
    by_rank = np.where(there, sums / np.where(there, totals, 1.0), np.nan)
    means = sums / np.maximum(counts, 1)
    return Part(
        share=lower_median(by_rank[there]) if there.any() else 0.0,
        mean_ns=lower_median(means[there]) if there.any() else 0.0,
        by_rank=by_rank,
    )


def _sums(values: Floats, used: Bools) -> tuple[Floats, Floats]:
    """[R]; over the steps that are used, and how many; a product needs no copy, and is nan where a rank left."""
    chosen = used.astype(np.float64)
    sums, counts = values @ chosen, np.full(len(values), chosen.sum())
    for rank in np.flatnonzero(np.isnan(sums)):
        own = values[rank][used]
        sums[rank], counts[rank] = np.nansum(own), (~np.isnan(own)).sum()
    return np.asarray(sums, np.float64), counts


def common(durations_ns: Floats) -> Floats:
    """[S]; what the median rank has, step by step (the lower middle one): a wait of few ranks is not everybody's."""
    if not np.isnan(durations_ns).any():
        middle = (len(durations_ns) - 1) // 2
        return np.asarray(np.partition(durations_ns, middle, axis=0)[middle], np.float64)
    ordered = np.sort(durations_ns, axis=0)  # nan last
    counts = (~np.isnan(ordered)).sum(axis=0)
    return np.asarray(ordered[np.maximum(counts - 1, 0) // 2, np.arange(ordered.shape[1])], np.float64)


def is_even(durations_ns: Floats) -> bool:
    """Whether every step has about as much of it; else some have much and most hardly any."""
    return bool(np.median(durations_ns) >= durations_ns.mean() / 2)


def having(durations_ns: Floats) -> Bools:
    """[S]; the steps that have a good part of it, where most have hardly any."""
    return np.asarray(durations_ns > durations_ns.mean() / 2, np.bool_)


def stretches_with(shared_ns: Floats, step_ns: Floats, least_share: float) -> float:
    """The share of stretches of the run that show at least ``least_share`` by themselves."""
    stretches = np.array_split(np.arange(len(step_ns)), min(thresholds.WANDER_BLOCKS, len(step_ns)))
    return float(np.mean([shared_ns[at].sum() >= least_share * step_ns[at].sum() for at in stretches]))


def where_stopped(view: View, stopped_ns: Floats) -> Floats:
    """[S]; how much longer each step is for what stops the training on some rank.

    What one rank does after the last collective of a step its peers wait for in the next one: there goes what this step
    is not long enough for.
    """
    took = np.asarray(np.fmax.reduce(stopped_ns, axis=0), np.float64)
    usual = float(np.median(np.maximum(view.step_ns - took, 0.0)))
    room = np.maximum(view.step_ns - usual, 0.0)
    here = np.minimum(took, room)
    if view.lockstep:
        here[1:] += np.minimum(took[:-1] - here[:-1], room[1:] - here[1:])
    return here
