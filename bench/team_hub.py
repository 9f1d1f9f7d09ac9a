"""What one hub for a team takes: runs that send, and people who look at the list, at a reduced time scale.

    python bench/team_hub.py                                      # 500 runs of 100 ranks, 200 viewers
    python bench/team_hub.py --runs 100 --viewers 50 --speed 0.5
    python bench/team_hub.py --json

A real ``stepscope serve DIR --join`` in a process of its own; over loopback, without TLS.  The agents are those of
``bench/hub.py``: every run joins by itself with one node, whose ranks make a step per second.  Each viewer polls the
list of runs as the page does.  Both share the machine with the hub, hence ``--speed``: simulated seconds in a real one.
CPU is per simulated second, so 100% is a core that the hub would keep busy in real time; the latency of the list is in
real milliseconds, from the request to the last byte, and includes waiting for the load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from fakes.load import LoadJob, LoadPlan, LoadReport, run_load

from stepscope.wire.handshake import load_keys

SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 34))
POLL_S = 3.0
"""Of the page's list while a run is active."""
START_S = 60.0
END_S = 30.0


@dataclass
class ListFigures:
    """What viewers saw."""

    latencies_ms: list[float] = field(default_factory=list)
    bytes: int = 0
    listed: int = 0
    refused: int = 0


async def view(port: int, token: str, figures: ListFigures, wait_s: float, first_s: float) -> None:
    """Poll the list until canceled."""
    await asyncio.sleep(first_s)
    lines = ("GET /api/v1/runs?limit=1000 HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", "Connection: close")
    request = "\r\n".join([*lines, "", ""]).encode()
    while True:
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)  # idle ones are closed at a slow time scale
        try:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int((re.search(rb"content-length: (\d+)", head) or [b"", b"0"])[1])
            body = await reader.readexactly(size)
            figures.latencies_ms.append((time.monotonic() - began_s) * 1e3)
            figures.bytes += size
            if b" 200 " in head.split(b"\r\n", 1)[0]:
                figures.listed = json.loads(body)["total"]
            else:
                figures.refused += 1
        finally:
            writer.close()
        await asyncio.sleep(wait_s)


def note(reports: dict[str, LoadReport], run: str, _now_s: float, report: LoadReport) -> None:
    reports[run] = report


async def load(port: int, token: str, key: bytes, hub: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    plans = [
        LoadPlan(
            host="127.0.0.1",
            port=port,
            run=f"run-{number:04}",
            key=key,
            job=LoadJob(agents=1, ranks_per_agent=args.ranks, seed=number),
            seconds=args.seconds,
            speed=args.speed,
            first_node=1,
            nnodes=2,
            sources=(SOURCES[number % len(SOURCES)],),
        )
        for number in range(args.runs)
    ]
    figures, reports = ListFigures(), dict[str, LoadReport]()
    wait_s = POLL_S / args.speed
    tasks = [asyncio.create_task(run_load(plan, partial(note, reports, plan.run))) for plan in plans]
    viewers = [
        asyncio.create_task(view(port, token, figures, wait_s, wait_s * number / args.viewers))
        for number in range(args.viewers)
    ]
    await asyncio.sleep(args.seconds / args.speed / 4)  # all have joined, and the first rings are known
    began_s, began_cpu_s, memory = time.monotonic(), _cpu_s(hub), list[float]()
    figures.latencies_ms.clear()
    figures.bytes, frames = 0, sum(report.frames for report in reports.values())
    pending = set(tasks)
    while pending and time.monotonic() - began_s < args.seconds / args.speed:
        _, pending = await asyncio.wait(pending, timeout=1.0)
        memory.append(hub.memory_info().rss / 1e6)
    real_s, cpu_s = time.monotonic() - began_s, _cpu_s(hub) - began_cpu_s
    for task in (*viewers, *pending):
        task.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    await asyncio.gather(*tasks, return_exceptions=True)
    latencies = sorted(figures.latencies_ms)
    return {
        "runs": args.runs,
        "ranks": args.runs * args.ranks,
        "viewers": args.viewers,
        "speed": args.speed,
        "real_s": round(real_s, 1),
        "cpu_share": round(cpu_s / (real_s * args.speed), 3),
        "memory_mb": round(max(memory), 1),
        "list_p50_ms": round(statistics.median(latencies), 1) if latencies else None,
        "list_p99_ms": round(latencies[int(len(latencies) * 0.99)], 1) if latencies else None,
        "lists": len(latencies),
        "list_kb": round(figures.bytes / max(len(latencies), 1) / 1e3, 1),
        "listed": figures.listed,
        "refused_lists": figures.refused,
        "joined": sum(report.joins for report in reports.values()),
        "frames_per_s": round((sum(report.frames for report in reports.values()) - frames) / (real_s * args.speed), 1),
        "rows": sum(report.rows for report in reports.values()),
        "late_s": round(max((report.late_s for report in reports.values()), default=0.0), 1),
        "failed": [line for report in reports.values() for line in report.failed][:3],
        "unfinished": len(pending),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="stepscope-team-", dir=args.dir))
    environ = {**os.environ, "HOME": str(root), "STEPSCOPE_KEY": secrets.token_hex(16)}
    environ.pop("XDG_CONFIG_HOME", None)
    (root / "runs").mkdir()
    (root / "token").write_text(secrets.token_urlsafe(32) + "\n")
    (root / "token").chmod(0o600)
    command = [sys.executable, "-m", "stepscope", "serve", str(root / "runs"), "--join", "--port", "0"]
    command += ["--token-file", str(root / "token")]
    serving = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        port = int(serving.stdout.readline().strip().rpartition(":")[2])
        token, key = (root / "token").read_text().strip(), load_keys(environ)[0]
        return asyncio.run(load(port, token, key, psutil.Process(serving.pid), args))
    finally:
        serving.kill()  # it would seal every run first
        serving.wait(END_S)
        shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=100, help="of each run")
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=12.0, help="of simulated time")
    parser.add_argument("--speed", type=float, default=0.1, help="simulated seconds in a real one")
    parser.add_argument("--dir", type=Path, help="where the hub writes (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    row = {**measure(args), "machine": f"{os.cpu_count()} cores, {platform.machine()}", "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(row))
        return
    for name, value in row.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
