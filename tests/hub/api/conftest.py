"""Runs for the hub to answer for, made from a synthetic cluster in the files that an agent writes; a real server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from stepscope.hub.api.readers import Readers
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import make_app
from stepscope.hub.gate.entrance import ServerLimits
from stepscope.hub.gate.server import Server, run_loop
from stepscope.hub.runs import Runs
from stepscope.records.hang import Culprit, HangRecord, StackGroup, ThreadStack
from stepscope.records.hang import Frame as StackFrame
from stepscope.records.series import RankSeries, RunData
from stepscope.ring import RingBatch
from stepscope.store.create import create_run
from stepscope.store.hangs import write_hang
from stepscope.store.jsonl import append_jsonl
from stepscope.store.meta import end_run, read_meta, write_meta
from stepscope.store.paths import EVENTS, SAMPLES, STACKS, segment_path
from stepscope.store.seal import seal
from stepscope.store.segments import FRAME_SLOTS, SegmentWriter
from stepscope.store.sidecar import RingSidecar, write_sidecar
from stepscope.testing.cluster import Cluster, slow_at
from stepscope.testing.samples import with_samples

READER = "reader-token-of-the-tests"
HOSTILE = "<img src=x onerror=alert(1)>\"'`{{7*7}} ü"
WALL_NS = 1_700_000_000_000_000_000
DEMO = Cluster(
    ranks=8, steps=600, hosts=2, faults=(slow_at(3, "forward", 30.0),), allocated_mb=100.0, memory_every=2, tail=0.0
)


def sidecar_of(series: RankSeries, *, heard_wall_ns: int = 1) -> RingSidecar:
    return RingSidecar(
        identity=series.identity,
        pid=series.identity.pid,
        start_ticks=1,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns,
        phase_names=series.phase_names,
        state=series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=len(series.steps),
        hook_failures=0,
        heard_wall_ns=heard_wall_ns,
        ended_wall_ns=series.ended_wall_ns,
    )


def append_steps(run_dir: Path, series: RankSeries, first: int, last: int) -> None:
    """Steps ``first`` to before ``last``, as the agent appends them."""
    writer = SegmentWriter(segment_path(run_dir, sidecar_of(series).key))
    rows = series.steps[first:last]
    for at in range(0, len(rows), FRAME_SLOTS):
        part = rows[at : at + FRAME_SLOTS]
        slots = [row.tobytes() for row in part]
        writer.append(RingBatch(slots=slots, last_seq=int(part["seq"][-1]), lost=0, torn=0))


def record(
    root: Path,
    name: str,
    run: RunData,
    *,
    sealed: bool = True,
    events: Sequence[dict[str, Any]] = (),
    stacks: Sequence[dict[str, Any]] = (),
) -> Path:
    """A run that is over, in ``root``."""
    run_dir = create_run(root, name, ["python", "train.py"], environ={}, sessions=root.parent / "sessions").run_dir
    write_meta(run_dir, {**read_meta(run_dir), "launcher": None})  # this very process would count as alive
    for series in run.ranks:
        append_steps(run_dir, series, 0, len(series.steps))
        write_sidecar(run_dir, sidecar_of(series))
    append_jsonl(run_dir / SAMPLES, run.samples)
    append_jsonl(run_dir / EVENTS, events)
    append_jsonl(run_dir / STACKS, stacks)
    (run_dir / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    end_run(run_dir, exit_code=0, status="finished", wall_ns=WALL_NS + 100_000_000_000)
    if sealed:
        seal(run_dir)
    return run_dir


@pytest.fixture
def record_run() -> Callable[..., Path]:
    return record


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[Cluster], tuple[Path, Any]]:
    """``begun(cluster)``: a run without a step yet, and what appends some: ``append(run_dir, series, first, last)``."""

    def begin(cluster: Cluster, name: str = "growing") -> tuple[Path, Any]:
        made = create_run(tmp_path / "runs", name, ["train.py"], environ={}, sessions=tmp_path / "sessions")
        write_meta(made.run_dir, {**read_meta(made.run_dir), "launcher": None})
        for series in cluster.series():
            write_sidecar(made.run_dir, sidecar_of(series))
        return made.run_dir, append_steps

    return begin


def _hang() -> HangRecord:
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that nobody may change: ``demo`` is sealed, ``plain`` is not, the third has a name."""
    root = tmp_path_factory.mktemp("hub") / "runs"
    events = [
        {"schema": 1, "wall_ns": WALL_NS + i, "event": "warning", "message": f"number {i}", "host": "node0"}
        for i in range(5)
    ]
    stack = {"rank": 3, "pid": 1003, "wall_ns": WALL_NS + 5, "step": 7, "phase": "other", "node": "node0"}
    frames = [{"file": "train.py", "line": 3, "function": "main"}]
    demo = record(root, "demo", with_samples(DEMO, every_s=0.5), events=events, stacks=[{**stack, "frames": frames}])
    (demo / "flight").mkdir()
    (demo / "flight" / "rank_3.json").write_text('{"version": "2.9"}')
    write_hang(record(root, "plain", Cluster(ranks=2, steps=40).run(), sealed=False), _hang())
    record(root, HOSTILE, Cluster(ranks=1, steps=5).run())
    return root


class Answer(NamedTuple):
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Hub:
    """A server in a thread of its own."""

    def __init__(self, make: Callable[[], Any], limits: ServerLimits | None = None) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._limits = limits
        self._thread = threading.Thread(target=lambda: run_loop(self._serve(make)), name="hub")
        self._thread.start()
        assert self._ready.wait(30)
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self._plain = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)  # leaves paths as they are

    async def _serve(self, make: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        # One thread, there from the start: tests that share a hub would each be told of a new one.
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(int)
        self.server = Server(make(), self._listening, limits=self._limits)
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


Serve = Callable[..., Hub]


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """``serve()``: a hub of the folder; of other runs, or with other limits, if that is said."""
    hubs: list[Hub] = []

    def start(
        runs: Callable[[], Runs] | None = None, *, streams: Streams | None = None, limits: ServerLimits | None = None
    ) -> Hub:
        def make() -> Any:
            return make_app(runs() if runs else Runs.of_folder(folder), Readers(READER), streams=streams)

        hubs.append(Hub(make, limits))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    """One for all tests of a file that only ask."""

    async def at_once(_seconds: float) -> None:
        """Wrong tokens are slowed down, which these tests have seen enough of."""

    hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, sleep=at_once)))
    yield hub
    hub.close()
