"""A stand-in for torch's worker server: HTTP on a Unix socket, which answers as a test says or replays recorded dumps.

    server = WorkerServer(path, replaying({"dump_nccl_trace_json": dump, "dump_traceback": b"Thread 0x1 …"}))

A dump of NCCL's recorder is replayed as torch answers it: with ``onlyactive`` without what has ended.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

Behave = Callable[[socket.socket, bytes], None]

EMPTY = b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
"""What the recorder of a backend answers that is not used."""


class WorkerServer:
    """Listens on a Unix socket; each connection is served by ``behave(connection, request)``."""

    def __init__(self, path: Path, behave: Behave) -> None:
        self.path = path
        self.requests: list[bytes] = []
        self._behave = behave
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                request = connection.recv(4096)
                if not request:
                    continue
                self.requests.append(request)
                try:
                    self._behave(connection, request)
                except OSError:
                    continue  # the client went away, as it may

    def handlers(self) -> list[str]:
        """What it was asked, in order."""
        return [handler_of(request) for request in self.requests]

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # its path may be gone
        self._thread.join()
        self._socket.close()


def handler_of(request: bytes) -> str:
    return request.split()[1].rpartition(b"/")[2].decode()


def replaying(answers: Mapping[str, bytes]) -> Behave:
    """By handler, with its query or without; what is not there is not found."""

    def behave(connection: socket.socket, request: bytes) -> None:
        handler = handler_of(request)
        name, _, query = handler.partition("?")
        body = answers.get(handler, answers.get(name))
        if body is not None and name == "dump_nccl_trace_json" and "onlyactive=true" in query:
            body = active(body)
        status = b"200 OK" if body is not None else b"404 Not Found"
        connection.sendall(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (status, len(body or b"")) + (body or b""))

    return behave


def active(dump: bytes) -> bytes:
    """A dump as the recorder gives it when it is asked for what has not ended."""
    raw = json.loads(dump)
    rows = [row for row in raw.pop("entries", []) if row["state"] != "completed"]
    return json.dumps({**raw, "entries": rows} if rows else raw, separators=(",", ":")).encode()
