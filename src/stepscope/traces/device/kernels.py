"""What ran on a device: kernels, repeated sequences of them, copies, and how well they used the device.

``kernel_types`` splits the busy time: each instant at which the device worked belongs to exactly one row, by the kinds
of work that ran then (computation, communication, memory, or several at once), so the rows add up to it. The other
tables add up durations: two concurrent kernels count twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.work import Work
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Codes, Ints
from stepscope.traces.model.intervals import Spans
from stepscope.traces.model.kernel_names import fitted, is_fp32_matmul, kernel_class, short_name, uses_tensor_cores
from stepscope.traces.model.tables import Table, distinct, sums_of, table_of

__all__ = [
    "bandwidth_table",
    "bytes_of",
    "copies_table",
    "is_pageable",
    "kernel_classes",
    "kernel_types",
    "kernels_table",
    "occupancy_of",
    "occupancy_sums",
    "sequences_table",
    "sm_efficiency_of",
    "utilization_of",
]


# -- kernels ----------------------------------------------------------------------------------------------------------

TYPES: Final = ("computation", "communication", "memory")


def kernels_table(work: Work) -> Table:
    """Build one row per kernel name, the longest total first."""
    at = np.flatnonzero(work.kernel)
    name, groups = work.name[at], work.by_kernel
    overlapped_ns = sums_of(groups, name, _overlapped_ns(work)[at])
    weighted, weight_ns = occupancy_sums(work)
    occupied = np.bincount(name, weighted, minlength=len(work.window.trace.strings))[groups.key]
    weight_ns = np.bincount(name, weight_ns, minlength=len(work.window.trace.strings))[groups.key]
    owners = _usual_owner(work, at, groups.key)
    all_ns = int(groups.total.sum())
    rows = []
    for place in np.argsort(-groups.total, kind="stable").tolist():
        text = work.window.trace.strings[groups.key[place]]
        total_ns = int(groups.total[place])
        rows.append(
            (
                text,
                kernel_class(text),
                groups.count[place],
                total_ns,
                total_ns / all_ns if all_ns else None,
                groups.mean[place],
                groups.median[place],
                groups.least[place],
                groups.most[place],
                groups.deviation[place],
                overlapped_ns[place],
                total_ns - int(overlapped_ns[place]),
                occupied[place] / weight_ns[place] if weight_ns[place] else None,
                int(uses_tensor_cores(text)),
                owners[place],
            )
        )
    return table_of(
        "kernels",
        "Kernels by name",
        KERNEL_COLUMNS,
        rows,
        note="overlapped_ns: while a kernel of the other type ran (communication or compute); deviation_ns: of all its "
        "durations; occupancy_share: the profiler's estimate.",
    )


KERNEL_COLUMNS: Final = (
    "name", "class", "count", "total_ns", "time_share", "mean_ns", "median_ns", "min_ns", "max_ns", "deviation_ns",
    "overlapped_ns", "exposed_ns", "occupancy_share", "tensor_cores", "operator",
)  # fmt: skip


def occupancy_sums(work: Work) -> tuple[np.ndarray, Ints]:
    """Return occupancy (0 to 1) times duration, and the duration where occupancy is known, else 0.

    [kernels of the work] each.
    """
    kernels = work.window.trace.kernels
    rows = work.rows[work.kernel]
    occupancy = kernels.occupancy[np.searchsorted(kernels.row, rows)].astype(np.float64) / 100
    dur_ns = work.dur_ns[work.kernel]
    known = ~np.isnan(occupancy)
    return np.where(known, occupancy * dur_ns, 0.0), np.where(known, dur_ns, 0)


def _overlapped_ns(work: Work) -> Ints:
    """Return for how long a kernel of the other kind ran at the same time, [work]."""
    computes = work.kernel & ~work.comm
    out = np.zeros(len(work), np.int64)
    for these, other in ((computes, work.comm), (work.comm, computes)):
        spans = intervals.merge(work.start_ns[other], work.end_ns[other])
        out[these] = intervals.covered(work.start_ns[these], work.end_ns[these], spans)
    return out


def _usual_owner(work: Work, at: np.ndarray, names: Ints) -> list[str]:
    """Return the operator that launched most kernels of each name, [names]; empty: unknown."""
    width = len(work.window.trace.strings) + 1
    pairs, counts = np.unique(work.name[at].astype(np.int64) * width + work.owner[at] + 1, return_counts=True)
    # The most frequent pair of each name comes first.
    order = np.lexsort((-counts, pairs // width))
    pairs = pairs[order]
    first = np.searchsorted(pairs // width, names)
    return [work.window.trace.text(owner) for owner in (pairs[first] % width - 1).tolist()]


def kernel_classes(work: Work) -> Table:
    """Sum the time of kernels by class, with the part on Tensor Cores."""
    groups = work.by_kernel
    sums: dict[str, list[int]] = {}
    for code, count, total_ns in zip(groups.key, groups.count.tolist(), groups.total.tolist(), strict=True):
        text = work.window.trace.strings[code]
        row = sums.setdefault(kernel_class(text), [0] * 5)
        on_tensor_cores, fp32 = uses_tensor_cores(text), is_fp32_matmul(text)
        for column, value in enumerate((1, count, total_ns, on_tensor_cores * total_ns, fp32 * total_ns)):
            row[column] += value
    all_ns = int(groups.total.sum())
    return table_of(
        "kernel_classes",
        "Kernels by class",
        ("class", "names", "count", "total_ns", "time_share", "tensor_core_ns", "fp32_matmul_ns"),
        (
            (found, names, count, total_ns, total_ns / all_ns if all_ns else None, tensor_core_ns, fp32_ns)
            for found, (names, count, total_ns, tensor_core_ns, fp32_ns) in sorted(
                sums.items(), key=lambda item: -item[1][2]
            )
        ),
        note="Classes and Tensor Cores are derived from the kernel names.",
    )


def kernel_types(work: Work) -> Table:
    """Split the busy time, each instant once, without idle time."""
    spans = [
        intervals.merge(work.start_ns[which], work.end_ns[which])
        for which in (work.kernel & ~work.comm, work.comm, ~work.kernel)
    ]
    time_ns = _together(spans)
    busy_ns = sum(time_ns.values())
    return table_of(
        "kernel_types",
        "Device time by type of work and overlap",
        ("type", "time_ns", "busy_share"),
        (
            (" overlapping ".join(TYPES[index] for index in which), each_ns, each_ns / busy_ns if busy_ns else None)
            for which, each_ns in sorted(time_ns.items(), key=lambda item: -item[1])
        ),
        note="Each instant of device work is in exactly one row.",
    )


def _together(spans: list[Spans]) -> dict[tuple[int, ...], int]:
    """Return for every combination how long exactly these ran at the same time."""
    times = np.concatenate([edge for each in spans for edge in each])
    weights = np.concatenate(
        [
            np.full(len(edge), sign << bit)
            for bit, each in enumerate(spans)
            for edge, sign in zip(each, (1, -1), strict=True)
        ]
    )
    order = np.argsort(times, kind="stable")
    there = np.cumsum(weights[order])[:-1]
    lengths = np.diff(times[order])
    choices = [which for size in range(1, len(spans) + 1) for which in combinations(range(len(spans)), size)]
    return {which: int(lengths[there == sum(1 << bit for bit in which)].sum()) for which in choices}


# -- repeated sequences -----------------------------------------------------------------------------------------------
# Kernels that repeatedly follow each other: candidates for fusion or a CUDA graph.
#
# A sequence is three to six consecutive kernels on one stream; communication, copies and memsets are ignored.
# Overlapping occurrences (A A A A contains A A A twice) count once, the first. A sequence that only ever occurs inside
# one longer sequence is left out, as are more than three repetitions of the same kernel.

SHORTEST: Final = 3
LONGEST: Final = 6
TWICE: Final = 2
ROWS: Final = 50
NAME_CHARS: Final = 80


@dataclass(frozen=True, kw_only=True)
class _Grams:
    """All windows of one length over the kernels, numbered by content."""

    length: int
    id: NDArray[np.int64]
    """[windows]; −1: it crosses from one stream to the next."""
    count: Ints
    """[ids]; including overlapping ones."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Sequences with their sums over all occurrences."""

    length: Ints
    count: Ints
    total_ns: Ints
    span_ns: Ints
    first: Ints
    """Where it occurs first."""


