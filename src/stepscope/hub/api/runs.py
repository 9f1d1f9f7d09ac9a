"""The runs, and everything about one that fits on a page: status, verdict, findings, hangs, summary, collectives.

Readers may have the files of a run, complete or in pieces (a log from its end, or from an offset).
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from stepscope.errors import RunError, UsageError
from stepscope.hub.api.auth import ONLY_RUN
from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import ApiError, Body, json_body
from stepscope.hub.open_run import OpenRun
from stepscope.records.identity import logged_steps
from stepscope.records.text import count_text
from stepscope.reports.event_text import exit_text
from stepscope.reports.finding_text import (
    finding_price,
    findings_document,
    judged_text,
    nothing_text,
)
from stepscope.reports.goodput_text import advice_view, goodput_view
from stepscope.reports.hang_text import hang_document
from stepscope.reports.sections import attempt_texts, errors_view
from stepscope.reports.summary_text import measured_text
from stepscope.store.catalog import RunEntry
from stepscope.store.live.failures import read_hang_records
from stepscope.store.live.logs import data_at
from stepscope.store.paths import META, hang_path

__all__ = [
    "CHANGE_RESOURCES",
    "FILE_RESOURCES",
    "FINDING_RESOURCES",
    "RUN_RESOURCES",
    "collectives_document",
    "findings_of",
    "hangs_document",
    "list_files",
    "read_piece",
    "run_document",
    "status_of",
    "summary_document",
]

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
    """Return the findings with their text.  ``verdict``: the first in short, with its price; null without findings."""
    made_from = run.live.judged if run.document is None else run.document
    known = _FINDINGS.get(run)
    if known is None or known[0] is not made_from or known[1] != run.over:
        # Every client of the stream asks at every change of the run; findings change only when the rules ran.
        known = _FINDINGS[run] = (made_from, run.over, _findings_document(run))
    return known[2] if known[2]["findings"] else {**known[2], "nothing": _nothing_of(run)}


_FINDINGS: WeakKeyDictionary[OpenRun, tuple[object, bool, dict[str, Any]]] = WeakKeyDictionary()


def _findings_document(run: OpenRun) -> dict[str, Any]:
    if run.document is not None:
        return findings_document(run.document.get("findings"), run.document.get("verdict"), live=False, over=run.over)
    judged = run.live.findings()
    rows = judged.pop("findings")
    found = findings_document(rows, _verdict(rows[0]) if rows else None, live=True, over=run.over)
    if judged["step"] is None:
        return found
    return {**found, "judged": {**judged, "text": judged_text(judged, rows)}}


def _nothing_of(run: OpenRun) -> list[str]:
    """Return what to say of a run without findings, in a headline and a sentence."""
    live = run.live
    return [
        *nothing_text(
            over=run.over,
            ranks=live.planes.columns,
            world_size=live.registry.world_size,
            steps=live.planes.newest + 1,
            collecting=live.judged.collecting,
        )
    ]


def status_of(run: OpenRun) -> dict[str, Any]:
    """Return the status of a run.  ``status_text``: as ``stepscope list`` shows it."""
    info = run.live.info()
    text, severity = run.status_text(hung=bool(info["still_ranks"]))
    words = {"status": run.status(), "status_text": text, "status_severity": severity}
    standing = {**words, "over": run.over, "leaving": run.leaving, "ended_wall_ns": run.ended_wall_ns()}
    return {
        **standing,
        **{name: info[name] for name in _KEPT},
        "hung_ranks": info["still_ranks"],
        "hung_steps": None if run.over else _hung_steps(run),
        "logged_step": _logged_step(run, info["newest_step"]),
        "ranks_text": _ranks_text(info, over=run.over),
    }


def _logged_step(run: OpenRun, newest: int) -> int | None:
    """Return the number of the newest step in the framework's logs, if it is known and differs from ours."""
    registry, rings = run.live.registry, run.live.ring_of
    if newest < 0 or not len(rings):
        return None
    lowest_rank = rings[registry.of["shown"][rings].argmin()]
    logged = logged_steps(registry.facts(int(lowest_rank)), newest, newest)
    return None if logged is None or logged[0] == newest else logged[0]


