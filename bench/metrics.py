"""What a scrape of ``/metrics`` takes on a hub of many nodes, and for how long it blocks the hub's event loop.

    python bench/metrics.py --nodes 1,64,512

A real server in this process serves a run in memory: 8 ranks and 8 GPUs on each node, which have made 300 steps, and
the samples of some seconds.  Between scrapes a step of all ranks arrives, so that nothing is answered from an earlier
one.  ``cpu`` is the CPU time of this process during a scrape; the client is another one.  In every second scrape a
task wants to run every millisecond: ``blocked`` is the longest time in which it could not, ``idle`` the same between
scrapes.  Its own CPU time would be a third of the scrape's on a busy machine, so it sleeps during the other scrapes.
``cpu_unit`` is the CPU time of a fixed sum in Python beside each scrape: on a busy machine everything takes more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from fakes.load_rows import LoadJob, LoadRanks
from numpy.typing import NDArray

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.hub.server import Server
from stepscope.records.steps import SLOT_BYTES
from stepscope.store.create import create_run
from stepscope.store.documents import NodeInfo, read_meta, write_nodes
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.paths import SAMPLES

RANKS_PER_NODE = 8
STEPS = 300
STEPS_AT_ONCE = 25
SAMPLED_S = 10
TOKEN = "token-of-the-benchmark"
EVERY_S = 0.001
CLIENT = """
import gzip, sys, urllib.request
for _ in sys.stdin:
    headers = {"Authorization": f"Bearer {sys.argv[2]}", "Accept-Encoding": "gzip"}
    request = urllib.request.Request(sys.argv[1], headers=headers)
    text = gzip.decompress(urllib.request.urlopen(request, timeout=60).read()).decode()
    print(sum(1 for line in text.splitlines() if not line.startswith("#")), len(text) // 1000, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Taken:
    slots: NDArray[np.uint8]
    table: NDArray[Any]


class Job:
    """A run in memory that makes steps."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.run_dir = create_run(root, "load", ["train.py"], sessions=root / "sessions").run_dir
        self.live = LiveRun(name="load", run_dir=self.run_dir, meta=read_meta(self.run_dir))
        job = LoadJob(agents=nodes, ranks_per_agent=RANKS_PER_NODE, slow_rank=nodes * RANKS_PER_NODE * 2 // 3)
        pool = job.pool_ns()
        self._nodes = [LoadRanks(job, node, pool) for node in range(nodes)]
        self.steps = 0
        wall_ns = time.time_ns()
        write_nodes(
            self.run_dir,
            [
                NodeInfo(
                    spool=f"{number:032x}",
                    node=number,
                    host=ranks.host,
                    joined_wall_ns=wall_ns,
                    heard_wall_ns=wall_ns,
                    frames=10,
                    rows=100,
                    bytes=10_000,
                )
                for number, ranks in enumerate(self._nodes)
            ],
        )
        for number, ranks in enumerate(self._nodes):
            for sidecar in ranks.sidecars():
                about = RingSidecar.from_dict(sidecar)
                assert about is not None
                self.live.ring(about, node=str(number))
        while self.steps < STEPS:
            self.make(STEPS_AT_ONCE)
        for second in range(SAMPLED_S):
            self.sample(wall_ns - (SAMPLED_S - second) * 10**9)

    def make(self, steps: int) -> None:
        for ranks in self._nodes:
            rows = ranks.rows(self.steps, self.steps + steps)
            table = ranks.table.copy()
            table["after_seq"], table["last_seq"] = self.steps, self.steps + steps
            table["rows"], table["live_step"] = steps, self.steps + steps
            slots = np.ascontiguousarray(rows.reshape(-1)).view(np.uint8).reshape(-1, SLOT_BYTES)
            self.live.rows(Taken(slots=slots, table=table))
        self.steps += steps
        self.live.tick()

    def sample(self, wall_ns: int) -> None:
        for number, ranks in enumerate(self._nodes):
            self.live.lines(SAMPLES, _samples(ranks.host, number, wall_ns), node=str(number), offset_ns=0)


def _samples(host: str, number: int, wall_ns: int) -> list[bytes]:
    common = {"wall_ns": wall_ns, "mono_ns": wall_ns, "node": host}
    figures = ("net_rx_bps", "net_tx_bps", "net_errors_ps", "net_drops_ps", "tcp_retrans_ps", "disk_read_bps")
    lines: list[dict[str, Any]] = [
        {
            **common,
            "kind": "host",
            "cpu_percent": 40.5,
            "cpu_count": 96,
            "load1": 12.5,
            "mem_total": 1 << 40,
            "mem_available": 1 << 39,
            "swap_used": 0,
            "cpu_pressure": 0.01,
            "io_pressure": 0.0,
            "memory_pressure": 0.0,
            **dict.fromkeys(figures, 1000.5),
        }
    ]
    for local in range(RANKS_PER_NODE):
        rank = number * RANKS_PER_NODE + local
        lines.append(
            {**common, "kind": "process", "pid": 100 + local, "rank": rank, "cpu_percent": 99.0, "rss": 8 << 30}
            | {"rss_file": 1 << 30, "threads": 40, "cpu_wait": 0.01}
        )
        lines.append(
            {
                **common,
                "kind": "gpu",
                "index": local,
                "uuid": f"GPU-{rank:08x}",
                "name": "Synthetic 80GB",
                "util_percent": 97,
                "mem_util_percent": 60,
                "mem_used": 60 << 30,
                "mem_total": 80 << 30,
                "temperature_c": 62,
                "power_w": 612.5,
                "power_limit_w": 700.0,
                "sm_clock_mhz": 1830,
                "mem_clock_mhz": 2619,
                "throttle_reasons": [],
            }
        )
    return [json.dumps(line, separators=(",", ":")).encode() for line in lines]


class Served:
    """The run behind a server, in an event loop of its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ready = threading.Event()
        self.blocked_s = 0.0
        self.ticks = True
        self.port = 0
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(4))
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        runs = Runs.of_live(self._job.run_dir, self._job.live)
        self._server = Server(make_app(runs, Readers(TOKEN)), listening)
        serving = asyncio.create_task(self._server.run())
        ticking = asyncio.create_task(self._tick())
        await self._server.started.wait()
        self._ready.set()
        await serving
        ticking.cancel()

    async def _tick(self) -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(EVERY_S if self.ticks else 0.05)
            now_s = time.perf_counter()
            self.blocked_s = max(self.blocked_s, now_s - last_s - EVERY_S)
            last_s = now_s

    def in_loop(self, call: Any) -> None:
        async def called() -> None:
            call()

        asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()


