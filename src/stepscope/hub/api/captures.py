"""The captures of a run: the list, one with its analysis, its traces; and requests for another.

A request is appended to the run's file, as the command line does it; the run's own hub takes it from there within a
second, and the new record has its id in ``request``.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, BinaryIO

import msgspec
from starlette.responses import Response, StreamingResponse

from stepscope.errors import RunError
from stepscope.hub.api.resource import Parameter, Query, Resource, change_run, read_body
from stepscope.hub.api.responses import ApiError
from stepscope.records import run_clock
from stepscope.records.capture import CAPTURE_STEPS, CAPTURE_WARMUP, CaptureRecord, CaptureRequest, RankChoice
from stepscope.records.dataclass_json import encoded
from stepscope.store.captures import (
    left_behind,
    open_trace,
    read_analysis,
    read_capture,
    read_captures,
    request_capture,
)
from stepscope.store.documents import read_hub_file, read_meta

__all__ = ["CAPTURE_CHANGES", "CAPTURE_RESOURCES"]

MOST_LISTED = 1000
CHUNK_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class _NewCapture(msgspec.Struct, forbid_unknown_fields=True):
    choose: RankChoice = "worst"
    ranks: tuple[int, ...] = ()
    steps: int = CAPTURE_STEPS
    warmup: int = CAPTURE_WARMUP
    memory: bool = False
    stacks: bool = True
    shapes: bool = False
    by: str = ""


async def _list(query: Query) -> Mapping[str, Any]:
    records = await asyncio.to_thread(read_captures, query.run.path)
    newest = records[::-1][: query.values["limit"]]
    return {"captures": [_row(query, record) for record in newest], "total": len(records), "may": _may(query)}


async def _capture(query: Query) -> Mapping[str, Any]:
    name = query.request.path_params["capture"]
    record = await asyncio.to_thread(read_capture, query.run.path, name)
    if record is None:
        raise ApiError(404, "there is no such capture")
    return {**_row(query, record), "analysis": await asyncio.to_thread(read_analysis, query.run.path, name)}


def _row(query: Query, record: CaptureRecord) -> dict[str, Any]:
    row: dict[str, Any] = encoded(left_behind(record) if query.run.over else record)
    return {"id": record.order.id, **row}


def _may(query: Query) -> list[str]:
    """What this reader may do besides reading."""
    return ["capture"] if "capture" in query.roles and not query.run.over else []


async def _request(query: Query) -> Mapping[str, Any]:
    form = (
        '{"choose": "worst" | "all" | "listed", "ranks": [0, 3], "steps": 6, "warmup": 2, "memory": false, '
        '"stacks": true, "shapes": false, "by": TEXT}, or {}'
    )
    body = await read_body(query, _NewCapture, form)
    fields = msgspec.structs.asdict(body)
    fields["by"] = query.signed(body.by)
    if body.ranks:
        fields["choose"] = "listed"

    def change(run_dir: Any) -> Mapping[str, Any]:
        if read_meta(run_dir).get("end") is not None:
            raise RunError("the run has ended")
        if read_hub_file(run_dir) is None:
            raise RunError("the run is recorded without a hub, which orders captures")
        request = request_capture(run_dir, CaptureRequest(id="", wall_ns=run_clock.wall_ns(), **fields))
        return {"request": request.id}

    return await change_run(query, change)


# -- traces -----------------------------------------------------------------------------------------------------------


async def _file(query: Query) -> Response:
    """Stream a trace, or the range of it that was requested."""
    path = query.request.path_params
    try:
        file = await asyncio.to_thread(open_trace, query.run.path, path["capture"], path["file"])
    except OSError:
        raise ApiError(404, "there is no such file") from None
    size = os.fstat(file.fileno()).st_size
    first, last = 0, size - 1
    headers = {"Accept-Ranges": "bytes"}
    wanted = query.request.headers.get("range")
    status = 200
    if wanted is not None:
        span = _span(wanted, size)
        if span is None:
            file.close()
            return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
        (first, last), status = span, 206
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    headers["Content-Length"] = str(last - first + 1)
    headers["Content-Disposition"] = f'attachment; filename="{path["capture"]}-{path["file"]}"'
    return StreamingResponse(
        _pieces(file, first, last), status_code=status, headers=headers, media_type="application/gzip"
    )


def _span(text: str, size: int) -> tuple[int, int] | None:
    """First and last byte of a single range; None if it cannot be satisfied."""
    found = _RANGE.fullmatch(text.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last bytes
        return (max(0, size - int(found[2])), size - 1) if size and int(found[2]) else None
    first, last = int(found[1]), min(int(found[2]) if found[2] else size - 1, size - 1)
    return (first, last) if first <= last else None


async def _pieces(file: BinaryIO, first: int, last: int) -> AsyncIterator[bytes]:
    with file:
        while first <= last:
            piece = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK_BYTES, last - first + 1), first)
            if not piece:
                return
            first += len(piece)
            yield piece


CAPTURE_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/captures",
        about="The captures of a run, newest first: what was ordered, why, its state, and what it found.",
        answer=_list,
        parameters=(Parameter(name="limit", about="maximum number", default=100, least=1, most=MOST_LISTED),),
    ),
    Resource(
        path="/api/v1/runs/{run}/captures/{capture}",
        about="One capture, with `analysis`: the document of its traces, as of `stepscope trace --json`.",
        answer=_capture,
        path_parameters={"capture": "its id"},
    ),
    Resource(
        path="/api/v1/runs/{run}/captures/{capture}/files/{file}",
        about="A trace of a capture (`files` of its record), whole or a range of its bytes.",
        answer=_file,
        media_types=("application/gzip",),
        path_parameters={"capture": "its id", "file": "a name from `files`"},
    ),
)
CAPTURE_CHANGES = (
    Resource(
        path="/api/v1/runs/{run}/captures",
        about="Request a capture of some steps of a running job; the record of the capture will name the request.",
        answer=_request,
        method="POST",
        role="capture",
    ),
)
