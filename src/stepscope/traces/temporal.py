"""Where a device's time goes: computing, communicating, moving memory, nothing.

*span*: from the first start of device work to the last end.  *idle*: the part of it in which nothing ran.  *compute*,
*comm*, *memory*: the instants at which at least one such kernel, copy or memset ran; they may overlap each other.
*overlap*: the part of comm that was hidden behind compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.traces import intervals
from stepscope.traces.categories import Kind
from stepscope.traces.columns import Rows
from stepscope.traces.intervals import Spans
from stepscope.traces.kernel_names import is_communication
from stepscope.traces.window import Window

__all__ = ["DeviceSpans", "Temporal", "device_spans", "temporal_of"]


@dataclass(frozen=True, kw_only=True)
class Temporal:
    span_ns: int
    idle_ns: int
    compute_ns: int
    comm_ns: int
    memory_ns: int
    overlap_ns: int
    """Of communication with compute."""
    exposed_comm_ns: int
    """Communication while nothing computed."""
    exposed_memory_ns: int
    """Copies and memsets while nothing computed or communicated."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpans:
    """When a device did what."""

    compute: Spans
    comm: Spans
    memory: Spans


def device_spans(window: Window, rows: Rows | None = None) -> DeviceSpans:
    """Of all device work that counts, or of some rows of it."""
    rows = window.device_rows if rows is None else rows
    slices = window.trace.slices
    kernel = slices.kind[rows] == Kind.KERNEL
    comm = kernel & window.trace.names_where(is_communication)[slices.name[rows]]

    def spans(which: np.ndarray) -> Spans:
        return intervals.merge(slices.start_ns[rows[which]], slices.end_ns[rows[which]])

    return DeviceSpans(compute=spans(kernel & ~comm), comm=spans(comm), memory=spans(~kernel))


def temporal_of(window: Window, rows: Rows | None = None) -> Temporal:
    rows = window.device_rows if rows is None else rows
    spans = device_spans(window, rows)
    slices = window.trace.slices
    span_ns = int(slices.end_ns[rows].max() - slices.start_ns[rows].min()) if len(rows) else 0
    working = intervals.union(spans.compute, spans.comm)
    busy_ns = intervals.total(intervals.union(working, spans.memory))
    comm_ns = intervals.total(spans.comm)
    overlap_ns = intervals.total(intervals.intersection(spans.compute, spans.comm))
    return Temporal(
        span_ns=span_ns,
        idle_ns=span_ns - busy_ns,
        compute_ns=intervals.total(spans.compute),
        comm_ns=comm_ns,
        memory_ns=intervals.total(spans.memory),
        overlap_ns=overlap_ns,
        exposed_comm_ns=comm_ns - overlap_ns,
        exposed_memory_ns=busy_ns - intervals.total(working),
    )
