"""How the hub answers: JSON with a ``schema``, an ETag where it may be asked again, gzip where it is worth it.

Packing is done in a thread when there is much of it: the loop that takes the agents' frames does not wait for a page.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

__all__ = ["SCHEMA", "ApiError", "Body", "answer", "failure", "json_body", "takes_gzip"]

SCHEMA = 1
SMALL_BYTES = 1 << 10
"""Below, gzip gains nothing."""
JSON = "application/json"
_LEVEL = 1


class ApiError(Exception):
    """What a reader asked wrongly; becomes ``{"error": …}`` with that status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Body:
    """An answer that is not JSON, or already is."""

    data: bytes
    media_type: str
    headers: Mapping[str, str]


def json_body(document: Mapping[str, Any]) -> bytes:
    """``nan`` becomes ``null``, and text that no UTF-8 can hold becomes what it can."""
    try:
        return msgspec.json.encode({"schema": SCHEMA, **document})
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable({"schema": SCHEMA, **document}))


async def answer(headers: Headers, content: Mapping[str, Any] | Body) -> Response:
    """To the one who sent these headers: 304 when they have it already, packed when they can unpack."""
    return await asyncio.to_thread(_answer, headers, content)


def failure(status: int, why: str, *, headers: Mapping[str, str] | None = None, name: str = "error") -> Response:
    """``name``: of the reason in the document; agents look for ``why``."""
    return Response(json_body({name: why}), status, dict(headers or {}), JSON)


def _answer(headers: Headers, content: Mapping[str, Any] | Body) -> Response:
    body = content if isinstance(content, Body) else Body(data=json_body(content), media_type=JSON, headers={})
    tag = f'W/"{hashlib.blake2b(body.data, digest_size=12).hexdigest()}"'
    said = {**body.headers, "ETag": tag, "Vary": "Accept, Accept-Encoding"}
    if tag in {known.strip() for known in headers.get("if-none-match", "").split(",")}:
        return Response(status_code=304, headers=said)
    data = body.data
    if len(data) >= SMALL_BYTES and takes_gzip(headers):
        data = gzip.compress(data, _LEVEL, mtime=0)
        said["Content-Encoding"] = "gzip"
    return Response(data, headers=said, media_type=body.media_type)


def takes_gzip(headers: Headers) -> bool:
    for coding in headers.get("accept-encoding", "").split(","):
        name, _, weight = coding.strip().partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(inner) for inner in value]
    return value
