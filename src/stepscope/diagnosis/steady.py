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
    steady = np.zeros(len(wall_ns), np.bool_)
    apart = np.zeros(len(wall_ns), np.bool_)
    for row in rows:
        of_steady, of_apart = _of_rank(window, row, wall_ns)
        steady |= of_steady
        apart |= of_apart
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
    """By sample: whether all it tells of are steady steps of the rank, and whether any is a step that is set apart."""
    ends = window.end_wall_ns[row]
    there = ~np.isnan(ends)
    if not there.any():
        nowhere = np.zeros(len(wall_ns), np.bool_)
        return nowhere, nowhere
    ends = ends[there]
    begins = float(ends[0] - window.wall_ns[row, there][0])
    since_ns = wall_ns - thresholds.SAMPLE_LOOKS_BACK_S * 1e9
    # Numbers of the first and the last step it tells of; one that is not in the window counts as the next one.
    first, last = np.searchsorted(ends, since_ns), np.searchsorted(ends, wall_ns)
    set_apart = np.concatenate(([0], np.cumsum(~window.steady[there])))
    some_apart = set_apart[np.minimum(last + 1, len(ends))] > set_apart[first]
    inside = (since_ns >= begins) & (last < len(ends))
    touches = (wall_ns >= begins) & (first < len(ends))
    return inside & ~some_apart, touches & some_apart
