"""Work of a device: its streams, time by kind (compute, communication, memory), idle time by cause.

A *lane* is a stream of a device. It is named by the stream's number, prefixed by the device's if the trace has several
devices (``7``, ``1:7``).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Codes, Ints, Kind, Rows
from stepscope.traces.model.intervals import Spans
from stepscope.traces.model.kernel_names import is_communication, is_synchronizing
from stepscope.traces.model.tables import Grouped, Table, distinct, grouped, table_of
from stepscope.traces.model.window import Window

__all__ = [
    "Gaps",
    "StreamIdle",
    "Temporal",
    "Work",
    "device_spans",
    "gaps_of",
    "idle_by_lane",
    "idle_by_operator",
    "idle_of",
    "idle_table",
    "on_one_stream",
    "temporal_of",
    "temporal_steps",
    "work_of",
]


# -- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """Kernels, copies and memsets that count, by start; all columns have the length of ``rows``."""

    window: Window
    rows: Rows
    start_ns: Ints
    end_ns: Ints
    dur_ns: Ints
    name: Codes
    kernel: NDArray[np.bool_]
    """The others are copies and memsets."""
    comm: NDArray[np.bool_]
    lane: NDArray[np.int64]
    """Index into ``lanes``."""
    lanes: tuple[str, ...]
    launch: Rows
    """The launching call; −1: unknown."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Whether the launching call is known."""
        return self.launch >= 0

    @cached_property
    def call_start_ns(self) -> Ints:
        """Start of the launching call; if unknown, the start of the work itself."""
        return np.where(self.known, self.window.trace.slices.start_ns[self.launch], self.start_ns)

    @cached_property
    def by_kernel(self) -> Grouped:
        """Durations of kernels by name."""
        return grouped(self.name[self.kernel], self.dur_ns[self.kernel])

    @cached_property
    def by_lane(self) -> NDArray[np.int64]:
        """Indices of the work by lane, within a lane by start."""
        return np.argsort(self.lane, kind="stable")

    @cached_property
    def owner(self) -> Codes:
        """Name of the operator that launched it, else of the launching call; −1: unknown."""
        names, owner = self.window.trace.slices.name, self.window.owner[self.rows]
        call = np.where(self.known, names[self.launch], -1)
        return np.where(owner >= 0, names[owner], call).astype(np.int32)


def work_of(window: Window) -> Work:
    rows = window.device_rows
    slices = window.trace.slices
    kernel = slices.kind[rows] == Kind.KERNEL
    name = slices.name[rows]
    device, stream = slices.device[rows].astype(np.int64), slices.stream[rows].astype(np.int64)
    place = (device << 32) + (stream + 1)
    places = np.unique(place)
    devices = slices.device[window.trace.device_rows]
    several = bool(len(devices)) and devices.min() != devices.max()
    lanes = [f"{place >> 32}:{(place & (2**32 - 1)) - 1}" for place in places.tolist()]
    return Work(
        window=window,
        rows=rows,
        start_ns=slices.start_ns[rows],
        end_ns=slices.end_ns[rows],
        dur_ns=slices.dur_ns[rows],
        name=name,
        kernel=kernel,
        comm=kernel & window.trace.names_where(is_communication)[name],
        lane=np.searchsorted(places, place),
        lanes=tuple(each if several else each.partition(":")[2] for each in lanes),
        launch=window.launch[rows],
    )


# -- time by kind of work ---------------------------------------------------------------------------------------------
# How a device spends its time: computing, communicating, moving memory, or idle.
#
# *span*: from the first start of device work to the last end. *idle*: the part of it in which nothing ran. *compute*,
# *comm*, *memory*: the instants at which at least one such kernel, copy or memset ran; they may overlap each other.
# *overlap*: the part of comm that was hidden behind compute.
#
# For a step, all this describes the work that the step launched, whenever it ran. Its *utilization* is the time that
# the device was busy with this work, divided by the longer of the step's time on the host and the work's own span.


@dataclass(frozen=True, kw_only=True)
class Temporal:
    span_ns: int
    idle_ns: int
    compute_ns: int
    comm_ns: int
    memory_ns: int
    overlap_ns: int
    """Overlap of communication with compute."""
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
    """Return the spans of all device work that counts, or of some rows of it."""
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
    """Build one row per step that counts, by time."""
    rows = window.device_rows
    step = window.step_of[rows]
    inside = step >= 0
    temporals = _temporals(window, rows[inside], step[inside].astype(np.int64), len(window.steps))
    counts = np.bincount(step[inside], minlength=len(window.steps))
    lengths = [each.end_ns - each.start_ns for each in window.steps]
    columns = ("step", "start_ns", "wall_ns", "pace_ns", "utilization_share", "work", *TEMPORAL_COLUMNS)
    return table_of(
        "temporal_steps",
        "Device time by step",
        columns,
        (
            (each.number, each.start_ns, wall_ns, pace_ns, _share(temporal, pace_ns), count, *astuple(temporal))
            for each, wall_ns, count, temporal in zip(window.steps, lengths, counts, temporals, strict=True)
            for pace_ns in [max(wall_ns, temporal.span_ns)]
        ),
        note="wall_ns: on the host; work and later columns: what the step launched, whenever it ran; pace_ns: the "
        "longer of wall_ns and span_ns; utilization_share: of pace_ns.",
    )


