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
from stepscope.diagnosis.engine.view import View
from stepscope.judge import thresholds
from stepscope.judge.statistics import median_rank

__all__ = ["excess_without_waiting", "waited_ns", "waiting_shares", "without_waiting"]

Floats = NDArray[np.float64]


def waited_ns(view: View) -> Floats | None:
    """[R, S]; how long each rank waited for a processor in each step, nan where unknown; None: nothing is known."""
    readings = process_readings(view)
    shares, times = readings.of("cpu_wait"), readings.of("wall_ns")
    if view.clock != "host" or not shares.size or np.isnan(shares).all():
        return None
    out = np.full_like(view.wall_ns, np.nan)
    for row, index in enumerate(view.rows):
        known = ~np.isnan(shares[row]) & ~np.isnan(times[row])
        at, share = times[row][known], shares[row][known]
        if not len(at):
            continue
        ends = view.window.end_wall_ns[index][view.columns]
        sums = np.concatenate(([0.0], np.cumsum(share)))
        # Samples that were taken during the step, and the first one after it.
        first = np.minimum(np.searchsorted(at, ends - view.wall_ns[row]), len(at) - 1)
        last = np.minimum(np.searchsorted(at, ends) + 1, len(at))
        mean = (sums[np.maximum(last, first + 1)] - sums[first]) / np.maximum(last - first, 1)
        near = np.abs(at[first] - ends) <= thresholds.CPU_WAIT_SAMPLE_NS + view.wall_ns[row]
        out[row] = np.where(near, mean * view.wall_ns[row], np.nan)
    return None if np.isnan(out).all() else out


def waiting_shares(view: View, waited: Floats, at: slice) -> Floats:
    """[R]; share of their work that ranks waited for a processor in a stretch; nan where unknown."""
    work_ns = np.where(np.isnan(waited), np.nan, view.work_ns)[:, at]
    known = ~np.isnan(work_ns)
    total, waits = np.where(known, work_ns, 0.0).sum(axis=1), np.where(known, waited[:, at], 0.0).sum(axis=1)
    enough = known.mean(axis=1) >= thresholds.EXPLAINS_SHARE if known.size else np.zeros(len(known), np.bool_)
    shares = np.where(enough & (total > 0), waits / np.where(total > 0, total, 1.0), np.nan)
    return np.minimum(shares, thresholds.WAITING_AT_MOST)


def without_waiting(view: View, waited: Floats) -> View:
    """The view with every phase but the wait for peers as long as the rank had a processor; unknown: as it is."""
    shares = np.clip(np.nan_to_num(waited) / np.maximum(view.work_ns, 1.0), 0.0, thresholds.WAITING_AT_MOST)
    own = np.array([name != "comm" or not view.comm_measured for name in view.phases])
    phase_ns = np.where(own[:, None, None], view.phase_ns * (1.0 - shares), view.phase_ns)
    return replace(
        view,
        phase_ns=phase_ns,
        wall_ns=view.wall_ns - view.work_ns * shares,
        between_ns=view.between_ns * (1.0 - shares),
    )


def excess_without_waiting(view: View, durations_ns: Floats, rank: int, at: slice, shares: Floats) -> float:
    """The typical excess of a rank over its peers had all of them waited for a processor as little as the peers."""
    peers = np.flatnonzero((view.groups == view.groups[rank]) & (np.arange(len(view.ranks)) != rank))
    usual = float(np.nanmedian(shares[peers])) if (~np.isnan(shares[peers])).any() else np.nan
    own_ns = durations_ns[rank, at] * (1.0 - shares[rank]) / (1.0 - usual)
    excess_ns = own_ns - median_rank(durations_ns[peers][:, at])
    excess_ns = excess_ns[~np.isnan(excess_ns)]
    return float(np.median(excess_ns)) if len(excess_ns) else float("nan")
