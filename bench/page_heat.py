"""How the map of ranks and steps moves: 10,000 ranks × 10,000 steps, panned and zoomed in a headless Chromium.

    python bench/page_heat.py --ranks 10000 --steps 10000 --json page-heat.json

A hub of its own in another process; its model is filled as a run of that length leaves it: the newest steps one by
one, the map's bins of all.  Per gesture: the time from one animation frame to the next, which other load on the machine
lengthens; what the page's main thread worked, in CPU time of its tasks (Chromium's trace), and how many of them were
longer than a frame; and how long after the last movement the picture was as fine as the hub can make it
(``aria-busy``).  ``live``: steps go on, and what the page asks for is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
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
from stepscope.store.create import create_run
from stepscope.store.live.ring_files import RingSidecar

TOKEN = "token-of-the-benchmark"
NEWEST = 256
"""Steps that the model has one by one."""
EVERY = 40
"""Of the steps before, every so many-th goes through all of the model; the map has all."""
SIZE: Any = {"width": 1400, "height": 900}
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MOVES = 90
WATCH = """() => {
  const frames = []; let last = performance.now(), on = true;
  const frame = (now) => { frames.push(now - last); last = now; if (on) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  window.stopFrames = () => { on = false; return frames.slice(1); };
}"""


@dataclass(frozen=True, kw_only=True)
class Fed:
    slots: NDArray[np.uint8]
    table: NDArray[Any]


class Filled:
    """A model as a long run leaves it, and goes on from there."""

    def __init__(self, live: LiveRun, job: LoadJob, steps: int) -> None:
        self.live, self.job, self.next = live, job, steps
        self._ranks = LoadRanks(job, 0, job.pool_ns())
        for sidecar in self._ranks.sidecars():
            live.ring(RingSidecar.from_dict(sidecar), node="0")
        for step in range(0, max(0, steps - NEWEST), EVERY):
            self._feed(step, step + 1)
            self._map(step + 1, min(step + EVERY, steps - NEWEST))
        for step in range(max(0, steps - NEWEST), steps, 16):
            self._feed(step, min(step + 16, steps))

    def go_on(self) -> None:
        self._feed(self.next, self.next + 1)
        self.next += 1

    def _feed(self, first: int, end: int) -> None:
        table = self._ranks.table.copy()
        table["after_seq"], table["last_seq"], table["rows"], table["live_step"] = first, end, end - first, end
        rows = np.ascontiguousarray(self._ranks.rows(first, end).reshape(-1))
        self.live.rows(Fed(slots=rows.view(np.uint8).reshape(len(rows), -1), table=table))
        self.live.tick()

    def _map(self, first: int, end: int) -> None:
        if end <= first:
            return
        rows = self._ranks.rows(first, end)
        wall = rows["wall_ns"].astype(np.float32).reshape(-1)
        work = wall - rows["phase_ns"][:, :, 5].astype(np.float32).reshape(-1)
        column = np.repeat(np.arange(self.job.ranks), end - first)
        self.live.map.add(column, rows["step"].astype(np.int64).reshape(-1), work, wall)


async def serve(folder: Path, ranks: int, steps: int, fd: int, period_s: float) -> None:
    """Until it is killed; steps go on from the first line on standard input."""
    paths = create_run(folder, "large", ["load.py"], sessions=folder / "sessions")
    live = LiveRun(name="large", meta={})
    job = LoadJob(agents=1, ranks_per_agent=ranks, slow_rank=ranks * 2 // 3, slow_share=0.2)
    filled = Filled(live, job, steps)
    listening = socket.socket(fileno=fd)
    server = Server(make_app(Runs.of_live(paths.run_dir, live), Readers(TOKEN)), listening)
    running = asyncio.create_task(server.run())
    await server.started.wait()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    while not running.done():
        await asyncio.sleep(period_s)
        filled.go_on()


class Gestures:
    """A person at the map, and what the browser says of it."""

    def __init__(self, page: Any) -> None:
        self._page = page
        page.locator("canvas[aria-roledescription=map]").scroll_into_view_if_needed()
        box = page.locator("canvas[aria-roledescription=map]").bounding_box()
        self._middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def settled_s(self) -> float:
        began_s = time.perf_counter()
        self._page.wait_for_selector("canvas[aria-roledescription=map][aria-busy=false]", timeout=60_000)
        return time.perf_counter() - began_s

    def measure(self, name: str, gesture: Any) -> dict[str, Any]:
        self._page.evaluate(WATCH)
        browser = self._page.context.browser
        browser.start_tracing(page=self._page, categories=["toplevel"])
        began_s = time.perf_counter()
        gesture()
        took_s = time.perf_counter() - began_s
        refined_s = self.settled_s()
        frames = self._page.evaluate("window.stopFrames()")
        tasks_ms = main_thread_tasks_ms(browser.stop_tracing())
        row = {
            "gesture": name,
            "seconds": took_s,
            "frames": len(frames),
            "frame_ms_p50": statistics.median(frames),
            "frame_ms_p95": float(np.percentile(frames, 95)),
            "frame_ms_max": max(frames),
            "main_thread_cpu_ms": float(tasks_ms.sum()),
            "task_cpu_ms_max": float(tasks_ms.max(initial=0)),
            "tasks_over_16_ms": int((tasks_ms > 16).sum()),
            "tasks_over_50_ms": int((tasks_ms > 50).sum()),
            "refined_s": refined_s,
        }
        print("  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items()))
        return row

    def drag(self, across: float, down: float) -> None:
        x, y = self._middle
        mouse = self._page.mouse
        mouse.move(x, y)
        mouse.down()
        for at in range(1, MOVES + 1):
            mouse.move(x + across * at / MOVES, y + down * at / MOVES)
        mouse.up()

    def wheel(self, turns: int, delta: float) -> None:
        self._page.mouse.move(*self._middle)
        self._page.keyboard.down("Control")
        for _ in range(turns):
            self._page.mouse.wheel(0, delta)
            self._page.wait_for_timeout(16)
        self._page.keyboard.up("Control")


def main_thread_tasks_ms(trace: bytes) -> NDArray[np.float64]:
    """The CPU time of each task of the page's main thread."""
    events = json.loads(trace)["traceEvents"]
    named = [event for event in events if event.get("name") == "thread_name"]
    own = {(event["pid"], event["tid"]) for event in named if event["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if event["ph"] == "X" and event["name"].endswith("RunTask")]
    return np.array(
        [event["tdur"] / 1000 for event in tasks if (event["pid"], event["tid"]) in own and "tdur" in event]
    )


def look(url: str, follow_s: float, start: Any) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_context(viewport=SIZE).new_page()
        asked: list[tuple[str, int]] = []
        page.on("response", lambda answer: asked.append((answer.url, int(answer.headers.get("content-length", "0")))))
        began_s = time.perf_counter()
        page.goto(f"{url}/#/run/large?token={TOKEN}")
        page.wait_for_selector("canvas[aria-roledescription=map][aria-busy=false]", timeout=60_000)
        found: dict[str, Any] = {"first_picture_s": time.perf_counter() - began_s}
        person = Gestures(page)
        rows = [person.measure("nothing", lambda: page.wait_for_timeout(1000))]
        rows.append(person.measure("zoom in", lambda: person.wheel(20, -100)))
        page.get_by_role("button", name="Pan", exact=True).click()
        rows.append(person.measure("pan steps", lambda: person.drag(-500, 0)))
        rows.append(person.measure("pan both", lambda: person.drag(400, 120)))
        rows.append(person.measure("zoom out", lambda: person.wheel(20, 100)))
        found["gestures"] = rows
        page.get_by_role("button", name="All", exact=True).first.click(force=True)
        person.settled_s()
        heats = len([one for one in asked if "/heat" in one[0]])
        start()
        rows.append(person.measure("live", lambda: page.wait_for_timeout(1000 * follow_s)))
        live = [one for one in asked if "/heat" in one[0]][heats:]
        found["live"] = {"seconds": follow_s, "questions": len(live), "bytes": sum(size for _, size in live)}
        browser.close()
    return found


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--live-seconds", type=float, default=10.0, help="how long steps go on (default: %(default)s)")
    parser.add_argument("--period", type=float, default=1.0, help="seconds from one live step to the next")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_fd is not None:
        uvloop.run(serve(args.folder, args.ranks, args.steps, args.serve_fd, args.period))
        return
    folder = Path(tempfile.mkdtemp(prefix="stepscope-page-"))
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    again = [sys.executable, __file__, "--serve-fd", str(listening.fileno()), "--folder", str(folder)]
    again += ["--ranks", str(args.ranks), "--steps", str(args.steps), "--period", str(args.period)]
    pipe, handed = subprocess.PIPE, [listening.fileno()]
    hub = subprocess.Popen(again, pass_fds=handed, text=True, stdin=pipe, stdout=pipe)
    try:
        assert hub.stdin is not None and hub.stdout is not None
        began_s = time.perf_counter()
        if hub.stdout.readline() != "ready\n":
            raise SystemExit("the hub did not start")
        print(f"{args.ranks:,} ranks x {args.steps:,} steps, filled in {time.perf_counter() - began_s:.0f} s")

        def start() -> None:
            print(file=hub.stdin, flush=True)

        found = look(f"http://127.0.0.1:{listening.getsockname()[1]}", args.live_seconds, start)
    finally:
        hub.kill()
        hub.communicate()
        listening.close()
        shutil.rmtree(folder)
    print(json.dumps({key: value for key, value in found.items() if key != "gestures"}))
    if args.json:
        machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
        document = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine, **found}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