def _hung_steps(run: OpenRun) -> list[int] | None:
    """Return the first and last of the steps in which the job hangs now."""
    lasting = (
        finding
        for finding in run.live.judged.findings
        if finding.kind.startswith("hang_") and finding.evidence.get("over") is None
    )
    return next((list(finding.steps) for finding in lasting if finding.steps), None)


def _ranks_text(info: Mapping[str, Any], *, over: bool) -> str:
    """``8 ranks``, ``7 of 8 ranks``, ``7 of 8 ranks hung``."""
    ranks, live, hung = info["ranks"], info["live_ranks"], info["still_ranks"]
    most = max(ranks, info["world_size"])
    if over:
        return count_text(ranks, "rank") if ranks else "no rank"
    if not ranks:
        return f"{count_text(most, 'rank')} expected" if most else "no rank yet"
    if not live:
        return "the rank has ended" if ranks == 1 else f"all {ranks:,} ranks have ended"
    if hung:
        return f"{f'{hung:,} of ' if hung < most else ''}{count_text(most, 'rank')} hung"
    return f"{live:,} of {count_text(most, 'rank')}" if live < most else count_text(ranks, "rank")


def _verdict(finding: Mapping[str, Any]) -> dict[str, Any]:
    price = finding_price(finding["kind"], finding["cost"], finding["evidence"], over=False)
    return {**{name: finding[name] for name in _VERDICT}, "price": price}


# -- run resources ----------------------------------------------------------------------------------------------------

MOST_LISTED = 1000
_HIDDEN = ("path",)
"""Left out of a list: the location of the folder is private."""


async def _list(query: Query) -> Mapping[str, Any]:
    entries = _readable(query, await query.runs.entries())
    user = query.values["user"]
    if user is not None:
        entries = [entry for entry in entries if entry.user == user]
    first, limit = query.values["first"], query.values["limit"]
    chosen = entries[first : first + limit]
    open_now = {run.path: findings_of(run)["verdict"] for run in query.runs.live() if not run.over}
    rows = [
        {
            "id": query.runs.id_of(entry.path),
            **{key: value for key, value in entry.to_dict().items() if key not in _HIDDEN},
            "folder": query.runs.folder_of(entry.path),
            **_found(open_now.get(entry.path)),
        }
        for entry in chosen
    ]
    return {"total": len(entries), "runs": rows, "may": _may(query), "me": query.who}


def _may(query: Query) -> list[str]:
    """Return what this reader may do besides reading."""
    return [role for role in ("label", "delete") if role in query.roles and (role == "label" or query.runs.may_delete)]


async def _history(query: Query) -> Mapping[str, Any]:
    entries = _readable(query, await query.runs.entries())
    name, tag = query.values["like"], query.values["tag"]
    like = _like(query, entries, name)
    if name is not None and like is None:
        raise ApiError(400, "like must be the name of a run")
    chosen = [
        entry
        for entry in entries
        if like is not None
        and (entry.command, entry.ranks) == (like.command, like.ranks)
        and (tag is None or tag in entry.labels.tags)
    ][: query.values["last"]]
    document = await asyncio.to_thread(_history_of, chosen)
    rows = [
        {"id": query.runs.id_of(Path(row["path"])), **{key: row[key] for key in row if key not in _HIDDEN}}
        for row in document["runs"]
    ]
    return {**document, "runs": rows, "command": [] if like is None else list(like.command)}


def _like(query: Query, entries: Sequence[RunEntry], name: str | None) -> RunEntry | None:
    """Return the run of that name; without one, the newest of the job that has most runs."""
    from stepscope.comparison.history import same_job  # not for live hubs

    chosen = same_job(entries)[0] if name is None else entries
    return next((entry for entry in chosen if name in (None, query.runs.id_of(entry.path))), None)


