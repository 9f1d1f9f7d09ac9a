"""Which operator a call of the runtime, and the device work it launched, belongs to.

It is the innermost operator on the same thread that holds the call.  Where none does (the call is made on a thread of
its own, or is missing from the trace), it is the operator with the same ``External id``; but many versions of the
profiler write the correlation there, which may equal some operator's id by chance and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.traces.model.categories import DEVICE_KINDS, Kind
from stepscope.traces.model.columns import Rows

if TYPE_CHECKING:
    from stepscope.traces.model.window import Window

__all__ = ["owner_of"]


def owner_of(window: Window) -> Rows:
    """[slices]; of runtime and device rows that count the operator, which counts too; −1: none, and of all others.

    ``Window.owner`` keeps it.
    """
    slices = window.trace.slices
    out = np.full(len(slices), -1, np.int32)
    ops = window.host.ops
    if not len(ops):
        return out
    calls = window.rows_of((Kind.RUNTIME,))
    work = window.rows_of(DEVICE_KINDS)
    out[calls] = window.host.op_holder[calls]
    launched = work[window.launch[work] >= 0]
    out[launched] = out[window.launch[launched]]
    rest = np.concatenate([calls, work])
    rest = rest[(out[rest] < 0) & (slices.external[rest] > 0) & (slices.external[rest] != slices.correlation[rest])]
    out[rest] = _by_external(slices.external[ops], ops, slices.external[rest])
    # Now that calls may have found theirs, so may what they launched.
    orphans = launched[out[launched] < 0]
    out[orphans] = out[window.launch[orphans]]
    return out


def _by_external(known: np.ndarray, ops: Rows, wanted: np.ndarray) -> Rows:
    """[wanted]; the first operator with that id; −1: none."""
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
    row = ops[order][at]
    return np.where(known[order][at] == wanted, row, -1).astype(np.int32)
