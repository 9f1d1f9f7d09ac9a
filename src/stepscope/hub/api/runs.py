"""The runs, and everything about one that fits on a page: status, verdict, findings, hangs, summary, collectives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.hangs.report import told_of
from stepscope.hub.api.auth import ONLY_RUN
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.runs import OpenRun
from stepscope.reports.layout import finding_price
from stepscope.reports.sections import listed_steps
from stepscope.store.live.failures import read_hang_records
from stepscope.store.paths import hang_path

__all__ = ["FINDING_RESOURCES", "RUN_RESOURCES", "findings_of", "status_of"]


# -- findings and status ----------------------------------------------------------------------------------------------
# From the last evaluation of the rules while the run is active, afterwards from its summary.

_VERDICT = ("kind", "severity", "title", "ranks", "phase", "advice", "confidence")
_KEPT = (
    "attempt",
    "world_size",
    "ranks",
    "live_ranks",
    "still_ranks",
    "states",
    "step",
    "newest_step",
    "phases",
    "clock",
)


def findings_of(run: OpenRun) -> dict[str, Any]:
    """Return the findings.  ``verdict``: the first in short, with its price; null while there are no findings."""
    if run.document is not None:
        found = run.document.get("findings")
        return {"live": False, "verdict": run.document.get("verdict"), "findings": found or []}
    said = run.live.findings()
    findings = said.pop("findings")
    judged = {} if said["step"] is None else {"judged": said}
    return {"live": True, "verdict": _verdict(findings[0]) if findings else None, "findings": findings, **judged}


def status_of(run: OpenRun) -> dict[str, Any]:
    """Return the status of a run.  ``status_text``: as ``stepscope list`` shows it."""
    info = run.live.info()
    text, severity = run.status_text(hung=bool(info["still_ranks"]))
    words = {"status": run.status(), "status_text": text, "status_severity": severity}
    standing = {**words, "over": run.over, "leaving": run.leaving, "ended_wall_ns": run.ended_wall_ns()}
    return {**standing, **{name: info[name] for name in _KEPT}}


def _verdict(finding: Mapping[str, Any]) -> dict[str, Any]:
    price = finding_price(finding["kind"], finding["cost"], finding["evidence"], over=False)
    return {**{name: finding[name] for name in _VERDICT}, "price": price}


# -- run resources ----------------------------------------------------------------------------------------------------

MOST_LISTED = 1000
_HIDDEN = ("path",)
"""Left out of a list: the location of the folder is private."""


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
    """Return the verdict of a run that is followed here; for others only the stored one is known."""
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


RUN_RESOURCES = (
    Resource(
        path="/api/v1/runs",
        about="The runs of this hub, newest first.",
        answer=_list,
        parameters=(
            Parameter(name="first", about="how many to skip", default=0),
            Parameter(name="limit", about="maximum number", default=MOST_LISTED, least=1, most=MOST_LISTED),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}",
        about="A run: its status, context (command, git, environment) and verdict.",
        answer=_one,
    ),
)


# -- finding resources ------------------------------------------------------------------------------------------------


def _findings(asked: Asked) -> Mapping[str, Any]:
    return findings_of(asked.run)


async def _hangs(asked: Asked) -> Mapping[str, Any]:
    # Judging hangs together takes as much time as a summary: skip it if there are no records.
    there, unread = await asyncio.to_thread(read_hang_records, asked.run.path)
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


FINDING_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/findings",
        about="The findings, most severe first, each with cost, evidence and advice; the first is the verdict.",
        answer=_findings,
    ),
    Resource(
        path="/api/v1/runs/{run}/hangs",
        about="The hangs: culprits, victims, stacks, Flight Recorder data. A hang seen by several hosts is reported as "
        "one, as in `/summary`; `parts` has each host's record.",
        answer=_hangs,
    ),
    Resource(
        path="/api/v1/runs/{run}/summary",
        about="The contents of summary.json (docs/schema.md); for an active run, of its last steps.",
        answer=_summary,
        parameters=(Parameter(name="keys", about="keys to return, separated by commas; default: all", kind="texts"),),
    ),
    Resource(
        path="/api/v1/runs/{run}/collectives",
        about="Communication by process group: operations, bytes, exposed time, which ranks are waited for.",
        answer=_collectives,
    ),
)
