"""The steps of all ranks as flat columns, one row per rank, attempt and step, and back.  No I/O.

Columns are signed, so that a difference in SQL may be negative; no time of ours comes near 2**63.
A user's phase is a column by its name, whatever slot each rank gave it; ``ranks.json`` keeps which slot is which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.phases import BUILTIN_PHASES, OTHER, PHASE_SLOTS
from stepscope.records.series import RankSeries
from stepscope.records.slot import DEVICE, STEP
from stepscope.store.assemble import DEVICE_DTYPE, STEP_DTYPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PLAIN", "phase_columns", "steps_of_columns", "to_columns"]

PLAIN = (
    "step",
    "start_ns",
    "wall_ns",
    "flags",
    "micro_batches",
    "forwards",
    "batches",
    "allocated",
    "reserved",
    "peak_allocated",
    "ddp_compute_ns",
    "ddp_comm_ns",
    "between_ns",
)
"""Fields of a step that are columns under their own names."""

BUILTIN_COLUMNS = tuple(f"{name}_ns" for name in BUILTIN_PHASES)
_LAST = BUILTIN_COLUMNS[OTHER]
"""What is left over stands last among the phases."""
DEVICE_PREFIX = "device_"
_UNSAFE = re.compile(r"\W+")


def phase_columns(ranks: Sequence[RankSeries]) -> list[list[str]]:
    """For each rank the column of each of its sixteen slots; empty for one without name and without time.

    Columns are told apart without regard to case, as SQL does, so "Loss" beside "loss" gets a number.
    """
    given: dict[str, str] = {}
    used: set[str] = set()
    chosen = []
    for series in ranks:
        columns: list[str] = []
        for slot, name in enumerate(series.phase_names):
            if slot < len(BUILTIN_PHASES):
                columns.append(BUILTIN_COLUMNS[slot])
                continue
            if not name and not series.steps["phase_ns"][:, slot].any():
                columns.append("")
                continue
            label = name or f"slot_{slot}"
            if label not in given or given[label] in columns:
                given[label] = _free("phase_" + _UNSAFE.sub("_", label), used)
                used.add(given[label].casefold())
            columns.append(given[label])
        chosen.append(columns)
    return chosen


def to_columns(ranks: Sequence[RankSeries], phases: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Rank by rank; device columns are masked where a step has no device times."""
    counts = [len(series.steps) for series in ranks]
    columns: dict[str, NDArray[Any]] = {
        "rank": np.repeat(np.array([series.rank for series in ranks], np.int64), counts),
        "attempt": np.repeat(np.array([series.identity.attempt for series in ranks], np.int64), counts),
    }
    for name in PLAIN:
        columns[name] = _joined([series.steps[name].astype(np.int64) for series in ranks], np.dtype(np.int64))
    present = _joined([np.isin(s.steps["step"], s.device_steps["step"]) for s in ranks], np.dtype(bool))
    own = sorted({name for chosen in phases for name in chosen} - {*BUILTIN_COLUMNS, ""})
    names = [*(name for name in BUILTIN_COLUMNS if name != _LAST), *own, _LAST]
    for name in names:
        columns[name] = np.zeros(sum(counts), np.int64)
    for name in ("flags", "wall_ns", *names):
        columns[DEVICE_PREFIX + name] = np.ma.masked_array(np.zeros(sum(counts), np.int64), mask=~present)
    at = 0
    for series, chosen in zip(ranks, phases, strict=True):
        rows = slice(at, at + len(series.steps))
        has = np.flatnonzero(present[rows]) + at
        for name in ("flags", "wall_ns"):
            np.ma.getdata(columns[DEVICE_PREFIX + name])[has] = series.device_steps[name].astype(np.int64)
        for slot, name in enumerate(chosen):
            if not name:
                continue
            columns[name][rows] = series.steps["phase_ns"][:, slot].astype(np.int64)
            on_device = series.device_steps["phase_ns"][:, slot].astype(np.int64)
            np.ma.getdata(columns[DEVICE_PREFIX + name])[has] = on_device
        at = rows.stop
    return columns


def steps_of_columns(
    columns: Mapping[str, NDArray[Any]], rows: slice, chosen: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """``steps`` and ``device_steps`` of one rank; a column that is missing is zero (or has no device times)."""
    count = rows.stop - rows.start
    steps = np.zeros(count, STEP_DTYPE)
    steps["kind"] = STEP
    for name in PLAIN:
        if name in columns:
            steps[name] = columns[name][rows]
    for slot in range(PHASE_SLOTS):
        if chosen[slot] in columns:
            steps["phase_ns"][:, slot] = columns[chosen[slot]][rows]
    wall = columns.get(DEVICE_PREFIX + "wall_ns")
    if wall is None:
        return steps, np.zeros(0, DEVICE_DTYPE)
    present = ~np.ma.getmaskarray(wall[rows])
    device = np.zeros(int(present.sum()), DEVICE_DTYPE)
    device["kind"] = DEVICE
    device["step"] = steps["step"][present]
    for name in ("flags", "wall_ns"):
        if DEVICE_PREFIX + name in columns:
            device[name] = np.ma.getdata(columns[DEVICE_PREFIX + name])[rows][present]
    for slot in range(PHASE_SLOTS):
        if DEVICE_PREFIX + chosen[slot] in columns:
            device["phase_ns"][:, slot] = np.ma.getdata(columns[DEVICE_PREFIX + chosen[slot]])[rows][present]
    return steps, device


def _free(name: str, used: set[str]) -> str:
    column, number = f"{name}_ns", 2
    while column.casefold() in used:
        column, number = f"{name}_{number}_ns", number + 1
    return column


def _joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
