"""What tests of the hub and the page stand on: a real server in a thread, and runs for it to answer for.

folder = tmp_path / "runs"
record(folder, "demo", DEMO.run())
hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER)))
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop
from fakes.cluster import Cluster, slow_at
from made_runs import WALL_NS, Feed, append_steps, record, sidecar_of

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.limits import ServerLimits
from stepscope.hub.runs import Runs
from stepscope.hub.server import Server
from stepscope.hub.traces.desk import TraceDesk
from stepscope.hub.transport import TlsFiles
from stepscope.records.hang import Culprit, HangRecord, StackGroup, ThreadStack
from stepscope.records.hang import Frame as StackFrame

__all__ = [
    "DEMO",
    "HOSTILE",
    "READER",
    "WALL_NS",
    "Answer",
    "Feed",
    "Hub",
    "ServedFolder",
    "append_steps",
    "missing_rank",
    "record",
    "sidecar_of",
]

READER = "reader-token-of-the-tests"
HOSTILE = "<img src=x onerror=alert(1)>\"'`{{7*7}} ü"
DEMO = Cluster(
    ranks=8, steps=600, hosts=2, faults=(slow_at(3, "forward", 30.0),), allocated_mb=100.0, memory_every=2, tail=0.0
)


def missing_rank() -> HangRecord:
    where = StackFrame(file="train.py", line=41, function="step")
    return HangRecord(
        number=1,
        host="node0",
        kind="hang_missing_collective",
        title="Rank 3 has not called all_reduce.",
        declared_wall_ns=WALL_NS + 2,
        stopped_wall_ns=WALL_NS + 1,
        threshold_s=30.0,
        culprits=(Culprit(rank=3, reason="sleeps", at=where),),
        victims=(0, 1, 2),
        stacks=(StackGroup(ranks=(3,), threads=(ThreadStack(main=True, frames=(where,)),)),),
    )


class Answer(NamedTuple):
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@functools.cache
def known_authorities() -> ssl.SSLContext:
    """As every client would read them for itself, which takes 40 ms."""
    return ssl.create_default_context()


class Hub:
    """A server in a thread of its own."""

    def __init__(
        self,
        make: Callable[[], Any],
        limits: ServerLimits | None = None,
        port: int = 0,
        tls: TlsFiles | None = None,
    ) -> None:
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self._tls = tls
        self._ready = threading.Event()
        self._limits = limits
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve(make)), name="hub")
        self._thread.start()
        assert self._ready.wait(30)
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=known_authorities())
        self._plain = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)  # leaves paths as they are

    async def _serve(self, make: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        # One thread, there from the start: tests that share a hub would each be told of a new one.
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        self.server = Server(make(), self._listening, limits=self._limits, tls=self._tls)
        serving = asyncio.create_task(self.server.run())
        await self.server.started.wait()
        self._ready.set()
        await serving

    def get(self, path: str, *, token: str | None = READER, method: str = "GET", **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            named["Authorization"] = f"Bearer {token}"
        for fresh in (False, True):
            try:
                self._plain.request(method, path, headers={"Accept-Encoding": "identity", **named})
                response = self._plain.getresponse()
                return Answer(response.status, httpx.Headers(response.getheaders()), response.read())
            except (http.client.HTTPException, ConnectionError):
                self._plain.close()  # it was idle for too long
                if fresh:
                    raise
        raise AssertionError

    def in_loop(self, call: Callable[[], Any]) -> Any:
        """What belongs to the loop is touched there."""

        async def called() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(30)

    def close(self) -> None:
        self.client.close()
        self._plain.close()
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(30)
        self._listening.close()


class ServedFolder:
    """A hub of a folder in a thread: ``url``, ``token``; ``stop`` and ``start`` again at the same port."""

    token = READER

    def __init__(self, folder: Path, *, changes: bool = False, desk: TraceDesk | None = None) -> None:
        self.folder = folder
        self.changes = changes
        self._desk = desk
        self.port = 0
        self._hub: Hub | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def hub(self) -> Hub:
        assert self._hub is not None, "it is stopped"
        return self._hub

    def start(self) -> None:
        async def at_once(_seconds: float) -> None:
            """Wrong tokens are slowed down, which other tests see to."""

        readers = Readers(self.token, sleep=at_once)

        def app() -> Any:
            return make_app(Runs.of_folder(self.folder), readers, changes=self.changes, desk=self._desk)

        self._hub = Hub(app, port=self.port)
        self.port = self._hub.port

    def stop(self) -> None:
        if self._hub is not None:
            self._hub.close()
            self._hub = None