def _readable(query: Query, entries: Sequence[RunEntry]) -> Sequence[RunEntry]:
    """The runs that the reader's token covers."""
    only = query.request.scope.get("state", {}).get(ONLY_RUN)
    return entries if only is None else [entry for entry in entries if query.runs.id_of(entry.path) == only]


def _history_of(entries: Sequence[RunEntry]) -> dict[str, Any]:
    from stepscope.comparison.history import history_document, history_points, history_sentences  # not for live hubs

    document = history_document(*history_points(entries))
    return {**document, "sentences": history_sentences(document)}


def _reopen(run: OpenRun) -> str | None:
    """Return the command that shows a run again whose hub ends with it; None for the hub of a folder."""
    return shlex.join(["stepscope", "serve", str(run.path.absolute()), "--open"]) if run.fed or run.leaving else None


def _found(verdict: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the verdict of a run that is followed here; for others only the stored one is known."""
    return {} if verdict is None else {"verdict": verdict["title"], "severity": verdict["severity"]}


def run_document(run: OpenRun, folder: str | None = None) -> dict[str, Any]:
    """``folder``: where it is, as text, if this hub serves several folders."""
    found, labels = findings_of(run), run.labels()
    return {
        "id": run.id,
        "name": labels.name or run.meta().get("name", run.name),
        "label": labels.name or run.name,
        "tags": list(labels.tags),
        "note": labels.note,
        "folder": folder,
        "reopen": _reopen(run),
        "reading": run.live.partial,
        **status_of(run),
        "context": {**run.context(), "end_text": _end_text(run)},
        "verdict": found["verdict"],
        "info": run.live.info(),
    }


def _end_text(run: OpenRun) -> str:
    """Return how the run ended; its launcher alone cannot distinguish a crash from a failure."""
    end = run.context().get("end")
    if not isinstance(end, Mapping):
        return ""
    text = run.status_text(hung=False)[0] if run.over else str(end.get("status", ""))
    code = end.get("exit_code")
    return f"{text}, {exit_text(code)}" if type(code) is int and code and text != exit_text(code) else text


RUN_RESOURCES = (
    Resource(
        path="/api/v1/runs",
        about="The runs of this hub, newest first.",
        answer=_list,
        parameters=(
            Parameter(name="first", about="how many to skip", default=0),
            Parameter(name="limit", about="maximum number", default=MOST_LISTED, least=1, most=MOST_LISTED),
            Parameter(name="user", about="only runs that this user started; `me` of the answer is you", kind="text"),
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
        answer=lambda query: run_document(query.run, query.runs.folder_of(query.run.path)),
    ),
)


# -- changes ----------------------------------------------------------------------------------------------------------
# Name, tags and note of a run, and deleting it, for readers with these roles (``api/auth.py``).  The measurements of a
# run cannot be changed.

BODY_BYTES = 64 << 10


class _LabelChange(msgspec.Struct, forbid_unknown_fields=True):
    name: str | None = None
    tags: list[str] | None = None
    note: str | None = None


async def _label(query: Query) -> Mapping[str, Any]:
    body = b""
    async for chunk in query.request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise ApiError(400, "the body is too long")
    try:
        change = msgspec.json.decode(body, type=_LabelChange)
        labels = await query.runs.label(
            query.request.path_params["run"], name=change.name, tags=change.tags, note=change.note
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


async def _delete(query: Query) -> Mapping[str, Any]:
    if not query.runs.may_delete:
        raise ApiError(403, "this hub serves one run, which cannot be deleted here")
    try:
        deleted = await query.runs.delete(query.request.path_params["run"])
    except RunError as error:
        raise ApiError(409, str(error)) from None
    if not deleted:
        raise ApiError(404, "there is no such run")
    return {"deleted": query.request.path_params["run"]}


CHANGE_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/labels",
        about="Change the name, the tags or the note of a run: what the body contains. Answers with all of them.",
        answer=_label,
        method="POST",
        role="label",
    ),
    Resource(
        path="/api/v1/runs/{run}",
        about="Delete a run that is over. 409 if it is active, of another user, or in use.",
        answer=_delete,
        method="DELETE",
        role="delete",
    ),
)


# -- finding resources ------------------------------------------------------------------------------------------------


async def hangs_document(run: OpenRun) -> dict[str, Any]:
    # Judging hangs together takes as much time as a summary: skip it if there are no records.
    there, unread = await asyncio.to_thread(read_hang_records, run.path)
    hangs = await run.hangs() if there else ()
    rows = [
        {
            **hang_document(hang, over=run.over),
            "file": hang_path(Path(), hang.host, hang.number).as_posix(),
        }
        for hang in hangs
    ]
    return {"hangs": rows, "unread": list(unread)}


async def summary_document(run: OpenRun, *, keys: Sequence[str] | None = None) -> dict[str, Any]:
    whole = await run.summary()
    chosen = {key: whole[key] for key in whole if key in keys} if keys else whole
    text = {
        "errors": errors_view(chosen.get("errors")),
        "attempts": attempt_texts(chosen.get("attempts")),
        "goodput": goodput_view(chosen.get("goodput")),
        "advice": advice_view(chosen.get("advice_after_failure")),
    }
    return {"live": run.document is None, "summary": chosen, "text": text}


async def collectives_document(run: OpenRun) -> dict[str, Any]:
    found = (await run.summary()).get("communication")
    known = found if isinstance(found, Mapping) else {}
    return {"measured": None, "groups": [], "groups_left_out": 0, **known, "measured_text": measured_text(known)}


FINDING_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/findings",
        about="The findings, most severe first, each with cost, evidence and advice; the first is the verdict.",
        answer=lambda query: findings_of(query.run),
    ),
    Resource(
        path="/api/v1/runs/{run}/findings/history",
        about="When each finding was first shown, changed, and was over, with step and time.",
        answer=lambda query: {"history": query.run.finding_history()},
    ),
    Resource(
        path="/api/v1/runs/{run}/hangs",
        about="The hangs: culprits, victims, stacks, Flight Recorder data. A hang seen by several hosts is reported as "
        "one, as in `/summary`; `parts` has each host's record.",
        answer=lambda query: hangs_document(query.run),
    ),
    Resource(
        path="/api/v1/runs/{run}/summary",
        about="The contents of summary.json (docs/schema.md); for an active run, of its last steps.",
        answer=lambda query: summary_document(query.run, **query.values),
        parameters=(Parameter(name="keys", about="keys to return, separated by commas; default: all", kind="texts"),),
    ),
    Resource(
        path="/api/v1/runs/{run}/collectives",
        about="Communication by process group: operations, bytes, exposed time, which ranks are waited for.",
        answer=lambda query: collectives_document(query.run),
    ),
)


# -- file access ------------------------------------------------------------------------------------------------------
# Readers may have logs, errors, hangs, dumps, events and summaries, and nothing else.
#
# A path is checked against a list of forms before the file system is touched, and is then opened part by part without
# following links: a run directory may contain what strangers put there.  Large files are read in pieces; a log may be
# requested from its end.

MOST_BYTES = 4 << 20
"""The limit for one answer."""
MOST_FILES = 10_000
"""The limit for one folder in a list."""
FOLDERS = ("logs", "errors", "hangs", "flight")
PLAIN = ("events.jsonl", "findings.json", "nodes.json", "summary.json", "summary.txt")
"""Without ``run.json``: its public part is in the answer about the run."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,160}\.(?:log|json|txt)")
_TYPES = {"json": "application/json", "jsonl": "application/x-ndjson"}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    path: str
    """Within the run, with slashes."""
    size: int
    changed_wall_ns: int


