"""What is wrong: findings, hangs, the whole summary, and what the ranks exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.hangs.tense import told_of
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.views.findings import findings_of
from stepscope.reports.hangs import listed_steps
from stepscope.store.hangs import read_records
from stepscope.store.paths import hang_path

__all__ = ["RESOURCES"]


def _findings(asked: Asked) -> Mapping[str, Any]:
    return findings_of(asked.run)


async def _hangs(asked: Asked) -> Mapping[str, Any]:
    # To judge them together takes what a summary takes: not asked for while there is nothing to judge.
    there, unread = await asyncio.to_thread(read_records, asked.run.path)
    hangs = await asked.run.hangs() if there else ()
    rows = [
        {
            **told_of(hang, over=asked.run.over).to_dict(),
            "steps": listed_steps(hang),
            "file": hang_path(Path(), hang.host, hang.number).as_posix(),
        }
        for hang in hangs
    ]
    return {"hangs": rows, "unread": list(unread)}


async def _summary(asked: Asked) -> Mapping[str, Any]:
    whole, wanted = await asked.run.summary(), asked.values["keys"]
    chosen = {key: whole[key] for key in whole if key in wanted} if wanted else whole
    return {"live": asked.run.document is None, "summary": chosen}


async def _collectives(asked: Asked) -> Mapping[str, Any]:
    found = (await asked.run.summary()).get("communication")
    return {"measured": None, "groups": [], "groups_left_out": 0, **(found if isinstance(found, Mapping) else {})}


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/findings",
        about="The findings, the most severe first, each with price, evidence and advice; the verdict is the first.",
        answer=_findings,
    ),
    Resource(
        path="/api/v1/runs/{run}/hangs",
        about="The times that the job stood still: culprits, victims, stacks, what the Flight Recorders knew. Those "
        "that several hosts saw are judged as one, as in `/summary`; `parts` has what each of them said.",
        answer=_hangs,
    ),
    Resource(
        path="/api/v1/runs/{run}/summary",
        about="The document of summary.json (docs/schema.md); of a run that goes on, of its last steps.",
        answer=_summary,
        parameters=(
            Parameter(name="keys", about="only these, divided by commas; all if it is not given", kind="texts"),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/collectives",
        about="What the ranks exchange, by process group: operations, bytes, exposed time, who is waited for.",
        answer=_collectives,
    ),
)
