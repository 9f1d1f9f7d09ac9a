"""Ranges that people (or libraries) marked with ``record_function`` or NVTX: phases of a step.

*Device*: the work launched inside, on the same thread or, since backward runs on threads of autograd while the caller
waits for it, by those meanwhile.  It counts for each range around the launch, once per name.  *Device span*: from the
first start to the last end of it, over the calls.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.calls import innermost_at
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.nesting import Nest, medians, nest_of, sums
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["user_annotations"]

INTERNAL = re.compile(r"^ProfilerStep|^PyTorch Profiler|_data: .*\bcompile_id=")
"""Steps are no phases; the last are the compiler's notes on its own phases."""


def user_annotations(window: Window) -> Table | None:
    """None: there are none."""
    trace, slices = window.trace, window.trace.slices
    internal = trace.names_where(INTERNAL.search)
    rows = window.host.annotations
    rows = rows[~internal[slices.name[rows]]]
    if not len(rows):
        return None
    nest = nest_of(window.calls, rows)
    codes, group = np.unique(slices.name[rows], return_inverse=True)
    count = len(codes)
    outermost = nest.outermost(group)
    work, holder = _launched_inside(window, nest)
    device = sums(holder, slices.dur_ns[work], len(rows))
    device_ns = nest.totals(group, device, count, outermost)
    host_ns = sums(group[outermost], slices.dur_ns[rows[outermost]], count)
    span_ns = sums(group[outermost], _spans(nest, holder, slices.start_ns[work], slices.end_ns[work])[outermost], count)
    calls, median_ns = np.bincount(group, minlength=count), medians(group, slices.dur_ns[rows], count)
    order = np.lexsort((-host_ns, -device_ns)) if device_ns.any() else np.argsort(-host_ns, kind="stable")
    found = [
        (trace.strings[codes[at]], calls[at], host_ns[at], median_ns[at], device_ns[at], span_ns[at])
        for at in order.tolist()
    ]
    columns = ("annotation", "calls", "host_ns", "host_median_ns", "device_ns", "device_span_ns")
    return table_of("annotations", "User annotations", columns, found)


def _launched_inside(window: Window, nest: Nest) -> tuple[Rows, NDArray[np.int32]]:
    """Device rows, and for each the innermost annotation (index into ``nest.rows``) it was launched in."""
    slices, work = window.trace.slices, window.device_rows
    anchor = np.where(window.launch[work] >= 0, window.launch[work], window.owner[work])
    work, anchor = work[anchor >= 0], anchor[anchor >= 0]
    main = window.host.main_thread
    apart = np.isin(slices.thread[anchor], window.host.autograd_threads)
    there = np.full(int(apart.sum()), main, np.int32)
    meanwhile = innermost_at(window.trace, window.calls, window.host_rows, there, slices.start_ns[anchor[apart]])
    work = np.concatenate([work, work[apart]])
    holder = np.concatenate([nest.around[anchor], nest.around[meanwhile]])
    return work[holder >= 0], holder[holder >= 0]


def _spans(nest: Nest, holder: NDArray[np.int32], start_ns: Ints, end_ns: Ints) -> Ints:
    """[rows]; from the first start to the last end of the work launched in each, or in one it holds."""
    first = np.full(len(nest.rows), np.iinfo(np.int64).max)
    last = np.full(len(nest.rows), np.iinfo(np.int64).min)
    while len(holder):
        np.minimum.at(first, holder, start_ns)
        np.maximum.at(last, holder, end_ns)
        up = nest.above[holder]
        inner = up >= 0
        holder, start_ns, end_ns = up[inner], start_ns[inner], end_ns[inner]
    return np.where(last > first, last - np.minimum(first, last), 0)
