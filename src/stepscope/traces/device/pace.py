"""How long a step takes: one definition for all that says so.

A host that never waits is through with its steps long before its device, and says nothing of how fast the job goes; a
device that waits for its host says nothing either.  So the *pace* is the longer of two times, by the number of steps:

    on the host       from the start of the first step that counts to the end of the last
    on the device     from the first start to the last end of the work that these steps launched

Work that earlier steps launched, and that still ran when the trace began, is no part of it (``Window.step_of``).  It is
in ``Temporal`` and in the tables of kernels, which are of all device work that counts; whoever divides by the number of
steps takes the figures from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.figures import DeviceFigures, figures_of
from stepscope.traces.device.temporal import Temporal, temporal_of
from stepscope.traces.device.work import Work, work_of
from stepscope.traces.model.window import Window

__all__ = ["BEHIND", "Pace", "device_time", "launched_in_steps", "pace_of", "shared_out"]

BEHIND = 1.05
"""How many times the host's time the device's must be for the device to set the pace clearly."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    steps: int
    host_ns: int
    device_ns: int
    work: Temporal
    """Of the device work that the steps launched."""
    device: DeviceFigures
    """Of the same; its utilisation is that of the pace."""

    @property
    def total_ns(self) -> int:
        """Of all steps together."""
        return max(self.host_ns, self.device_ns)

    @property
    def step_ns(self) -> int:
        return self.total_ns // self.steps if self.steps else 0

    @property
    def by_device(self) -> bool:
        """Whether the device sets it, clearly."""
        return self.device_ns > BEHIND * self.host_ns


def pace_of(window: Window, everything: DeviceFigures) -> Pace:
    """``everything``: of all device work that counts, which mostly is the same."""
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
    """[slices]; device work launched from the start of one step to the end of another, so between them, too."""
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
    """From when to when the device works for some steps, where it sets their pace clearly; else None."""
    last = len(window.steps) - 1 if last is None else last
    rows = np.flatnonzero(launched_in_steps(window, first, last))
    if not len(rows):
        return None
    slices = window.trace.slices
    start_ns, end_ns = int(slices.start_ns[rows].min()), int(slices.end_ns[rows].max())
    host_ns = window.steps[last].end_ns - window.steps[first].start_ns
    return (start_ns, end_ns) if end_ns - start_ns > BEHIND * host_ns else None


def shared_out(total_ns: int, steps: int) -> tuple[int, ...]:
    """As many whole numbers that add up to it, as equal as can be."""
    return tuple((at + 1) * total_ns // steps - at * total_ns // steps for at in range(steps))


def _part_of(work: Work, which: NDArray[np.bool_]) -> Work:
    columns = ("rows", "start_ns", "end_ns", "dur_ns", "name", "kernel", "comm", "launch")
    lanes, lane = np.unique(work.lane[which], return_inverse=True)
    names = tuple(work.lanes[index] for index in lanes.tolist())
    return replace(work, **{name: getattr(work, name)[which] for name in columns}, lane=lane, lanes=names)
