"""The device figures that findings are made of, and the pace: how long a step takes on host and device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.kernels import (
    bytes_of,
    is_pageable,
    occupancy_of,
    occupancy_sums,
    sm_efficiency_of,
    utilisation_of,
)
from stepscope.traces.device.launches import SHORT_NS, launches_in, queues_of
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
from stepscope.traces.model.columns import Ints, Kind
from stepscope.traces.model.kernel_names import (
    is_fp32_matmul,
    is_graph_launch,
    is_matrix_class,
    kernel_class,
    uses_tensor_cores,
)
from stepscope.traces.model.tables import median
from stepscope.traces.model.window import Window

__all__ = ["DeviceFigures", "Pace", "device_figures", "device_time", "launched_in_steps", "pace_of", "shared_out"]


# -- figures ----------------------------------------------------------------------------------------------------------

LOW_OCCUPANCY: Final = 0.5
LISTED: Final = 10
NOT_IDLE: Final = StreamIdle(host_wait_ns=0, kernel_wait_ns=0, other_ns=0, sync_ns=0)


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Shares are 0 to 1; None: not in the trace."""

    device_name: str | None
    utilisation: float | None
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
        utilisation=utilisation_of(work),
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
    utilisation = busy_ns / pace.total_ns if pace.total_ns and len(own) else None
    return replace(pace, device=replace(pace.device, utilisation=utilisation))


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
    lanes, lane = np.unique(work.lane[which], return_inverse=True)
    names = tuple(work.lanes[index] for index in lanes.tolist())
    return replace(work, **{name: getattr(work, name)[which] for name in columns}, lane=lane, lanes=names)
