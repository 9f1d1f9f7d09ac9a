"""How full the devices are, how evenly, and how much of what the allocator holds can be of use.

The allocator keeps what it once took from the device, so a device that looks full may have room: what counts is the
most that was ever in use (``peak_allocated``; at the ends of steps, where activations are gone, it is far less).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice_machine import FRAGMENTED, IMBALANCED, PRESSED
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.fsdp_advice import for_full_device
from stepscope.diagnosis.placed import Gpu, gpu_readings, last_of_rows, row_medians
from stepscope.diagnosis.robust import lower_median
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding
from stepscope.records.units import bytes_text, share_text

__all__ = ["Devices", "devices_of", "find_levels", "fragmented"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Bytes; nan where not known."""

    peak: Floats
    """[R]; the most that was in use at once."""
    reserved: Floats
    """[R]; what the allocator held in the second half of the run (median)."""
    gpus: list[Gpu]
    total: Floats
    """[G]."""
    used: Floats
    """[G]; by all processes, at the last sample of a steady step."""
    used_most: Floats
    """[G]; in the steady steps; nan with too few samples."""

    @cached_property
    def gpu_of_row(self) -> NDArray[np.intp]:
        """[R]; -1 where it is not known."""
        out = np.full(len(self.peak), -1, np.intp)
        for index, gpu in enumerate(self.gpus):
            out[list(gpu.rows)] = index
        return out

    @property
    def total_by_row(self) -> Floats:
        """[R]; of the device that a rank is on."""
        return np.append(self.total, np.nan)[self.gpu_of_row]

    def by_gpu(self, values: Floats) -> Floats:
        """[G]; the sum over the ranks on each, without what is nan."""
        known = (self.gpu_of_row >= 0) & ~np.isnan(values)
        sums = np.bincount(self.gpu_of_row[known], weights=values[known], minlength=len(self.gpus))
        return np.asarray(sums, np.float64)


def devices_of(view: View) -> Devices:
    window = view.window
    gpus, readings = gpu_readings(view)
    used = readings.of("mem_used")
    used[~(used > 0)] = np.nan
    few = (~np.isnan(used)).sum(axis=1) < thresholds.MACHINE_SAMPLES
    half = len(window.steps) // 2
    return Devices(
        peak=np.fmax.reduce(window.peak_allocated[view.rows], axis=1, initial=np.nan),
        reserved=row_medians(window.reserved[view.rows, half:]),
        gpus=gpus,
        total=np.array([gpu.total_bytes for gpu in gpus], np.float64),
        used=last_of_rows(used),
        used_most=np.where(few, np.nan, np.fmax.reduce(used, axis=1, initial=np.nan)),
    )


def fragmented(devices: Devices) -> Bools:
    """[R]; whether much of what the allocator holds was never in use at once."""
    gap = devices.reserved - devices.peak
    return np.asarray(
        (gap >= thresholds.FRAGMENTED_SHARE * devices.reserved) & (gap >= thresholds.FRAGMENTED_BYTES), np.bool_
    )


def find_levels(view: View, devices: Devices, growing: Bools) -> list[Claim]:
    """``growing`` [R]: the reserve rises though what is in use does not."""
    return [*_pressure(view, devices), *_imbalance(view, devices), *_fragmentation(view, devices, growing)]


def _pressure(view: View, devices: Devices) -> list[Claim]:
    needed = devices.used_most - devices.by_gpu(np.maximum(devices.reserved - devices.peak, 0.0))
    share = needed / devices.total
    full = np.flatnonzero(share >= thresholds.PRESSURE_SHARE)
    if not len(full):
        return []
    worst = int(full[np.argmax(share[full])])
    rows = sorted({row for gpu in full for row in devices.gpus[gpu].rows})
    everywhere = len(full) == len(devices.gpus)
    most = float(share[worst])
    finding = Finding(
        kind="memory_pressure",
        severity="critical" if most >= thresholds.PRESSURE_CRITICAL_SHARE else "warning",
        title=(
            f"Device memory is nearly full: {share_text(most)} of {bytes_text(float(devices.total[worst]))} "
            f"needed at the peak{_on(view, devices.gpus[worst])}."
        ),
        ranks=() if everywhere else tuple(view.ranks[row] for row in rows),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "needed_share": round(most, 4),
            "needed_bytes": round(float(needed[worst])),
            "used_bytes": round(float(devices.used_most[worst])),
            "total_bytes": round(float(devices.total[worst])),
            "node": devices.gpus[worst].node,
            "gpu": devices.gpus[worst].index,
            "gpus_full": len(full),
            "gpus": len(devices.gpus),
        },
        advice=(*_held_by_fsdp(view, float(devices.total[worst])), *PRESSED)[:2],
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]


