"""What judging an unattended job costs: memory and CPU of its hub, and the step time of the job.

    .venv/bin/python bench/judge.py [--rounds 3] [--seconds 60] [--ranks 1 8]

Each round runs the same job three times in turn, on one node and without a viewer: ``off`` (``--no-hub``), ``idle``
(the default: the hub starts after 15 seconds), and ``alerts`` (with a receiver: hub and sender start with the job).
The ranks make steps of 10 ms of computation and 10 ms of sleep, without torch.  Memory and CPU are read from ``/proc``
over the second half of the job, when the hub has been running for a while; its step time over the same half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

RANKS = """
import os, subprocess, sys
count, seconds = int(sys.argv[1]), sys.argv[2]
def start(rank):
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    return subprocess.Popen([sys.executable, "rank.py", seconds], env={**os.environ, **own})
sys.exit(max(process.wait() for process in [start(rank) for rank in range(count)]))
"""
RANK = """
import os, sys, time
import stepscope
began, until, times = time.monotonic(), time.monotonic() + float(sys.argv[1]), []
while time.monotonic() < until:
    before = time.monotonic()
    with stepscope.step(), stepscope.phase("work"):
        busy = time.thread_time() + 0.01
        while time.thread_time() < busy:
            pass
        time.sleep(0.01)
    times.append(time.monotonic() - before)
late = sorted(times[len(times) // 2:])
with open(f"step-{os.environ['RANK']}", "w") as file:
    file.write(str(late[len(late) // 2]))
"""
ARMS = {"off": ["--no-hub"], "idle": [], "alerts": []}


def pids_of(module: str, run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if module.encode() in words and os.fsencode(run_dir) in words:
            found.append(int(entry.name))
    return found


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident and proportional, in MB (10^6 bytes)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0]: int(words[1]) * 1024 / 1e6 for words in lines}
    return found["Rss:"], found["Pss:"]


def measure(arm: str, ranks: int, seconds: float, receiver: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "ranks.py").write_text(RANKS)
        (folder / "rank.py").write_text(RANK)
        alert = ["--alert", receiver] if arm == "alerts" else []
        words = ["run", "--quiet", "--no-html", "--name", "job", *ARMS[arm], *alert]
        command = [sys.executable, "-m", "stepscope", *words, "ranks.py", str(ranks), str(seconds)]
        job = subprocess.Popen(command, cwd=folder)
        time.sleep(seconds / 2 + 1)
        helpers = {"hub": "stepscope.hub", "sender": "stepscope.alerts.sender"}
        found = {who: pids_of(module, folder / "runs" / "job") for who, module in helpers.items()}
        before = {who: (time.monotonic(), cpu_s(pids[0])) for who, pids in found.items() if pids}
        time.sleep(seconds / 2 - 3)
        result: dict[str, float] = {}
        for who, (began_s, used_s) in before.items():
            pid = found[who][0]
            result[f"{who} CPU %"] = 100 * (cpu_s(pid) - used_s) / (time.monotonic() - began_s)
            result[f"{who} RSS MB"], result[f"{who} PSS MB"] = memory_mb(pid)
        if job.wait() != 0:
            raise SystemExit(f"the job of {arm} failed")
        result["step ms"] = 1e3 * statistics.median(float((folder / f"step-{n}").read_text()) for n in range(ranks))
        return result


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each job; at least 40")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    args = parser.parse_args()
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    receiver = f"http://127.0.0.1:{server.server_port}/"
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for ranks in args.ranks:
            for arm in ARMS:
                rows.setdefault(f"{ranks} ranks, {arm}", []).append(measure(arm, ranks, args.seconds, receiver))
    for name, own in rows.items():
        keys = dict.fromkeys(key for row in own for key in row)
        values = {key: [row[key] for row in own if key in row] for key in keys}
        cells = (f"{key} {statistics.median(n):.2f} ({min(n):.2f}–{max(n):.2f})" for key, n in values.items())
        print(f"{name:18} {' · '.join(cells)}")
    for ranks in args.ranks:
        bare = [row["step ms"] for row in rows[f"{ranks} ranks, off"]]
        for arm in ("idle", "alerts"):
            judged = [row["step ms"] for row in rows[f"{ranks} ranks, {arm}"]]
            more = [100 * (mine / off - 1) for mine, off in zip(judged, bare, strict=True)]
            spread = f"{min(more):+.2f} to {max(more):+.2f}"
            print(f"{ranks} ranks, {arm}: step time {statistics.median(more):+.2f}% ({spread})")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    server.shutdown()


if __name__ == "__main__":
    main()
