"""One rank over its steps: phases and memory where the steps are there one by one, mean work where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.views.heat_map import MEMORY, heat_map

__all__ = ["column_of", "rank_series"]


def column_of(live: LiveRun, rank: int) -> int | None:
    """Of the last attempt; None: there is no such rank, or it has no step yet."""
    found = np.flatnonzero(live.registry.of["shown"][live.ring_of] == rank)
    return int(found[0]) if len(found) else None


def rank_series(live: LiveRun, rank: int, first: int, last: int | None, bins: int) -> dict[str, Any]:
    """``steps``: single ones, or means of neighbours where there are more than ``bins``; ``past``: all of the run."""
    column = column_of(live, rank)
    planes = live.planes
    kept = planes.complete()
    kept = kept[(kept >= first) & (kept <= (planes.newest if last is None else last))]
    rows = planes.row_of(kept)
    if column is not None and len(rows):
        there = planes.have[rows, column]
        kept, rows = kept[there], rows[there]
    if column is None or not len(rows):
        return {"steps": _empty(live), "past": _past(live, rank, first, last, bins)}
    starts = np.arange(0, len(rows), max(1, -(-len(rows) // bins)))
    counts = np.diff(np.append(starts, len(rows)))

    def mean(name: str) -> list[int]:
        values = planes.held[name][rows, column].astype(np.float64)
        return [round(value) for value in (np.add.reduceat(values, starts) / counts).tolist()]

    steps: dict[str, Any] = {
        "first": kept[starts].tolist(),
        "last": kept[np.append(starts[1:], len(rows)) - 1].tolist(),
        "wall_ns": mean("wall_ns"),
        "phase_ns": {name: mean(f"phase:{name}") for name in live.used_phases()},
        "device_ns": {name.partition(":")[2]: mean(name) for name in sorted(planes.held) if name.startswith("device:")},
        "memory_bytes": {
            name: _most(planes.held[name][rows, column], starts) for name in MEMORY if name in planes.held
        },
        "start_wall_ns": _walls(live, column, planes.held["start_ns"][rows[starts], column]),
        "flags": np.bitwise_or.reduceat(planes.held["flags"][rows, column], starts).tolist()
        if "flags" in planes.held
        else [0] * len(starts),
    }
    return {"steps": steps, "past": _past(live, rank, first, last, bins)}


def _past(live: LiveRun, rank: int, first: int, last: int | None, bins: int) -> dict[str, Any]:
    found = {value: heat_map(live, value, "mean", (rank, rank), (first, last), (1, bins)) for value in ("wall", "work")}
    wall, work = found["wall"], found["work"]
    if wall is None or work is None or not len(wall.cells):
        return {"first": [], "last": [], "wall_ns": [], "work_ns": []}
    return {
        "first": wall.first_steps.tolist(),
        "last": wall.last_steps.tolist(),
        "wall_ns": _nullable(wall.cells[0]),
        "work_ns": _nullable(work.cells[0]),
    }


def _empty(live: LiveRun) -> dict[str, Any]:
    nothing: dict[str, Any] = {name: [] for name in ("first", "last", "wall_ns", "start_wall_ns", "flags")}
    return {**nothing, "phase_ns": {name: [] for name in live.used_phases()}, "device_ns": {}, "memory_bytes": {}}


def _walls(live: LiveRun, column: int, start_ns: NDArray[np.uint64]) -> list[int]:
    of, ring = live.registry.of, live.ring_of[column]
    offset_ns = live.offsets_ns.get(live.registry.nodes[of["node"][ring]], 0)
    shift = int(of["anchor_wall_ns"][ring]) - int(of["anchor_mono_ns"][ring]) - offset_ns
    return [start + shift for start in start_ns.tolist()]


def _most(levels: NDArray[np.float32], starts: NDArray[np.intp]) -> list[int | None]:
    """0: it was not sampled."""
    return [round(level) or None for level in np.maximum.reduceat(levels, starts).tolist()]


def _nullable(values: NDArray[np.float32]) -> list[int | None]:
    return [None if value != value else round(value) for value in values.tolist()]
