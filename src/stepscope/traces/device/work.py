"""Device work that counts, with all that the device's analyses ask of it: where it ran, what it is, who launched it.

A *lane* is a stream of a device.  It is called by the stream's number, with the device's before it where the trace has
several devices (``7``, ``1:7``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Codes, Ints, Rows
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.model.statistics import Grouped, grouped
from stepscope.traces.model.window import Window

__all__ = ["Work", "work_of"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Kernels, copies and memsets by start; all columns are as long as ``rows``."""

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
    """Index of ``lanes``."""
    lanes: tuple[str, ...]
    launch: Rows
    """The call that launched it; −1: not known."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """Is the launching call known?"""
        return self.launch >= 0

    @cached_property
    def call_start_ns(self) -> Ints:
        """Of the launching call; where it is not known, the start of the work itself."""
        return np.where(self.known, self.window.trace.slices.start_ns[self.launch], self.start_ns)

    @cached_property
    def by_kernel(self) -> Grouped:
        """Durations of kernels by name."""
        return grouped(self.name[self.kernel], self.dur_ns[self.kernel])

    @cached_property
    def by_lane(self) -> NDArray[np.int64]:
        """Indices of the work: lane by lane, within a lane by start."""
        return np.argsort(self.lane, kind="stable")

    @cached_property
    def owner(self) -> Codes:
        """The name of the operator that launched it, or else of the launching call; −1: neither is known."""
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
