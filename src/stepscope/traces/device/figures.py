"""How the host feeds the device, the device figures that findings are made of, and the pace of steps.

Figures: the cost of launches, how long work waits, how much of it is queued, and how long a step takes on host and
device.

A *launch* is a runtime call whose work is in the trace, whatever its name: ``cudaLaunchKernel``, ``cuLaunchKernelEx``,
``hipExtModuleLaunchKernel``, an asynchronous copy, Intel's calls. A CUDA graph's launch is one launch, however many
kernels it starts; its stream and start are those of its first work. *delay*: from the start of the call to the start of
the work, including queueing behind other work. A launch is *queued* for exactly its delay, so the mean queue is the sum
of delays divided by the time.

A stream holds about 1,024 launches; the next call waits until there is room. A launch counts as *blocked* if at its
start at least 1,000 are queued on its stream and it takes more than five times the median duration of calls with its
name. Only the time beyond that median counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.dominant import KernelUse, kernel_uses
from stepscope.traces.device.kernels import (
    bytes_of,
    is_pageable,
    occupancy_of,
    occupancy_sums,
    sm_efficiency_of,
    utilization_of,
)
from stepscope.traces.device.work import (
    Gaps,
    StreamIdle,
    Temporal,
    Work,
    gaps_of,
    idle_by_lane,
    idle_by_operator,
    on_one_stream,
    temporal_of,
    work_of,
)
from stepscope.traces.model.columns import Codes, Ints, Kind, Rows
from stepscope.traces.model.kernel_names import (
    is_fp32_matmul,
    is_graph_launch,
    is_matrix_class,
    kernel_class,
    uses_tensor_cores,
)
from stepscope.traces.model.tables import Table, distinct, grouped, median, sums_of, table_of
from stepscope.traces.model.window import Window

__all__ = [
    "SHORT_NS",
    "DeviceFigures",
    "Launches",
    "Pace",
    "Queue",
    "device_figures",
    "device_time",
    "launched_in_steps",
    "launches_in",
    "launches_table",
    "pace_of",
    "queue_curve",
    "queue_table",
    "queues_of",
    "shared_out",
    "short_kernels_table",
]

# -- launches ---------------------------------------------------------------------------------------------------------

SHORT_NS: Final = 10_000
SLOW_CALL_NS: Final = 50_000
LONG_DELAY_NS: Final = 100_000
FULL: Final = 1000
"""Slightly less than the limit: the trace may have lost some."""
UNUSUAL: Final = 5
POINTS: Final = 500
"""Points of the curve, over all streams."""
STREAMS: Final = 4
"""Maximum number of streams with a curve."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches by the start of the calls."""

    row: Rows
    """The call."""
    name: Codes
    start_ns: Ints
    call_ns: Ints
    lane: NDArray[np.int64]
    starts_work_ns: Ints
    """When its first work began, but never before the call."""
    work: Ints
    """Number of work items."""
    work_ns: Ints
    """Sum of their durations."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def delay_ns(self) -> Ints:
        return self.starts_work_ns - self.start_ns


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue of one stream."""

    lane: int
    launches: int
    span_ns: int
    """From the first launch to the last start of work; the following figures are within it."""
    most: int
    queued_ns: int
    """Sum of all delays."""
    full_ns: int
    """While at least 1,000 were queued."""
    blocked: int
    """Number of calls."""
    blocked_ns: int
    time_ns: Ints
    """When the length changes, ascending."""
    length: Ints
    """From then on."""


def launches_in(work: Work) -> Launches:
    slices = work.window.trace.slices
    known = np.flatnonzero(work.known)
    # Work is sorted by start, so the first index of a call is its first work.
    row, first, at = np.unique(work.launch[known], return_index=True, return_inverse=True)
    at = at.reshape(-1)
    first = known[first]
    start_ns = slices.start_ns[row]
    return Launches(
        row=row,
        name=slices.name[row],
        start_ns=start_ns,
        call_ns=slices.dur_ns[row],
        lane=work.lane[first],
        starts_work_ns=np.maximum(work.start_ns[first], start_ns),
        work=np.bincount(at, minlength=len(row)),
        work_ns=np.bincount(at, work.dur_ns[known], minlength=len(row)).astype(np.int64),
    )


