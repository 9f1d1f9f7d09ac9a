"""Which runs there are, and everything about one of them that fits on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.hub.api.readers import ONLY_RUN
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.views.findings import findings_of, status_of

__all__ = ["RESOURCES"]

MOST_LISTED = 1000
_HIDDEN = ("path",)
"""Of a list: where the folder lies is nobody's business."""


async def _list(asked: Asked) -> Mapping[str, Any]:
    entries = await asked.runs.entries()
    only = asked.request.scope.get("state", {}).get(ONLY_RUN)
    if only is not None:
        entries = [entry for entry in entries if entry.path.name == only]
    first, limit = asked.values["first"], asked.values["limit"]
    chosen = entries[first : first + limit]
    open_now = {run.name: findings_of(run)["verdict"] for run in asked.runs.live() if not run.over}
    rows = [
        {
            "id": entry.path.name,
            **{key: value for key, value in entry.to_dict().items() if key not in _HIDDEN},
            **_found(open_now.get(entry.path.name)),
        }
        for entry in chosen
    ]
    return {"total": len(entries), "runs": rows}


def _found(verdict: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Of a run that is followed here; of others only what is written down is known."""
    return {} if verdict is None else {"verdict": verdict["title"], "severity": verdict["severity"]}


def _one(asked: Asked) -> Mapping[str, Any]:
    run = asked.run
    found = findings_of(run)
    return {
        "id": run.name,
        "name": run.meta().get("name", run.name),
        **status_of(run),
        "context": run.context(),
        "verdict": found["verdict"],
        "info": run.live.info(),
    }


RESOURCES = (
    Resource(
        path="/api/v1/runs",
        about="The runs of this hub, newest first.",
        answer=_list,
        parameters=(
            Parameter(name="first", about="how many to pass over", default=0),
            Parameter(name="limit", about="how many at most", default=MOST_LISTED, least=1, most=MOST_LISTED),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}",
        about="A run: how it stands, its context (command, git, environment), its verdict.",
        answer=_one,
    ),
)
