"""Memory findings: memory_creep, memory_pressure, memory_imbalance and fragmentation.

They cost no time, but they end runs.  Device memory is what torch's allocator reports at the ends of steps, host memory
what the agent samples of the processes once a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.readings import (
    Gpu,
    at_steps,
    gpu_readings,
    host_readings,
    last_of_rows,
    process_readings,
    row_medians,
)
from stepscope.diagnosis.engine.settings import accumulation_setting, frameworks_of, fsdp_memory_advice
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import lower_median, z_needed
from stepscope.records.finding import Finding, Severity
from stepscope.records.text import bytes_text, count_text, duration_text, named_ranks, share_text, span_texts

__all__ = ["PRESSURE_ADVICE", "find_memory", "rise_of_floors", "without_forecast"]


# -- advice -----------------------------------------------------------------------------------------------------------

MEMORY_CREEP_ADVICE = {
    "host_rss": (
        "Look for what the loop keeps: losses or outputs in a list hold their graphs; keep loss.item() or .detach().",
        "Then lists, dicts and caches that only grow, in the dataset too; tracemalloc or memray names the line.",
    ),
    "host_used": (
        "Look for what the loop keeps: losses or outputs in a list hold their graphs; keep loss.item() or .detach().",
        "Then lists, dicts and caches that only grow; tracemalloc or memray names the line.",
        "The process itself may not grow for a while: the C library gives it memory that was freed before.",
    ),
    "device_allocated": (
        "Something keeps tensors of past steps: total += loss holds every graph (use loss.item() or loss.detach()).",
        "Other causes: outputs collected in a list, retain_graph=True, hooks that store what they see.",
        "While it runs: `stepscope snapshot RUN --rank R --history 10` shows the lines that allocated what is in use.",
    ),
    "device_reserved": (
        "Memory in use does not grow, but reserved memory does: varying shapes leave gaps that cannot be reused.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes the allocator grow blocks instead of adding new ones.",
        "Pad or bucket batches to a few shapes; torch.cuda.empty_cache() costs time and is not a fix.",
    ),
}
FREE_IN_MALLOC = (
    "Most of it was freed, but the C library keeps it ({size}): with MALLOC_MMAP_THRESHOLD_=131072 in the environment, "
    "or with jemalloc, more of it is returned to the system."
)
FRAGMENTATION_ADVICE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the allocator grow its blocks instead of adding new ones.",
    "Pad or bucket batches to a few shapes, the largest first; torch.cuda.empty_cache() costs time and is not a fix.",
)
MEMORY_IMBALANCE_ADVICE = (
    "See what only that rank holds: a second copy of the model, gathered outputs, torch.load without map_location.",
    "If its batches are larger, give every rank the same number of tokens; the fullest device limits all of them.",
)
SMALLER_BATCH = (
    "To avoid running out of memory, use a smaller batch with gradient accumulation{how}, activation checkpointing or "
    "autocast."
)
PRESSURE_ADVICE = (
    say(
        SMALLER_BATCH,
        "Optimizer state and gradients can be sharded over the ranks (FSDP, ZeroRedundancyOptimizer).",
        several=True,
        sharded=False,
    ),
    say(SMALLER_BATCH, "An optimizer with less state (8-bit Adam, Adafactor) also frees memory."),
)
"""``sharded``: FSDP or ZeRO already shards the model's state."""


# -- device memory ----------------------------------------------------------------------------------------------------
# How full the devices are, how evenly, and how much of the allocator's memory is usable.
#
# The allocator keeps what it once took from the device, so a device that looks full may have room: what counts is the
# most that was ever in use (``peak_allocated``; at the ends of steps, where activations are gone, it is far less).

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Bytes; nan if unknown."""

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
        """[R]; -1 if unknown."""
        out = np.full(len(self.peak), -1, np.intp)
        for index, gpu in enumerate(self.gpus):
            out[list(gpu.rows)] = index
        return out

    @property
    def total_by_row(self) -> Floats:
        """[R]; memory of the rank's device."""
        return np.append(self.total, np.nan)[self.gpu_of_row]

    def by_gpu(self, values: Floats) -> Floats:
        """[G]; the sum over the ranks on each, ignoring nan."""
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


def fragmented_ranks(devices: Devices) -> Bools:
    """[R]; whether much of what the allocator holds was never in use at once."""
    gap = devices.reserved - devices.peak
    return np.asarray(
        (gap >= thresholds.FRAGMENTED_SHARE * devices.reserved) & (gap >= thresholds.FRAGMENTED_BYTES), np.bool_
    )


