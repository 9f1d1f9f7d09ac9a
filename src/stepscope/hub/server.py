"""The hub's HTTP server: accepts connections and enforces limits and deadlines on each.

    sock ── accept ── Entrance: room for it? ── TLS handshake ── GuardedProtocol ── ASGI app

It runs uvicorn's HTTP protocol on a socket that is already bound.  Connections are accepted here rather than by the
loop, so that a stranger is counted before a handshake is computed for it.  Only uvicorn's protocol is used, without
its signal handlers, log or periodic tick; errors that it would log are counted, and the first few are printed.  The
listening socket stays open when the server stops: it belongs to the code that bound it.

*Why a server and protocol of our own.*  uvicorn limits the requests in progress (``limit_concurrency``, answered after
a handshake and a parsed head), the pause between requests and the length of a shutdown.  It has no deadline for a
handshake, a head or a body, no limit for a body or for the connections of one address, and no hook before the
handshake; hypercorn and granian have neither.  A reverse proxy, which has all that, is not there on a compute node.
``tests/hub/test_hub_attacks.py`` and ``tests/faults`` attack each of these limits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

import httptools
from uvicorn.config import Config
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from stepscope.errors import HubError
from stepscope.hub.limits import Entrance, Reason, Refusals, ServerLimits, is_local, plain_address
from stepscope.hub.transport import TlsFiles, peer_uid, server_context
from stepscope.records.text import say

__all__ = ["AGENT", "Server", "known"]


# -- connection guard -------------------------------------------------------------------------------------------------
# One connection within its limits: uvicorn's HTTP protocol with a deadline and a byte count for each stage.
#
# httptools only parses; it knows no time and no limit for a request head.  Here every connection is in one of a few
# stages (``Stage``), each with a deadline.  One sweep a second closes overdue connections, which is cheaper than a
# timer per request.  The limits for a body are decided when the head is complete, before any of the body is accepted.
# Refused, since Stepscope never sends them: ambiguous requests (two lengths, a length and chunks, headers after the
# chunks), a request before the answer to the last one, and upgrades.

Stage = Literal["handshake", "head", "body", "busy", "drain", "idle", "closing"]
"""``drain``: the request was answered before its body was complete; the rest is discarded."""

AGENT: Final = "stepscope.agent"
"""The app sets this in ``scope["state"]`` when the client is an agent of the run: its connection may stay open."""
_KNOWN: Final = "stepscope.known"
PEER: Final = "stepscope.peer"
"""In ``scope["state"]``: a function that returns the local user at the other end; None: remote or unknown."""
_SLACK: Final = 64 << 10
"""The number of bytes that chunk framing may add to a body."""
_FOREVER: Final = float("inf")


def known(scope: MutableMapping[str, Any]) -> None:
    """Mark the client as authenticated; the app calls this before it reads a body."""
    mark = scope.get("state", {}).get(_KNOWN)
    if mark is not None:
        mark()


class _WrongError(Exception):
    """Raised through the parser, which turns it into its own error."""


class _Door(asyncio.Transport):
    """The transport as a request sees it: sends the head and body of an answer together, and closes without a reset.

    Waking the other side twice costs more than all other work for a small answer.  Closing a socket with unread data
    resets the connection, and the peer may lose the answer just written; the rest is therefore read first.
    """

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._unsent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._unsent:
            self._protocol.loop.call_soon(self.flush)
        self._unsent.append(bytes(data))

    def flush(self) -> None:
        if self._unsent:
            self._protocol.transport.write(b"".join(self._unsent))
            self._unsent.clear()

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
        # The loop has a separate deadline for the handshake, which expires first.
        self._stage("handshake", self._limits.handshake_s + self._limits.linger_s)

    def _stage(self, stage: Stage, seconds: float) -> None:
        self.stage: Stage = stage
        self.until_s = self._time() + seconds

    # -- called by the entrance and the sweep ------------------------------------------------------------------------

    def send_away(self) -> None:
        """Close the connection at once, in any stage."""
        if self.stage != "handshake":
            self.transport.abort()
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # makes the handshake fail
        except OSError:
            pass

    def sweep(self, now_s: float) -> None:
        """Close the connection if it is past a deadline."""
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

    # -- called by the transport -------------------------------------------------------------------------------------

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

    # -- called by the parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.stage == "idle":  # arrived together with the rest of a body that was answered early
            self._stage("head", self._limits.head_s)
        elif self.stage != "head":
            raise _WrongError("a request before the previous one was answered")
        self._head = self._body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.stage != "head":
            raise _WrongError("headers after the body")
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
        """Return the peer's user.  Looked up at most once per connection, on demand: the kernel's table may be long."""
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

    # -- called by the app -------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.stage == "closing":
            return
        self.flow.resume_reading()
        self._agent = self._agent or self.scope["state"].get(AGENT) is True
        if self.stage == "busy":
            self._idle()
        else:
            self._stage("drain", self._limits.linger_s)  # up to the size of the body, which is already limited

    def close_behind(self) -> None:
        """Close after the answer just written."""
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
        """Answer without calling the app, discard what still comes, and close."""
        self._entrance.refusals.count(reason, self.address)
        if self.stage in ("body", "busy"):
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.stage == "drain" or (self.stage in ("body", "busy") and self.cycle.response_started):
            self.transport.abort()  # it already has an answer, or part of one
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


# -- server -----------------------------------------------------------------------------------------------------------

App = Callable[..., Awaitable[None]]
"""ASGI 3."""
Result = TypeVar("Result")

_AT_ONCE: Final = 64
"""Connections accepted before other tasks get a turn."""
_OTHER_FILES: Final = 128
_PAUSE_S: Final = 0.25
_SWEEP_S: Final = 1.0
_LINES: Final = 20


class Server:
    """``await run()`` until ``stop()``; both in one event loop."""

    def __init__(
        self,
        app: App,
        sock: socket.socket,
        *,
        tls: TlsFiles | None = None,
        limits: ServerLimits | None = None,
        refusals: Refusals | None = None,
        caller: socket.socket | None = None,
    ) -> None:
        """HubError if the certificate cannot be used.  ``caller``: a connection that was already accepted."""
        self._caller = caller
        self.refusals = refusals if refusals is not None else Refusals()
        self.limits = _affordable(limits if limits is not None else ServerLimits())
        self._sock = sock
        self._tls = server_context(tls) if tls is not None else None
        self._entrance = Entrance(self.limits, self.refusals)
        self._config = Config(
            app,
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ws="none",
            interface="asgi3",
        )
        self._state = ServerState()
        self._stop = asyncio.Event()
        self._arriving: set[asyncio.Task[None]] = set()
        self.started = asyncio.Event()

    @property
    def connections(self) -> int:
        """The number of open connections, including those still in the handshake."""
        return self._entrance.open

    @property
    def answered(self) -> int:
        """The number of requests answered so far."""
        return self._state.total_requests

    def stop(self) -> None:
        """Stop; answers in progress may finish within ``grace_s``."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until ``stop()``.  HubError if the app cannot start."""
        loop = asyncio.get_running_loop()
        faults = _Faults(self.refusals)
        with faults:
            loop.set_exception_handler(faults.in_loop)
            self._config.load()
            lifespan = LifespanOn(self._config)
            await lifespan.startup()
            if lifespan.should_exit:
                raise HubError("the hub's application could not start")
            self._app_state = lifespan.state
            self._sock.setblocking(False)
            loop.add_reader(self._sock, self._accept)
            if self._caller is not None:
                with suppress(OSError):  # it disconnected meanwhile
                    self._let_in(self._caller, self._caller.getpeername())
                self._caller = None
            self.started.set()
            try:
                await self._sweep()
            finally:
                loop.remove_reader(self._sock)
                await self._close()
                await lifespan.shutdown()
                loop.set_exception_handler(None)

    async def _sweep(self) -> None:
        times = (self.limits.head_s, self.limits.body_s, self.limits.idle_s, self.limits.linger_s)
        pause_s = min(_SWEEP_S, *times)
        while not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), pause_s)
            except asyncio.TimeoutError:
                self._entrance.sweep(asyncio.get_running_loop().time())

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self.refusals.count("connections", "")
                loop.remove_reader(self._sock)
                loop.call_later(_PAUSE_S, self._accept_again)
                return
            self._let_in(sock, peer)

    def _let_in(self, sock: socket.socket, peer: Any) -> None:
        loop = asyncio.get_running_loop()
        address = plain_address(peer[0]) if isinstance(peer, tuple) else "local"
        reason = self._entrance.turned_away(address, loop.time())
        if reason is not None:
            self.refusals.count(reason, address)
            sock.close()
            return
        sock.setblocking(False)
        protocol = GuardedProtocol(
            self._config,
            self._state,
            self._app_state,
            loop=loop,
            entrance=self._entrance,
            sock=sock,
            address=address,
        )
        self._entrance.enter(protocol)
        task = loop.create_task(self._admit(protocol, sock))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    def _accept_again(self) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    async def _admit(self, protocol: GuardedProtocol, sock: socket.socket) -> None:
        deadline_s = self.limits.handshake_s if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=deadline_s
            )
        except (OSError, asyncio.TimeoutError) as error:
            if not isinstance(error, ConnectionResetError):  # that client disconnected, or was sent away
                self.refusals.count("tls", protocol.address)
            self._entrance.leave(protocol)
            sock.close()

    async def _close(self) -> None:
        for task in self._arriving:
            task.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = [*self._state.tasks, *self._arriving]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.limits.grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=self.limits.grace_s)
        for visitor in self._entrance.inside():
            visitor.send_away()
        await asyncio.sleep(0)  # lets the transports close


