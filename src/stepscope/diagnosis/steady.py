"""Which samples were taken in steady steps, not while the script imported, started up, compiled or warmed up.

Times of steps and of samples are both by the wall clock of the machine they come from; the store has moved both onto
the hub's clock by the same offset, so they can be compared whatever the clocks of other nodes say.

A sample looks back: NVML's utilization and power are means over up to a second, and a host's rates count from the
sample before.  So a sample counts only if the second before it was steady too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.window import Window

__all__ = ["in_steady_steps", "spaced"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def in_steady_steps(window: Window, rows: Iterable[int], wall_ns: Floats) -> Bools:
    """By sample: whether it tells of a steady step of one of these ranks (rows of the window), and of the warm-up or
    a compile step of none of them.

    A rank that has ended, or has not begun yet, has no say.
    """
    before_ns = wall_ns - thresholds.SAMPLE_LOOKS_BACK_S * 1e9
    steady = np.zeros(len(wall_ns), np.bool_)
    apart = np.zeros(len(wall_ns), np.bool_)
    for row in rows:
        now, earlier = _of_rank(window, row, wall_ns), _of_rank(window, row, before_ns)
        steady |= now[0] & earlier[0]
        apart |= now[1] | earlier[1]
    return steady & ~apart


def spaced(wall_ns: Floats) -> Bools:
    """By sample of one source: some of them, about a second apart.

    The agent takes more in the first seconds of a run; without this they would outweigh the rest.
    """
    out = np.zeros(len(wall_ns), np.bool_)
    if len(wall_ns):
        numbers = np.floor((wall_ns - np.fmin.reduce(wall_ns)) / (thresholds.SAMPLES_APART_S * 1e9))
        out[np.unique(numbers, return_index=True)[1]] = True
    return out


def _of_rank(window: Window, row: int, wall_ns: Floats) -> tuple[Bools, Bools]:
    """By time: whether the rank was in a steady step, and whether it was in one that is set apart."""
    ends = window.end_wall_ns[row]
    there = ~np.isnan(ends)
    if not there.any():
        nowhere = np.zeros(len(wall_ns), np.bool_)
        return nowhere, nowhere
    ends, steady = ends[there], window.steady[there]
    starts = ends - window.wall_ns[row, there]
    step = np.searchsorted(ends, wall_ns)  # a step that is not in the window counts as the next one
    within = (step < len(ends)) & (wall_ns >= starts[0])
    is_steady = steady[np.minimum(step, len(ends) - 1)]
    return within & is_steady, within & ~is_steady