def sequences_table(work: Work) -> Table:
    """Build the table, the longest total first."""
    computes = work.kernel & ~work.comm
    at = work.by_lane[computes[work.by_lane]]
    found = _found(work, at)
    order = np.lexsort((found.first, -found.length, -found.total_ns))[:ROWS].tolist()
    all_ns = int(work.dur_ns[at].sum())
    names = work.name[at]
    shown = {code for place in order for code in _codes(names, found, place)}
    short = {code: fitted(short_name(work.window.trace.strings[code]), NAME_CHARS) for code in shown}
    rows = []
    for place in order:
        total_ns = int(found.total_ns[place])
        rows.append(
            (
                " → ".join(short[code] for code in _codes(names, found, place)),
                found.length[place],
                found.count[place],
                total_ns,
                total_ns / all_ns if all_ns else None,
                found.span_ns[place],
                work.window.trace.text(int(work.owner[at[found.first[place]]])),
            )
        )
    table = table_of(
        "sequences",
        "Repeating kernel sequences",
        ("kernels", "length", "count", "total_ns", "time_share", "span_ns", "operator"),
        rows,
        note="time_share: of the time in compute kernels; span_ns: from the start of the first kernel to the end of "
        "the last, including gaps; operator: of the first kernel in the first occurrence.",
    )
    return replace(table, left_out=len(found.length) - len(rows))


