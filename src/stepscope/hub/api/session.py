"""``/api/v1/session``: a browser trades the token for a cookie, because EventSource can send no headers."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stepscope.hub.api.answers import JSON, failure, json_body
from stepscope.hub.api.readers import SESSION_PATH, SESSION_S, Reader, Readers, browser_of

__all__ = ["session_routes"]

MOST_BYTES = 4096


class _Given(msgspec.Struct):
    token: str


def session_routes(readers: Readers) -> list[Route]:
    async def begin(request: Request) -> Response:
        """The token comes in the body, ``{"token": …}``, or as the header that also serves without a session."""
        whose = browser_of(request.scope)
        admitted = readers.admits(request.headers, whose)
        if admitted is None:
            token = await _token(request)
            admitted = None if token is None else readers.right(token)
        if not admitted:
            return await readers.refuse(request.scope, tried=admitted is False)
        if "authorization" not in request.headers and (left_s := readers.session_left_s(request.headers, whose)):
            return Response(json_body({"seconds": left_s}), media_type=JSON)  # it does not renew itself
        response = Response(json_body({"seconds": SESSION_S}), media_type=JSON)
        readers.open_session(response, whose)
        readers.note("signed in", request.scope, Reader(via="hub token"), 200)
        return response

    async def over(request: Request) -> Response:
        if readers.session_left_s(request.headers, browser_of(request.scope)):
            readers.note("signed out", request.scope, Reader(via="hub token"), 200)
        response = Response(json_body({"seconds": 0}), media_type=JSON)
        readers.end_session(response)
        return response

    async def other(_request: Request) -> Response:
        return failure(405, "POST begins a session, DELETE ends it", headers={"Allow": "POST, DELETE"})

    return [
        Route(SESSION_PATH, begin, methods=["POST"]),
        Route(SESSION_PATH, over, methods=["DELETE"]),
        Route(SESSION_PATH, other),
    ]


async def _token(request: Request) -> str | None:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                return None
    except ClientDisconnect:
        return None
    try:
        return msgspec.json.decode(body, type=_Given).token
    except msgspec.MsgspecError:
        return None