def find_device_memory(view: View, devices: Devices, growing: Bools) -> list[Claim]:
    """``growing`` [R]: the reserve rises while the memory in use does not."""
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
            f"needed at the peak{_gpu_text(view, devices.gpus[worst])}."
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
        advice=(*_held_by_fsdp(view, float(devices.total[worst])), *_pressure_advice(view))[:2],
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]


def _imbalance(view: View, devices: Devices) -> list[Claim]:
    """The rank whose memory exceeds its peers' most."""
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
        advice=MEMORY_IMBALANCE_ADVICE,
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]


def _fragmentation(view: View, devices: Devices, growing: Bools) -> list[Claim]:
    loose = fragmented_ranks(devices)
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
        advice=FRAGMENTATION_ADVICE,
        confidence=0.9,
    )
    return [Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))]


def _pressure_advice(view: View) -> tuple[str, ...]:
    frameworks = frameworks_of(view.facts)
    setting = accumulation_setting(frameworks)
    return advice_for(
        PRESSURE_ADVICE,
        how=f" ({setting})" if setting else "",
        several=max(view.window.identities[row].world_size for row in view.rows) > 1,
        sharded=bool(view.facts.get("fsdp")) or "deepspeed" in frameworks,
    )


def _held_by_fsdp(view: View, total_bytes: float) -> Iterator[str]:
    fsdp = view.facts.get("fsdp")
    yield from fsdp_memory_advice(fsdp if isinstance(fsdp, dict) else {}, total_bytes)


def _known(value: float) -> int | None:
    return None if np.isnan(value) else round(value)


def _gpu_text(view: View, gpu: Gpu) -> str:
    where = f" on {gpu.node}" if len(set(view.hosts)) > 1 else ""
    if len(view.ranks) > 1 and len(gpu.rows) == 1:
        return f" (rank {view.ranks[gpu.rows[0]]}{where})"
    return where


# -- memory growth ----------------------------------------------------------------------------------------------------
# Statistics of lasting growth over arrays ``[rank, step]`` in which nan means "not sampled".
#
# What counts is the *floor*: the level below which memory never falls again.  A leak raises it all the time; a sawtooth
# (garbage that is collected now and then, a cache that is emptied each epoch) does not, and for a cache that fills up
# it stops rising.  The run is cut into stretches and their lowest points are compared (Theil–Sen for the slope,
# Mann–Kendall for the significance).  A run with only a few samples must show a rise that is large and even.


@dataclass(frozen=True, kw_only=True)
class Rise:
    """By rank [R]."""

    rises: Bools
    """Grows for good, by enough to matter."""
    judged: Bools
    """Has enough samples to judge."""
    per_step: Floats
    """Bytes; nan where not judged, here and below."""
    first: Floats
    """Bytes at ``first_step``, on the line with this slope …"""
    last: Floats
    """… and at ``last_step``, on the same line."""
    first_step: Floats
    last_step: Floats
    samples: int
    """Of the typical rank."""
    sure: bool
    """By the test; else by the size of a few samples."""
    steadily: Bools
    """Grows for good, by however little."""


@dataclass(frozen=True, kw_only=True)
class LongRise:
    """Growth since the run began."""

    rise: Rise
    epoch: Floats
    """[R]; steps of an epoch; 0 or nan if unknown."""


FACT_UNIT = 1 << 16
"""Bytes in which recorders publish memory (``recorder/layers/growth.py``, ``malloc_free.py``)."""


def rise_of_steps(values: Floats, steps: NDArray[np.int64], begin: int, comparisons: int) -> Rise:
    """``values`` [R, S] at the ends of ``steps``; the first ``begin`` steps are warm-up."""
    left_out = max(begin, int(np.ceil(thresholds.CREEP_LEFT_OUT * len(steps))))
    count = _typical_count(values[:, left_out:])
    if count < thresholds.CREEP_SAMPLES:
        order = np.argsort(np.isnan(values[:, begin:]), axis=1, kind="stable")
        return _rise_of_few_samples(
            np.broadcast_to(steps[begin:].astype(np.float64), order.shape)[np.arange(len(order))[:, None], order],
            np.take_along_axis(values[:, begin:], order, axis=1),
        )
    blocks = _blocks(count)
    starts = np.linspace(left_out, len(steps), blocks, endpoint=False).astype(np.intp)
    ends = np.append(starts[1:], len(steps))
    centers = (steps[starts] + steps[ends - 1]) / 2.0
    lowest = np.fmin.reduceat(values, starts, axis=1)
    spans = zip(starts, ends, lowest.T, strict=True)
    within = np.stack([(values[:, first:end] == least[:, None]).argmax(axis=1) for first, end, least in spans], axis=1)
    at = np.where(np.isnan(lowest), centers, steps[starts + within])
    return _rise_of_blocks(lowest, at, centers, count, comparisons, thresholds.CREEP_DEVICE_BYTES)


