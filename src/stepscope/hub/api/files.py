"""The files of a run: what there is, and pieces of it (a log from its end, or from where the reader left off)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stepscope.hub.api.answers import ApiError, Body, json_body
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.views.files import MOST_BYTES, list_files, media_type_of, read_piece
from stepscope.store.paths import META

__all__ = ["RESOURCES"]


async def _list(asked: Asked) -> Mapping[str, Any]:
    found = await asyncio.to_thread(list_files, asked.run.path)
    return {"files": [asdict(entry) for entry in found]}


async def _file(asked: Asked) -> Body:
    path = asked.request.path_params["path"]
    if path == META:
        return Body(data=json_body(asked.run.context()), media_type=media_type_of(META), headers={})
    offset, tail, most = (asked.values[name] for name in ("offset", "tail", "most"))
    if offset is not None and tail is not None:
        raise ApiError(400, "offset or tail, not both")
    piece = await asyncio.to_thread(read_piece, asked.run.path, path, offset=offset, tail=tail, most=most)
    if piece is None:
        raise ApiError(404, "there is no such file")
    place = {"X-Stepscope-Offset": str(piece.offset), "X-Stepscope-Size": str(piece.size)}
    return Body(data=piece.data, media_type=media_type_of(path), headers=place)


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/files",
        about="The files of a run that may be read, with their sizes.",
        answer=_list,
    ),
    Resource(
        path="/api/v1/runs/{run}/files/{path:path}",
        about="A file, or a piece of it. X-Stepscope-Offset says where the piece begins, X-Stepscope-Size how long "
        "the file is: to follow a log, ask again with offset = offset + length of what came.",
        answer=_file,
        parameters=(
            Parameter(name="offset", about="first byte"),
            Parameter(name="tail", about="the last so many bytes, from the start of a line on", most=MOST_BYTES),
            Parameter(name="most", about="bytes of one answer", default=MOST_BYTES, least=1, most=MOST_BYTES),
        ),
        media_types=("application/json", "application/x-ndjson", "text/plain"),
        path_parameters={"path": "as the list of files has it"},
    ),
)