def _codes(names: Codes, found: _Found, place: int) -> list[int]:
    """Return the codes of its kernels' names."""
    return names[found.first[place] : found.first[place] + found.length[place]].tolist()  # type: ignore[no-any-return]


def _found(work: Work, at: NDArray[np.int64]) -> _Found:
    ids = distinct(work.name[at])[1]
    grams = _grams(ids, work.lane[at])
    start_ns, end_ns = work.start_ns[at], work.end_ns[at]
    until_ns = np.concatenate([[0], np.cumsum(work.dur_ns[at])])
    pieces = []
    for each, longer in zip(grams, [*grams[1:], None], strict=True):
        place = _occurrences(each, longer)
        if each.length > SHORTEST:
            place = place[~_same(ids, each.length)[place]]
        of = each.id[place]
        first = np.flatnonzero(np.diff(of, prepend=-1))
        count = np.diff(np.append(first, len(of)))
        after = place + each.length
        sums = [until_ns[after] - until_ns[place], end_ns[after - 1] - start_ns[place]]
        totals = [np.add.reduceat(column, first) if len(first) else column for column in sums]
        repeated = count >= TWICE
        columns = (np.full(len(first), each.length), count, *totals, place[first])
        pieces.append([column[repeated] for column in columns])
    length, count, total_ns, span_ns, where = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return _Found(length=length, count=count, total_ns=total_ns, span_ns=span_ns, first=where)


def _grams(ids: NDArray[np.int64], lane: NDArray[np.int64]) -> list[_Grams]:
    """Number each length's windows by pairing the shorter window's number with the next kernel: exact, no hashing."""
    grams = []
    current, width = ids, int(ids.max()) + 1 if len(ids) else 1
    for length in range(2, LONGEST + 1):
        last = ids[length - 1 :]
        inside = lane[length - 1 :] == lane[: len(last)]
        pairs = np.where(inside, current[: len(last)] * width + last, -1)
        values, current = distinct(pairs)
        count = np.bincount(current, minlength=len(values))
        if len(values) and values[0] < 0:
            current, count = current - 1, count[1:]
        if length >= SHORTEST:
            grams.append(_Grams(length=length, id=current, count=count))
    return grams