def rise_of_samples(values: Floats, at: Floats, begin: float, comparisons: int) -> Rise:
    """``values`` [R, T] taken ``at`` step numbers [R, T], in order; those before the step ``begin`` are warm-up."""
    values = np.where(at >= begin, values, np.nan)
    there = ~np.isnan(values)
    if not there.any():
        return _rise_of_few_samples(at, values)
    low, high = float(at[there].min()), float(at[there].max())
    start = low + thresholds.CREEP_LEFT_OUT * (high - low)
    count = _typical_count(np.where(at >= start, values, np.nan))
    if count < thresholds.CREEP_SAMPLES or high <= start:
        order = np.argsort(~there, axis=1, kind="stable")
        return _rise_of_few_samples(np.take_along_axis(at, order, axis=1), np.take_along_axis(values, order, axis=1))
    blocks = _blocks(count)
    rows, columns = np.nonzero(there & (at >= start))
    block = np.minimum(((at[rows, columns] - start) / (high - start) * blocks).astype(np.intp), blocks - 1)
    order = np.lexsort((values[rows, columns], block, rows))
    rows, columns, block = rows[order], columns[order], block[order]
    first = np.append(True, (np.diff(rows) != 0) | (np.diff(block) != 0))
    rows, columns, block = rows[first], columns[first], block[first]
    centers = start + (np.arange(blocks) + 0.5) * (high - start) / blocks
    lowest, where = np.full((len(values), blocks), np.nan), np.tile(centers, (len(values), 1))
    lowest[rows, block], where[rows, block] = values[rows, columns], at[rows, columns]
    return _rise_of_blocks(lowest, where, centers, count, comparisons, thresholds.CREEP_FLOOR_BYTES)


def _typical_count(values: Floats) -> int:
    """Samples of the median rank that has any."""
    counts = (~np.isnan(values)).sum(axis=1)
    return int(np.median(counts[counts > 0])) if (counts > 0).any() else 0


