"""``/api/v1/session``: a browser trades a token for a cookie, because EventSource can send no headers."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stepscope.hub.api.answers import JSON, failure, json_body
from stepscope.hub.api.reader_tokens import METRICS
from stepscope.hub.api.readers import SESSION_PATH, Readers, browser_of

__all__ = ["session_routes"]

MOST_BYTES = 4096


class _Given(msgspec.Struct):
    token: str


def session_routes(readers: Readers) -> list[Route]:
    async def begin(request: Request) -> Response:
        """The token comes in the body, ``{"token": …}``, or as the header that also serves without a session."""
        whose = browser_of(request.scope)
        token = None if "authorization" in request.headers else await _token(request)
        reader = readers.admits(request.headers, whose) if token is None else readers.with_token(token)
        if not reader:
            return await readers.refuse(request.scope, tried=reader is False)
        if reader.token is not None and reader.token.scope == METRICS:
            readers.note("refused", request.scope, reader, 403)
            return failure(403, f"this token is for {reader.token.scope} only")
        if token is None and "authorization" not in request.headers:
            _, left_s = readers.session(request.headers, whose)
            return Response(json_body({"seconds": left_s}), media_type=JSON)  # it does not renew itself
        response = Response(json_body({"seconds": readers.session_s(reader.token)}), media_type=JSON)
        readers.open_session(response, whose, reader.token)
        readers.note("signed in", request.scope, reader, 200)
        return response

    async def over(request: Request) -> Response:
        reader, _ = readers.session(request.headers, browser_of(request.scope))
        if reader:
            readers.note("signed out", request.scope, reader, 200)
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
