"""Memory of the device over time, and what it was allocated for when it was fullest.

*Allocated* is what tensors hold, *reserved* what the caching allocator keeps from the device; the difference is cached
or fragmented.  The device with the most events is shown, the host's own memory only where there is no other.

What was alive at the peak is known where the trace has addresses: a block is alive if the last that happened to its
address was that it was allocated.  It is booked to the innermost operator that ran on the thread at that instant.
Without addresses the net growth up to the peak is booked instead.  What was there before the trace is a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.modules import Modules
from stepscope.traces.model.calls import innermost_at, padded
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.nesting import sums
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["MemoryCurve", "memory", "memory_of", "memory_peak"]

POINTS = 500
BEFORE = "(before the trace)"
OUTSIDE = "(outside operators)"


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Of one device; columns by time."""

    device_type: int
    device: int
    at: NDArray[np.int64]
    """Which of ``Trace.memory``."""
    allocated: Ints
    reserved: Ints
    absolute: bool
    """Else ``allocated`` counts from the trace's start, and ``reserved`` is not known (all −1)."""
    peak: int
    """Index of the first instant with the most allocated."""

    @property
    def name(self) -> str:
        return "host" if self.device_type == 0 else f"device {self.device}"


def memory_of(window: Window) -> MemoryCurve | None:
    """Of the part of the trace that counts; None: it has no such events."""
    memory = window.trace.memory
    counts = np.ones(len(memory.time_ns), bool)
    if window.left_out is not None:
        counts = memory.time_ns < window.left_out.start_ns
    if not counts.any():
        return None
    key = memory.device_type.astype(np.int64) * 65536 + memory.device
    on_device = counts & (memory.device_type > 0)
    used, sizes = np.unique(key[on_device if on_device.any() else counts], return_counts=True)
    at = np.flatnonzero(counts & (key == used[sizes.argmax()]))
    absolute = bool((memory.allocated[at] >= 0).all())
    allocated = memory.allocated[at] if absolute else np.cumsum(memory.bytes[at])
    return MemoryCurve(
        device_type=int(memory.device_type[at[0]]),
        device=int(memory.device[at[0]]),
        at=at,
        allocated=allocated,
        reserved=memory.reserved[at] if absolute else np.full(len(at), -1),
        absolute=absolute,
        peak=int(allocated.argmax()),
    )


def memory(window: Window, curve: MemoryCurve) -> Table:
    """At most ``POINTS`` instants: of each stretch the lowest and the highest, so the peak itself is among them."""
    count = len(curve.at)
    kept = np.arange(count)
    if count > POINTS:
        edges = np.linspace(0, count, POINTS // 2).astype(np.int64)[:-1]
        stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, count)))
        order = np.lexsort((np.arange(count), curve.allocated, stretch))
        # First with the value: lowest at the stretch's beginning; highest likewise, by the other order.
        falling = np.lexsort((np.arange(count), -curve.allocated, stretch))
        kept = np.unique(np.concatenate([order[edges], falling[edges], [0, count - 1]]))
    time_ns = window.trace.memory.time_ns[curve.at[kept]]
    reserved = [None if value < 0 else value for value in curve.reserved[kept].tolist()]
    rows = zip(time_ns.tolist(), curve.allocated[kept].tolist(), reserved, strict=True)
    base = "" if curve.absolute else " This trace does not say how much there was before it: counted from its start."
    note = f"Of {curve.name}; times from the trace's first event.{base}"
    return table_of("memory", "Memory", ("time_ns", "allocated_bytes", "reserved_bytes"), rows, note=note)


def memory_peak(window: Window, curve: MemoryCurve, modules: Modules | None) -> Table:
    memory, trace, sources = window.trace.memory, window.trace, window.host.sources
    until = curve.at[: curve.peak + 1]
    addressed = bool((memory.address[until] >= 0).all())
    alive = _alive(memory.address[until], memory.bytes[until]) if addressed else np.arange(len(until))
    at = until[alive]
    running = innermost_at(trace, window.calls, window.host_rows, memory.thread[at], memory.time_ns[at])
    operator = np.where(window.host.is_op[running], running, padded(window.host.op_holder)[running])
    name = padded(trace.slices.name)[operator]
    source = padded(sources.code)[running]
    module = padded(modules.of)[running] if modules is not None else np.full(len(at), -1)
    keys = np.stack([name, module, source], axis=1)
    groups, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    sizes, blocks = sums(inverse, memory.bytes[at], len(groups)), np.bincount(inverse, minlength=len(groups))
    peak = int(curve.allocated[curve.peak])
    rows = [
        (
            trace.strings[op] if op >= 0 else OUTSIDE,
            modules.path(node) if modules is not None and node >= 0 else None,
            sources.texts[line] if line >= 0 else None,
            int(size),
            int(count),
            int(size) / peak if peak > 0 else None,
        )
        for (op, node, line), size, count in zip(groups.tolist(), sizes, blocks, strict=True)
        if size > 0
    ]
    rest = peak - int(sizes.sum())
    if rest > 0 and addressed and curve.absolute:
        rows.append((BEFORE, None, None, rest, 0, rest / peak))
    rows.sort(key=lambda row: -row[3])
    note = (
        f"What was alive on {curve.name} when the most was allocated."
        if addressed
        else f"This trace has no addresses: not what was alive, but net growth on {curve.name} up to the peak."
    )
    columns = ("operator", "module", "source", "alive_bytes", "blocks", "peak_share")
    return table_of("memory_peak", "Memory at the peak", columns, rows, limit=200, note=note)


def _alive(address: Ints, size: Ints) -> NDArray[np.int64]:
    """Which events allocated blocks that nothing freed afterwards."""
    order = np.lexsort((np.arange(len(address)), address))
    last = np.append(address[order][1:] != address[order][:-1], True)
    ends = order[last]
    return np.sort(ends[size[ends] > 0])
