"""A fake of Slack on loopback: the Web API methods that the bot calls, and the WebSocket of socket mode.

Not Slack: it checks tokens, delivers the events that a test sends and keeps what the bot posts.  The client under test
is slack_sdk's own, with ``base_url`` set to ``url``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import queue
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

__all__ = ["APP_TOKEN", "BOT_TOKEN", "FakeSlack"]

APP_TOKEN, BOT_TOKEN = "xapp-test", "xoxb-test"
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


class FakeSlack:
    def __init__(self) -> None:
        self.posted: queue.Queue[dict[str, Any]] = queue.Queue()
        self.confirmed: queue.Queue[str] = queue.Queue()
        """The envelopes that the client acknowledged."""
        self.connected = threading.Semaphore(0)
        self.refuse = ""
        """An error to answer with instead."""
        self._sockets: list[socket.socket] = []
        fake = self

        class Handler(_Handler):
            slack = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/api/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake slack")
        self._thread.start()

    def send(self, event: dict[str, Any], *, envelope: str, event_id: str) -> None:
        """Deliver an event to the newest connection."""
        payload = {"type": "event_callback", "event_id": event_id, "event": event}
        self._frame({"envelope_id": envelope, "type": "events_api", "payload": payload})

    def disconnect(self) -> None:
        """Ask the client to connect again, as Slack does every few hours."""
        self._frame({"type": "disconnect", "reason": "refresh_requested"})

    def _frame(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        head = struct.pack("!BB", 0x81, len(data)) if len(data) < 126 else struct.pack("!BBH", 0x81, 126, len(data))
        self._sockets[-1].sendall(head + data)

    def serve_socket(self, sock: socket.socket) -> None:
        """Read the client's frames until it leaves."""
        self._sockets.append(sock)
        self._frame({"type": "hello"})
        self.connected.release()
        file = sock.makefile("rb")
        while len(head := file.read(2)) == 2:
            kind, length = head[0] & 0x0F, head[1] & 0x7F
            if length == 126:
                length = struct.unpack("!H", file.read(2))[0]
            mask = file.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(file.read(length)))
            if kind == 0x8:
                return
            if kind == 0x9:
                sock.sendall(struct.pack("!BB", 0x8A, len(data)) + data)
            elif kind == 0x1:
                self.confirmed.put(json.loads(data)["envelope_id"])

    def close(self) -> None:
        for sock in self._sockets:
            with_shutdown(sock)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def with_shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class _Handler(BaseHTTPRequestHandler):
    slack: FakeSlack
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + _GUID
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
        self.wfile.write("\r\n".join([*lines, f"Sec-WebSocket-Accept: {accept}", "", ""]).encode())
        self.slack.serve_socket(self.connection)
        self.close_connection = True

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        method = self.path.removeprefix("/api/")
        wanted = APP_TOKEN if method == "apps.connections.open" else BOT_TOKEN
        if self.headers.get("Authorization") != f"Bearer {wanted}":
            answer: dict[str, Any] = {"ok": False, "error": "invalid_auth"}
        elif self.slack.refuse:
            answer = {"ok": False, "error": self.slack.refuse}
        elif method == "apps.connections.open":
            answer = {"ok": True, "url": f"ws://127.0.0.1:{self.slack.port}/socket?ticket=secret"}
        elif method == "chat.postMessage":
            self.slack.posted.put(self._values(body))
            answer = {"ok": True, "ts": "2.0"}
        else:
            answer = {"ok": True, "user_id": "UBOT"}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _values(self, body: bytes) -> dict[str, Any]:
        if "json" in self.headers.get("Content-Type", ""):
            found: dict[str, Any] = json.loads(body)
            return found
        return {name: values[0] for name, values in parse_qs(body.decode()).items()}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Say nothing."""