def launches_table(work: Work, launches: Launches) -> Table:
    """Build one row per name of a launching call, the longest total first."""
    name = launches.name
    calls, delays = grouped(name, launches.call_ns), grouped(name, launches.delay_ns)
    columns = (
        sums_of(calls, name, launches.work),
        calls.total,
        calls.median,
        calls.most,
        delays.median,
        delays.most,
        sums_of(calls, name, launches.work_ns < launches.call_ns),
        sums_of(calls, name, launches.call_ns > SLOW_CALL_NS),
        sums_of(calls, name, launches.delay_ns > LONG_DELAY_NS),
    )
    unknown = int((~work.known).sum())
    return table_of(
        "launches",
        "Launches by call",
        LAUNCH_COLUMNS,
        (
            (work.window.trace.text(int(calls.key[place])), calls.count[place], *(column[place] for column in columns))
            for place in np.argsort(-calls.total, kind="stable").tolist()
        ),
        note="delay: from the start of the call to the start of its work; slow calls take over 50 µs, long delays over "
        "100 µs." + (f"  {unknown} work items have no launch in the trace." if unknown else ""),
    )


LAUNCH_COLUMNS: Final = (
    "call", "count", "work", "call_ns", "call_median_ns", "call_max_ns", "delay_median_ns", "delay_max_ns",
    "shorter_than_call", "slow_calls", "long_delays",
)  # fmt: skip


def short_kernels_table(work: Work) -> Table:
    """List kernels shorter than 10 µs by name, the most frequent first."""
    slices = work.window.trace.slices
    groups = work.by_kernel
    short = work.kernel & (work.dur_ns < SHORT_NS)
    name, dur_ns = work.name[short], work.dur_ns[short]
    call_ns = np.where(work.known[short], slices.dur_ns[work.launch[short]], 0)
    counts = sums_of(groups, name, np.ones(len(name), np.int64))
    columns = (sums_of(groups, name, dur_ns), sums_of(groups, name, call_ns), sums_of(groups, name, dur_ns < call_ns))
    order = [place for place in np.argsort(-counts, kind="stable").tolist() if counts[place]]
    strings = work.window.trace.strings
    return table_of(
        "short_kernels",
        "Kernels under 10 µs",
        ("name", "count", "of_count", "total_ns", "call_ns", "shorter_than_call"),
        (
            (strings[code], counts[place], groups.count[place], *(c[place] for c in columns))
            for place in order
            for code in [int(groups.key[place])]
        ),
        limit=100,
        note="call_ns: host time spent launching them.",
    )


def queues_of(work: Work, launches: Launches) -> list[Queue]:
    """Return the queue of each stream with launches, the one with most launches first."""
    columns = (launches.start_ns, launches.starts_work_ns, launches.call_ns, _usual_ns(launches))
    queues = [
        _queue(lane, *(column[launches.lane == lane] for column in columns))
        for lane in np.unique(launches.lane).tolist()
    ]
    return sorted(queues, key=lambda queue: -queue.launches)


def _usual_ns(launches: Launches) -> Ints:
    """Return the median duration of calls with the same name, [launches]."""
    calls = grouped(launches.name, launches.call_ns)
    return calls.median[np.searchsorted(calls.key, launches.name)]


def _queue(lane: int, start_ns: Ints, out_ns: Ints, call_ns: Ints, usual_ns: Ints) -> Queue:
    time_ns = np.concatenate([start_ns, out_ns])
    order = np.argsort(time_ns, kind="stable")
    time_ns, length = time_ns[order], np.cumsum(np.repeat([1, -1], len(start_ns))[order])
    # Changes at the same instant count as one.
    last = np.append(time_ns[1:] != time_ns[:-1], True)
    time_ns, length = time_ns[last], length[last]
    lasts_ns = np.diff(time_ns)
    blocked = (length[np.searchsorted(time_ns, start_ns)] >= FULL) & (call_ns > UNUSUAL * usual_ns)
    return Queue(
        lane=lane,
        launches=len(start_ns),
        span_ns=int(time_ns[-1] - time_ns[0]),
        most=int(length.max()),
        queued_ns=int((out_ns - start_ns).sum()),
        full_ns=int(lasts_ns[length[:-1] >= FULL].sum()),
        blocked=int(blocked.sum()),
        blocked_ns=int((call_ns - usual_ns)[blocked].sum()),
        time_ns=time_ns,
        length=length,
    )


