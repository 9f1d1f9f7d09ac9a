"""``stepscope demo`` with its page open: from its start to the slow rank's name, and from a step's end to its pixels.

The page is opened as soon as there is an address to open, as somebody would who clicks on it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fakes.browser import launched
from page_parts import drawings, open_page, spread, wait_until

from stepscope.store.load import open_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["measure_demo"]

LOOK_S = 0.02
NAMED = "document.querySelector('main')?.innerText.includes('Rank 2 is')"


def measure_demo(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    with launched() as browser:
        for number in range(args.repeats):
            runs.append(_once(browser, work / str(number)))
            print(f"  {runs[-1]}", file=sys.stderr)
    names = ("address_s", "first_step_ended_s", "first_step_drawn_s", "named_s")
    return {
        **{name: spread([run[name] for run in runs]) for name in names},
        "step_to_pixels_s": spread([late for run in runs for late in run["late_s"]]),
    }


def _once(browser: Browser, folder: Path) -> dict[str, Any]:
    began_s = time.time()
    command = [sys.executable, "-m", "stepscope", "demo", "--dir", str(folder), "--steps", "200"]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        place = folder / "demo" / "hub.json"
        while not place.exists():
            time.sleep(LOOK_S)
        about = json.loads(place.read_text())
        address_s = time.time()
        with open_page(browser) as page:
            page.goto(f"{about['url']}/#/run/demo?token={about['token']}")
            wait_until(page, NAMED)
            named_s = time.time()
            page.wait_for_timeout(1500)
            seen = drawings(page)
        demo.wait()
    finally:
        demo.kill()
        demo.wait()
    ends = _ends_s(folder / "demo")
    newest, late = -1, []
    for step, wall_ms, _ in seen:
        late += [wall_ms / 1e3 - ends[each] for each in range(newest + 1, step + 1) if each in ends and newest >= 0]
        newest = max(newest, step)
    return {
        "address_s": address_s - began_s,
        "first_step_ended_s": ends[0] - began_s,
        "first_step_drawn_s": seen[0][1] / 1e3 - began_s,
        "named_s": named_s - began_s,
        "late_s": late,
    }


def _ends_s(run_dir: Path) -> dict[int, float]:
    """When the last rank ended each step, by the wall clock."""
    ends: dict[int, float] = {}
    for series in open_run(run_dir).ranks:
        offset = series.anchor_wall_ns - series.anchor_mono_ns
        ended_ns = series.steps["start_ns"] + series.steps["wall_ns"].astype(np.int64) + offset
        for step, end_ns in zip(series.steps["step"].tolist(), ended_ns.tolist(), strict=True):
            ends[step] = max(ends.get(step, 0.0), end_ns / 1e9)
    return ends
