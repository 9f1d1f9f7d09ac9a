"""Traces in the page: folders of them next to the runs, and the captures of a run.

A worker process analyzes a folder when it is first opened (``hub/traces/``); until then the answer says how far it is.
The answers were written by the worker, and are sent as they are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec
from starlette.responses import Response, StreamingResponse

from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import JSON, ApiError, Body
from stepscope.hub.runs import Runs
from stepscope.hub.traces.desk import TraceDesk, ViewState
from stepscope.hub.traces.folders import TraceFolder, files_of, trace_folder, trace_folders
from stepscope.hub.traces.worker import PAGE, PERFETTO, rank_file, raw_file, timeline_file
from stepscope.records.capture import CaptureRecord
from stepscope.records.paths import capture_folder
from stepscope.store.captures import is_capture_id, read_capture, trace_sizes

__all__ = ["expect_traces", "trace_resources"]

MOST_RANK = 1 << 20
PIECE_BYTES = 256 << 10
REMOVED = "the views were just removed; request them again"
Found = Callable[[Query], Awaitable[TraceFolder]]


def trace_resources(desk: TraceDesk) -> Iterable[Resource]:
    about = {"trace": "ID of the trace folder"}

    async def listing(query: Query) -> Mapping[str, Any]:
        rows = await asyncio.to_thread(_rows, query.runs)
        if rows:
            await desk.expect()
        return {"traces": rows}

    return (
        Resource(
            path="/api/v1/traces",
            about="Folders of traces next to the served runs that belong to no run, newest first.",
            answer=listing,
        ),
        *_views("/api/v1/traces/{trace}", "a trace folder", _of_folder, desk, about),
        *_views(
            "/api/v1/runs/{run}/captures/{capture}/view",
            "a capture",
            _of_capture,
            desk,
            {"capture": "ID of the capture"},
        ),
        _baseline(desk),
    )


async def expect_traces(desk: TraceDesk, runs: Runs) -> None:
    """Prepare for readers if the served folder has traces."""
    if await asyncio.to_thread(_rows, runs):
        await desk.expect()


def _views(base: str, what: str, found: Found, desk: TraceDesk, about: Mapping[str, str]) -> Iterable[Resource]:
    """The resources of one set of traces."""

    async def page(query: Query) -> Mapping[str, Any] | Body:
        folder = await found(query)
        return await _written(await desk.view(folder.files, name=folder.path.name), PAGE)

    async def rank(query: Query) -> Mapping[str, Any] | Body:
        folder = await found(query)
        number, peer = _rank(query.request.path_params["rank"]), query.values["peer"]
        if peer is None:
            wanted = rank_file(number)
            return await _written(
                await desk.view(folder.files, name=folder.path.name, wanted=wanted), wanted, "there is no such rank"
            )
        for side in (number, peer):
            state = await desk.view(folder.files, name=folder.path.name, wanted=raw_file(side))
            if not state.done:
                return state.document()
        return await asyncio.to_thread(_difference, state, number, peer)

    async def timeline(query: Query) -> Mapping[str, Any] | Body:
        folder, number = await found(query), query.values["rank"]
        if number is not None:
            state = await desk.view(folder.files, name=folder.path.name, wanted=rank_file(number))
            if not state.done:
                return state.document()
            await _written(state, rank_file(number), "there is no such rank")
        return await _written(
            await desk.timeline(folder.files, name=folder.path.name, rank=number), timeline_file(number)
        )

    async def perfetto(query: Query) -> Mapping[str, Any]:
        folder = await found(query)
        state = await desk.perfetto(folder.files, name=folder.path.name)
        size = await asyncio.to_thread(_size_of, state.path(PERFETTO)) if state.done else None
        return {**state.document(), "size_bytes": size}

    async def timeline_as_file(query: Query) -> Response:
        folder = await found(query)
        state = await desk.perfetto(folder.files, name=folder.path.name)
        if not state.done:
            raise ApiError(409, "the timeline is not ready; request …/perfetto until its state is done")
        try:
            file = await asyncio.to_thread(state.path(PERFETTO).open, "rb")
        except OSError:
            raise ApiError(503, REMOVED) from None
        name = quote(f"{folder.path.name}.json.gz", safe="")
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "Content-Length": str(os.fstat(file.fileno()).st_size),
        }
        return StreamingResponse(_pieces(file), headers=headers, media_type="application/gzip")

    return (
        Resource(
            path=base,
            about=f"The views of {what}: how far the analysis is; then the page, with the parts of one rank.",
            answer=page,
            path_parameters=about,
        ),
        Resource(
            path=f"{base}/ranks/{{rank}}",
            about=f"The parts of one rank of {what}; with `peer` what the rank does longer than that one in a step.",
            answer=rank,
            parameters=(Parameter(name="peer", about="another rank", most=MOST_RANK),),
            path_parameters={**about, "rank": "number of the rank"},
        ),
        Resource(
            path=f"{base}/timeline",
            about=f"One step of a few ranks of {what} as lanes of events.",
            answer=timeline,
            parameters=(Parameter(name="rank", about="the rank that comes first", most=MOST_RANK),),
            path_parameters=about,
        ),
        Resource(
            path=f"{base}/perfetto",
            about=f"Whether the merged timeline of {what} is ready for download; the first request makes it.",
            answer=perfetto,
            path_parameters=about,
        ),
        Resource(
            path=f"{base}/perfetto.json.gz",
            about=f"All ranks of {what} on one clock, for ui.perfetto.dev.",
            answer=timeline_as_file,
            media_types=("application/gzip",),
            path_parameters=about,
        ),
    )


def _baseline(desk: TraceDesk) -> Resource:
    async def answer(query: Query) -> Mapping[str, Any]:
        folder = await _of_capture(query)
        record = await asyncio.to_thread(read_capture, query.run.path, folder.id)
        known = record.figures.get("baseline") if record is not None else None
        if record is None or known is None:
            raise ApiError(404, "this capture was not compared with a baseline")
        before = await _files_of(query, known["id"])
        rank, peer = _compared(record, before)
        states = []
        for each, number in ((folder, rank), (before, peer)):
            state = await desk.view(each.files, name=each.path.name, wanted=raw_file(number))
            if not state.done:
                return state.document()
            states.append(state)
        return await asyncio.to_thread(_since_baseline, states[0], states[1], rank, peer)

    return Resource(
        path="/api/v1/runs/{run}/captures/{capture}/view/baseline",
        about="What the slow rank of a capture does longer than in the run's baseline, as parts of the page.",
        answer=answer,
        path_parameters={"capture": "ID of the capture"},
    )


# -- which files ------------------------------------------------------------------------------------------------------


def _rows(runs: Runs) -> list[dict[str, Any]]:
    root = _root(runs)
    return [] if root is None else [_row(folder) for folder in trace_folders(root)]


def _row(folder: TraceFolder) -> dict[str, Any]:
    return {
        "id": folder.id,
        "name": folder.path.name,
        "files": len(folder.files),
        "size_bytes": folder.size_bytes,
        "changed_wall_ns": folder.changed_ns,
    }


def _root(runs: Runs) -> Path | None:
    """The served folder; a hub of one run, or of all runs of a user, serves no traces besides."""
    folders = runs.folders()
    return folders[0] if len(folders) == 1 else None


async def _of_folder(query: Query) -> TraceFolder:
    wanted = query.request.path_params["trace"]

    def found() -> TraceFolder | None:
        root = _root(query.runs)
        return None if root is None else trace_folder(root, wanted)

    folder = await asyncio.to_thread(found)
    if folder is None:
        raise ApiError(404, "there is no such trace folder")
    return folder


async def _of_capture(query: Query) -> TraceFolder:
    return await _files_of(query, query.request.path_params["capture"])


async def _files_of(query: Query, capture: str) -> TraceFolder:
    run_dir = query.run.path
    path = capture_folder(run_dir, capture) if is_capture_id(capture) else None
    names = await asyncio.to_thread(trace_sizes, run_dir, capture) if path is not None else {}
    files = await asyncio.to_thread(files_of, [path / name for name in names]) if path is not None else ()
    if path is None or not files:
        raise ApiError(404, "there is no such capture, or it has no traces")
    return TraceFolder(id=capture, path=path, files=files)


# -- answers ----------------------------------------------------------------------------------------------------------


async def _written(state: ViewState, name: str, missing: str = "") -> Mapping[str, Any] | Body:
    """What the worker wrote, or how far it is."""
    if not state.done:
        return state.document()
    try:
        data = await asyncio.to_thread(state.path(name).read_bytes)
    except OSError:
        if missing:
            raise ApiError(404, missing) from None
        raise ApiError(503, REMOVED) from None
    return Body(data=data, media_type=JSON, headers={})


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ApiError(400, "the rank must be a whole number")
    return int(text)


def _difference(state: ViewState, rank: int, peer: int) -> Mapping[str, Any]:
    from stepscope.reports.page.trace_views import difference_parts  # only hubs that are asked for it load it

    try:
        raw = {str(number): msgspec.json.decode(state.path(raw_file(number)).read_bytes()) for number in (rank, peer)}
    except OSError:
        raise ApiError(404, "there is no such rank") from None
    return {"rank": rank, "peer": peer, "parts": difference_parts({"ranks": raw}, rank, peer)}


def _compared(record: CaptureRecord, before: TraceFolder) -> tuple[int, int]:
    """The rank of the capture, and that of its baseline: those that the analysis compared, if it found a change."""
    first = next(iter(record.changes), None)
    if first is not None:
        return first.rank, first.peer
    work_ms = record.figures.get("work_ms")
    rows = work_ms.items() if isinstance(work_ms, dict) else ()
    known = {int(rank): float(ms) for rank, ms in rows if rank.isdecimal() and isinstance(ms, int | float)}
    rank = max(known or dict.fromkeys(record.order.ranks or (0,), 0.0), key=lambda each: (known.get(each, 0.0), -each))
    ranks = [int(file.path.name.removeprefix("rank-").partition(".")[0]) for file in before.files]
    return rank, rank if rank in ranks else min(ranks)


def _since_baseline(now: ViewState, before: ViewState, rank: int, peer: int) -> Mapping[str, Any]:
    from stepscope.reports.page.trace_views import compared_parts  # only hubs that are asked for it load it

    try:
        raw, old = (
            msgspec.json.decode(state.path(raw_file(number)).read_bytes())
            for state, number in ((now, rank), (before, peer))
        )
    except OSError:
        raise ApiError(404, "there is no such rank") from None
    name = "the baseline" if rank == peer else f"rank {peer} of the baseline"
    return {"state": "done", "rank": rank, "peer": peer, "parts": compared_parts((f"rank {rank}", raw), (name, old))}


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