@dataclass(frozen=True, kw_only=True)
class FilePiece:
    data: bytes
    offset: int
    size: int
    """The size of the whole file when it was read."""


def allowed(path: str) -> bool:
    folder, slash, name = path.partition("/")
    if not slash:
        return path in PLAIN
    return folder in FOLDERS and _NAME.fullmatch(name) is not None


def media_type_of(path: str) -> str:
    """Return the media type; all other text is plain: the output of a rank is never shown as a page."""
    return _TYPES.get(path.rpartition(".")[2], "text/plain; charset=utf-8")


def list_files(run_dir: Path) -> list[FileEntry]:
    found: list[FileEntry] = []
    for name in PLAIN:
        entry = _entry(run_dir / name, name)
        found += [entry] if entry else []
    for folder in FOLDERS:
        if (run_dir / folder).is_symlink():
            continue
        try:
            names = sorted(path.name for path in (run_dir / folder).iterdir())[:MOST_FILES]
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}"
            entry = _entry(run_dir / folder / name, path) if allowed(path) else None
            found += [entry] if entry else []
    return found


def read_piece(run_dir: Path, path: str, *, offset: int | None, tail: int | None, most: int) -> FilePiece | None:
    """Read from ``offset``, or the last ``tail`` bytes starting at a line, if they contain a line end.

    Gaps that a long log dropped (``store/live/logs.py``) are skipped: the piece then begins, or ends, at existing
    data.  None: the file does not exist or may not be read.
    """
    fd = _open(run_dir, path) if allowed(path) else None
    if fd is None:
        return None
    try:
        size = os.fstat(fd).st_size
        if tail is not None:
            at, _ = data_at(fd, max(size - min(tail, most), 0))
            data = os.pread(fd, min(size - at, most), at)
            if at and b"\n" in data:
                cut = data.index(b"\n") + 1
                data, at = data[cut:], at + cut
            return FilePiece(data=data, offset=at, size=size)
        at, end = data_at(fd, min(offset or 0, size))
        return FilePiece(data=os.pread(fd, min(most, end - at), at), offset=at, size=size)
    except OSError:
        return None
    finally:
        os.close(fd)


