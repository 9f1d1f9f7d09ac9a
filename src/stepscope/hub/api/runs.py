"""The runs, and everything about one that fits on a page: status, verdict, findings, hangs, summary, collectives."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import RunError, UsageError
from stepscope.hangs.report import told_of
from stepscope.hub.api.auth import MAY_CHANGE, ONLY_RUN
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.runs import OpenRun
from stepscope.reports.layout import finding_price
from stepscope.reports.sections import listed_steps
from stepscope.store.catalog import RunEntry
from stepscope.store.live.failures import read_hang_records
from stepscope.store.paths import hang_path

__all__ = ["CHANGE_RESOURCES", "FINDING_RESOURCES", "RUN_RESOURCES", "findings_of", "status_of"]


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
    entries = _readable(asked, await asked.runs.entries())
    first, limit = asked.values["first"], asked.values["limit"]
    chosen = entries[first : first + limit]
    open_now = {run.path: findings_of(run)["verdict"] for run in asked.runs.live() if not run.over}
    rows = [
        {
            "id": asked.runs.id_of(entry.path),
            **{key: value for key, value in entry.to_dict().items() if key not in _HIDDEN},
            "folder": asked.runs.folder_of(entry.path),
            **_found(open_now.get(entry.path)),
        }
        for entry in chosen
    ]
    return {"total": len(entries), "runs": rows, "may": _may(asked)}


def _may(asked: Asked) -> list[str]:
    """Return what this reader may do besides reading."""
    if asked.request.scope.get("state", {}).get(MAY_CHANGE) is not True:
        return []
    return ["label", "delete"] if asked.runs.may_delete else ["label"]


async def _history(asked: Asked) -> Mapping[str, Any]:
    entries = _readable(asked, await asked.runs.entries())
    name, tag = asked.values["like"], asked.values["tag"]
    like = next((entry for entry in entries if name in (None, asked.runs.id_of(entry.path))), None)
    if name is not None and like is None:
        raise ApiError(400, "like must be the name of a run")
    chosen = [
        entry
        for entry in entries
        if like is not None
        and (entry.command, entry.ranks) == (like.command, like.ranks)
        and (tag is None or tag in entry.labels.tags)
    ][: asked.values["last"]]
    document = await asyncio.to_thread(_history_of, chosen)
    rows = [
        {"id": asked.runs.id_of(Path(row["path"])), **{key: row[key] for key in row if key not in _HIDDEN}}
        for row in document["runs"]
    ]
    return {**document, "runs": rows, "command": [] if like is None else list(like.command)}


def _readable(asked: Asked, entries: Sequence[RunEntry]) -> Sequence[RunEntry]:
    """The runs that the reader's token covers."""
    only = asked.request.scope.get("state", {}).get(ONLY_RUN)
    return entries if only is None else [entry for entry in entries if asked.runs.id_of(entry.path) == only]


def _history_of(entries: Sequence[RunEntry]) -> dict[str, Any]:
    from stepscope.compare.history import history_document, history_points, history_sentences  # not for live hubs

    document = history_document(*history_points(entries))
    return {**document, "sentences": history_sentences(document)}


def _reopen(run: OpenRun) -> str | None:
    """Return the command that shows a run again whose hub ends with it; None for the hub of a folder."""
    return shlex.join(["stepscope", "serve", str(run.path.absolute()), "--open"]) if run.fed or run.leaving else None


def _found(verdict: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the verdict of a run that is followed here; for others only the stored one is known."""
    return {} if verdict is None else {"verdict": verdict["title"], "severity": verdict["severity"]}


def _one(asked: Asked) -> Mapping[str, Any]:
    run = asked.run
    found, labels = findings_of(run), run.labels()
    return {
        "id": run.id,
        "name": labels.name or run.meta().get("name", run.name),
        "label": labels.name or run.name,
        "tags": list(labels.tags),
        "note": labels.note,
        "folder": asked.runs.folder_of(run.path),
        "reopen": _reopen(run),
        "reading": run.live.partial,
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
        path="/api/v1/history",
        about="The step time of the runs with the command and number of ranks of one run, and where it changed.",
        answer=_history,
        parameters=(
            Parameter(name="like", about="name of the run (default: the newest)", kind="text"),
            Parameter(name="tag", about="only runs with this tag", kind="text"),
            Parameter(name="last", about="maximum number, the newest", default=50, least=1, most=MOST_LISTED),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}",
        about="A run: its status, context (command, git, environment) and verdict.",
        answer=_one,
    ),
)


# -- changes ----------------------------------------------------------------------------------------------------------
# Name, tags and note of a run, and deleting it: for the hub's own token alone (``api/auth.py``).  The measurements of a
# run cannot be changed.

BODY_BYTES = 64 << 10


class _LabelChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    tags: list[str] | None = None
    note: str | None = None


async def _label(asked: Asked) -> Mapping[str, Any]:
    body = b""
    async for chunk in asked.request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ApiError(400, "the body is too long")
    try:
        change = msgspec.json.decode(body, type=_LabelChange)
        labels = await asked.runs.label(
            asked.request.path_params["run"], name=change.name, tags=change.tags, note=change.note
        )
    except msgspec.MsgspecError:
        raise ApiError(
            400, 'the body must be {"name": TEXT, "tags": [TEXT, …], "note": TEXT}; all are optional'
        ) from None
    except UsageError as error:
        raise ApiError(400, str(error)) from None
    except RunError as error:
        raise ApiError(409, str(error)) from None
    if labels is None:
        raise ApiError(404, "there is no such run")
    return labels.to_dict()


async def _delete(asked: Asked) -> Mapping[str, Any]:
    if not asked.runs.may_delete:
        raise ApiError(403, "this hub serves one run, which cannot be deleted here")
    try:
        deleted = await asked.runs.delete(asked.request.path_params["run"])
    except RunError as error:
        raise ApiError(409, str(error)) from None
    if not deleted:
        raise ApiError(404, "there is no such run")
    return {"deleted": asked.request.path_params["run"]}


CHANGE_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/labels",
        about="Change the name, the tags or the note of a run: what the body contains. Answers with all of them.",
        answer=_label,
        method="POST",
        changes=True,
    ),
    Resource(
        path="/api/v1/runs/{run}",
        about="Delete a run that is over. 409 if it is active, of another user, or in use.",
        answer=_delete,
        method="DELETE",
        changes=True,
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
