"""Where the host waits for the device: ``.item()``, ``.cpu()``, ``nonzero``, ``torch.cuda.synchronize()`` …

The wait is the duration of the runtime's call that synchronises: a synchronisation by its name, a copy that is not
asynchronous, or one to pageable memory, which blocks whatever its name says.  It is told by the outermost operator
around it that is known to synchronise, else by the innermost operator, else by the call itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.calls import padded
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Rows
from stepscope.traces.model.nesting import nest_of, sums
from stepscope.traces.model.runtime_names import is_asked_to_wait
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["SyncPlace", "sync_rows", "syncs", "syncs_of"]

ASYNC_COPY = re.compile(r"^(cuda|hip)Memcpy\w*Async|^cuMemcpy\w*Async")
TO_PAGEABLE = re.compile(r"Device -> Pageable|DtoH.*Pageable", re.IGNORECASE)
KNOWN = frozenset(
    (
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::argwhere",
        "aten::masked_select",
        "aten::equal",
        "aten::allclose",
        "aten::cpu",
        "aten::to",
        "aten::_to_copy",
        "aten::copy_",
        "aten::tolist",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::bincount",
        "aten::repeat_interleave",
        "aten::index",
        "aten::index_put_",
        "aten::multinomial",
    )
)


@dataclass(frozen=True, kw_only=True)
class SyncPlace:
    call: str
    """``aten::item`` or, outside operators, ``cudaDeviceSynchronize``."""
    source: str | None
    """``train.py(31): step``."""
    count: int
    wait_ns: int


def sync_rows(window: Window) -> Rows:
    """Calls of the runtime, within steps, in which the host waited for the device; of nested ones the outer."""
    trace, slices = window.trace, window.trace.slices
    calls = window.rows_of((Kind.RUNTIME,))
    names = slices.name[calls]
    waits = trace.names_where(is_asked_to_wait)[names]
    copies = window.rows_of((Kind.MEMCPY,))
    pageable = trace.names_where(TO_PAGEABLE.search)
    blocking = window.launch[copies[pageable[slices.name[copies]]]]
    to_pageable = np.zeros(len(slices), bool)
    to_pageable[blocking[blocking >= 0]] = True
    waits |= to_pageable[calls] & trace.names_where(ASYNC_COPY.match)[names]
    rows = calls[waits & (window.step_of[calls] >= 0)]
    rows = rows[~window.host.mask(rows)[window.calls.parents[rows]] | (window.calls.parents[rows] < 0)]
    # The profiler itself waits for the device when it stops: that is the last thing a host does in a trace.
    if len(rows) and rows[-1] == window.host_rows[-1] and window.owner[rows[-1]] < 0:
        rows = rows[:-1]
    return rows


def syncs_of(window: Window) -> tuple[SyncPlace, ...]:
    """The most costly first."""
    rows = sync_rows(window)
    if not len(rows):
        return ()
    trace, slices, sources = window.trace, window.trace.slices, window.host.sources
    teller = _teller(window, rows)
    name, code = slices.name[teller], sources.code[rows]
    span = len(sources.texts) + 1
    keys, group = np.unique(name.astype(np.int64) * span + code + 1, return_inverse=True)
    wait_ns, count = sums(group, slices.dur_ns[rows], len(keys)), np.bincount(group, minlength=len(keys))
    return tuple(
        SyncPlace(
            call=trace.strings[int(keys[at]) // span],
            source=sources.texts[int(keys[at]) % span - 1] if int(keys[at]) % span else None,
            count=int(count[at]),
            wait_ns=int(wait_ns[at]),
        )
        for at in np.lexsort((-count, -wait_ns)).tolist()
    )


def _teller(window: Window, rows: Rows) -> NDArray[np.int32]:
    """[rows]; the slice whose name says what this wait is for."""
    ops = window.host.ops
    known = ops[window.trace.names_where(KNOWN.__contains__)[window.trace.slices.name[ops]]]
    nest = nest_of(window.calls, known)
    at = nest.around[rows]
    while True:
        up = padded(nest.above)[at]
        if (up < 0).all():
            break
        at = np.where(up >= 0, up, at)
    owner = window.owner[rows]
    return np.where(at >= 0, padded(known)[at], np.where(owner >= 0, owner, rows)).astype(np.int32)


def syncs(window: Window, places: tuple[SyncPlace, ...]) -> Table | None:
    """None: the host never waited."""
    if not places:
        return None
    steps_ns = sum(step.end_ns - step.start_ns for step in window.steps)
    rows = [
        (place.call, place.source, place.count, place.wait_ns, place.wait_ns / steps_ns if steps_ns else None)
        for place in places
    ]
    columns = ("call", "source", "count", "wait_ns", "step_share")
    return table_of("syncs", "Waiting for the device", columns, rows)
