"""A receiver of alerts on loopback that records what it gets and answers as a test says."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["LoopbackReceiver", "Received", "Reply", "closed_port", "loopback_receiver"]


@dataclass(frozen=True, kw_only=True)
class Received:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: bytes = b"ok"
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent instead of an answer in HTTP; then the connection is closed."""
    never: bool = False
    """No answer until the receiver is closed."""


class LoopbackReceiver:
    """``replies``: one for each of the first requests; then ``otherwise`` decides."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Received] = []
        self.accepted: list[Received] = []
        """Those that were answered with 2xx."""
        self.replies: list[Reply] = []
        self.otherwise: Callable[[Received], Reply] = lambda _: Reply()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Received(method=self.command, path=self.path, headers=dict(self.headers), body=body)
                receiver.answer(self, request)

            do_GET = do_POST = _serve  # noqa: N815 - names of the base class

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"

    def answer(self, handler: BaseHTTPRequestHandler, request: Received) -> None:
        with self._changed:
            self.requests.append(request)
            reply = self.replies.pop(0) if self.replies else self.otherwise(request)
            if reply.raw is None and not reply.never and 200 <= reply.status < 300:
                self.accepted.append(request)
            self._changed.notify_all()
        handler.close_connection = True
        if reply.never:
            self._closing.wait()
        elif reply.raw is not None:
            handler.wfile.write(reply.raw)
        else:
            handler.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(reply.body)

    def wait_for(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until the requests so far satisfy a condition."""
        with self._changed:
            assert self._changed.wait_for(done, timeout_s), [request.body[:200] for request in self.requests]

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def loopback_receiver(tls: ssl.SSLContext | None = None) -> Iterator[LoopbackReceiver]:
    receiver = LoopbackReceiver(tls)
    try:
        yield receiver
    finally:
        receiver.close()


def closed_port() -> int:
    """A port of loopback on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
