"""The hub's server: uvicorn's HTTP on a socket that is bound already, with an entrance of our own.

    sock ── accept ── Entrance: room for it? ── TLS handshake ── GuardedProtocol ── ASGI app

Accepting is done here and not by the loop, so that a stranger is counted before a handshake is computed for it.
uvicorn is used for its protocol alone: no signal handlers, no log of its own, no ticking; what it would have logged is
counted, and told in a few plain lines.  The listening socket stays open when the server stops: it belongs to whoever
bound it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from uvicorn.config import Config
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from stepscope.errors import HubError
from stepscope.hub.gate.entrance import Entrance, ServerLimits, plain_address
from stepscope.hub.gate.guard import GuardedProtocol
from stepscope.hub.gate.refusals import Refusals
from stepscope.hub.gate.tls import TlsFiles, server_context
from stepscope.records.messages import say

__all__ = ["App", "Server", "run_loop"]

App = Callable[..., Awaitable[None]]
"""ASGI 3."""
Result = TypeVar("Result")

_AT_ONCE: Final = 64
"""Connections accepted before anything else gets its turn."""
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
        """HubError when the certificate cannot be used.  ``caller``: a connection that was accepted already."""
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
        """Open ones, also those whose handshake is not complete."""
        return self._entrance.open

    @property
    def answered(self) -> int:
        """How many requests so far."""
        return self._state.total_requests

    def stop(self) -> None:
        """Answers under way are finished, within ``grace_s``."""
        self._stop.set()

    async def run(self) -> None:
        """HubError when the app cannot start."""
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
                with suppress(OSError):  # it left meanwhile
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
            if not isinstance(error, ConnectionResetError):  # that one only left, or was sent away
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
        await asyncio.sleep(0)  # in which the transports close


class _Faults(logging.Handler):
    """What uvicorn or the loop would have logged: an error of ours, counted, and a few of them told."""

    _NAMES = ("uvicorn", "asyncio")

    def __init__(self, refusals: Refusals) -> None:
        super().__init__(logging.ERROR)
        self._refusals = refusals
        self._told = 0

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
        if not isinstance(error, OSError):  # those are somebody's broken connection
            self._tell(error, str(context.get("message", "")))

    def _tell(self, error: BaseException | None, message: str) -> None:
        if isinstance(error, asyncio.CancelledError):
            return
        self._refusals.count("fault", "")
        self._told += 1
        if self._told <= _LINES:
            place = ""
            trace = error.__traceback__ if error is not None else None
            while trace is not None:
                place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
                trace = trace.tb_next
            what = message.strip() if error is None else f"{type(error).__name__}: {error}"
            say(f"the hub made a mistake: {what}{place}")


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on uvloop's loop, where there is one."""
    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        asyncio.set_event_loop(None)
        loop.close()


def _affordable(limits: ServerLimits) -> ServerLimits:
    """As many connections as there can be files; as many files as we may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    return replace(limits, connections=max(2, soft - _OTHER_FILES))