def _blocks(count: int) -> int:
    """Two samples in each if that leaves enough blocks for a test."""
    return min(thresholds.CREEP_BLOCKS, max(thresholds.CREEP_SAMPLES, count // 2))


def _rise_of_blocks(
    lowest: Floats,
    at: Floats,
    centers: Floats,
    samples: int,
    comparisons: int,
    least_bytes: float,
    drift_t: float = thresholds.CREEP_DRIFT_T,
) -> Rise:
    """Judge by the lowest points [R, B] of stretches, the steps they are ``at``, and the middles [B] of the stretches.

    ``least_bytes``: less growth does not count, however fast.

    Growing memory is lowest at the start of its stretch: placed at the middle, the whole line would lie half a stretch
    late.
    """
    lowest = lowest.copy()
    for column in range(1, lowest.shape[1]):  # a stretch without a sample shows no growth
        gap = np.isnan(lowest[:, column])
        lowest[gap, column] = lowest[gap, column - 1]
    judged: Bools = np.asarray(~np.isnan(lowest).any(axis=1), np.bool_)
    known = np.where(judged[:, None], lowest, 0.0)
    floor = np.minimum.accumulate(known[:, ::-1], axis=1)[:, ::-1]
    growth = floor[:, -1] - floor[:, 0]
    blocks = lowest.shape[1]
    thirds = np.rint(np.linspace(0, blocks - 1, 4)).astype(np.intp)
    even = np.diff(thirds) / (blocks - 1) * growth[:, None]
    goes_on = (np.diff(floor[:, thirds], axis=1) >= thresholds.CREEP_THIRD_SHARE * even).all(axis=1)
    early, late = np.triu_indices(blocks, 1)
    differences = known[:, late] - known[:, early]
    per_step = np.median(differences / (at[:, late] - at[:, early]), axis=1)
    z = (np.sign(differences).sum(axis=1) - 1) / np.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    # A wandering level may also go far, but its single moves are large compared with the total.
    moves = np.diff(known, axis=1)
    drifts = growth >= drift_t * np.sqrt(blocks - 1) * moves.std(axis=1)
    level = np.median(known - per_step[:, None] * at, axis=1)
    steadily = judged & goes_on & drifts & (per_step > 0) & (z >= z_needed(comparisons))
    return _rise(
        steadily,
        # A job of any size: what is small today fills the memory overnight.
        _grew(floor[:, 0], growth, thresholds.CREEP_SHARE, thresholds.CREEP_FLOOR_BYTES)
        | ((per_step >= thresholds.CREEP_BYTES_PER_STEP) & (growth >= least_bytes)),
        growth,
        judged=judged,
        per_step=per_step,
        level=level,
        between=(np.full(len(known), centers[0]), np.full(len(known), centers[-1])),
        samples=samples,
        sure=True,
    )


def rise_of_floors(facts: Sequence[Mapping[str, Any]], name: str, comparisons: int, answers: Floats) -> LongRise:
    """Judge the floors that recorders of the ranks saw since the run began; ``answers`` [R]: bytes that are not theirs.

    Recorders tell them only if they rise, so a rank without floors does not.
    """
    count = len(facts)
    rises, judged = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    figures = {key: np.full(count, np.nan) for key in ("per_step", "first", "last", "first_step", "last_step")}
    epochs, samples = np.full(count, np.nan), 0
    for row, own in enumerate(facts):
        known = _floors_of(own, name)
        if known is None:
            continue
        steps, values, epoch = known
        rise = _rise_of_blocks(
            values[None], steps[None], steps, len(steps), comparisons, np.inf, thresholds.CREEP_FLOORS_DRIFT_T
        )
        growth = float(rise.last[0] - rise.first[0]) - float(answers[row])
        pace = float(rise.per_step[0])
        fast = pace >= thresholds.CREEP_BYTES_PER_STEP or pace * epoch >= thresholds.CREEP_BYTES_PER_EPOCH
        enough = fast and growth >= thresholds.CREEP_FLOORS_BYTES
        rises[row] = bool(rise.steadily[0]) and enough and _keeps_its_pace(steps, values)
        epochs[row] = epoch
        samples = max(samples, len(steps))
        for key, value in figures.items():
            value[row] = getattr(rise, key)[0]
    return LongRise(
        rise=Rise(rises=rises, steadily=rises, judged=judged, **figures, samples=samples, sure=True), epoch=epochs
    )


def _keeps_its_pace(steps: Floats, values: Floats) -> bool:
    """Whether the floor rises in the second half about as much as in the first: a cache that fills up does not."""
    floor = np.minimum.accumulate(values[::-1])[::-1]
    middle = float(np.interp((steps[0] + steps[-1]) / 2, steps, floor))
    return float(floor[-1]) - middle >= thresholds.CREEP_FLOORS_PACE * (middle - float(floor[0]))


def _floors_of(facts: Mapping[str, Any], name: str) -> tuple[Floats, Floats, float] | None:
    """The steps at which stretches begin, their floors in bytes, and the steps of an epoch (0: unknown).

    None while it is too early to tell: the first epoch fills caches of the data.
    """
    raw = facts.get("floors")
    if not isinstance(raw, Mapping) or not raw.get(name) or len(raw[name]) != len(raw.get("step", ())):
        return None
    steps, values = np.array(raw["step"], np.float64), np.array(raw[name], np.float64) * FACT_UNIT
    loader = facts.get("loader")
    begun, at = raw.get("epochs", 0), raw.get("epoch_steps", ())
    epoch, start_at = 0.0, float(thresholds.CREEP_FLOORS_STEPS)
    length = loader.get("length") if isinstance(loader, Mapping) else None
    if begun >= thresholds.CREEP_EPOCHS and len(at) == 3:
        epoch = (at[2] - at[0]) / (begun - 1)
        start_at = float(at[1])
    elif length and length <= thresholds.CREEP_EPOCH_AWAITED:
        return None
    start = max(int(np.searchsorted(steps, start_at)), math.ceil(len(steps) * thresholds.CREEP_LEFT_OUT))
    early = steps[-1] < thresholds.CREEP_FLOORS_LENGTH * start_at
    if early or len(steps) - start < thresholds.CREEP_SAMPLES or not (np.diff(steps) > 0).all():
        return None
    return steps[start:], values[start:], epoch


def _beyond_malloc(rise: Rise, facts: Sequence[Mapping[str, Any]]) -> Rise:
    """The growth without that of ranks where it is almost all memory that the C library keeps after it was freed.

    If it has come to keep very much more, that counts: it may not end.
    """
    rises = rise.rises.copy()
    for row in map(int, np.flatnonzero(rises)):
        first, last = _malloc_free(facts[row], np.array([rise.first_step[row], rise.last_step[row]]))
        start, most = _malloc_free(facts[row], np.array([0.0, np.inf]))
        share = (last - first) / max(rise.last[row] - rise.first[row], 1.0)
        rises[row] = share < thresholds.CREEP_FREE_SHARE or most - start >= thresholds.CREEP_FREE_BYTES
    return replace(rise, rises=rises)


def _malloc_free(facts: Mapping[str, Any], steps: Floats) -> Floats:
    """The most that the C library kept of freed memory until these steps, in bytes; zeros if that is not known.

    The most, since memory that the process takes from there does not make it grow.
    """
    at, free, _ = _malloc_readings(facts)
    most = np.interp(steps, at, np.maximum.accumulate(free)) if len(at) else np.zeros_like(steps)
    return np.asarray(most, np.float64)


def rise_in_use(facts: Sequence[Mapping[str, Any]], last_step: int, comparisons: int) -> Rise:
    """Judge what the processes use of their memory, from the recorders' readings since the run began.

    A leak that lives on what was free does not show in the size of the process for hundreds of steps.  Old readings are
    not judged: what grew at the start may have ended long ago.
    """
    readings = [_malloc_readings(own) for own in facts]
    width = max((len(at) for at, _, _ in readings), default=0)
    steps, used = np.full((len(facts), width), np.nan), np.full((len(facts), width), np.nan)
    steady = np.zeros(len(facts), np.bool_)
    for row, (at, free, resident) in enumerate(readings):
        if not len(at) or at[-1] * thresholds.CREEP_READINGS_OLD < last_step:
            continue
        steps[row, : len(at)], used[row, : len(at)] = at, resident - free
        start = math.ceil(len(at) * thresholds.CREEP_LEFT_OUT)
        steady[row] = _keeps_its_pace(at[start:], (resident - free)[start:])
    rise = rise_of_samples(used, steps, 0.0, comparisons)
    # Those who publish nothing use no more than before.
    return replace(rise, rises=rise.rises & steady, judged=np.ones(len(facts), np.bool_))


def _malloc_readings(facts: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
    """Steps, bytes that the C library kept of freed memory, and the memory of the process; all empty if not known."""
    raw = facts.get("malloc")
    columns = [raw.get(name, ()) for name in ("step", "free", "resident")] if isinstance(raw, Mapping) else [(), (), ()]
    steps, free, resident = (np.array(column, np.float64) for column in columns)
    if not len(steps) == len(free) == len(resident) or not (np.diff(steps) > 0).all():
        return np.zeros(0), np.zeros(0), np.zeros(0)
    return steps, free * FACT_UNIT, resident * FACT_UNIT


def _rise_of_few_samples(at: Floats, values: Floats) -> Rise:
    """Judge rows whose samples come first, in order of time, followed by nan."""
    counts = (~np.isnan(values)).sum(axis=1)
    judged = counts >= thresholds.CREEP_FEW_SAMPLES
    if not judged.any():
        nothing = np.full(len(values), np.nan)
        none = dict.fromkeys(("per_step", "first", "last", "first_step", "last_step"), nothing)
        return Rise(rises=judged, steadily=judged, judged=judged, **none, samples=0, sure=False)
    rows, end = np.arange(len(values)), np.maximum(counts - 1, 0)
    first, last = values[:, 0], values[rows, end]
    growth = np.where(judged, last - first, 0.0)
    steps = np.where(judged, at[rows, end] - at[:, 0], 0.0)
    rises = np.diff(values, axis=1)
    least = thresholds.CREEP_FEW_EVEN * growth / np.maximum(end, 1)
    even = ((rises >= least[:, None]) | np.isnan(rises)).all(axis=1)
    per_step = np.where(steps > 0, growth / np.where(steps > 0, steps, 1.0), np.nan)
    return _rise(
        judged & even & (growth > 0) & (steps > 0),
        _grew(np.where(judged, first, 0.0), growth, thresholds.CREEP_FEW_SHARE, thresholds.CREEP_FEW_BYTES),
        growth,
        judged=judged,
        per_step=per_step,
        level=first - per_step * at[:, 0],
        between=(at[:, 0], at[rows, end]),
        samples=_typical_count(values),
        sure=False,
    )


def _grew(first: Floats, growth: Floats, share: float, least_bytes: float) -> Bools:
    return np.asarray((growth >= share * first) & (growth >= least_bytes), np.bool_)


def _rise(
    steadily: Bools,
    enough: Bools,
    growth: Floats,
    *,
    judged: Bools,
    per_step: Floats,
    level: Floats,
    between: tuple[Floats, Floats],
    samples: int,
    sure: bool,
) -> Rise:
    """Include the ranks that have the same leak as those beyond the limit and are just short of it.

    ``level``: the line with this slope at step 0; ``between``: the places that it was laid through.
    """
    rises = steadily & enough
    if rises.any():
        rises |= steadily & (growth >= thresholds.CREEP_ALIKE_SHARE * np.median(growth[rises]))
    hidden = np.where(judged, 0.0, np.nan)
    first_step, last_step = (np.rint(at + hidden) for at in between)
    return Rise(
        rises=rises,
        steadily=steadily,
        judged=judged,
        per_step=per_step + hidden,
        first=level + per_step * first_step,
        last=level + per_step * last_step,
        first_step=first_step,
        last_step=last_step,
        samples=samples,
        sure=sure,
    )


# -- findings ---------------------------------------------------------------------------------------------------------

WHAT = {
    "host_rss": "Host memory",
    "host_used": "Host memory in use",
    "device_allocated": "Device memory in use",
    "device_reserved": "Device memory held by the allocator",
}


FORECAST = "; at this pace it runs out at step"


@dataclass(frozen=True, kw_only=True)
class _RunsOut:
    """When memory runs out at the present pace."""

    step: int | None = None
    in_s: float | None = None
    in_steps: float = math.inf


def find_memory(view: View) -> list[Claim]:
    """``memory_creep``, ``memory_pressure``, ``memory_imbalance`` and ``fragmentation``; their saved time is zero."""
    if not view.enough:
        return []
    devices = devices_of(view)
    claims = []
    comparisons = len(WHAT) * len(view.rows)
    begin = _begin(view)
    window = view.window
    allocated = rise_of_steps(window.allocated[view.rows], window.steps, begin, comparisons)
    reserved = rise_of_steps(window.reserved[view.rows], window.steps, begin, comparisons)
    loose = fragmented_ranks(devices)
    # Memory in use and gaps both raise the reserve: the cause is reported, once.
    reserve_only = reserved.rises & ~allocated.rises & ~loose
    if allocated.rises.any():
        claims.append(
            _creep(view, "device_allocated", allocated, allocated.rises, _device_end(view, devices, allocated))
        )
    if reserve_only.any():
        claims.append(_creep(view, "device_reserved", reserved, reserve_only, _device_end(view, devices, reserved)))
    facts = [view.window.facts[row] for row in view.rows]
    if not allocated.rises.any():
        long = rise_of_floors(facts, "device", comparisons, np.zeros(len(facts)))
        if long.rise.rises.any():
            end = _device_end(view, devices, long.rise)
            claims.append(_creep(view, "device_allocated", long.rise, long.rise.rises, end, long.epoch))
    claims.extend(
        _creep(view, which, rise, rise.rises, _host_end(view, rise), epochs)
        for which, rise, epochs in _host_rises(view, facts, comparisons)
        if rise.rises.any()
    )
    return [*claims, *find_device_memory(view, devices, reserved.rises & ~allocated.rises)]


def _host_rises(
    view: View, facts: Sequence[Mapping[str, Any]], comparisons: int
) -> Iterator[tuple[str, Rise, Floats | None]]:
    """The growth of host memory, judged in several ways until some is found; and the steps of an epoch."""
    resident, answers = _resident(view, comparisons)
    yield "host_rss", (rise := _beyond_malloc(resident, facts)), None
    if rise.rises.any():
        return
    long = rise_of_floors(facts, "host", comparisons, answers)
    yield "host_rss", (rise := _beyond_malloc(long.rise, facts)), long.epoch
    if rise.rises.any():
        return
    yield "host_used", (rise := rise_in_use(facts, int(view.window.steps[-1]), comparisons)), None
    if rise.rises.any():
        return
    known = np.array(["growing" in own for own in facts], np.bool_)
    yield "host_rss", replace(resident, rises=resident.rises & known), None


def _begin(view: View) -> int:
    """How many columns at the start of the window are warm-up."""
    steady = view.window.steady
    return int(steady.argmax()) if steady.any() else len(steady)


def _resident(view: View, comparisons: int) -> tuple[Rise, Floats]:
    """Growth of the processes' memory without what is not the job's own, and the most of what is not.

    That is the pages of mapped files, which the kernel may drop, and what torch's worker server keeps of its answers to
    the agent (``agent/flight_reader.py``), which is bounded.
    """
    readings = process_readings(view)
    of_files, of_answers = readings.of("rss_file"), readings.of("rss_answers")
    own = readings.of("rss") - np.nan_to_num(of_files) - np.nan_to_num(of_answers)
    own[~(own > 0)] = np.nan  # a process that is just ending has none
    at = at_steps(view, readings.of("wall_ns"))
    rise = rise_of_samples(own, at, float(view.window.steps[_begin(view)]), comparisons)
    return rise, np.nan_to_num(np.fmax.reduce(of_answers, axis=1, initial=0.0))


def _device_end(view: View, devices: Devices, rise: Rise) -> _RunsOut:
    """The first device that fills up: ranks that share one fill it together."""
    inside = np.maximum(devices.reserved - np.fmax(devices.peak, rise.last), 0.0)
    room = devices.total - devices.used + devices.by_gpu(inside)
    return _runs_out(view, room, devices.by_gpu(np.where(rise.rises, rise.per_step, 0.0)))


def _host_end(view: View, rise: Rise) -> _RunsOut:
    hosts, readings = host_readings(view)
    places = {host: index for index, host in enumerate(hosts)}
    at = np.array([places[host] for host in view.hosts], np.intp)
    growth = np.bincount(at, weights=np.where(rise.rises, rise.per_step, 0.0), minlength=len(hosts))
    return _runs_out(view, last_of_rows(readings.of("mem_available")), np.asarray(growth, np.float64))


def _runs_out(view: View, room: Floats, per_step: Floats) -> _RunsOut:
    """The first of several places to run out, given the bytes left and the growth per step of each."""
    known = (per_step > 0) & ~np.isnan(room)
    if not known.any():
        return _RunsOut()
    in_steps = float((np.maximum(room[known], 0.0) / per_step[known]).min())
    ends = view.window.end_wall_ns[view.rows]
    step_s = float(np.nanmax(ends) - np.nanmin(ends)) / 1e9 / max(len(view.window.steps) - 1, 1)
    step = int(view.window.steps[-1]) + math.ceil(in_steps)
    return _RunsOut(step=step, in_s=round(in_steps * step_s, 1), in_steps=in_steps)


def _creep(view: View, which: str, rise: Rise, rises: Bools, end: _RunsOut, epochs: Floats | None = None) -> Claim:
    rows = np.flatnonzero(rises)
    worst = int(rows[np.argmax(rise.per_step[rows])])
    alike = bool((rises == rise.judged).all())
    ranks = () if alike else tuple(view.ranks[row] for row in rows)
    per_step, first, last = (float(values[worst]) for values in (rise.per_step, rise.first, rise.last))
    first_step, last_step = round(float(rise.first_step[worst])), round(float(rise.last_step[worst]))
    first_text, last_text = span_texts(first, last)
    epoch = 0.0 if epochs is None else float(np.nan_to_num(epochs[worst]))
    by_epoch = epoch > 0 and per_step < thresholds.CREEP_BYTES_PER_STEP
    pace = f"{bytes_text(per_step * epoch)} an epoch" if by_epoch else f"{bytes_text(per_step)} a step"
    found = _what_grows(view, rows, worst)
    grows = tuple(_growing_advice(found))
    if which == "host_rss" and not found:
        free = _malloc_free(view.window.facts[view.rows[worst]], np.array([first_step, last_step], np.float64))
        if free[1] - free[0] >= thresholds.CREEP_FREE_SHARE * (last - first):
            grows = (FREE_IN_MALLOC.format(size=bytes_text(float(free[1]))),)
    # Correct for a run that continues and for one that is over.
    more = f"after another {duration_text(end.in_s)}"
    runs_out = f"{FORECAST} {end.step:,}, {more}" if end.step else ""
    settling = (
        which.startswith("host")
        and not found
        and last - first < thresholds.CREEP_SETTLING_BYTES
        and (last_step - first_step) * float(view.step_ns.mean()) < thresholds.CREEP_SETTLING_S * 1e9
        and end.in_steps > thresholds.CREEP_SETTLING_RUNS * (last_step - first_step)
    )
    finding = Finding(
        kind="memory_creep",
        severity="info" if settling else _creep_severity(view, end),
        title=(
            f"{WHAT[which]}{_of_whom(view, ranks)} grows by {pace}, "
            f"from {first_text} at step {first_step:,} to {last_text} at step {last_step:,}{runs_out}."
        ),
        ranks=ranks,
        steps=(min(int(view.window.steps[0]), first_step), int(view.window.steps[-1])),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "which": which,
            "bytes_per_step": round(per_step),
            "bytes_per_epoch": round(per_step * epoch) if epoch else None,
            "first_bytes": round(first),
            "last_bytes": round(last),
            "first_step": first_step,
            "last_step": last_step,
            "ranks_growing": [view.ranks[row] for row in rows],
            "runs_out_at_step": end.step,
            "runs_out_in_s": end.in_s,
            "samples": rise.samples,
            "growing": found or None,
        },
        # What it names is not to be looked for any more.
        advice=(*grows, *MEMORY_CREEP_ADVICE[which][1 if found.get("holder") else 0 :])[:3],
        confidence=0.95 if rise.sure else 0.75,
    )
    return Claim(finding=finding, explained_ns=np.zeros(len(view.steps)))


def without_forecast(finding: Finding) -> Finding:
    """The same of a job that ran out of memory: when it would have done so is not worth saying, and was not right."""
    if finding.kind != "memory_creep":
        return finding
    title, forecast, _ = finding.title.partition(FORECAST)
    return replace(
        finding,
        title=f"{title}." if forecast else title,
        evidence={**finding.evidence, "runs_out_at_step": None, "runs_out_in_s": None},
    )


def _what_grows(view: View, rows: NDArray[np.intp], worst: int) -> dict[str, Any]:
    """What the recorder of the rank that grows most, or of another one that grows, found to get longer; or {}."""
    for row in (worst, *rows):
        found = view.window.facts[view.rows[row]].get("growing")
        if isinstance(found, dict) and {"holder", "per_step", "element", "element_bytes"} <= set(found):
            return {**found, "rank": view.ranks[row]}
    return {}


FEW = 0.1
"""Elements a step; if there are fewer, the text gives their number."""


def _growing_advice(found: Mapping[str, Any]) -> Iterator[str]:
    if found and not found["element"]:
        yield (
            f"{found['holder']} keeps the graphs of past steps, back to step {found['from']:,} at least: "
            "call .detach() or .item() on what goes into it."
        )
    elif found:
        size = f", {bytes_text(found['element_bytes'])} each" if found["element_bytes"] >= 1024 else ""
        graph = found.get("graph") is True
        kept = ", each with its autograd graph: keep .detach() or .item() instead" if graph else ""
        grows = f"{found['holder']}, gets longer by" if found["holder"] else "Tensors of one kind increase by"
        yield f"{grows} {_pace(found)}: {found['element']}{size}{kept}."


def _pace(found: Mapping[str, Any]) -> str:
    per_step, steps = found["per_step"], found["to"] - found["from"]
    if per_step < FEW:
        return f"{count_text(max(round(per_step * steps), 1), 'element')} within {steps:,} steps"
    return f"{per_step:g} element{'' if per_step == 1 else 's'} a step"


def _creep_severity(view: View, end: _RunsOut) -> Severity:
    if end.in_s is None:
        return "warning"
    soon = end.in_s <= thresholds.CREEP_SOON_S or end.in_steps <= thresholds.CREEP_SOON_RUNS * len(view.window.steps)
    if soon:
        return "critical"
    return "info" if end.in_s > thresholds.CREEP_LATE_S else "warning"


def _of_whom(view: View, ranks: tuple[int, ...]) -> str:
    if ranks:
        return f" of {named_ranks(ranks).lower()}"
    return " of every rank" if len(view.ranks) > 1 else ""