def queue_table(work: Work, queues: list[Queue]) -> Table:
    return table_of(
        "queue",
        "Launches queued by stream",
        ("stream", "launches", "span_ns", "mean_length", "max_length", "full_ns", "blocked_calls", "blocked_ns"),
        (
            (
                work.lanes[each.lane],
                each.launches,
                each.span_ns,
                each.queued_ns / each.span_ns if each.span_ns else None,
                each.most,
                each.full_ns,
                each.blocked,
                each.blocked_ns,
            )
            for each in queues
        ),
        note="Queued: launched but not started.  full: at least 1,000 queued; blocked: extra time of calls that then "
        "took over five times as long as usual.",
    )


def queue_curve(work: Work, queues: list[Queue]) -> Table:
    """Return the longest queue in equal time intervals, for the streams with most launches."""
    shown = [each for each in queues[:STREAMS] if each.span_ns]
    rows = []
    for each in shown:
        first_ns, last_ns = int(each.time_ns[0]), int(each.time_ns[-1])
        edges = np.unique(np.linspace(first_ns, last_ns, POINTS // len(shown) + 1).astype(np.int64))
        # An interval begins with the length since the last change before it and ends with that of the last change in
        # it.
        first = np.searchsorted(each.time_ns, edges[:-1], side="right") - 1
        last = np.searchsorted(each.time_ns, edges[1:], side="left") - 1
        most = np.maximum(np.maximum.reduceat(each.length[:-1], first), each.length[last])
        rows += [(work.lanes[each.lane], *point) for point in zip(edges[:-1].tolist(), most.tolist(), strict=True)]
    return table_of(
        "queue_curve",
        "Launches queued over time",
        ("stream", "start_ns", "max_length"),
        rows,
        note="The longest queue between start_ns and the next row's, for the four streams with most launches.",
    )


# -- figures ----------------------------------------------------------------------------------------------------------

LOW_OCCUPANCY: Final = 0.5
LISTED: Final = 10
NOT_IDLE: Final = StreamIdle(host_wait_ns=0, kernel_wait_ns=0, other_ns=0, sync_ns=0)


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Shares are 0 to 1; None: not in the trace."""

    device_name: str | None
    utilization: float | None
    sm_efficiency: float | None
    occupancy: float | None
    tensor_core_share: float | None
    """Of the time in kernels that multiply matrices (products, convolutions, attention)."""
    eligible_fp32_ns: int
    """Products and convolutions in FP32 without Tensor Cores."""
    kernel_count: int
    short_kernel_count: int
    """Shorter than 10 µs."""
    short_kernel_ns: int
    launch_count: int
    launch_delay_ns_median: int | None
    """From the start of the call to the start of its work."""
    queue_full_ns: int
    """Time the host was blocked in launches because about 1,024 were queued."""
    mean_queue: float | None
    """Launched but not started, over all streams, from the first launch to the last start."""
    pageable_copy_ns: int
    pageable_copy_bytes: int
    pageable_copy_count: int
    low_occupancy: tuple[tuple[str, float, int], ...]
    """Attention kernels with less than half of the warps that fit: name, occupancy, total_ns; the longest first."""
    dominant: tuple[KernelUse, ...]
    """Kernels that compute, the longest total first."""
    graph_launches: int
    idle: StreamIdle
    """Of the whole device: the gaps in which no stream worked; they add up to ``Temporal.idle_ns``."""
    idle_before: tuple[tuple[str, int], ...]
    """Operators whose launches ended host waits of the whole device, with the waits; the longest first."""


def device_figures(window: Window, work: Work | None = None) -> DeviceFigures:
    """Compute the figures; ``work`` if already known."""
    return figures_of(work_of(window) if work is None else work)


def figures_of(work: Work) -> DeviceFigures:
    trace = work.window.trace
    name, dur_ns = work.name[work.kernel], work.dur_ns[work.kernel]

    def time_of(which: np.ndarray) -> int:
        return int(dur_ns[which].sum())

    matrix_ns = time_of(trace.names_where(lambda text: is_matrix_class(kernel_class(text)))[name])
    tensor_core_ns = time_of(trace.names_where(uses_tensor_cores)[name])
    short = dur_ns < SHORT_NS
    launches = launches_in(work)
    queues = queues_of(work, launches)
    queued_over_ns = int(launches.starts_work_ns.max() - launches.start_ns.min()) if len(launches) else 0
    pageable = ~work.kernel
    pageable[pageable] = trace.names_where(is_pageable)[work.name[pageable]]
    sizes = bytes_of(work)[pageable]
    calls = work.window.rows_of((Kind.RUNTIME,))
    joined = on_one_stream(work)
    gaps = gaps_of(joined)
    return DeviceFigures(
        device_name=_device_name(work),
        utilization=utilization_of(work),
        sm_efficiency=sm_efficiency_of(work),
        occupancy=occupancy_of(work),
        tensor_core_share=tensor_core_ns / matrix_ns if matrix_ns else None,
        eligible_fp32_ns=time_of(trace.names_where(is_fp32_matmul)[name]),
        kernel_count=len(name),
        short_kernel_count=int(short.sum()),
        short_kernel_ns=time_of(short),
        launch_count=len(launches),
        launch_delay_ns_median=median(launches.delay_ns),
        queue_full_ns=sum(queue.blocked_ns for queue in queues),
        mean_queue=sum(queue.queued_ns for queue in queues) / queued_over_ns if queued_over_ns else None,
        pageable_copy_ns=int(work.dur_ns[pageable].sum()),
        pageable_copy_bytes=int(sizes[sizes >= 0].sum()),
        pageable_copy_count=int(pageable.sum()),
        low_occupancy=_low_occupancy(work, dur_ns),
        dominant=kernel_uses(work),
        graph_launches=int(trace.names_where(is_graph_launch)[trace.slices.name[calls]].sum()),
        idle=idle_by_lane(joined, gaps).get("all", NOT_IDLE),
        idle_before=_idle_before(joined, gaps),
    )


def _idle_before(joined: Work, gaps: Gaps) -> tuple[tuple[str, int], ...]:
    table = idle_by_operator(joined, gaps)
    name, wait = table.columns.index("operator"), table.columns.index("host_wait_ns")
    return tuple((row[name], row[wait]) for row in table.rows[:LISTED])


def _device_name(work: Work) -> str | None:
    """Return the name of the device that did the work, from the file's list; the first of several."""
    devices = work.window.trace.meta.devices
    used = int(work.window.trace.slices.device[work.rows].min()) if len(work) else 0
    listed = next((each for each in devices if each.get("id") == used), devices[0] if devices else {})
    name = listed.get("name")
    return name if isinstance(name, str) else None


def _low_occupancy(work: Work, dur_ns: Ints) -> tuple[tuple[str, float, int], ...]:
    trace, name = work.window.trace, work.name[work.kernel]
    attends = trace.names_where(lambda text: kernel_class(text) == "attention")[name]
    weighted, weight_ns = occupancy_sums(work)
    found = []
    for code in np.unique(name[attends]).tolist():
        own = name == code
        if weight_ns[own].sum():
            occupancy = float(weighted[own].sum() / weight_ns[own].sum())
            if occupancy < LOW_OCCUPANCY:
                found.append((trace.strings[code], occupancy, int(dur_ns[own].sum())))
    return tuple(sorted(found, key=lambda each: -each[2])[:LISTED])


# -- pace -------------------------------------------------------------------------------------------------------------
# How long a step takes: the single definition used everywhere.
#
# A host that never waits finishes its steps long before its device and does not show how fast the job is; neither does
# a device that waits for its host. The *pace* is therefore the longer of two times, divided by the number of steps:
#
#     on the host       from the start of the first step that counts to the end of the last
#     on the device     from the first start to the last end of the work that these steps launched
#
# Work that earlier steps launched, and that still ran when the trace began, is not part of it (``Window.step_of``). It
# is in ``Temporal`` and in the tables of kernels, which cover all device work that counts. Code that divides by the
# number of steps must use the figures from here.

BEHIND = 1.05
"""The device clearly sets the pace if its time exceeds the host's by this factor."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    steps: int
    host_ns: int
    device_ns: int
    work: Temporal
    """The device work that the steps launched."""
    device: DeviceFigures
    """Figures of the same work; its utilization relates to the pace."""

    @property
    def total_ns(self) -> int:
        """Total of all steps."""
        return max(self.host_ns, self.device_ns)

    @property
    def step_ns(self) -> int:
        return self.total_ns // self.steps if self.steps else 0

    @property
    def by_device(self) -> bool:
        """Whether the device clearly sets the pace."""
        return self.device_ns > BEHIND * self.host_ns


def pace_of(window: Window, everything: DeviceFigures) -> Pace:
    """Compute the pace; ``everything``: figures of all device work that counts, which usually is the same work."""
    work = work_of(window)
    which = launched_in_steps(window)[work.rows]
    own = work if which.all() else _part_of(work, which)
    temporal = temporal_of(window, own.rows)
    pace = Pace(
        steps=len(window.steps),
        host_ns=window.steps[-1].end_ns - window.steps[0].start_ns if window.steps else 0,
        device_ns=temporal.span_ns,
        work=temporal,
        device=everything if own is work else figures_of(own),
    )
    busy_ns = temporal.span_ns - temporal.idle_ns
    utilization = busy_ns / pace.total_ns if pace.total_ns and len(own) else None
    return replace(pace, device=replace(pace.device, utilization=utilization))


def launched_in_steps(window: Window, first: int = 0, last: int | None = None) -> NDArray[np.bool_]:
    """Return device work launched from the start of step ``first`` to the end of step ``last``; [slices]."""
    if not window.steps:
        return np.zeros(len(window.trace), bool)
    last = len(window.steps) - 1 if last is None else last
    slices, launch = window.trace.slices, window.launch
    out = np.zeros(len(slices), bool)
    rows = window.device_rows
    call_ns, step = slices.start_ns[launch[rows]], window.step_of[rows]
    between = (call_ns >= window.steps[first].start_ns) & (call_ns < window.steps[last].end_ns)
    out[rows] = np.where(launch[rows] >= 0, between, (step >= first) & (step <= last))
    return out


def device_time(window: Window, first: int = 0, last: int | None = None) -> tuple[int, int] | None:
    """Return when the device works for some steps, if it clearly sets their pace; else None."""
    last = len(window.steps) - 1 if last is None else last
    rows = np.flatnonzero(launched_in_steps(window, first, last))
    if not len(rows):
        return None
    slices = window.trace.slices
    start_ns, end_ns = int(slices.start_ns[rows].min()), int(slices.end_ns[rows].max())
    host_ns = window.steps[last].end_ns - window.steps[first].start_ns
    return (start_ns, end_ns) if end_ns - start_ns > BEHIND * host_ns else None


def shared_out(total_ns: int, steps: int) -> tuple[int, ...]:
    """Split the total into integers that add up to it, as equal as possible."""
    return tuple((at + 1) * total_ns // steps - at * total_ns // steps for at in range(steps))


def _part_of(work: Work, which: NDArray[np.bool_]) -> Work:
    columns = ("rows", "start_ns", "end_ns", "dur_ns", "name", "kernel", "comm", "launch")
    lanes, lane = distinct(work.lane[which])
    names = tuple(work.lanes[index] for index in lanes.tolist())
    return replace(work, **{name: getattr(work, name)[which] for name in columns}, lane=lane, lanes=names)