def _imbalance(view: View, devices: Devices) -> list[Claim]:
    """The rank that needs most beyond its peers."""
    excess = np.full(len(view.rows), np.nan)
    typical = np.full(len(view.rows), np.nan)
    for group in np.unique(view.groups):
        rows = np.flatnonzero((view.groups == group) & ~np.isnan(devices.peak))
        if len(rows) > 1:
            typical[rows] = lower_median(devices.peak[rows])
            excess[rows] = devices.peak[rows] - typical[rows]
    uneven = (excess >= thresholds.IMBALANCE_SHARE * devices.peak) & (excess >= thresholds.IMBALANCE_BYTES)
    if not uneven.any():
        return []
    row = int(np.where(uneven, excess, -np.inf).argmax())
    peak, total = float(devices.peak[row]), float(devices.total_by_row[row])
    rank = view.ranks[row]
    finding = Finding(
        kind="memory_imbalance",
        severity="warning" if peak >= thresholds.DEVICE_FULL_SHARE * total else "info",
        title=(
            f"Rank {rank} needs {bytes_text(peak)} of device memory at its peak, its peers typically "
            f"{bytes_text(float(typical[row]))}."
        ),
        ranks=(rank,),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "peak_bytes": round(peak),
            "typical_bytes": round(float(typical[row])),
            "excess_bytes": round(float(excess[row])),
            "total_bytes": _known(total),
            "ranks_compared": int((view.groups == view.groups[row]).sum()),
        },
        advice=IMBALANCED,
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]


def _fragmentation(view: View, devices: Devices, growing: Bools) -> list[Claim]:
    loose = fragmented(devices)
    if not loose.any():
        return []
    gap = np.where(loose, devices.reserved - devices.peak, -np.inf)
    row = int(gap.argmax())
    reserved, total = float(devices.reserved[row]), float(devices.total_by_row[row])
    known = ~np.isnan(devices.peak) & ~np.isnan(devices.reserved)
    grows = bool((growing & loose).any())
    tight = bool((devices.reserved[loose] >= thresholds.DEVICE_FULL_SHARE * devices.total_by_row[loose]).any())
    finding = Finding(
        kind="fragmentation",
        severity="warning" if tight or grows else "info",
        title=(
            f"The allocator holds {bytes_text(reserved)} of device memory, {share_text(float(gap[row]) / reserved)} of "
            f"it never in use at once{' and growing' if grows else ''}."
        ),
        ranks=() if (loose == known).all() else tuple(view.ranks[index] for index in np.flatnonzero(loose)),
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "reserved_bytes": round(reserved),
            "peak_allocated_bytes": round(float(devices.peak[row])),
            "gap_share": round(float(gap[row]) / reserved, 4),
            "total_bytes": _known(total),
            "growing": grows,
        },
        advice=FRAGMENTED,
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]


def _held_by_fsdp(view: View, total_bytes: float) -> Iterator[str]:
    fsdp = view.facts.get("fsdp")
    yield from for_full_device(fsdp if isinstance(fsdp, dict) else {}, total_bytes)


def _known(value: float) -> int | None:
    return None if np.isnan(value) else round(value)


def _on(view: View, gpu: Gpu) -> str:
    where = f" on {gpu.node}" if len(set(view.hosts)) > 1 else ""
    if len(view.ranks) > 1 and len(gpu.rows) == 1:
        return f" (rank {view.ranks[gpu.rows[0]]}{where})"
    return where
