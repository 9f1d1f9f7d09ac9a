"""A part of the map rank × step, in as many cells as a screen has room for.

Where the model still has the steps one by one (the window, or all of a run that is over and fits) any phase can be
drawn, and a single slow step stands out.  Further back there are bins of steps with the mean of work and length.  Cells
are cut so that none holds a part of a rank or of a bin.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.live_run import LiveRun

__all__ = ["HeatMap", "Statistic", "heat_map", "pack_heat"]

Floats = NDArray[np.float32]
Statistic = Literal["max", "mean"]
MEMORY = ("allocated", "reserved", "peak_allocated")
HEAD = struct.Struct("<4sHHII")
MAGIC = b"STHM"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """R rows of ranks, C columns of steps."""

    value: str
    unit: Literal["ns", "bytes"]
    first_ranks: NDArray[np.int64]
    last_ranks: NDArray[np.int64]
    first_steps: NDArray[np.int64]
    last_steps: NDArray[np.int64]
    cells: Floats
    """[R, C]; nan where nothing is known."""
    exact: bool
    """Whether single steps are behind it, not bins of them."""


def heat_map(
    live: LiveRun,
    value: str,
    statistic: Statistic,
    ranks: tuple[int, int] | None,
    steps: tuple[int, int | None],
    shape: tuple[int, int],
) -> HeatMap | None:
    """None: the model has nothing of that name.  ``steps``: first and last; ``shape``: at most so many cells."""
    shown = live.registry.of["shown"][live.ring_of].astype(np.int64)
    order = np.argsort(shown, kind="stable")
    if ranks is not None:
        order = order[(shown[order] >= ranks[0]) & (shown[order] <= ranks[1])]
    newest = live.planes.newest
    first, last = max(0, steps[0]), newest if steps[1] is None else min(steps[1], newest)
    exact = live.planes.stride == 1 and first >= live.planes.oldest
    if value in ("work", "wall"):
        found = _of_planes(live, value, order, first, last) if exact else _of_bins(live, value, order, first, last)
    elif f"phase:{value}" in live.planes.held or (value in live.planes.held and value in MEMORY):
        exact = True
        found = _of_planes(live, value, order, max(first, live.planes.oldest), last)
    else:
        return None
    plane, from_step, to_step = found
    row_starts, column_starts = _starts(len(order), shape[0]), _starts(plane.shape[1], shape[1])
    cells = _reduced(_reduced(plane, row_starts, 0, statistic), column_starts, 1, statistic)
    return HeatMap(
        value=value,
        unit="bytes" if value in MEMORY else "ns",
        first_ranks=shown[order[row_starts]],
        last_ranks=shown[order[_ends(row_starts, len(order))]],
        first_steps=from_step[column_starts],
        last_steps=to_step[_ends(column_starts, len(to_step))],
        cells=cells,
        exact=exact,
    )


def pack_heat(heat: HeatMap) -> bytes:
    """Little endian:

    0    4s   magic  b"STHM"
    4    u16  version
    6    u16  1 where single steps are behind it
    8    u32  R, rows of ranks
    12   u32  C, columns of steps
    16   ...  first_ranks, last_ranks  2 x R x u32;  first_steps, last_steps  2 x C x u32
         ...  R x C x f32, row by row; nan where nothing is known
    """
    rows, columns = heat.cells.shape
    edges = (heat.first_ranks, heat.last_ranks, heat.first_steps, heat.last_steps)
    numbers = [np.minimum(edge, 0xFFFFFFFF).astype("<u4").tobytes() for edge in edges]
    head = HEAD.pack(MAGIC, VERSION, int(heat.exact), rows, columns)
    return b"".join((head, *numbers, heat.cells.astype("<f4").tobytes()))


def _of_planes(
    live: LiveRun, value: str, order: NDArray[np.intp], first: int, last: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """[rank, step], and the steps."""
    planes = live.planes
    kept = planes.complete()
    kept = kept[(kept >= first) & (kept <= last)]
    rows = planes.row_of(kept)
    grid = np.ix_(rows, order)
    if value == "work":
        comm = planes.held.get("phase:comm")
        plane = planes.held["wall_ns"][grid] - (0 if comm is None else comm[grid]) if "wall_ns" in planes.held else None
    else:
        held = planes.held.get({"wall": "wall_ns"}.get(value, value if value in MEMORY else f"phase:{value}"))
        plane = None if held is None else held[grid]
    if plane is None:
        return np.zeros((len(order), 0), np.float32), kept[:0], kept[:0]
    there = planes.have[grid]
    if value in MEMORY:
        there = there & (plane > 0)  # 0: not sampled in that step
    return np.where(there, plane, np.nan).astype(np.float32).T, kept, kept


def _of_bins(
    live: LiveRun, value: str, order: NDArray[np.intp], first: int, last: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    held, span = live.map, live.map.span
    bins = np.arange(first // span, max(last, -1) // span + 1, dtype=np.int64)
    bins = bins[bins < held.bins]
    grid = np.ix_(order, bins)
    count = held.count[grid]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (held.wall_ns if value == "wall" else held.work_ns)[grid] / count
    means[count == 0] = np.nan
    return means.astype(np.float32), bins * span, np.minimum(bins * span + span - 1, live.planes.newest)


def _starts(count: int, most: int) -> NDArray[np.intp]:
    """Where each cell begins, all of one size but the last."""
    return np.arange(0, count, max(1, -(-count // max(1, most))), dtype=np.intp)


def _ends(starts: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    return np.append(starts[1:], count) - 1 if len(starts) else starts


def _reduced(plane: Floats, starts: NDArray[np.intp], axis: int, statistic: Statistic) -> Floats:
    if not plane.size or len(starts) == plane.shape[axis]:
        return plane
    if statistic == "max":
        return np.fmax.reduceat(plane, starts, axis=axis)
    known = ~np.isnan(plane)
    total = np.add.reduceat(np.where(known, plane, 0), starts, axis=axis)
    count = np.add.reduceat(known, starts, axis=axis, dtype=np.int32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, total / count, np.nan).astype(np.float32)
