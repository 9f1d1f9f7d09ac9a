"""Steps over all ranks, binned; the map rank × step, in as many cells as fit on a screen; and the ranks.

The map is JSON or bytes. Ranks: a table with sorting and pages, one rank over its steps, the layers of its model.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import ApiError, Body
from stepscope.hub.live.digests import sampled_rows
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.hub.open_run import OpenRun
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import LayerRecords
from stepscope.records.paths import error_path, log_of_rank
from stepscope.records.text import host_in_name
from stepscope.reports.event_text import rank_state_text
from stepscope.reports.evidence_text import facts_sections
from stepscope.reports.layers import choose_sample, layers_document, no_layers

__all__ = [
    "FIRST",
    "HEAT_HEAD",
    "HEAT_TYPE",
    "LAST",
    "MOST_BINS",
    "RANK_RESOURCES",
    "RESOURCES",
    "HeatMap",
    "Statistic",
    "heat_map",
    "metrics_document",
    "pack_heat",
    "rank_document",
    "rank_series",
    "ranks_document",
    "sampled_layers",
    "steps_document",
]

# -- heat map ---------------------------------------------------------------------------------------------------------
# A part of the map rank × step, in as many cells as fit on a screen.
#
# While the model has the steps individually (the window, or a whole finished run that fits) any phase can be drawn,
# and a single slow step stands out.  Further back there are bins of steps with the mean of work and length.  No cell
# splits a rank or a bin.
#
# A map of ten thousand ranks is millions of figures: they are read in slices, never individually by index.

Floats = NDArray[np.float32]
Statistic = Literal["max", "mean"]
MEMORY = ("allocated", "reserved", "peak_allocated")
DEVICE = "device:"
"""Prefix of a phase: its time on the device, known for the steps that were timed there."""
ON_DEVICE = (f"{DEVICE}work", f"{DEVICE}wall")
"""The whole step on the device, and the same without waiting for others: sums over its phases."""
HEAT_HEAD = struct.Struct("<4sHHII")
HEAT_MAGIC = b"STHM"
HEAT_VERSION = 1


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
    """[R, C]; nan where unknown."""
    exact: bool
    """Whether it is based on single steps, not bins of them."""
    known_from: int
    """The first step for which the model can have this value; the requested range may begin before it."""


def heat_map(
    live: LiveRun,
    value: str,
    statistic: Statistic,
    ranks: tuple[int, int] | None,
    steps: tuple[int, int | None],
    shape: tuple[int, int],
) -> HeatMap | None:
    """None: the model has no such value.  ``steps``: first and last; ``shape``: the largest number of cells."""
    shown = live.registry.of["shown"][live.ring_of].astype(np.int64)
    order = np.argsort(shown, kind="stable")
    if ranks is not None:
        order = order[(shown[order] >= ranks[0]) & (shown[order] <= ranks[1])]
    newest = live.planes.newest
    first, last = max(0, steps[0]), newest if steps[1] is None else min(steps[1], newest)
    exact, known_from = live.planes.stride == 1 and first >= live.planes.oldest, 0
    if value in ("work", "wall"):
        found = _of_planes(live, value, order, first, last) if exact else _of_bins(live, value, order, first, last)
    elif _plane_of(value) in live.planes.arrays or (value in ON_DEVICE and "device" in live.planes.arrays):
        exact, known_from = True, live.planes.oldest
        found = _of_planes(live, value, order, max(first, live.planes.oldest), last)
    else:
        return None
    plane, from_step, to_step = found
    tall, wide = _size(len(order), shape[0]), _size(plane.shape[1], shape[1])
    row_starts, column_starts = np.arange(0, len(order), tall), np.arange(0, plane.shape[1], wide)
    cells = _reduced(_reduced(plane, tall, statistic).T, wide, statistic).T
    return HeatMap(
        value=value,
        unit="bytes" if value in MEMORY else "ns",
        first_ranks=shown[order[row_starts]],
        last_ranks=shown[order[_ends(row_starts, len(order))]],
        first_steps=from_step[column_starts],
        last_steps=to_step[_ends(column_starts, len(to_step))],
        cells=cells,
        exact=exact,
        known_from=known_from,
    )


def pack_heat(heat: HeatMap) -> bytes:
    """Encode a map, little endian:

    0    4s   magic  b"STHM"
    4    u16  version
    6    u16  1 if based on single steps
    8    u32  R, rows of ranks
    12   u32  C, columns of steps
    16   ...  first_ranks, last_ranks  2 x R x u32;  first_steps, last_steps  2 x C x u32
         ...  R x C x f32, row by row; nan where unknown
    """
    rows, columns = heat.cells.shape
    edges = (heat.first_ranks, heat.last_ranks, heat.first_steps, heat.last_steps)
    numbers = [np.minimum(edge, 0xFFFFFFFF).astype("<u4").tobytes() for edge in edges]
    head = HEAT_HEAD.pack(HEAT_MAGIC, HEAT_VERSION, int(heat.exact), rows, columns)
    return b"".join((head, *numbers, heat.cells.astype("<f4").tobytes()))


def _of_planes(
    live: LiveRun, value: str, order: NDArray[np.intp], first: int, last: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """[rank, step], and the steps."""
    planes = live.planes
    kept = planes.complete()
    kept = kept[(kept >= first) & (kept <= last)]
    name = _plane_of(value)
    rows = planes.row_of(kept)
    if value in ON_DEVICE:
        parts = [own for own in planes.arrays if own.startswith(DEVICE) and own != _skipped(value)]
        plane = np.zeros((len(rows), len(order)), np.float32)
        for part in parts:
            plane += _picked(planes.arrays[part], rows, order)
    elif name in planes.arrays:
        plane = _picked(planes.arrays[name], rows, order)
    else:
        return np.zeros((len(order), 0), np.float32), kept[:0], kept[:0]
    if value == "work" and "phase:comm" in planes.arrays:
        plane = plane - _picked(planes.arrays["phase:comm"], rows, order)
    there = _picked(planes.arrays["device"] if name.startswith(DEVICE) else planes.have, rows, order)
    if value in MEMORY:
        there = there & (plane > 0)  # 0: not sampled in that step
    else:
        shown = _unsampled(planes, rows)
        plane, there = plane[shown], there[shown]
    if not there.all():
        plane = np.where(there, plane, np.float32(np.nan))
    return plane.T, kept, kept


def _unsampled(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of these steps, which to show: itself or, if it was sampled and so took longer, the one before it."""
    plain = np.flatnonzero(~sampled_rows(planes, rows))
    if not len(plain):
        return np.arange(len(rows))
    return plain[np.maximum(np.searchsorted(plain, np.arange(len(rows)), side="right") - 1, 0)]


