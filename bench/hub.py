"""What a hub takes: CPU, memory and lag with 1,000, 10,000 and 100,000 simulated ranks, a step per second each.

    python bench/hub.py --ranks 1000,10000,100000 --seconds 180
    python bench/hub.py --ranks 100000 --speed 0.5      # the load generator needs a core of its own, or more time

A real hub process; the load generator of ``testing/`` in this one.  Figures are taken
between the first quarter and the end of simulated time: ``cpu`` is the hub's CPU time per simulated second (that of
sealing journals to Parquet beside it), ``lag`` how many steps the newest complete one is behind what ranks have made.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.load import LoadJob, LoadPlan, LoadReport, run_load

from stepscope.store.create import create_run
from stepscope.store.documents import HubFile, write_hub_file
from stepscope.wire.handshake import load_keys

RANKS_PER_AGENT = 8
SOURCES = tuple(f"127.0.0.{n}" for n in range(2, 34))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
END_S = 120.0
LOOK_S = 5.0
SETTLE_S = 5.0
"""For the last look of the rules."""


@dataclass
class Watch:
    """What is seen of the hub from outside, while the load runs."""

    pid: int
    port: int
    token: str
    job: LoadJob
    seconds: float
    begins_s: float
    marks: list[tuple[float, float, float]] = field(default_factory=list)
    """Simulated time, CPU time of the hub, and of the processes that it started and that have ended."""
    lags: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    unanswered: int = 0
    now: tuple[float, LoadReport] | None = None
    """Where the load is."""
    over: threading.Event = field(default_factory=threading.Event)

    def note(self, now_s: float, report: LoadReport) -> None:
        self.now = (now_s, report)

    def run(self) -> None:
        """In a thread: the load must not wait for an answer of the hub."""
        while not self.over.wait(LOOK_S):
            if self.now is not None:
                self.look(*self.now)

    def look(self, now_s: float, report: LoadReport) -> None:
        self.marks.append((now_s, *cpu_s(self.pid)))
        try:
            self.info = self.get("")
        except OSError:
            self.unanswered += 1
        else:
            if self.begins_s <= now_s <= self.seconds:
                self.lags.append(now_s * self.job.steps_per_s - 1 - _step_of(self.info))
        print(
            f"  {now_s:6.0f} s  cpu {self.marks[-1][1]:6.1f} s  rss {rss_mb(self.pid)[0]:5.0f} MB  step "
            f"{_step_of(self.info)}  frames {report.frames}  late {report.late_s:.1f} s  {dict(report.statuses)}",
            file=sys.stderr,
        )

    def cpu_per_s(self) -> tuple[float, float]:
        steady = [mark for mark in self.marks if self.begins_s <= mark[0] <= self.seconds]
        steady = steady if len(steady) > 1 else self.marks
        (begin_s, *began), (end_s, *ended) = steady[0], steady[-1]
        span_s = max(1e-9, end_s - begin_s)
        return (ended[0] - began[0]) / span_s, (ended[1] - began[1]) / span_s

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_S)
        try:
            connection.request("GET", f"/api/v1/runs/load{path}", headers={"Authorization": f"Bearer {self.token}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer


def cpu_s(pid: int) -> tuple[float, float]:
    """Its own, and that of its children that were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, child_user, child_system = (int(word) / TICKS_PER_S for word in fields[11:15])
    return user + system, child_user + child_system


def rss_mb(pid: int) -> tuple[float, float]:
    """Now, and at the most."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return tuple(int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def measure(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="stepscope-hub-", dir=args.dir))
    os.environ["STEPSCOPE_KEY"] = secrets.token_hex(16)
    job = LoadJob(agents=ranks // RANKS_PER_AGENT, ranks_per_agent=RANKS_PER_AGENT, slow_rank=ranks * 2 // 3)
    paths = create_run(root, "load", ["load.py"], sessions=root / "sessions")
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    write_hub_file(paths.run_dir, HubFile(url=f"http://127.0.0.1:{port}", token=token))
    command = [sys.executable, "-m", "stepscope.hub", "--run-dir", str(paths.run_dir), "--fd", str(listening.fileno())]
    command += ["--nnodes", str(job.agents + 1), "--name", "load"]
    hub = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()])
    listening.close()
    watch = Watch(hub.pid, port, token, job, seconds=args.seconds, begins_s=args.seconds / 4)
    plan = LoadPlan(
        host="127.0.0.1",
        port=port,
        run="load",
        key=load_keys(os.environ)[0],
        job=job,
        seconds=args.seconds,
        speed=args.speed,
        first_node=1,
        sources=SOURCES,
    )
    try:
        looking = threading.Thread(target=watch.run)
        looking.start()
        try:
            report = asyncio.run(run_load(plan, watch.note))
        finally:
            watch.over.set()
            looking.join()
        peak_mb = rss_mb(hub.pid)[1]
        watch.look(report.simulated_s, report)
        time.sleep(SETTLE_S)
        last = watch.get("")
        found = watch.get("/findings")
        hub.terminate()
        hub.wait(END_S)
        return _row(job, watch, report, peak_mb, last, found, paths.run_dir)
    finally:
        hub.kill()
        hub.wait()
        shutil.rmtree(root)


def _row(
    job: LoadJob,
    watch: Watch,
    report: LoadReport,
    peak_mb: float,
    last: dict[str, Any],
    found: dict[str, Any],
    run_dir: Path,
) -> dict[str, Any]:
    own, sealing = watch.cpu_per_s()
    sizes = {path: path.stat().st_size for path in run_dir.rglob("*") if path.is_file()}
    parts = [path for path in sizes if path.suffix == ".parquet"]
    return {
        "ranks": job.ranks,
        "agents": job.agents,
        "cpu_per_s": own,
        "sealing_cpu_per_s": sealing,
        "peak_mb": peak_mb,
        "lag_steps": max(watch.lags, default=0.0),
        "frames_per_s": report.frames / report.simulated_s,
        "rows_per_s": report.rows / watch.seconds,
        "sent_bytes_per_row": report.sent_bytes / max(1, report.rows),
        "statuses": dict(report.statuses),
        "failed": len(report.failed),
        "late_s": report.late_s,
        "steps": report.steps,
        "last_step": _step_of(last),
        "unanswered": watch.unanswered,
        "judged": last.get("info", last).get("judged"),
        "named": [finding.get("title") for finding in found.get("findings", [])],
        "disk_mb": sum(sizes.values()) / 1e6,
        "parquet_parts": len(parts),
        "parquet_mb": sum(sizes[path] for path in parts) / 1e6,
        "real_s": report.real_s,
        "window": last.get("info", last).get("window"),
    }


def _step_of(info: dict[str, Any]) -> int:
    return int(info.get("live", info).get("step", -1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1000,10000,100000")
    parser.add_argument("--seconds", type=float, default=180.0, help="of simulated time (default: %(default)s)")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds in a real one")
    parser.add_argument("--dir", type=Path, help="where the run is written")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows = []
    for ranks in map(int, args.ranks.split(",")):
        row = measure(ranks, args)
        rows.append(row)
        print(json.dumps(row, indent=1))
    if args.json:
        machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
        document = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
