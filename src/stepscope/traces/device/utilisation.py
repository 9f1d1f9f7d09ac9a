"""How well the device was used: three questions, each finer than the one before.

*utilisation*: for which share of the time did it do anything?  *SM efficiency*: which share of its multiprocessors had
something to do, over the same time?  At each instant it is the sum of ``blocks per SM`` of the kernels that run, but no
more than 1.  *occupancy*: of the warps that fit, how many were there while kernels ran?  It is the profiler's estimate
for each kernel, weighted by duration.

The time is that of all steps that count: from the start of the first to the end of the last, or to the end of the
device work that they launched, whichever is later.
"""

from __future__ import annotations

import numpy as np

from stepscope.traces.device.kernels import occupancy_sums
from stepscope.traces.device.work import Work
from stepscope.traces.model import intervals

__all__ = ["occupancy_of", "sm_efficiency_of", "step_time_of", "utilisation_of"]


def step_time_of(work: Work) -> tuple[int, int]:
    """From when to when the steps lasted; equal: there are none."""
    steps = work.window.steps
    if not steps:
        return 0, 0
    launched = work.window.step_of[work.rows] >= 0
    ends_ns = [int(work.end_ns[launched].max())] if launched.any() else []
    return steps[0].start_ns, max(*ends_ns, *(step.end_ns for step in steps), steps[0].start_ns)


def utilisation_of(work: Work) -> float | None:
    start_ns, end_ns = step_time_of(work)
    if end_ns <= start_ns or not len(work):
        return None
    busy = intervals.cut(intervals.merge(work.start_ns, work.end_ns), start_ns, end_ns)
    return intervals.total(busy) / (end_ns - start_ns)


def sm_efficiency_of(work: Work) -> float | None:
    """None: no kernel says how many blocks it has."""
    kernels = work.window.trace.kernels
    blocks = kernels.blocks_per_sm[np.searchsorted(kernels.row, work.rows[work.kernel])].astype(np.float64)
    said = ~np.isnan(blocks)
    first_ns, last_ns = step_time_of(work)
    if last_ns <= first_ns or not said.any():
        return None
    start_ns = np.clip(work.start_ns[work.kernel][said], first_ns, last_ns)
    end_ns = np.clip(work.end_ns[work.kernel][said], first_ns, last_ns)
    times = np.concatenate([start_ns, end_ns])
    order = np.argsort(times, kind="stable")
    level = np.cumsum(np.concatenate([blocks[said], -blocks[said]])[order])[:-1]
    return float((np.clip(level, 0, 1) * np.diff(times[order])).sum() / (last_ns - first_ns))


def occupancy_of(work: Work) -> float | None:
    """0 to 1; None: no kernel says it."""
    weighted, weight_ns = occupancy_sums(work)
    total_ns = int(weight_ns.sum())
    return float(weighted.sum() / total_ns) if total_ns else None
