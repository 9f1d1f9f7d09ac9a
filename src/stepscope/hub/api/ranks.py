"""The ranks: a table with sorting and pages, one rank over its steps, and the layers of a rank's model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.api.steps import FIRST, LAST, MEMORY, heat_map
from stepscope.hub.live.live_run import LiveRun
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import LayerRecords
from stepscope.records.paths import error_path, log_of_rank
from stepscope.records.text import host_in_name
from stepscope.reports.layers import choose_sample, layers_document, no_layers

__all__ = ["RESOURCES", "rank_series"]


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
        "device_ns": _device_series(live, rows, column, starts),
        "memory_bytes": {
            name: _most(planes.held[name][rows, column], starts) for name in MEMORY if name in planes.held
        },
        "start_wall_ns": _walls(live, column, planes.held["start_ns"][rows[starts], column]),
        "flags": np.bitwise_or.reduceat(planes.held["flags"][rows, column], starts).tolist()
        if "flags" in planes.held
        else [0] * len(starts),
    }
    return {"steps": steps, "past": _past(live, rank, first, last, bins)}


def _device_series(
    live: LiveRun, rows: NDArray[np.intp], column: int, starts: NDArray[np.intp]
) -> dict[str, list[int | None]]:
    """By phase, the mean over the timed steps of each bin; None where none was timed."""
    held = live.planes.held
    if "device" not in held:
        return {}
    timed = np.add.reduceat(held["device"][rows, column], starts, dtype=np.float64)
    found: dict[str, list[int | None]] = {}
    for name in sorted(held):
        if name.startswith("device:"):
            sums = np.add.reduceat(held[name][rows, column].astype(np.float64), starts).tolist()
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


def _ranks(asked: Asked) -> Mapping[str, Any]:
    live, values = asked.run.live, asked.values
    orders = ("rank", "work", "wall", *live.used_phases(), *(f"device:{name}" for name in live.device_means()))
    if values["order"] not in orders:
        raise ApiError(400, f"order must be one of {', '.join(orders)}")
    chosen = values["ranks"]
    if chosen is not None and chosen[1] - chosen[0] >= MOST_RANKS:
        raise ApiError(400, f"at most {MOST_RANKS} ranks at a time")
    numbers = None if chosen is None else range(chosen[0], chosen[1] + 1)
    found = live.ranks(first=values["start"], limit=values["limit"], order=values["order"], chosen=numbers)
    return {"start": values["start"], "order": values["order"], **found}


def _rank(asked: Asked) -> Mapping[str, Any]:
    live = asked.run.live
    said = asked.request.path_params["rank"]
    rank = int(said) if said.isascii() and said.isdecimal() and len(said) <= 10 else LARGEST_RANK
    column = column_of(live, rank)
    if column is None:
        raise ApiError(404, "there is no such rank")
    ring = int(live.ring_of[column])
    row = live.ranks(limit=1, chosen=(rank,))
    first, last, bins = (asked.values[name] for name in ("first", "last", "bins"))
    return {
        "rank": rank,
        "attempt": live.registry.attempt,
        "identity": asdict(live.registry.identity(ring)),
        "now": {name: values[0] for name, values in row.items() if isinstance(values, list) and values},
        "mean_ns": {name: values[0] for name, values in row["mean_ns"].items()},
        "device_mean_ns": {name: values[0] for name, values in row["device_mean_ns"].items()},
        "facts": live.registry.facts(ring),
        **_files_of(asked.run.path, live.registry.identity(ring), int(live.registry.of["restarts"][ring])),
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


async def _layers(asked: Asked) -> Mapping[str, Any]:
    records, values = await asked.run.layers(), asked.values
    return await asyncio.to_thread(_layers_of, records, values["rank"], values["step"], values["modules"])


def _layers_of(records: LayerRecords, rank: int | None, step: int | None, modules: int) -> Mapping[str, Any]:
    if not records:
        return no_layers()
    sample = choose_sample(records, rank=rank, step=step)
    if sample is None:
        raise ApiError(404, "there are no layer samples of this rank")
    return layers_document(records, sample, most=modules)


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/ranks",
        about="The ranks of the last attempt, as columns: identity, host, and means over the last steady steps.",
        answer=_ranks,
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
        answer=_layers,
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
