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
    at = np.fromiter(rows, np.intp)[:, None]
    since_ns = wall_ns - thresholds.SAMPLE_LOOKS_BACK_S * 1e9
    inside = (since_ns >= window.begin_wall_ns[at]) & (wall_ns <= window.last_wall_ns[at])
    apart = np.zeros_like(inside)
    for begins_ns, ends_ns in window.apart_wall_ns:
        apart |= (wall_ns >= begins_ns[at]) & (since_ns <= ends_ns[at])
    return np.asarray((inside & ~apart).any(axis=0) & ~apart.any(axis=0), np.bool_)


def spaced(wall_ns: Floats, spans_s: Floats | None = None) -> Bools:
    """By sample of one source: some of them, about a second apart.

    The agent takes more in the first seconds of a run; without this they would outweigh the rest.  Of a long run those
    of earlier hours are thinned (``spans_s``: how many seconds each stands for): then all are as far apart as these.
    """
    out = np.zeros(len(wall_ns), np.bool_)
    if len(wall_ns):
        spans_s = np.zeros(0) if spans_s is None else spans_s
        apart_s = np.fmax.reduce(spans_s, initial=thresholds.SAMPLES_APART_S)
        numbers = np.floor((wall_ns - np.fmin.reduce(wall_ns)) / (apart_s * 1e9))
        out[np.unique(numbers, return_index=True)[1]] = True
    return out
