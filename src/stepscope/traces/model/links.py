"""Which call of the host launched which work of the device."""

from __future__ import annotations

import numpy as np

from stepscope.traces.model.categories import DEVICE_KINDS, LAUNCHING
from stepscope.traces.model.columns import Rows, Trace

__all__ = ["launches_of"]


def launches_of(trace: Trace) -> Rows:
    """[slices]; of device rows the runtime call with the same correlation (a CUDA graph's launch has many), else −1.

    Where calls share a correlation (a driver's call inside of a runtime's), it is the first, that is the outer one.
    """
    slices = trace.slices
    out = np.full(len(slices), -1, np.int32)
    calls = trace.rows_of(LAUNCHING)
    calls = calls[slices.correlation[calls] > 0]
    work = trace.rows_of(DEVICE_KINDS)
    work = work[slices.correlation[work] > 0]
    if not len(calls) or not len(work):
        return out
    order = np.argsort(slices.correlation[calls], kind="stable")
    known = slices.correlation[calls][order]
    wanted = slices.correlation[work]
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = known[at] == wanted
    out[work[found]] = calls[order][at[found]]
    return out
