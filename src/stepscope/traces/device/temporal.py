"""Where a device's time goes: computing, communicating, moving memory, nothing.

*span*: from the first start of device work to the last end.  *idle*: the part of it in which nothing ran.  *compute*,
*comm*, *memory*: the instants at which at least one such kernel, copy or memset ran; they may overlap each other.
*overlap*: the part of comm that was hidden behind compute.

Of a step all this is of the work that the step launched, whenever it ran.  Its *utilisation* is the time that the
device was busy with this work, by the longer of the step's time on the host and the work's own span.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np

from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.intervals import Spans
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["DeviceSpans", "Temporal", "device_spans", "temporal_of", "temporal_steps"]


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
    return _spans(window, rows, slices.start_ns[rows], slices.end_ns[rows])


def _spans(window: Window, rows: Rows, start_ns: Ints, end_ns: Ints) -> DeviceSpans:
    slices = window.trace.slices
    kernel = slices.kind[rows] == Kind.KERNEL
    comm = kernel & window.trace.names_where(is_communication)[slices.name[rows]]

    def spans(which: np.ndarray) -> Spans:
        return intervals.merge(start_ns[which], end_ns[which])

    return DeviceSpans(compute=spans(kernel & ~comm), comm=spans(comm), memory=spans(~kernel))


def temporal_of(window: Window, rows: Rows | None = None) -> Temporal:
    rows = window.device_rows if rows is None else rows
    return _temporals(window, rows, np.zeros(len(rows), np.int64), 1)[0]


def temporal_steps(window: Window) -> Table:
    """One row per step that counts, by time."""
    rows = window.device_rows
    step = window.step_of[rows]
    inside = step >= 0
    temporals = _temporals(window, rows[inside], step[inside].astype(np.int64), len(window.steps))
    counts = np.bincount(step[inside], minlength=len(window.steps))
    lengths = [each.end_ns - each.start_ns for each in window.steps]
    columns = ("step", "start_ns", "wall_ns", "pace_ns", "utilisation_share", "work", *TEMPORAL_COLUMNS)
    return table_of(
        "temporal_steps",
        "Device time by step",
        columns,
        (
            (each.number, each.start_ns, wall_ns, pace_ns, _share(temporal, pace_ns), count, *astuple(temporal))
            for each, wall_ns, count, temporal in zip(window.steps, lengths, counts, temporals, strict=True)
            for pace_ns in [max(wall_ns, temporal.span_ns)]
        ),
        note="wall_ns: on the host; work and what follows: what the step launched, whenever it ran; pace_ns: the "
        "longer of wall_ns and span_ns, which utilisation_share is of.",
    )


def _share(temporal: Temporal, pace_ns: int) -> float | None:
    """Of the time that the device was busy with it."""
    return (temporal.span_ns - temporal.idle_ns) / pace_ns if pace_ns else None


TEMPORAL_COLUMNS = tuple(each.name for each in fields(Temporal))


def _temporals(window: Window, rows: Rows, group: Ints, count: int) -> list[Temporal]:
    """One for each of ``count`` groups of rows.

    Each group's times are moved to a stretch of their own, far from the next one's, so that all groups are merged and
    intersected at once, however many there are.
    """
    if not len(rows):
        return [Temporal(**dict.fromkeys(TEMPORAL_COLUMNS, 0))] * count
    slices = window.trace.slices
    start_ns, end_ns = slices.start_ns[rows], slices.end_ns[rows]
    first_ns = int(start_ns.min())
    far_ns = int(end_ns.max()) - first_ns + 1
    shift_ns = group * far_ns - first_ns
    spans = _spans(window, rows, start_ns + shift_ns, end_ns + shift_ns)

    def total(each: Spans) -> Ints:
        lengths = each.end_ns - each.start_ns
        # Sums of whole numbers below 2⁵³ are exact in doubles: that is three months of nanoseconds.
        return np.bincount(each.start_ns // far_ns, lengths, minlength=count).astype(np.int64)

    working = intervals.union(spans.compute, spans.comm)
    working_ns, busy_ns = total(working), total(intervals.union(working, spans.memory))
    begins, ends = np.full(count, far_ns), np.full(count, -far_ns)
    np.minimum.at(begins, group, start_ns - first_ns)
    np.maximum.at(ends, group, end_ns - first_ns)
    span_ns = np.maximum(ends - begins, 0)
    comm_ns = total(spans.comm)
    overlap_ns = total(intervals.intersection(spans.compute, spans.comm))
    columns = (
        span_ns,
        span_ns - busy_ns,
        total(spans.compute),
        comm_ns,
        total(spans.memory),
        overlap_ns,
        comm_ns - overlap_ns,
        busy_ns - working_ns,
    )
    return [
        Temporal(**dict(zip(TEMPORAL_COLUMNS, values, strict=True)))
        for values in zip(*(column.tolist() for column in columns), strict=True)
    ]
