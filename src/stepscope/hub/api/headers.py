"""What every answer of the hub says to a browser: run no foreign script, guess no type, tell no referrer.

A pure ASGI layer around everything, so that no resource can forget it.  What is behind ``/api`` and ``/metrics`` is
never kept by a cache on the way: it is somebody's run.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["POLICY", "SafeHeaders"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing but what the hub itself serves, nothing inline, nobody's frame."""
_ALWAYS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_UNCACHED = ("/api/", "/metrics", "/healthz")


class SafeHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                _put(message, scope["path"])
            await send(message)

        await self._app(scope, receive, sent)


def _put(message: MutableMapping[str, Any], path: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in _ALWAYS.items():
        headers[name] = value
    if path.startswith(_UNCACHED):
        headers["Cache-Control"] = "no-store"