def measure(nodes: int, scrapes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stepscope-metrics-") as folder:
        job = Job(Path(folder), nodes)
        served = Served(job)
        took_ms: list[float] = []
        cpu_ms: list[float] = []
        blocked_ms: list[float] = []
        idle_ms: list[float] = []
        unit_ms: list[float] = []
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, f"http://127.0.0.1:{served.port}/metrics", TOKEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            for scrape in range(scrapes + 2):
                served.in_loop(lambda: job.make(1))
                served.in_loop(lambda: job.sample(time.time_ns()))
                served.ticks = scrape % 2 == 0
                time.sleep(0.2)
                served.blocked_s = 0.0
                time.sleep(0.1)
                idle_s, served.blocked_s = served.blocked_s, 0.0
                unit_ms.append(_unit_ms())
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                client.stdin.write("\n")
                client.stdin.flush()
                series, kilobytes = map(int, client.stdout.readline().split())
                took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
                time.sleep(0.01)
                if scrape >= 2 and served.ticks:
                    blocked_ms.append(1e3 * served.blocked_s)
                    idle_ms.append(1e3 * idle_s)
                elif scrape >= 2:
                    took_ms.append(1e3 * took_s)
                    cpu_ms.append(1e3 * cpu_s)
            client.stdin.close()
        served.stop()
    return {
        "nodes": nodes,
        "series": series,
        "kilobytes": kilobytes,
        **_spread("scrape_ms", took_ms),
        **_spread("cpu_ms", cpu_ms),
        **_spread("blocked_ms", blocked_ms),
        **_spread("idle_ms", idle_ms),
        **_spread("cpu_unit_ms", unit_ms),
    }


def _unit_ms() -> float:
    began_s = time.thread_time()
    sum(range(500_000))
    return 1e3 * (time.thread_time() - began_s)


def _spread(name: str, values: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return {
        name: round(statistics.median(values), 2),
        f"{name}_quartiles": f"{low:.1f}-{high:.1f}",  # type: ignore[dict-item]
        f"{name}_max": round(max(values), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--nodes", default="1,64,512", help="numbers of nodes, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--scrapes", type=int, default=30, help="scrapes of each (default: %(default)s)")
    args = parser.parse_args()
    for nodes in map(int, args.nodes.split(",")):
        print(json.dumps(measure(nodes, args.scrapes)), flush=True)


if __name__ == "__main__":
    main()