class _Faults(logging.Handler):
    """Errors that uvicorn or the loop would log: bugs in the hub, all counted, the first few printed."""

    _NAMES = ("uvicorn", "asyncio")

    def __init__(self, refusals: Refusals) -> None:
        super().__init__(logging.ERROR)
        self._refusals = refusals
        self._printed = 0

    def __enter__(self) -> _Faults:
        for name in self._NAMES:
            logger = logging.getLogger(name)
            logger.addHandler(self)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._NAMES:
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._tell(error, record.getMessage())

    def in_loop(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):  # an OSError is only a broken connection
            self._tell(error, str(context.get("message", "")))

    def _tell(self, error: BaseException | None, message: str) -> None:
        if isinstance(error, asyncio.CancelledError) or _is_closed_by_peer(error):
            return
        self._refusals.count("fault", "")
        self._printed += 1
        if self._printed <= _LINES:
            place = ""
            trace = error.__traceback__ if error is not None else None
            while trace is not None:
                place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
                trace = trace.tb_next
            what = message.strip() if error is None else f"{type(error).__name__}: {error}"
            say(f"internal error in the hub: {what}{place}")


def _is_closed_by_peer(error: BaseException | None) -> bool:
    """What uvloop raises where something is written to a connection that is gone: a browser that closed its page."""
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


def _affordable(limits: ServerLimits) -> ServerLimits:
    """Raise the limit of open files as far as allowed, and limit the connections to what it permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    return replace(limits, connections=max(2, soft - _OTHER_FILES))
