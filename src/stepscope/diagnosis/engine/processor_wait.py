"""How long ranks were ready to run but had no processor, because other programs or too many threads used it.

The agent samples it once a second (``cpu_wait``).  Waiting makes every phase longer in proportion to its work, so a
rank whose core is shared looks like a straggler, and one that does more work also waits more.  What would be left of an
excess if the rank waited no more than its peers tells the two apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.readings import process_readings
from stepscope.diagnosis.engine.view import View, computed_once
from stepscope.judge import thresholds
from stepscope.judge.statistics import local_median, longest, median_rank, shortest

__all__ = ["excess_without_waiting", "levels_of", "waited_ns", "waiting_shares", "without_waiting"]

Floats = NDArray[np.float64]


def waited_ns(view: View) -> Floats | None:
    """[R, S]; how long each rank waited for a processor in each step, nan where unknown; None: nothing is known.

    What a sample says of the second before it is divided among the steps of that second by their work: a rank that
    waits for its peers wants no processor.
    """
    return computed_once(view, "processor_wait_ns", _waited_ns)


def without_waiting(view: View) -> View | None:
    """The view as if every rank had always had a processor; None where none waited for a good part of the steps.

    From one sample to the next, each step has the mean of them: when in that second a rank waited is not known, and
    single steps vary by as much.  Their sum is exact: in recordings under all kinds of load it is within a few percent
    of what the same job takes alone.
    """
    return computed_once(view, "without_waiting", _without_waiting)


def _waited_ns(view: View) -> Floats | None:
    readings = process_readings(view)
    shares, times = readings.of("cpu_wait"), readings.of("wall_ns")
    if view.clock != "host" or not shares.size or np.isnan(shares).all():
        return None
    out = np.full_like(view.wall_ns, np.nan)
    for row, index in enumerate(view.rows):
        known = ~np.isnan(shares[row]) & ~np.isnan(times[row])
        if known.any():
            ends = view.window.end_wall_ns[index][view.columns]
            out[row] = _divided(times[row][known], shares[row][known], ends, view.wall_ns[row], view.work_ns[row])
    return None if np.isnan(out).all() else out


def _divided(at: Floats, shares: Floats, ends: Floats, wall_ns: Floats, work_ns: Floats) -> Floats:
    """[S]; of one rank: samples (when, and the share of the time since the one before) divided among its steps."""
    there = ~np.isnan(wall_ns)
    if not there.any():
        return np.full(len(ends), np.nan)
    since = np.minimum(np.diff(at, prepend=at[0] - thresholds.CPU_WAIT_SAMPLE_NS), thresholds.CPU_WAIT_SAMPLE_NS)
    # What a rank had passed and worked at any time: within a step both are spread evenly.
    clock = np.stack((ends - wall_ns, ends), axis=1)[there].ravel()
    worked = np.concatenate(([0.0], np.cumsum(np.where(there, work_ns, 0.0))))
    passed = np.concatenate(([0.0], np.cumsum(np.where(there, wall_ns, 0.0))))
    work, wall = (np.stack((sums[:-1], sums[1:]), axis=1)[there].ravel() for sums in (worked, passed))
    first, last = np.interp(at - since, clock, work), np.interp(at, clock, work)
    covered_ns = np.interp(at, clock, wall) - np.interp(at - since, clock, wall)
    rates = np.where(last > first, shares * covered_ns / np.where(last > first, last - first, 1.0), 0.0)
    # Steps after the last sample are like those before it, for as long as a sample is valid.
    borders = np.concatenate(([first[0]], last, [worked[-1]]))
    total = np.concatenate(([0.0], np.cumsum(np.append(rates, rates[-1]) * np.diff(borders))))
    waited = np.interp(worked[1:], borders, total) - np.interp(worked[:-1], borders, total)
    known = there & (ends - wall_ns <= at[-1] + thresholds.CPU_WAIT_SAMPLE_NS) & (ends >= at[0] - since[0])
    return np.where(known, waited, np.nan)


def waiting_shares(view: View, waited: Floats, at: slice) -> Floats:
    """[R]; share of their work that ranks waited for a processor in a stretch; nan where unknown."""
    work_ns = np.where(np.isnan(waited), np.nan, view.work_ns)[:, at]
    known = ~np.isnan(work_ns)
    total, waits = np.where(known, work_ns, 0.0).sum(axis=1), np.where(known, waited[:, at], 0.0).sum(axis=1)
    enough = known.mean(axis=1) >= thresholds.EXPLAINS_SHARE if known.size else np.zeros(len(known), np.bool_)
    shares = np.where(enough & (total > 0), waits / np.where(total > 0, total, 1.0), np.nan)
    return np.minimum(shares, thresholds.WAITING_AT_MOST)


def _is_disturbed(view: View, waited: Floats) -> bool:
    """Whether some rank spends a good part of its work waiting for a processor, in a good part of the steps."""
    shares = longest(waited / np.maximum(view.work_ns, 1.0))
    return bool((shares >= thresholds.WAITING_SHARE).mean() >= thresholds.DISTURBED_STEPS)


def _leaves_enough(view: View, waited: Floats) -> bool:
    shares = waiting_shares(view, waited, slice(None))
    return bool(np.nanmax(shares, initial=0.0) <= thresholds.WAITING_KNOWN_SHARE)


def _without_waiting(view: View) -> View | None:
    waited = waited_ns(view)
    # Where ranks may wait for each other unseen, that is not work.
    alone = len(view.ranks) == 1 or not view.in_group
    if waited is None or not (alone or view.comm_measured):
        return None
    if not _is_disturbed(view, waited) or not _leaves_enough(view, waited):
        return None
    readings = process_readings(view)
    times, shares = readings.of("wall_ns"), readings.of("cpu_wait")
    phase_ns, between_ns = view.phase_ns.copy(), view.between_ns.copy()
    own = [at for at, name in enumerate(view.phases) if name != "comm" or not view.comm_measured]
    for row, index in enumerate(view.rows):
        known = ~np.isnan(waited[row]) & ~np.isnan(view.work_ns[row])
        ends = view.window.end_wall_ns[index][view.columns]
        group = _between_samples(times[row], ends, view.wall_ns[row], view.work_ns[row], known)
        if group is None:
            return None
        used = group >= 0
        counts = np.bincount(group[used])
        work, waits = (np.bincount(group[used], values[row][used]) for values in (view.work_ns, waited))
        # Steps that no sample describes are like those of the nearest one that does.
        nearest = np.interp(np.arange(len(group)), np.flatnonzero(used), group[used]).round().astype(np.intp)
        # A step that lies in two samples belongs to them by its own wait, and that is what it has beyond the mean.
        mean_ns = np.maximum(work - waits, 0.0) / counts
        beyond = np.maximum(view.work_ns[row] - mean_ns[nearest], thresholds.LEAST_WAIT_SHARE * view.work_ns[row])
        sampled = ~np.isnan(shares[row]) & ~np.isnan(times[row])
        divided = _divided(times[row][sampled], shares[row][sampled], ends, view.wall_ns[row], beyond)
        waits = np.bincount(group[used], np.nan_to_num(divided)[used])
        had = 1.0 - np.clip(waits / np.maximum(work, 1.0), 0.0, thresholds.WAITING_AT_MOST)
        there = ~np.isnan(view.wall_ns[row])
        for plane in (*(phase_ns[at] for at in own), between_ns):
            means = np.bincount(group[used], plane[row][used]) / counts * had
            plane[row] = np.where(there, means[nearest], np.nan)
    work_ns = np.sum(phase_ns[own], axis=0)
    if not view.comm_measured:
        return replace(view, phase_ns=phase_ns, wall_ns=work_ns, between_ns=between_ns)
    at = view.phases.index("comm")
    if view.lockstep and len(view.ranks) > 1:
        # The threads that exchange wait for processors, too; the fastest steps show what it takes without that.
        exchange_ns = float(np.quantile(shortest(view.phase_ns[at]), thresholds.UNDISTURBED_STEPS))
        phase_ns[at] = longest(work_ns) - work_ns + exchange_ns
    return replace(view, phase_ns=phase_ns, wall_ns=work_ns + phase_ns[at], between_ns=between_ns)


def _between_samples(
    times: Floats, ends: Floats, wall_ns: Floats, work_ns: Floats, known: NDArray[np.bool_]
) -> NDArray[np.intp] | None:
    """[S]; steps between the same two samples have the same number, counted from 0; -1: no sample describes them.

    The sample that covers the first step covers the warm-up before it as well.  A second with a step that is many times
    as long as those around it says nothing about the others.
    """
    at = np.sort(times[~np.isnan(times)])
    if not len(at) or not known.any():
        return None
    number = np.searchsorted(at, ends)
    first = int(np.searchsorted(at, ends[known][0] - wall_ns[known][0]))
    stalled = np.zeros(len(known), np.bool_)
    stalled[known] = work_ns[known] > (1 + thresholds.STALL_STEPS) * local_median(work_ns[known])
    inside = known & (number > first) & (ends <= at[-1]) & ~np.isin(number, number[stalled])
    if len(np.unique(number[inside])) < thresholds.SECONDS_AT_LEAST:
        return None
    group = np.full(len(ends), -1)
    numbers, group[inside] = np.unique(number[inside], return_inverse=True)
    return np.where(inside, group // -(-len(numbers) // thresholds.SECONDS_AT_MOST), -1)


def levels_of(values: Floats) -> tuple[NDArray[np.intp], Floats, Floats]:
    """Where the levels of a series [S] from ``without_waiting`` begin, how high they are, and for how many steps."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    return starts, values[starts], np.diff(starts, append=len(values)).astype(np.float64)


def excess_without_waiting(view: View, durations_ns: Floats, rank: int, at: slice, shares: Floats) -> float:
    """The typical excess of a rank over its peers had all of them waited for a processor as little as the peers."""
    peers = np.flatnonzero((view.groups == view.groups[rank]) & (np.arange(len(view.ranks)) != rank))
    usual = float(np.nanmedian(shares[peers])) if (~np.isnan(shares[peers])).any() else np.nan
    own_ns = durations_ns[rank, at] * (1.0 - shares[rank]) / (1.0 - usual)
    excess_ns = own_ns - median_rank(durations_ns[peers][:, at])
    excess_ns = excess_ns[~np.isnan(excess_ns)]
    return float(np.median(excess_ns)) if len(excess_ns) else float("nan")
