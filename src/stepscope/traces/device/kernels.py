"""What ran on the device: by name, by class, and by type with what overlapped what.

``kernel_types`` splits the busy time: each instant at which the device worked goes to exactly one row, by the kinds of
work that ran then (computation, communication, memory, or several of them at once), so that the rows sum to it.  The
other tables add up durations: two kernels that run side by side count twice.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

import numpy as np

from stepscope.traces.device.work import Work
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints
from stepscope.traces.model.intervals import Spans
from stepscope.traces.model.kernel_names import is_fp32_matmul, kernel_class, uses_tensor_cores
from stepscope.traces.model.statistics import sums_of
from stepscope.traces.model.table import Table, table_of

__all__ = ["kernel_classes", "kernel_types", "kernels_table", "occupancy_sums"]

TYPES: Final = ("computation", "communication", "memory")


def kernels_table(work: Work) -> Table:
    """One row per name of a kernel, the one that took longest first."""
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
        note="overlapped_ns: while a kernel of the other sort ran (communication for one that computes, and the other "
        "way round); deviation_ns: of all its durations; occupancy_share: as the profiler estimates it.",
    )


KERNEL_COLUMNS: Final = (
    "name", "class", "count", "total_ns", "time_share", "mean_ns", "median_ns", "min_ns", "max_ns", "deviation_ns",
    "overlapped_ns", "exposed_ns", "occupancy_share", "tensor_cores", "operator",
)  # fmt: skip


def occupancy_sums(work: Work) -> tuple[np.ndarray, Ints]:
    """[kernels of the work]; occupancy (0 to 1) times duration, and the duration where occupancy is said, else 0."""
    kernels = work.window.trace.kernels
    rows = work.rows[work.kernel]
    occupancy = kernels.occupancy[np.searchsorted(kernels.row, rows)].astype(np.float64) / 100
    dur_ns = work.dur_ns[work.kernel]
    said = ~np.isnan(occupancy)
    return np.where(said, occupancy * dur_ns, 0.0), np.where(said, dur_ns, 0)


def _overlapped_ns(work: Work) -> Ints:
    """[work]; of kernels: while one of the other sort ran."""
    computes = work.kernel & ~work.comm
    out = np.zeros(len(work), np.int64)
    for one, other in ((computes, work.comm), (work.comm, computes)):
        spans = intervals.merge(work.start_ns[other], work.end_ns[other])
        out[one] = intervals.covered(work.start_ns[one], work.end_ns[one], spans)
    return out


def _usual_owner(work: Work, at: np.ndarray, names: Ints) -> list[str]:
    """[names]; the operator that launched most kernels of the name; empty: not known."""
    width = len(work.window.trace.strings) + 1
    pairs, counts = np.unique(work.name[at].astype(np.int64) * width + work.owner[at] + 1, return_counts=True)
    # The most frequent pair of each name comes first.
    order = np.lexsort((-counts, pairs // width))
    pairs = pairs[order]
    first = np.searchsorted(pairs // width, names)
    return [work.window.trace.text(owner) for owner in (pairs[first] % width - 1).tolist()]


def kernel_classes(work: Work) -> Table:
    """Time of kernels by what they do, with the part of it on Tensor Cores."""
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
        note="Classes and Tensor Cores are told by the kernels' names.",
    )


def kernel_types(work: Work) -> Table:
    """The busy time, each instant once; ``idle`` is not here."""
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
        note="Each instant at which the device worked is in exactly one row.",
    )


def _together(spans: list[Spans]) -> dict[tuple[int, ...], int]:
    """How long just these were there at once, for every choice of them."""
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