def _skipped(value: str) -> str:
    """Return the phase that does not count as work."""
    return f"{DEVICE}comm" if value == f"{DEVICE}work" else ""


def _plane_of(value: str) -> str:
    """Return the name of the plane."""
    if value in ("work", "wall"):
        return "wall_ns"
    return value if value in MEMORY or value.startswith(DEVICE) else f"phase:{value}"


def _picked(plane: NDArray[Any], rows: NDArray[np.intp], order: NDArray[np.intp]) -> NDArray[Any]:
    """[step, rank]; usually the columns are consecutive, and whole pieces of rows are copied."""
    if len(order) and (np.diff(order) == 1).all():
        return plane[:, order[0] : order[-1] + 1][rows]
    return np.take(plane[rows], order, axis=1)


def _of_bins(
    live: LiveRun, value: str, order: NDArray[np.intp], first: int, last: int
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    held, span = live.map, live.map.span
    bins = np.arange(first // span, min(max(last, -1) // span + 1, held.bins), dtype=np.int64)
    seen = slice(first // span, first // span + len(bins))
    count = held.count[:, seen][order].astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (held.wall_ns if value == "wall" else held.work_ns)[:, seen][order] / count
    if not count.all():
        means[count == 0] = np.nan
    return means, bins * span, np.minimum(bins * span + span - 1, live.planes.newest)


def _size(count: int, most: int) -> int:
    """Return the size of each cell, for at most ``most`` cells."""
    return max(1, -(-count // max(1, most)))


def _ends(starts: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    return np.append(starts[1:], count) - 1 if len(starts) else starts


def _reduced(plane: Floats, size: int, statistic: Statistic) -> Floats:
    """Reduce each ``size`` neighbors along the first axis to one; the last group may be smaller."""
    if size == 1:
        return plane
    whole = len(plane) // size
    groups = plane[: whole * size].reshape(whole, size, plane.shape[1])
    parts = [_of_groups(groups, statistic)]
    if whole * size < len(plane):
        parts.append(_of_groups(plane[None, whole * size :], statistic))
    return np.concatenate(parts)


def _of_groups(groups: Floats, statistic: Statistic) -> Floats:
    if statistic == "max":
        highest: Floats = np.fmax.reduce(groups, axis=1)
        return highest
    known = ~np.isnan(groups)
    total = np.add.reduce(np.where(known, groups, np.float32(0)), axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (total / np.add.reduce(known, axis=1, dtype=np.int32)).astype(np.float32)
    return mean


# -- resources --------------------------------------------------------------------------------------------------------

MOST_BINS = 4096
MOST_ROWS = 2048
MOST_CELLS = 1 << 20
HEAT_TYPE = "application/vnd.stepscope.heat"
FIRST = Parameter(name="first", about="first step", default=0)
LAST = Parameter(name="last", about="last step; default: the newest")


def steps_document(
    run: OpenRun, *, first: int = 0, last: int | None = None, bins: int = 512, worst: int = 4
) -> dict[str, Any]:
    found = run.live.steps(first, last, bins=bins)
    found["worst"] = [rows[:worst] for rows in found["worst"]]
    return {"attempt": run.live.registry.attempt, **found}


async def _heat(query: Query) -> Mapping[str, Any] | Body:
    values = query.values
    shape = values["rank_bins"], values["step_bins"]
    if shape[0] * shape[1] > MOST_CELLS:
        raise ApiError(400, f"rank_bins times step_bins must be at most {MOST_CELLS}")
    live = query.run.live
    steps = values["first"], values["last"]
    heat = heat_map(live, values["value"], values["stat"], values["ranks"], steps, shape)
    if heat is None:
        known = ", ".join(("work", "wall", *live.used_phases()))
        raise ApiError(
            400,
            f"value must be one of {known}, or allocated, reserved, peak_allocated where devices were sampled, or "
            "device:work, device:wall, device:PHASE where they were timed",
        )
    if query.accepts(HEAT_TYPE):
        headers = {
            "X-Stepscope-Value": "memory" if heat.unit == "bytes" else "time",
            "X-Stepscope-Unit": heat.unit,
            "X-Stepscope-Known-From": str(heat.known_from),
        }
        return Body(data=await asyncio.to_thread(pack_heat, heat), media_type=HEAT_TYPE, headers=headers)
    return {
        "attempt": live.registry.attempt,
        "value": heat.value,
        "unit": heat.unit,
        "stat": values["stat"],
        "exact": heat.exact,
        "known_from": heat.known_from,
        "first_ranks": heat.first_ranks.tolist(),
        "last_ranks": heat.last_ranks.tolist(),
        "first_steps": heat.first_steps.tolist(),
        "last_steps": heat.last_steps.tolist(),
        "cells": await asyncio.to_thread(_numbers, heat),
    }


def _numbers(heat: HeatMap) -> list[list[int | None]]:
    return [[None if value != value else round(value) for value in row] for row in heat.cells.tolist()]


def metrics_document(run: OpenRun, *, first: int = 0, last: int | None = None, bins: int = 512) -> dict[str, Any]:
    live = run.live
    last = max(0, live.planes.newest) if last is None else last
    rates = _throughput(run.throughput(), first, last, bins)
    return {"metrics": [*live.noted.curves(first, last, bins), *rates], "left_out": len(live.noted.left_out)}


LARGEST = 1e300
RATE_NAMES = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "tflops": "TFLOP/s per device",
    "mfu": "MFU",
}


def _throughput(table: Mapping[str, Any], first: int, last: int, bins: int) -> Iterator[dict[str, Any]]:
    """The curves in the table of a summary, which may be from anywhere, in the form of ``Noted.curves``."""
    curve = table.get("curve")
    columns = {name: one for name, one in curve.items() if isinstance(one, list)} if isinstance(curve, Mapping) else {}
    for key, name in RATE_NAMES.items():
        if key not in table:
            continue
        pairs = zip(columns.get("step", ()), columns.get(key, ()), strict=False)
        known = [(at, one) for at, one in pairs if type(at) is int and type(one) in (int, float)]
        inside = [(at, one) for at, one in known if first <= at <= last and abs(one) < LARGEST]
        size = max(1, -(-len(inside) // max(1, bins)))
        groups = [inside[at : at + size] for at in range(0, len(inside), size)]
        if groups:
            means = [sum(one for _, one in group) / len(group) for group in groups]
            yield {"name": name, "step": [group[0][0] for group in groups], "value": means}


BINS = Parameter(name="bins", about="maximum number of bins", default=512, least=1, most=MOST_BINS)

RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/metrics",
        about="The numbers that the script gave to `stepscope.note()`, and the throughput, over steps.",
        answer=lambda query: metrics_document(query.run, **query.values),
        parameters=(
            FIRST,
            LAST,
            BINS,
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/steps",
        about="Steps across all ranks: quantiles of duration, work and each phase, worst ranks, device memory, start.",
        answer=lambda query: steps_document(query.run, **query.values),
        parameters=(
            FIRST,
            LAST,
            BINS,
            Parameter(name="worst", about="worst ranks per bin", default=4, most=16),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/heat",
        about=f"The rank × step heat map. Accept: {HEAT_TYPE} returns binary data (docs/api.md).",
        answer=_heat,
        parameters=(
            Parameter(
                name="value",
                about="work, wall, a phase, each with device: before it, or a memory value",
                kind="text",
                default="work",
            ),
            Parameter(name="stat", about="statistic per cell", kind="choice", default="max", choices=("max", "mean")),
            Parameter(name="ranks", about="FIRST-LAST; default: all", kind="span", most=(1 << 31) - 1),
            FIRST,
            LAST,
            Parameter(name="rank_bins", about="maximum number of rows", default=256, least=1, most=MOST_ROWS),
            Parameter(name="step_bins", about="maximum number of columns", default=512, least=1, most=MOST_BINS),
        ),
        media_types=("application/json", HEAT_TYPE),
    ),
)


# -- rank series ------------------------------------------------------------------------------------------------------
# One rank over its steps: phases and memory for steps kept individually, mean work for the others.


def column_of(live: LiveRun, rank: int) -> int | None:
    """Return the column in the last attempt; None: there is no such rank, or it has made no step yet."""
    found = np.flatnonzero(live.registry.of["shown"][live.ring_of] == rank)
    return int(found[0]) if len(found) else None


def rank_series(live: LiveRun, rank: int, first: int, last: int | None, bins: int) -> dict[str, Any]:
    """Return ``steps``: single, or means of neighbors if there are more than ``bins``; and ``past``: the whole run."""
    column = column_of(live, rank)
    planes = live.planes
    kept = planes.complete()
    kept = kept[(kept >= first) & (kept <= (planes.newest if last is None else last))]
    rows = planes.row_of(kept)
    if column is not None and len(rows):
        there = planes.have[rows, column]
        kept, rows = kept[there], rows[there]
        plain = ~sampled_rows(planes, rows)
        if plain.any():  # a sampled step took longer than it would have
            kept, rows = kept[plain], rows[plain]
    if column is None or not len(rows):
        return {"steps": _empty(live), "past": _past(live, rank, first, last, bins)}
    starts = np.arange(0, len(rows), max(1, -(-len(rows) // bins)))
    counts = np.diff(np.append(starts, len(rows)))

    def mean(name: str) -> list[int]:
        values = planes.arrays[name][rows, column].astype(np.float64)
        return [round(value) for value in (np.add.reduceat(values, starts) / counts).tolist()]

    steps: dict[str, Any] = {
        "first": kept[starts].tolist(),
        "last": kept[np.append(starts[1:], len(rows)) - 1].tolist(),
        "wall_ns": mean("wall_ns"),
        "phase_ns": {name: mean(f"phase:{name}") for name in live.used_phases()},
        "device_ns": _device_series(live, rows, column, starts),
        "memory_bytes": {
            name: _most(planes.arrays[name][rows, column], starts) for name in MEMORY if name in planes.arrays
        },
        "start_wall_ns": _walls(live, column, planes.arrays["start_ns"][rows[starts], column]),
        "flags": np.bitwise_or.reduceat(planes.arrays["flags"][rows, column], starts).tolist()
        if "flags" in planes.arrays
        else [0] * len(starts),
    }
    return {"steps": steps, "past": _past(live, rank, first, last, bins)}


def _device_series(
    live: LiveRun, rows: NDArray[np.intp], column: int, starts: NDArray[np.intp]
) -> dict[str, list[int | None]]:
    """By phase, the mean over the timed steps of each bin; None where none was timed."""
    arrays = live.planes.arrays
    if "device" not in arrays:
        return {}
    timed = np.add.reduceat(arrays["device"][rows, column], starts, dtype=np.float64)
    found: dict[str, list[int | None]] = {}
    for name in sorted(arrays):
        if name.startswith("device:"):
            sums = np.add.reduceat(arrays[name][rows, column].astype(np.float64), starts).tolist()
            found[name.partition(":")[2]] = [
                round(total / count) if count else None for total, count in zip(sums, timed.tolist(), strict=True)
            ]
    return found


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
    """Return the maximum of each bin; 0 means not sampled."""
    return [round(level) or None for level in np.maximum.reduceat(levels, starts).tolist()]


def _nullable(values: NDArray[np.float32]) -> list[int | None]:
    return [None if value != value else round(value) for value in values.tolist()]


# -- resources --------------------------------------------------------------------------------------------------------

MOST_RANKS = 10_000
MOST_MODULES = 1000
LARGEST_RANK = (1 << 31) - 1


def ranks_document(
    run: OpenRun,
    *,
    start: int = 0,
    limit: int = 1000,
    order: str = "rank",
    ranks: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """``ranks``: first and last."""
    live = run.live
    orders = ("rank", "work", "wall", *live.used_phases(), *(f"device:{name}" for name in live.device_means()))
    if order not in orders:
        raise ApiError(400, f"order must be one of {', '.join(orders)}")
    if ranks is not None and ranks[1] - ranks[0] >= MOST_RANKS:
        raise ApiError(400, f"at most {MOST_RANKS} ranks at a time")
    numbers = None if ranks is None else range(ranks[0], ranks[1] + 1)
    found = live.ranks(first=start, limit=limit, order=order, chosen=numbers)
    return {"start": start, "order": order, **found, "hang_state": found["standing"]}


def _rank(query: Query) -> Mapping[str, Any]:
    text = query.request.path_params["rank"]
    rank = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else LARGEST_RANK
    return rank_document(query.run, rank, **query.values)


def rank_document(
    run: OpenRun, rank: int, *, first: int = 0, last: int | None = None, bins: int = 512
) -> dict[str, Any]:
    live = run.live
    column = column_of(live, rank)
    if column is None:
        raise ApiError(404, "there is no such rank")
    ring = int(live.ring_of[column])
    row = live.ranks(limit=1, chosen=(rank,))
    row["hang_state"] = row["standing"]
    return {
        "rank": rank,
        "attempt": live.registry.attempt,
        "identity": asdict(live.registry.identity(ring)),
        "now": {name: values[0] for name, values in row.items() if isinstance(values, list) and values},
        "mean_ns": {name: values[0] for name, values in row["mean_ns"].items()},
        "device_mean_ns": {name: values[0] for name, values in row["device_mean_ns"].items()},
        "state_text": rank_state_text(str(row["state"][0]) if row["state"] else ""),
        "facts": live.registry.facts(ring),
        "facts_text": facts_sections(live.registry.facts(ring)),
        **_files_of(run.path, live.registry.identity(ring), int(live.registry.of["restarts"][ring])),
        **rank_series(live, rank, first, last, bins),
    }


def _files_of(run_dir: Path, who: RankIdentity, restarts: int) -> dict[str, str | None]:
    """Return paths below ``files/``: its output, and the exception that ended it; None: the file does not exist.

    ``restarts``: as its launcher counted; logs are named by it.
    """
    sent = error_path(run_dir, who.pid)
    errors = (sent.with_name(f"{host_in_name(who.host)}-{who.pid}.json"), sent)
    log = log_of_rank(run_dir, rank=who.rank, attempt=restarts)
    found = {"log": log if log.exists() else None, "error": next((path for path in errors if path.exists()), None)}
    return {name: None if path is None else path.relative_to(run_dir).as_posix() for name, path in found.items()}


async def sampled_layers(
    run: OpenRun, *, rank: int | None = None, step: int | None = None, modules: int = MOST_MODULES
) -> dict[str, Any]:
    return await asyncio.to_thread(_layers_of, await run.layers(), rank, step, modules)


def _layers_of(records: LayerRecords, rank: int | None, step: int | None, modules: int) -> dict[str, Any]:
    if not records:
        return no_layers()
    sample = choose_sample(records, rank=rank, step=step)
    if sample is None:
        raise ApiError(404, "there are no layer samples of this rank")
    return layers_document(records, sample, most=modules)


RANK_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/ranks",
        about="The ranks of the last attempt, as columns: identity, host, and means over the last steady steps.",
        answer=lambda query: ranks_document(query.run, **query.values),
        parameters=(
            Parameter(name="start", about="how many to skip", default=0),
            Parameter(name="limit", about="maximum number", default=1000, least=1, most=MOST_RANKS),
            Parameter(
                name="order",
                about="rank; or work, wall or a phase, longest first; device:work …: by the time on the device",
                kind="text",
                default="rank",
            ),
            Parameter(name="ranks", about="FIRST-LAST; default: all", kind="span", most=LARGEST_RANK),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/ranks/{rank}",
        about="A rank: its identity, its current state, its steps.",
        answer=_rank,
        parameters=(
            FIRST,
            LAST,
            Parameter(name="bins", about="maximum number of bins", default=512, least=1, most=4096),
        ),
        path_parameters={"rank": "rank number"},
    ),
    Resource(
        path="/api/v1/runs/{run}/layers",
        about="Memory, time and gradients by module, of one rank in a sampled step (docs/schema.md).",
        answer=lambda query: sampled_layers(query.run, **query.values),
        parameters=(
            Parameter(name="rank", about="default: the rank that holds most", most=LARGEST_RANK),
            Parameter(name="step", about="the last sample up to this step, or else the first; default: the last one"),
            Parameter(
                name="modules",
                about="maximum number; the smallest others are counted in the modules that contain them",
                default=MOST_MODULES,
                least=1,
                most=MOST_MODULES,
            ),
        ),
    ),
)