def _open(run_dir: Path, path: str) -> int | None:
    """Open a regular file without following links within the run."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    *folders, name = path.split("/")
    opened: list[int] = []
    try:
        opened.append(os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for folder in folders:
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        fd = os.open(name, flags, dir_fd=opened[-1])
    except OSError:
        return None
    finally:
        for folder_fd in opened:
            os.close(folder_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _entry(path: Path, name: str) -> FileEntry | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return None
    return FileEntry(path=name, size=about.st_size, changed_wall_ns=about.st_mtime_ns)


# -- resources --------------------------------------------------------------------------------------------------------


async def _list_files(query: Query) -> Mapping[str, Any]:
    found = await asyncio.to_thread(list_files, query.run.path)
    return {"files": [asdict(entry) for entry in found]}


async def _file(query: Query) -> Body:
    path = query.request.path_params["path"]
    if path == META:
        return Body(data=json_body(query.run.context()), media_type=media_type_of(META), headers={})
    offset, tail, most = (query.values[name] for name in ("offset", "tail", "most"))
    if offset is not None and tail is not None:
        raise ApiError(400, "use either offset or tail, not both")
    piece = await asyncio.to_thread(read_piece, query.run.path, path, offset=offset, tail=tail, most=most)
    if piece is None:
        raise ApiError(404, "there is no such file")
    place = {"X-Stepscope-Offset": str(piece.offset), "X-Stepscope-Size": str(piece.size)}
    return Body(data=piece.data, media_type=media_type_of(path), headers=place)


FILE_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/files",
        about="The readable files of a run, with their sizes.",
        answer=_list_files,
    ),
    Resource(
        path="/api/v1/runs/{run}/files/{path:path}",
        about="A file, or part of it. X-Stepscope-Offset is where the part begins, X-Stepscope-Size is the size of the "
        "file. To follow a log, repeat the request with offset = offset + length of the response.",
        answer=_file,
        parameters=(
            Parameter(name="offset", about="first byte"),
            Parameter(name="tail", about="number of bytes at the end, starting with a whole line", most=MOST_BYTES),
            Parameter(name="most", about="maximum bytes per response", default=MOST_BYTES, least=1, most=MOST_BYTES),
        ),
        media_types=("application/json", "application/x-ndjson", "text/plain"),
        path_parameters={"path": "path as listed by /files"},
    ),
)