def _share(temporal: Temporal, pace_ns: int) -> float | None:
    """Return the share of the pace that the device was busy."""
    return (temporal.span_ns - temporal.idle_ns) / pace_ns if pace_ns else None


TEMPORAL_COLUMNS = tuple(each.name for each in fields(Temporal))


def _temporals(window: Window, rows: Rows, group: Ints, count: int) -> list[Temporal]:
    """Compute the times of each of ``count`` groups of rows.

    Each group's times are shifted to a separate stretch, far from the next one's, so that all groups are merged and
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
        # Sums of integers below 2⁵³ are exact in doubles: that is three months of nanoseconds.
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


# -- idle time --------------------------------------------------------------------------------------------------------
# Why nothing ran on a stream: the gaps between its work, by cause.
#
# A gap lasts from the latest end before a kernel, copy or memset to its start. It is a *host wait* if the launching
# call began only after the gap did. Otherwise it is a *kernel wait* if it is shorter than 30 µs, the time to start a
# kernel. Otherwise it is *other*: the work was queued in time but could not start, for example because the stream waits
# for an event of another. If the launching call is unknown, a gap is not a host wait. There is no gap before the first
# work and after the last, so gaps and work add up to the stream's span.
#
# *sync*: the part of the host waits in which the launching thread was inside a call that waits for the device
# (``cudaStreamSynchronize``, ``cudaMemcpy``, a copy to pageable memory …).

KERNEL_WAIT_NS: Final = 30_000
HOST, KERNEL, OTHER = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class StreamIdle:
    host_wait_ns: int
    kernel_wait_ns: int
    other_ns: int
    sync_ns: int
    """Part of ``host_wait_ns``."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Non-empty gaps, by stream and time."""

    work: NDArray[np.int64]
    """Index of the work that ended it."""
    start_ns: Ints
    gap_ns: Ints
    cause: NDArray[np.int8]
    sync_ns: Ints


def on_one_stream(work: Work) -> Work:
    """Treat all work as if it were on one stream: its gaps are the idle time of the whole device."""
    return replace(work, lane=np.zeros(len(work), np.int64), lanes=("all",) if len(work) else ())


def idle_of(window: Window, work: Work | None = None) -> dict[str, StreamIdle]:
    """Return the idle time by stream; ``work`` if already known."""
    work = work_of(window) if work is None else work
    return idle_by_lane(work, gaps_of(work))


def idle_by_lane(work: Work, gaps: Gaps) -> dict[str, StreamIdle]:
    sums = {name: column.tolist() for name, column in _sums(work, gaps).items()}
    return {
        lane: StreamIdle(**{name: column[index] for name, column in sums.items()})
        for index, lane in enumerate(work.lanes)
    }


def gaps_of(work: Work) -> Gaps:
    order = work.by_lane
    lane, start_ns, end_ns = work.lane[order], work.start_ns[order], work.end_ns[order]
    # Lanes are shifted far apart, so that the running maximum restarts with each.
    shift_ns = lane * (int(end_ns.max()) + 1) if len(order) else lane
    before_ns = np.maximum.accumulate(end_ns + shift_ns)[:-1] - shift_ns[1:]
    same = lane[1:] == lane[:-1]
    at = np.flatnonzero(same & (start_ns[1:] > before_ns))
    index = order[at + 1]
    began_ns, gap_ns = before_ns[at], start_ns[at + 1] - before_ns[at]
    host = work.known[index] & (work.call_start_ns[index] > began_ns)
    cause = np.where(host, HOST, np.where(gap_ns < KERNEL_WAIT_NS, KERNEL, OTHER)).astype(np.int8)
    sync_ns = np.zeros(len(at), np.int64)
    sync_ns[host] = _synchronizing_ns(work, index[host], began_ns[host])
    return Gaps(work=index, start_ns=began_ns, gap_ns=gap_ns, cause=cause, sync_ns=sync_ns)


