"""What every answer of the hub says to a browser: run no foreign script, guess no type, tell no referrer.

A pure ASGI layer around everything, so that no resource can forget it.  What is behind ``/api`` and ``/metrics`` is
never kept by a cache on the way: it is somebody's run.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["FRAMED_POLICY", "POLICY", "SafeHeaders"]

_OWN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
)
POLICY = f"{_OWN}'none'"
"""Nothing but what the hub itself serves, nothing inline, nobody's frame."""
FRAMED_POLICY = f"{_OWN}'self' http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
"""The same in the frame of a notebook: on this machine, or by way of its server's own proxy (``stepscope.live()``)."""
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_UNCACHED = ("/api/", "/metrics", "/healthz")


class SafeHeaders:
    def __init__(self, app: ASGIApp, *, framed: bool = False) -> None:
        self._app = app
        frames = {"X-Frame-Options": "DENY"}  # it knows nobody or the same site; the policy is for newer browsers
        self._said = {**_ALWAYS, "Content-Security-Policy": FRAMED_POLICY if framed else POLICY}
        self._said |= {} if framed else frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                _put(message, self._said, scope["path"])
            await send(message)

        await self._app(scope, receive, sent)


def _put(message: MutableMapping[str, Any], said: Mapping[str, str], path: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in said.items():
        headers[name] = value
    if path.startswith(_UNCACHED):
        headers["Cache-Control"] = "no-store"
