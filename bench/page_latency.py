"""From a step's end to its pixels, with many simulated ranks that send over the network as agents do.

A real hub process and the load generator of ``testing/`` in a process of its own; the page follows in this one.  A
step is over when its last rank is, by the load's clock; it is on the screen when the page says so, after its frame.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fakes.browser import launched
from fakes.load import LoadJob, LoadPlan, LoadReport, run_load
from page_parts import drawings, open_page, spread

from stepscope.store.create import create_run
from stepscope.store.documents import HubFile, write_hub_file
from stepscope.wire.handshake import load_keys

__all__ = ["measure_latency"]

RANKS_PER_AGENT = 8
SOURCES = tuple(f"127.0.0.{n}" for n in range(2, 34))
WARMUP_S = 15.0
"""All ranks are introduced, and the page is open."""
LOOK_MS = 1000.0


def measure_latency(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    os.environ["STEPSCOPE_KEY"] = secrets.token_hex(16)
    paths = create_run(work / "runs", "load", ["load.py"], sessions=work / "sessions")
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    url = f"http://127.0.0.1:{port}"
    write_hub_file(paths.run_dir, HubFile(url=url, token=token))
    agents = args.ranks // RANKS_PER_AGENT
    command = [sys.executable, "-m", "stepscope.hub", "--run-dir", str(paths.run_dir), "--fd", str(listening.fileno())]
    hub = subprocess.Popen(
        [*command, "--nnodes", str(agents + 1), "--name", "load"],
        stdin=subprocess.PIPE,
        pass_fds=[listening.fileno()],
    )
    listening.close()
    load = subprocess.Popen(
        [sys.executable, __file__, str(port), str(args.ranks), str(args.seconds + WARMUP_S), str(args.steps_per_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert load.stdout is not None
        began_s = float(load.stdout.readline())
        seen = _follow(f"{url}/#/run/load?token={token}", began_s + WARMUP_S + args.seconds)
        report = json.loads(load.communicate(timeout=120)[0])
    finally:
        for process in (load, hub):
            process.kill()
            process.wait()
    late = [
        wall_ms / 1e3 - (began_s + (step + 1) / args.steps_per_s)
        for step, wall_ms in _first_seen(seen)
        if (step + 1) / args.steps_per_s > WARMUP_S
    ]
    return {
        "ranks": args.ranks,
        "agents": agents,
        "steps_per_s": args.steps_per_s,
        "drawings": len(seen),
        "step_to_pixels_s": spread(late),
        "load": report,
    }


def _follow(address: str, until_s: float) -> list[tuple[int, float]]:
    seen: list[tuple[int, float]] = []
    with launched() as browser, open_page(browser) as page:
        page.goto(address)
        while time.time() < until_s:
            page.wait_for_timeout(LOOK_MS)
            seen += [(step, wall_ms) for step, wall_ms, _ in drawings(page)]
    return seen


def _first_seen(seen: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each step, and when the first drawing that had it was on the screen."""
    found: list[tuple[int, float]] = []
    newest = seen[0][0] if seen else -1
    for step, wall_ms in seen:
        found += [(each, wall_ms) for each in range(newest + 1, step + 1)]
        newest = max(newest, step)
    return found


async def _load(port: int, ranks: int, seconds: float, steps_per_s: float) -> None:
    """In a process of its own: when simulated time began, then how it went."""
    told = False

    def progress(now_s: float, _report: LoadReport) -> None:
        nonlocal told
        if not told:
            print(time.time() - now_s, flush=True)
            told = True

    job = LoadJob(agents=ranks // RANKS_PER_AGENT, ranks_per_agent=RANKS_PER_AGENT, steps_per_s=steps_per_s)
    plan = LoadPlan(
        host="127.0.0.1",
        port=port,
        run="load",
        key=load_keys(os.environ)[0],
        job=job,
        seconds=seconds,
        first_node=1,
        sources=SOURCES,
    )
    report = await run_load(plan, progress)
    print(json.dumps({"frames": report.frames, "rows": report.rows, "late_s": round(report.late_s, 3)}))


if __name__ == "__main__":
    asyncio.run(_load(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
