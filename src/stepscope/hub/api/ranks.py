"""The ranks: a table that can be sorted and turned page by page, and one of them in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepscope.hub.api.answers import ApiError
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.steps import FIRST, LAST
from stepscope.hub.views.rank_series import column_of, rank_series
from stepscope.records.identity import RankIdentity
from stepscope.records.naming import host_in_name
from stepscope.records.places import error_path, log_of_rank

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
    return {
        "rank": rank,
        "attempt": live.registry.attempt,
        "identity": asdict(live.registry.identity(ring)),
        "now": {name: values[0] for name, values in row.items() if isinstance(values, list) and values},
        "mean_ns": {name: values[0] for name, values in row["mean_ns"].items()},
        "facts": live.registry.facts(ring),
        **_files_of(asked.run.path, live.registry.identity(ring), int(live.registry.of["restarts"][ring])),
        **rank_series(live, rank, first, last, bins),
    }


def _files_of(run_dir: Path, who: RankIdentity, restarts: int) -> dict[str, str | None]:
    """Below ``files/``: what it printed, and the exception that ended it; None: there is no such file.

    ``restarts``: as its launcher counted, after which logs are named.
    """
    sent = error_path(run_dir, who.pid)
    errors = (sent.with_name(f"{host_in_name(who.host)}-{who.pid}.json"), sent)
    log = log_of_rank(run_dir, rank=who.rank, attempt=restarts)
    found = {"log": log if log.exists() else None, "error": next((path for path in errors if path.exists()), None)}
    return {name: None if path is None else path.relative_to(run_dir).as_posix() for name, path in found.items()}


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
