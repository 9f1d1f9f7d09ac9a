"""From the address of a run of hours to its first picture: the first time its hub is asked for it, and again; and of
one that goes on, also until its newest step is in the picture.

The run is one of eight GPUs on one node, with all that an agent samples of them: 17 lines a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakes.browser import launched
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples
from made_runs import Feed, record
from page_parts import drawings, open_page, served, spread, wait_until

from stepscope.cli.finalize import finalize_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from stepscope.records.series import RunData

__all__ = ["measure_load"]

RUN = "hours"
FRAME = 2
"""Steps of a second each that an agent writes at once."""
AHEAD_S = 4.0
"""A little longer than a browser needs to start."""


def measure_load(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """``first``: the hub has just said its address; ``ahead``: some seconds ago, and nobody asked it anything yet;
    ``again``: it was asked before.  Nothing is in the browser's cache.
    """
    cluster = Cluster(
        ranks=8,
        steps=args.steps,
        phases_ms={"input": 50.0, "forward": 250.0, "backward": 500.0, "optimizer": 125.0, "other": 25.0},
        comm_ms=25.0,
        device_timed=True,
        allocated_mb=100.0,
        faults=(slow_at(3, "forward", 300.0),),
    )
    print(f"making a run of 8 ranks × {args.steps} steps …", file=sys.stderr)
    run = with_samples(cluster, every_s=1.0)
    record(work / "runs", RUN, run, sealed=False)
    ended_s = time.monotonic()
    finalize_run(work / "runs" / RUN, quiet=True)  # as every run that ended has its summary
    ended_s = time.monotonic() - ended_s
    hours = sum(float(series.steps["wall_ns"].sum()) for series in run.ranks[:1]) / 3.6e12
    first: list[float] = []
    ahead: list[float] = []
    again: list[float] = []
    with launched() as browser:
        with open_page(browser) as page:
            page.goto("about:blank")  # the browser itself has started
        for turn in range(2 * args.repeats):
            early = turn % 2 == 0
            with served(work / "runs") as hub:
                time.sleep(0 if early else AHEAD_S)
                for found in (first if early else ahead, again):
                    with open_page(browser) as page:
                        page.goto(hub.address(RUN))
                        wait_until(page, "window.__drawn.length > 0")
                        found.append(drawings(page)[0][2] / 1e3)
        live, newest = _measure_live(browser, work, cluster, run, args)
    times = {"first_s": spread(first), "ahead_s": spread(ahead), "again_s": spread(again)}
    times |= {"live_s": spread(live), "live_newest_s": spread(newest)}
    about = {"steps": args.steps, "hours": round(hours, 2), "samples": len(run.samples), "end_s": round(ended_s, 1)}
    return {**about, **times}


def _measure_live(
    browser: Browser, work: Path, cluster: Cluster, run: RunData, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """By a hub that has just begun, of a run that its agent wrote every two seconds: until anything, and the end."""
    feed = Feed(work / "going", RUN, cluster)
    feed.make(args.steps, frame=FRAME)
    feed.sample(run.samples)
    first: list[float] = []
    newest: list[float] = []
    for _ in range(args.repeats):
        with served(work / "going") as hub, open_page(browser) as page:
            page.goto(hub.address(RUN))
            wait_until(page, f"window.__drawn.some(([step]) => step >= {args.steps - 1})")
            seen = drawings(page)
            first.append(seen[0][2] / 1e3)
            newest.append(next(own_ms for step, _, own_ms in seen if step >= args.steps - 1) / 1e3)
    return first, newest