def _same(ids: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Return which windows repeat one kernel, [windows]."""
    changes = np.concatenate([[0], np.cumsum(ids[1:] != ids[:-1])])
    last = changes[length - 1 :]
    return np.asarray(last == changes[: len(last)])


def _occurrences(grams: _Grams, longer: _Grams | None) -> NDArray[np.int64]:
    """Return the places of sequences that occur at least twice, without overlaps: by sequence, each ascending."""
    wanted = grams.count >= TWICE
    if longer is not None:
        wanted[_inside_longer(grams, longer)] = False
    place = np.flatnonzero(grams.id >= 0)
    place = place[wanted[grams.id[place]]]
    place = place[np.argsort(grams.id[place], kind="stable")]
    of = grams.id[place]
    close = (np.diff(of) == 0) & (np.diff(place) < grams.length)
    overlaps = np.zeros(len(grams.count), bool)
    overlaps[of[1:][close]] = True
    keep = np.ones(len(place), bool)
    doubtful = np.flatnonzero(overlaps[of])
    keep[doubtful] = _first_ones(of[doubtful].tolist(), place[doubtful].tolist(), grams.length)
    return place[keep]


def _inside_longer(grams: _Grams, longer: _Grams) -> NDArray[np.int64]:
    """Find sequences that only occur as the beginning, or the end, of one and the same longer sequence."""
    at = np.flatnonzero(longer.id >= 0)
    count = longer.count[longer.id[at]]
    return np.concatenate([own[grams.count[own] == count] for own in (grams.id[at], grams.id[at + 1])])


def _first_ones(of: list[int], place: list[int], length: int) -> list[bool]:
    """Keep for each sequence the first place, then each that does not overlap the last one kept; [places]."""
    keep = [False] * len(of)
    current, free = -1, 0
    for at, (each, where) in enumerate(zip(of, place, strict=True)):
        if where >= free or each != current:
            keep[at] = True
            current, free = each, where + length
    return keep


# -- copies -----------------------------------------------------------------------------------------------------------
# Copies and memsets: how much was moved in which direction, and how fast. Bandwidth is bytes over the duration of the
# copies (not the time between them), for copies with known size and duration; 10⁹ bytes per second is one byte per
# nanosecond. Host memory is *pageable* unless it is pinned; a copy from or to it goes through a buffer of the driver
# and blocks the host.

POINTS: Final = 500
"""Points of the curve, over all directions."""
DIRECTIONS: Final = ("HtoD", "DtoH", "DtoD", "PtoP", "HtoH", "memset", "other")
WRITTEN: Final = (
    (re.compile(r"memset|fillbuffer|memoryfill", re.IGNORECASE), "memset"),
    (re.compile(r"PtoP|peer|P2P", re.IGNORECASE), "PtoP"),
    (re.compile(r"HtoD|HostToDevice|M2D|Host *-> *Device", re.IGNORECASE), "HtoD"),
    (re.compile(r"DtoH|DeviceToHost|D2M|Device *-> *Host", re.IGNORECASE), "DtoH"),
    (re.compile(r"DtoD|DeviceToDevice|D2D|AtoA|DtoA|AtoD", re.IGNORECASE), "DtoD"),
    (re.compile(r"HtoH|HostToHost|M2M", re.IGNORECASE), "HtoH"),
)
ENDS: Final = re.compile(r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*$")

COLUMNS: Final = (
    "direction", "memory", "count", "moved_bytes", "total_ns", "time_share", "bandwidth_gbps", "largest_bytes",
    "longest_ns",
)  # fmt: skip


@lru_cache(maxsize=4096)
def _direction(name: str) -> int:
    return DIRECTIONS.index(next((direction for pattern, direction in WRITTEN if pattern.search(name)), "other"))


def is_pageable(name: str) -> bool:
    return "pageable" in name.lower()


def _memory(name: str) -> str:
    """Return ``Pinned -> Device``; empty: unknown."""
    ends = ENDS.search(name)
    return ends.group(1) if ends else ""


def bytes_of(work: Work) -> Ints:
    """Return the size of each copy, [work]; −1 for unknown sizes and for kernels."""
    copies = work.window.trace.copies
    out = np.full(len(work), -1, np.int64)
    rows = work.rows[~work.kernel]
    out[~work.kernel] = copies.bytes[np.searchsorted(copies.row, rows)]
    return out


def copies_table(work: Work, sizes: Ints) -> Table:
    """Build one row per name, that is direction and kind of memory, the longest total first."""
    rows = []
    copied = ~work.kernel
    all_ns = int(work.dur_ns[copied].sum())
    for code in np.unique(work.name[copied]).tolist():
        own = copied & (work.name == code)
        name = work.window.trace.strings[code]
        dur_ns, size = work.dur_ns[own], sizes[own]
        total_ns = int(dur_ns.sum())
        moved = int(size[size >= 0].sum())
        rows.append(
            (
                DIRECTIONS[_direction(name)],
                _memory(name),
                len(dur_ns),
                moved,
                total_ns,
                total_ns / all_ns if all_ns else None,
                _bandwidth(dur_ns, size),
                int(size.max()) if size.max() >= 0 else None,
                int(dur_ns.max()),
            )
        )
    return table_of(
        "copies",
        "Copies and memsets",
        COLUMNS,
        sorted(rows, key=lambda row: -row[4]),
        note="Bandwidth: bytes divided by the time of copies of known size.",
    )


def _bandwidth(dur_ns: Ints, size: Ints) -> float | None:
    known = (size >= 0) & (dur_ns > 0)
    time_ns = int(dur_ns[known].sum())
    return int(size[known].sum()) / time_ns if time_ns else None


def bandwidth_table(work: Work, sizes: Ints) -> Table:
    """Sum the bytes in equal time intervals by direction, as if each copy progressed evenly."""
    moving = ~work.kernel & (sizes > 0)
    names, which = distinct(work.name[moving])
    direction = np.array([_direction(work.window.trace.text(code)) for code in names.tolist()], np.int64)[which]
    start_ns, end_ns, size = work.start_ns[moving], work.end_ns[moving], sizes[moving]
    rows = []
    present = np.unique(direction).tolist()
    if present:
        first_ns, last_ns = int(work.start_ns.min()), max(int(work.end_ns.max()), int(work.start_ns.min()) + 1)
        edges = np.unique(np.linspace(first_ns, last_ns, POINTS // len(present) + 1).astype(np.int64))
        for each in present:
            own = direction == each
            until = np.rint(_moved_until(edges, start_ns[own], end_ns[own], size[own])).astype(np.int64)
            moved = np.diff(until)
            rows += [
                (DIRECTIONS[each], begin_ns, end - begin_ns, amount, amount / (end - begin_ns))
                for begin_ns, end, amount in zip(edges[:-1].tolist(), edges[1:].tolist(), moved.tolist(), strict=True)
            ]
    return table_of(
        "copy_bandwidth",
        "Copy bandwidth over time",
        ("direction", "start_ns", "length_ns", "moved_bytes", "bandwidth_gbps"),
        rows,
        note="Over all device time, including pauses between copies.",
    )


def _moved_until(times: Ints, start_ns: Ints, end_ns: Ints, size: Ints) -> NDArray[np.float64]:
    """Return the bytes moved before each time, [times]; a copy without duration counts from its start on."""
    at_once = end_ns == start_ns
    last = times == times[-1]
    jumps = np.sort(start_ns[at_once])
    amount = np.concatenate([[0], np.cumsum(size[at_once][np.argsort(start_ns[at_once], kind="stable")])])
    before = np.where(last, len(jumps), np.searchsorted(jumps, times, side="left"))
    out: NDArray[np.float64] = amount[before].astype(np.float64)
    if at_once.all():
        return out
    start_ns, end_ns, size = start_ns[~at_once], end_ns[~at_once], size[~at_once]
    edges = np.concatenate([start_ns, end_ns])
    rate = np.concatenate([size / (end_ns - start_ns), -size / (end_ns - start_ns)])
    order = np.argsort(edges, kind="stable")
    edges, rate = edges[order], np.cumsum(rate[order])
    moved = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(edges))])
    out += np.interp(times, edges, moved)
    return out


# -- utilization ------------------------------------------------------------------------------------------------------
# How well the device was used: three measures, each finer than the one before.
#
# *utilization*: the share of the time in which it did anything. *SM efficiency*: the share of its multiprocessors that
# had work, over the same time; at each instant it is the sum of ``blocks per SM`` of the running kernels, at most 1.
# *occupancy*: how many of the warps that fit were present while kernels ran; it is the profiler's estimate for each
# kernel, weighted by duration.
#
# The time covers all steps that count: from the start of the first to the end of the last, or to the end of the device
# work that they launched, whichever is later.


def step_time_of(work: Work) -> tuple[int, int]:
    """Return the start and end of the steps; equal without steps."""
    steps = work.window.steps
    if not steps:
        return 0, 0
    launched = work.window.step_of[work.rows] >= 0
    ends_ns = [int(work.end_ns[launched].max())] if launched.any() else []
    return steps[0].start_ns, max(*ends_ns, *(step.end_ns for step in steps), steps[0].start_ns)


def utilization_of(work: Work) -> float | None:
    start_ns, end_ns = step_time_of(work)
    if end_ns <= start_ns or not len(work):
        return None
    busy = intervals.cut(intervals.merge(work.start_ns, work.end_ns), start_ns, end_ns)
    return intervals.total(busy) / (end_ns - start_ns)


def sm_efficiency_of(work: Work) -> float | None:
    """Return the SM efficiency; None if no kernel reports its blocks."""
    kernels = work.window.trace.kernels
    blocks = kernels.blocks_per_sm[np.searchsorted(kernels.row, work.rows[work.kernel])].astype(np.float64)
    known = ~np.isnan(blocks)
    first_ns, last_ns = step_time_of(work)
    if last_ns <= first_ns or not known.any():
        return None
    start_ns = np.clip(work.start_ns[work.kernel][known], first_ns, last_ns)
    end_ns = np.clip(work.end_ns[work.kernel][known], first_ns, last_ns)
    times = np.concatenate([start_ns, end_ns])
    order = np.argsort(times, kind="stable")
    level = np.cumsum(np.concatenate([blocks[known], -blocks[known]])[order])[:-1]
    return float((np.clip(level, 0, 1) * np.diff(times[order])).sum() / (last_ns - first_ns))


def occupancy_of(work: Work) -> float | None:
    """Return the occupancy, 0 to 1; None if no kernel reports it."""
    weighted, weight_ns = occupancy_sums(work)
    total_ns = int(weight_ns.sum())
    return float(weighted.sum() / total_ns) if total_ns else None