def synchronizing_calls(work: Work) -> Rows:
    """Return the runtime calls that wait for the device, by start."""
    trace, window = work.window.trace, work.window
    calls = window.rows_of((Kind.RUNTIME,))
    waits = trace.names_where(is_synchronizing)[trace.slices.name[calls]]
    to_pageable = work.known & ~work.kernel
    to_pageable[to_pageable] = trace.names_where(lambda name: "-> Pageable" in name)[work.name[to_pageable]]
    holds = np.zeros(len(trace), bool)
    holds[calls[waits]] = True
    holds[work.launch[to_pageable]] = True
    return np.flatnonzero(holds).astype(np.int32)


def _synchronizing_ns(work: Work, index: NDArray[np.int64], began_ns: Ints) -> Ints:
    """Return how much of each host wait, up to the launching call, its thread spent waiting for the device."""
    slices = work.window.trace.slices
    calls = synchronizing_calls(work)
    thread = slices.thread[work.launch[index]]
    until_ns = np.minimum(work.call_start_ns[index], work.start_ns[index])
    out = np.zeros(len(index), np.int64)
    for each in np.intersect1d(thread, slices.thread[calls]):
        own = calls[slices.thread[calls] == each]
        waits = intervals.merge(slices.start_ns[own], slices.end_ns[own])
        mine = thread == each
        out[mine] = intervals.covered(began_ns[mine], until_ns[mine], waits)
    return out


def _sums(work: Work, gaps: Gaps) -> dict[str, Ints]:
    """Sum by lane, [lanes] each, keyed by the names of ``StreamIdle``."""
    lane = work.lane[gaps.work]

    def total(values: Ints, which: NDArray[np.bool_]) -> Ints:
        return np.bincount(lane[which], values[which], minlength=len(work.lanes)).astype(np.int64)

    return {
        "host_wait_ns": total(gaps.gap_ns, gaps.cause == HOST),
        "kernel_wait_ns": total(gaps.gap_ns, gaps.cause == KERNEL),
        "other_ns": total(gaps.gap_ns, gaps.cause == OTHER),
        "sync_ns": total(gaps.sync_ns, gaps.cause == HOST),
    }


def idle_table(work: Work, gaps: Gaps) -> Table:
    """Build the table, the busiest stream first."""
    sums = {name: column.tolist() for name, column in _sums(work, gaps).items()}
    counts = np.bincount(work.lane, minlength=len(work.lanes)).tolist()
    gap_counts = np.bincount(work.lane[gaps.work], minlength=len(work.lanes)).tolist()
    rows = []
    for index, lane in enumerate(work.lanes):
        own = work.lane == index
        span_ns = int(work.end_ns[own].max() - work.start_ns[own].min())
        causes = [column[index] for column in sums.values()]
        idle_ns = sum(causes[:3])
        share = idle_ns / span_ns if span_ns else None
        busy_ns = span_ns - idle_ns
        rows.append((lane, counts[index], span_ns, busy_ns, gap_counts[index], idle_ns, share, *causes))
    return table_of(
        "idle",
        "Idle time by stream and cause",
        ("stream", "work", "span_ns", "busy_ns", "gaps", "idle_ns", "idle_share", *sums),
        sorted(rows, key=lambda row: -row[3]),
        note="host wait: launched too late; kernel wait: under 30 µs although launched in time; other: launched in "
        "time but delayed; sync: the part of host wait in which the host waited for the device.",
    )


def idle_by_operator(work: Work, gaps: Gaps) -> Table:
    """Name the operators whose launches ended the host waits of each stream, the costliest first."""
    host = gaps.cause == HOST
    index, gap_ns, sync_ns = gaps.work[host], gaps.gap_ns[host], gaps.sync_ns[host]
    owner = work.owner[index].astype(np.int64)
    keys, place = distinct(work.lane[index] * (len(work.window.trace.strings) + 1) + owner + 1)
    place = place.reshape(-1)
    longest_ns = np.zeros(len(keys), np.int64)
    np.maximum.at(longest_ns, place, gap_ns)
    columns = (
        np.bincount(place, minlength=len(keys)),
        np.bincount(place, gap_ns, minlength=len(keys)).astype(np.int64),
        np.bincount(place, sync_ns, minlength=len(keys)).astype(np.int64),
        longest_ns,
    )
    order = np.argsort(-columns[1], kind="stable")
    text, width = work.window.trace.text, len(work.window.trace.strings) + 1
    return table_of(
        "idle_by_operator",
        "Late launches by operator",
        ("stream", "operator", "gaps", "host_wait_ns", "sync_ns", "longest_ns"),
        (
            (work.lanes[key // width], text(key % width - 1), *values)
            for key, *values in zip(keys[order].tolist(), *(column[order].tolist() for column in columns), strict=True)
        ),
        limit=100,
        note="The operator whose launch ended the wait, or the launching call if no operator is known.",
    )
