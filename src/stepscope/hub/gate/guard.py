"""One connection, held to its limits: uvicorn's HTTP protocol with a deadline and a count for each of its stages.

httptools parses; it has no idea of time and sets no limit to a head.  Here every connection is in one of a few stages
(``Stage``), each with a deadline; one sweep a second closes those past theirs, which is cheaper than a timer for each
request.  What a request may bring along is decided when its head is complete, before a byte of its body is believed.
A request that could be read in two ways (two lengths, a length and chunks, something behind the chunks), one sent
before the answer to the last, and an upgrade are refused: nobody of ours sends such.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from functools import cached_property
from typing import Any, Final, Literal

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from stepscope.hub.gate.entrance import Entrance, is_local
from stepscope.hub.gate.refusals import Reason
from stepscope.records.peers import peer_uid

__all__ = ["AGENT", "PEER", "GuardedProtocol", "Stage", "known"]

Stage = Literal["handshake", "head", "body", "busy", "drain", "idle", "closing"]
"""``drain``: it was answered before its body was there, the rest of which is passed over."""

AGENT: Final = "stepscope.agent"
"""An app sets this in ``scope["state"]`` when whoever asks is an agent of the run: it may stay."""
_KNOWN: Final = "stepscope.known"
PEER: Final = "stepscope.peer"
"""In ``scope["state"]``: a function that tells which user of this machine asks; None: of another, or not known."""
_SLACK: Final = 64 << 10
"""What the frames of chunks may add to a body."""
_FOREVER: Final = float("inf")


def known(scope: MutableMapping[str, Any]) -> None:
    """An app calls this as soon as whoever asks has shown a key or a token, before it reads a body."""
    told = scope.get("state", {}).get(_KNOWN)
    if told is not None:
        told()


class _WrongError(Exception):
    """Raised through the parser, which hands it on as an error of its own."""


class _Door(asyncio.Transport):
    """The transport as a request sees it: head and body of an answer leave together, and closing is no reset.

    Waking the other side twice costs more than all else that is done for a small answer.  A socket that is closed with
    something unread is reset, and its peer may lose the answer that was just written: the rest is read first.
    """

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._held: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._protocol.loop.call_soon(self.flush)
        self._held.append(bytes(data))

    def flush(self) -> None:
        if self._held:
            self._protocol.transport.write(b"".join(self._held))
            self._held.clear()

    def is_closing(self) -> bool:
        return self._protocol.stage == "closing" or self._protocol.transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._protocol.close_behind()


class GuardedProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        entrance: Entrance,
        sock: socket.socket,
        address: str,
    ) -> None:
        super().__init__(config, state, app_state, _loop=loop)
        self.address = address
        self._entrance = entrance
        self._limits = entrance.limits
        self._sock = sock
        self._time = loop.time
        self._wrong: tuple[int, Reason] = (400, "http")
        self._read = self._head = self._body = 0
        self._most = self._body_most = 0
        self._agent = False
        self._stuck_s = _FOREVER
        # The loop has a deadline of its own for the handshake, which comes first.
        self._stage("handshake", self._limits.handshake_s + self._limits.linger_s)

    def _stage(self, stage: Stage, seconds: float) -> None:
        self.stage: Stage = stage
        self.until_s = self._time() + seconds

    # ── what the entrance and the sweep do ──────────────────────────────────────────────────────────────────────────

    def send_away(self) -> None:
        """At once, whatever it is doing."""
        if self.stage != "handshake":
            self.transport.abort()
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # the handshake then fails by itself
        except OSError:
            pass

    def sweep(self, now_s: float) -> None:
        """Close it if it is past a deadline."""
        if now_s - self._stuck_s > self._limits.answer_s:
            self._entrance.refusals.count("reader_slow", self.address)
            self.send_away()
            return
        if now_s < self.until_s:
            return
        if self.stage == "head" and self._read:
            self._refuse(408, "head_slow")
        elif self.stage == "body":
            self._refuse(408, "body_slow")
        elif self.stage in ("head", "idle", "drain"):
            self._stage("closing", self._limits.linger_s)
            self.transport.close()
        else:
            self.send_away()

    # ── the transport's side ────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stage("head", self._limits.head_s)
        self._most = self._limits.head_bytes
        self._door = _Door(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._entrance.leave(self)

    def data_received(self, data: bytes) -> None:
        self._read += len(data)
        if self.stage == "closing":
            if self._read > self._most:
                self.transport.abort()
            return
        if self.stage == "idle":
            self._stage("head", self._limits.head_s)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(*self._wrong)
            return
        if self._read > self._most:
            self._refuse(*((431, "head_large") if self.stage == "head" else (413, "body_large")))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_s = self._time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_s = _FOREVER

    # ── the parser's side ───────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        if self.stage == "idle":  # in one piece with the rest of a body that was answered early
            self._stage("head", self._limits.head_s)
        elif self.stage != "head":
            raise _WrongError("a request before the answer to the last")
        self._head = self._body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.stage != "head":
            raise _WrongError("headers behind the body")
        self._head += len(name) + len(value) + 4
        if self._head + len(self.url) > self._limits.head_bytes:
            self._fail(431, "head_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        lengths = [value for name, value in self.headers if name == b"content-length"]
        chunked = [value for name, value in self.headers if name == b"transfer-encoding"]
        clear = len(lengths) + len(chunked) <= 1 and all(value.lower() == b"chunked" for value in chunked)
        if not clear or self.parser.should_upgrade():
            self._fail(400, "http")
        self._body_most = self._limits.body_cap(self.url.partition(b"?")[0])
        length = int(lengths[0]) if lengths else 0
        if length > self._body_most:
            self._fail(413, "body_large")
        super().on_headers_complete()
        self.cycle.transport = self._door
        self._most = self._limits.head_bytes + self._body_most + _SLACK
        self.scope["state"][PEER] = self._peer
        self.scope["state"][_KNOWN] = lambda: self._entrance.known(self)
        self._stage("body", self._limits.body_s + length / self._limits.body_bytes_per_s)

    @cached_property
    def _uid(self) -> int | None:
        if not is_local(self.address) or not self.client or not self.server:
            return None
        return peer_uid(self.address, self.client[1], self.server[1] or 0)

    def _peer(self) -> int | None:
        """Looked up once a connection, and only where somebody wants to know: the table of a busy machine is long."""
        return self._uid

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if self._body > self._body_most and self.stage != "drain":
            self._fail(413, "body_large")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.stage == "drain":
            self._idle()
        else:
            self._stage("busy", _FOREVER)

    def _fail(self, status: int, reason: Reason) -> None:
        self._wrong = (status, reason)
        raise _WrongError(reason)

    # ── the app's side ──────────────────────────────────────────────────────────────────────────────────────────────

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.stage == "closing":
            return
        self.flow.resume_reading()
        self._agent = self._agent or self.scope["state"].get(AGENT) is True
        if self.stage == "busy":
            self._idle()
        else:
            self._stage("drain", self._limits.linger_s)  # as much as the body may be, which is counted already

    def close_behind(self) -> None:
        """After the answer that was just written."""
        if self.stage == "body":
            self._linger()
        else:
            self._stage("closing", self._limits.answer_s)
            self.transport.close()

    def _idle(self) -> None:
        self._read = 0
        self._most = self._limits.head_bytes
        self._stage("idle", self._limits.agent_idle_s if self._agent else self._limits.idle_s)
        if not self._agent:
            self._entrance.waits(self)

    def _refuse(self, status: int, reason: Reason) -> None:
        """Answer without asking the app, pass over what still comes, and close."""
        self._entrance.refusals.count(reason, self.address)
        if self.stage in ("body", "busy"):
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.stage == "drain" or (self.stage in ("body", "busy") and self.cycle.response_started):
            self.transport.abort()  # it has an answer, or part of one
        elif not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self._most = self._read + self._limits.linger_bytes
            self._linger()

    def _linger(self) -> None:
        self._stage("closing", self._limits.linger_s)
        if not self._agent:
            self._entrance.waits(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
