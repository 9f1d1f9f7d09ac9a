"""Steps over all ranks, binned; and the map rank × step, as JSON or as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from stepscope.hub.api.answers import ApiError, Body
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.views.heat_map import HeatMap, heat_map, pack_heat

__all__ = ["FIRST", "HEAT_TYPE", "LAST", "MOST_BINS", "RESOURCES"]

MOST_BINS = 4096
MOST_ROWS = 2048
MOST_CELLS = 1 << 20
HEAT_TYPE = "application/vnd.stepscope.heat"
FIRST = Parameter(name="first", about="first step", default=0)
LAST = Parameter(name="last", about="last step; the newest if it is not given")


def _steps(asked: Asked) -> Mapping[str, Any]:
    first, last, bins, worst = (asked.values[name] for name in ("first", "last", "bins", "worst"))
    found = asked.run.live.steps(first, last, bins=bins)
    found["worst"] = [rows[:worst] for rows in found["worst"]]
    return {"attempt": asked.run.live.registry.attempt, **found}


async def _heat(asked: Asked) -> Mapping[str, Any] | Body:
    values = asked.values
    shape = values["rank_bins"], values["step_bins"]
    if shape[0] * shape[1] > MOST_CELLS:
        raise ApiError(400, f"rank_bins times step_bins is at most {MOST_CELLS}")
    live = asked.run.live
    steps = values["first"], values["last"]
    heat = heat_map(live, values["value"], values["stat"], values["ranks"], steps, shape)
    if heat is None:
        known = ", ".join(("work", "wall", *live.used_phases()))
        raise ApiError(
            400,
            f"value is one of {known}, or allocated, reserved, peak_allocated where devices were sampled, or "
            "device:PHASE where they were timed",
        )
    if asked.accepts(HEAT_TYPE):
        said = {
            "X-Stepscope-Value": "memory" if heat.unit == "bytes" else "time",
            "X-Stepscope-Unit": heat.unit,
            "X-Stepscope-Known-From": str(heat.known_from),
        }
        return Body(data=await asyncio.to_thread(pack_heat, heat), media_type=HEAT_TYPE, headers=said)
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


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/steps",
        about="Steps over all ranks: length, work and each phase as quantiles, the worst ranks, device memory, when.",
        answer=_steps,
        parameters=(
            FIRST,
            LAST,
            Parameter(name="bins", about="at most so many", default=512, least=1, most=MOST_BINS),
            Parameter(name="worst", about="ranks told of each bin", default=4, most=16),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/heat",
        about=f"The map rank × step. Accept: {HEAT_TYPE} gives bytes (docs/api.md).",
        answer=_heat,
        parameters=(
            Parameter(
                name="value",
                about="work, wall, a phase, device:PHASE, or a level of memory",
                kind="text",
                default="work",
            ),
            Parameter(name="stat", about="of a cell", kind="choice", default="max", choices=("max", "mean")),
            Parameter(name="ranks", about="FIRST-LAST; all if it is not given", kind="span", most=(1 << 31) - 1),
            FIRST,
            LAST,
            Parameter(name="rank_bins", about="rows at most", default=256, least=1, most=MOST_ROWS),
            Parameter(name="step_bins", about="columns at most", default=512, least=1, most=MOST_BINS),
        ),
        media_types=("application/json", HEAT_TYPE),
    ),
)
