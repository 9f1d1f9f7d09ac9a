"""The ranks: a table that can be sorted and turned page by page, and one of them in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stepscope.hub.api.answers import ApiError
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.steps import FIRST, LAST
from stepscope.hub.views.rank_series import column_of, rank_series
from stepscope.records.places import log_path

__all__ = ["RESOURCES"]

MOST_RANKS = 10_000
LARGEST_RANK = (1 << 31) - 1


def _ranks(asked: Asked) -> Mapping[str, Any]:
    live, values = asked.run.live, asked.values
    orders = ("rank", "work", "wall", *live.used_phases())
    if values["order"] not in orders:
        raise ApiError(400, f"order is one of {', '.join(orders)}")
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
    attempt = live.registry.attempt
    return {
        "rank": rank,
        "attempt": attempt,
        "identity": asdict(live.registry.identity(ring)),
        "now": {name: values[0] for name, values in row.items() if isinstance(values, list) and values},
        "mean_ns": {name: values[0] for name, values in row["mean_ns"].items()},
        "facts": live.registry.facts(ring),
        "log": log_path(asked.run.path, rank=rank, attempt=attempt).relative_to(asked.run.path).as_posix(),
        **rank_series(live, rank, first, last, bins),
    }


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/ranks",
        about="The ranks of the last attempt, as columns: who and where each is, and its means over the last steps.",
        answer=_ranks,
        parameters=(
            Parameter(name="start", about="how many to pass over", default=0),
            Parameter(name="limit", about="how many at most", default=1000, least=1, most=MOST_RANKS),
            Parameter(
                name="order", about="rank; or work, wall or a phase, the longest first", kind="text", default="rank"
            ),
            Parameter(name="ranks", about="FIRST-LAST; all if it is not given", kind="span", most=LARGEST_RANK),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/ranks/{rank}",
        about="A rank: who it is, what it does now, its steps.",
        answer=_rank,
        parameters=(FIRST, LAST, Parameter(name="bins", about="at most so many", default=512, least=1, most=4096)),
        path_parameters={"rank": "its number"},
    ),
)
