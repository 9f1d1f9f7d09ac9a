"""Response formats: JSON with a ``schema``, an ETag, gzip if worthwhile, headers for browsers, text for Prometheus.

Answers are encoded and compressed in a thread, so that the loop that receives the agents' frames does not wait for a
page.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "CONTENT_TYPE",
    "JSON",
    "POLICY",
    "ApiError",
    "Body",
    "Exposition",
    "Family",
    "SafeHeaders",
    "answer",
    "failure",
    "json_body",
    "labels_text",
    "takes_gzip",
]


# -- answers ----------------------------------------------------------------------------------------------------------

SCHEMA = 1
SMALL_BYTES = 1 << 10
"""Below this, gzip gains nothing."""
JSON = "application/json"
_LEVEL = 1


class ApiError(Exception):
    """An invalid request; becomes ``{"error": …}`` with that status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Body:
    """An answer that is not JSON, or is already encoded."""

    data: bytes
    media_type: str
    headers: Mapping[str, str]


def json_body(document: Mapping[str, Any]) -> bytes:
    """Encode a document; ``nan`` becomes ``null``, and text that is not valid UTF-8 is escaped."""
    try:
        return msgspec.json.encode({"schema": SCHEMA, **document})
    except UnicodeEncodeError:
        return msgspec.json.encode(_printable({"schema": SCHEMA, **document}))


async def answer(headers: Headers, content: Mapping[str, Any] | Body) -> Response:
    """Return the response for these request headers: 304 if the client has it, compressed if it accepts gzip."""
    return await asyncio.to_thread(_answer, headers, content)


def failure(status: int, why: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response."""
    return Response(json_body({"error": why}), status, dict(headers or {}), JSON)


def _answer(headers: Headers, content: Mapping[str, Any] | Body) -> Response:
    body = content if isinstance(content, Body) else Body(data=json_body(content), media_type=JSON, headers={})
    tag = f'W/"{hashlib.blake2b(body.data, digest_size=12).hexdigest()}"'
    response_headers = {**body.headers, "ETag": tag, "Vary": "Accept, Accept-Encoding"}
    if tag in {known.strip() for known in headers.get("if-none-match", "").split(",")}:
        return Response(status_code=304, headers=response_headers)
    data = body.data
    if len(data) >= SMALL_BYTES and takes_gzip(headers):
        data = gzip.compress(data, _LEVEL, mtime=0)
        response_headers["Content-Encoding"] = "gzip"
    return Response(data, headers=response_headers, media_type=body.media_type)


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


# -- headers ----------------------------------------------------------------------------------------------------------
# Headers for browsers on every answer: run no foreign script, guess no type, send no referrer.
#
# A pure ASGI layer around everything, so that no resource can forget them.  Caches on the way never keep anything from
# ``/api`` or ``/metrics``: it is private.

_OWN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
)
POLICY = f"{_OWN}'none'"
"""Only what the hub itself serves, nothing inline, no framing by other pages."""
FRAMED_POLICY = f"{_OWN}'self' http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
"""The same, framed by a notebook: on this machine, or through its server's own proxy (``stepscope.live()``)."""
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",  # timelines are handed to ui.perfetto.dev in a new tab
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_UNCACHED = ("/api/", "/metrics", "/healthz")


class SafeHeaders:
    def __init__(self, app: ASGIApp, *, framed: bool = False) -> None:
        self._app = app
        frames = {"X-Frame-Options": "DENY"}  # for older browsers; it can only deny all or allow the same site
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


def _put(message: MutableMapping[str, Any], added: Mapping[str, str], path: str) -> None:
    headers = MutableHeaders(scope=message)
    for name, value in added.items():
        headers[name] = value
    if path.startswith(_UNCACHED):
        headers["Cache-Control"] = "no-store"


# -- Prometheus text format -------------------------------------------------------------------------------------------
# Families in the order of their table, each with its help, its type and its samples.
#
#     page = Exposition(FAMILIES)
#     page.put("stepscope_run_step", 120, run="demo")
#     page.put_column("stepscope_node_cpu_ratio", [labels_text({"run": "demo", "node": "0"})], [0.4])
#     page.text()
#
# A value that is missing, or not a number, is left out: Prometheus then shows a gap instead of a zero.  Written by hand
# because prometheus_client takes 30 us of a core for each sample, a quarter of a second for 512 nodes; this takes less
# than 1 us (bench/metrics.py).  A test reads the text with its parser and with promtool.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_HELP_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n"})
LONGEST_LABEL = 200


@dataclass(frozen=True, kw_only=True)
class Family:
    """The samples of one name."""

    name: str
    labels: tuple[str, ...]
    about: str

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


def labels_text(labels: Mapping[str, object]) -> str:
    """Return labels in the text format, cleaned and escaped."""
    return ",".join(f'{name}="{_label(text)}"' for name, text in labels.items())


def _label(value: object) -> str:
    text = str(value)[:LONGEST_LABEL]
    return text if text.isalnum() else _UNSEEN.sub("�", text).translate(_ESCAPES)


class Exposition:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        self._lines: defaultdict[str, list[str]] = defaultdict(list)

    def put(self, name: str, value: float | None, /, **labels: object) -> None:
        if value is not None and math.isfinite(value):
            own = f"{{{labels_text(labels)}}}" if labels else ""
            self._lines[name].append(f"{name}{own} {value!r}\n")

    def put_column(self, name: str, labels: Sequence[str], values: Sequence[float | None]) -> None:
        """``labels``: of each value, from ``labels_text``; the same for many families."""
        if not values:
            return
        finite = np.isfinite(np.array(values, np.float64))
        if not finite.all():
            labels, values = list(compress(labels, finite)), list(compress(values, finite))
        parts = [f"{name}{{", "", "} ", ""] * len(values)
        parts[1::4] = labels
        parts[3::4] = [f"{value!r}\n" for value in values]
        self._lines[name].append("".join(parts))

    def text(self) -> str:
        found = []
        for name, family in self._families.items():
            if lines := self._lines.get(name):
                about = family.about.translate(_HELP_ESCAPES)
                found += [f"# HELP {name} {about}\n# TYPE {name} {family.kind}\n", *lines]
        return "".join(found)
