"""The kernels that take most of a device's time: how many of its threads they keep busy, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from stepscope.traces.device.work import Work
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.kernel_names import is_communication, kernel_class

__all__ = ["KernelUse", "kernel_uses"]

LISTED: Final = 20
WARP: Final = 32
MOST_ROOM: Final = 1 << 62
"""Of registers, bytes or threads; a file may contain any number, also those that are too large for a float."""

Limit = Literal["", "blocks", "registers", "shared memory", "threads"]


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """All launches of one kernel; means are weighted by duration; None: not in the trace."""

    name: str
    class_: str
    count: int
    total_ns: int
    occupancy: float | None
    """Of the warps that fit, 0 to 1; the profiler's estimate."""
    blocks_per_sm: float | None
    limit: Limit
    """What keeps more blocks from running on a multiprocessor; ``blocks``: there are no more."""
    registers: int | None
    """Per thread."""
    shared_bytes: int | None
    """Per block."""


def kernel_uses(work: Work) -> tuple[KernelUse, ...]:
    """Return the kernels that compute, the longest total first."""
    trace = work.window.trace
    kernels, device = trace.kernels, _device_of(work)
    rows = work.rows[work.kernel]
    side = np.searchsorted(kernels.row, rows)
    name, dur_ns = work.name[work.kernel], work.dur_ns[work.kernel]
    groups = work.by_kernel
    found = []
    for place in np.argsort(-groups.total, kind="stable").tolist():
        text = trace.strings[groups.key[place]]
        if is_communication(text):
            continue
        own = name == groups.key[place]
        at, weight_ns = side[own], dur_ns[own]
        occupancy = _mean(kernels.occupancy[at] / 100, weight_ns)
        blocks = _mean(kernels.blocks_per_sm[at], weight_ns)
        warps = _mean(kernels.warps_per_sm[at], weight_ns)
        registers, shared = int(kernels.registers[at].max()), int(kernels.shared_bytes[at].max())
        threads = warps / blocks * WARP if warps and blocks else 0.0
        found.append(
            KernelUse(
                name=text,
                class_=kernel_class(text),
                count=int(groups.count[place]),
                total_ns=int(groups.total[place]),
                # The profiler writes 0 if it does not know.
                occupancy=occupancy or None,
                blocks_per_sm=blocks,
                limit=_limit(device, blocks or 0.0, threads, registers, shared),
                registers=registers if registers >= 0 else None,
                shared_bytes=shared if shared >= 0 else None,
            )
        )
        if len(found) == LISTED:
            break
    return tuple(found)


def _mean(values: Any, weight_ns: Ints) -> float | None:
    known = ~np.isnan(values)
    whole = float(weight_ns[known].sum())
    return float((values[known] * weight_ns[known]).sum()) / whole if whole else None


def _device_of(work: Work) -> dict[str, Any]:
    devices = work.window.trace.meta.devices
    used = int(work.window.trace.slices.device[work.rows].min()) if len(work) else 0
    return next((each for each in devices if each.get("id") == used), devices[0] if devices else {})


def _limit(device: dict[str, Any], blocks: float, threads: float, registers: int, shared: int) -> Limit:
    """What allows the fewest blocks on a multiprocessor."""
    if threads <= 0:
        return ""
    room: dict[Limit, float] = {"blocks": blocks}
    for name, key, needed in (
        ("registers", "regsPerMultiprocessor", registers * threads),
        ("shared memory", "sharedMemPerMultiprocessor", shared),
        ("threads", "maxThreadsPerMultiprocessor", threads),
    ):
        there = device.get(key)
        if isinstance(there, int) and 0 < there < MOST_ROOM and needed > 0:
            room[name] = there // needed  # type: ignore[index]
    return min(room, key=lambda name: room[name]) if len(room) > 1 or blocks < 1 else ""
