"""What is wrong: findings, hangs, the whole summary, and what the ranks exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.hub.api.resource import Asked, Resource
from stepscope.hub.views.findings import findings_of
from stepscope.store.hangs import read_hangs
from stepscope.store.paths import hang_path

__all__ = ["RESOURCES"]


def _findings(asked: Asked) -> Mapping[str, Any]:
    return findings_of(asked.run)


async def _hangs(asked: Asked) -> Mapping[str, Any]:
    hangs, unread = await asyncio.to_thread(read_hangs, asked.run.path)
    rows = [{**hang.to_dict(), "file": hang_path(Path(), hang.host, hang.number).as_posix()} for hang in hangs]
    return {"hangs": rows, "unread": list(unread)}


async def _summary(asked: Asked) -> Mapping[str, Any]:
    return {"live": not asked.run.over, "summary": await asked.run.summary()}


async def _collectives(asked: Asked) -> Mapping[str, Any]:
    found = (await asked.run.summary()).get("communication")
    return {"groups": [], "groups_left_out": 0, **(found if isinstance(found, Mapping) else {})}


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/findings",
        about="The findings, the most severe first, each with price, evidence and advice; the verdict is the first.",
        answer=_findings,
    ),
    Resource(
        path="/api/v1/runs/{run}/hangs",
        about="The times that the job stood still, as each host saw them: culprits, victims, stacks, Flight Recorders. "
        "`/summary` has those of several hosts judged as one.",
        answer=_hangs,
    ),
    Resource(
        path="/api/v1/runs/{run}/summary",
        about="The document of summary.json (docs/schema.md); of a run that goes on, of its last steps.",
        answer=_summary,
    ),
    Resource(
        path="/api/v1/runs/{run}/collectives",
        about="What the ranks exchange, by process group: operations, bytes, exposed time, who is waited for.",
        answer=_collectives,
    ),
)
