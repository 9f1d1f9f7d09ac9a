"""An hour of a live run in a tab, faster than it would pass: what the tab holds after each five minutes of it.

Ranks make two steps per simulated second; the host says how it is once a second, and there is an event now and then.
Steps are written as fast as the page draws them.  The heap is looked at after the garbage was collected.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakes.browser import launched
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples
from made_runs import Feed
from page_parts import drawings, open_page, served, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

__all__ = ["measure_memory"]

STEPS_PER_S = 2
PIECE_S = 10
"""Of simulated time, written at once."""
LOOK_MIN = 5
SETTLED_MIN = 10
"""From here on it is flat, or it is not."""
METRICS = {"JSHeapUsedSize": "heap_bytes", "Nodes": "nodes", "JSEventListeners": "listeners", "Documents": "documents"}


def measure_memory(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    steps = args.minutes * 60 * STEPS_PER_S
    cluster = Cluster(ranks=8, steps=steps, hosts=2, faults=(slow_at(3, "forward", 30.0),), allocated_mb=100.0)
    lines = list(with_samples(cluster, every_s=0.1).samples)
    run = Feed(work / "runs", "hour", cluster)
    run.make(STEPS_PER_S * PIECE_S)
    rows: list[dict[str, int]] = []
    with served(work / "runs") as hub, launched() as browser, open_page(browser) as page:
        page.goto(hub.address("hour"))
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        for second in range(PIECE_S, args.minutes * 60, PIECE_S):
            _feed(run, lines, second / (args.minutes * 60))
            _wait_for(page, run.made - 1)
            if (second + PIECE_S) % (LOOK_MIN * 60) == 0:
                rows.append({"minute": (second + PIECE_S) // 60, **_held(devtools)})
                print(f"  {rows[-1]}", file=sys.stderr)
    settled = [row["heap_bytes"] for row in rows if row["minute"] >= SETTLED_MIN]
    growth = (settled[-1] - settled[0]) / max(1, len(settled) - 1) * 60 / LOOK_MIN if settled else 0.0
    return {"minutes": args.minutes, "steps": run.made, "growth_bytes_per_hour": round(growth), "looks": rows}


def _feed(run: Feed, lines: list[dict[str, Any]], share: float) -> None:
    run.make(STEPS_PER_S * PIECE_S)
    upto = int(share * len(lines))
    run.sample(lines[max(0, upto - len(lines) // 360) : upto])
    run.say("warning", message=f"so far {run.made} steps")


def _wait_for(page: Page, step: int) -> None:
    """Until the page has drawn it."""
    seen = -1
    while seen < step:
        wait_until(page, "window.__drawn.length > 0")
        seen = max(seen, *(found for found, _, _ in drawings(page)))


def _held(devtools: CDPSession) -> dict[str, int]:
    devtools.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
    return {ours: int(found[name]) for name, ours in METRICS.items()}
