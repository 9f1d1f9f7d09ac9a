"""How quickly traces open in the page of a hub: real files, in a real browser without a window.

    python bench/page_traces.py ../shared/data/traces            # every folder of traces below it
    python bench/page_traces.py ../shared/data/traces --shots /tmp/pictures

*first*: nobody has opened these traces before, and nothing is cached: the worker process starts, reads and analyzes
them. *again*: the views were made. Measured from opening the address in a new tab until the verdict is drawn. *work*:
how long reading and analyzing take in a warm process of normal priority, for comparison. With ``--shots`` a picture of
every view, at 1,280 and 390 pixels, in both themes; a page that is wider than its window is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakes.browser import launched, what_is_missing
from page_parts import Hub, served

from stepscope.hub.traces.folders import TraceFolder, trace_folders
from stepscope.page.assets import is_built

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIMIT_S = 2.0
VIEWS = (*("overview", "timeline", "operators", "kernels", "memory", "modules", "distributed", "difference", "files"),)
WIDTHS = (1280, 390)
THEMES = ("light", "dark")
DRAWN = "() => document.querySelector('main[aria-busy=false] .verdict h2') !== null"
CALM = "() => !/Reading rank|Comparing rank/.test(document.body.innerText)"
LONGEST_MS = 180_000
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="a folder of trace folders")
    parser.add_argument("--repeats", type=int, default=3, help="of opening again (default: %(default)s)")
    parser.add_argument("--shots", metavar="DIR", type=Path, help="also take pictures of every view")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    missing = what_is_missing() or ("" if is_built() else "the page is not built (make page)")
    if missing:
        parser.error(missing)
    work = Path(tempfile.mkdtemp(prefix="stepscope-page-traces-"))
    os.environ["STEPSCOPE_CACHE"] = str(work / "cache")
    try:
        # A copy: the hub's token lies next to the served folder, and nothing is written next to somebody's traces.
        shutil.copytree(args.traces, work / "traces", copy_function=shutil.copyfile)
        rows = _measured(work / "traces", args)
    finally:
        shutil.rmtree(work)
    print(f"{'traces':32} {'files':>5} {'MB':>6} {'first s':>8} {'again s':>8} {'work s':>8}")
    for row in rows:
        figures = f"{row['first_s']:8.2f} {row['again_s']:8.2f} {row['work_s']:8.2f}"
        print(f"{row['id']:32} {row['files']:5} {row['size_bytes'] / 1e6:6.2f} {figures}")
    load = os.getloadavg()[0]
    slow = [row["id"] for row in rows if row["first_s"] > LIMIT_S]
    print(f"{len(rows) - len(slow)} of {len(rows)} open within {LIMIT_S:.0f} s the first time; load {load:.1f}")
    if args.json:
        args.json.write_text(json.dumps({"schema": 1, "load1": load, "rows": rows}, indent=1) + "\n")


def _measured(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with served(folder) as hub, launched("--font-render-hinting=none") as browser:
        _opened(browser, hub, "", ready="() => document.querySelector('main') !== null")  # the browser's own start
        for traces in trace_folders(folder):
            first_s = _opened(browser, hub, f"/trace/{traces.id}")
            again = [_opened(browser, hub, f"/trace/{traces.id}") for _ in range(args.repeats)]
            about = {"id": traces.id, "files": len(traces.files), "size_bytes": traces.size_bytes}
            work_s = _worked(traces)
            rows.append({**about, "first_s": first_s, "again_s": statistics.median(again), "work_s": work_s})
            if args.shots is not None:
                args.shots.mkdir(parents=True, exist_ok=True)
                _take(browser, hub, traces.id, args.shots)
    return rows


def _opened(browser: Browser, hub: Hub, place: str, ready: str = DRAWN) -> float:
    page = browser.new_context(viewport={"width": WIDTHS[0], "height": 900}).new_page()
    began_s = time.monotonic()
    page.goto(f"{hub.url}/#{place}?token={hub.token}")
    page.wait_for_function(ready, timeout=LONGEST_MS)
    took_s = time.monotonic() - began_s
    page.context.close()
    return took_s


def _worked(traces: TraceFolder) -> float:
    from stepscope.traces.engine import LocalEngine, Options, Problem, analyze_paths
    from stepscope.traces.findings import analyze_job
    from stepscope.traces.job import one_per_rank

    began_s = time.monotonic()
    found = analyze_paths([file.path for file in traces.files], Options(), LocalEngine(1))
    analyze_job(one_per_rank([each for each in found if not isinstance(each, Problem)])[0])
    return time.monotonic() - began_s


def _take(browser: Browser, hub: Hub, trace: str, out: Path) -> None:
    for theme in THEMES:
        for width in WIDTHS:
            page = _page(browser, theme, width)
            page.goto(f"{hub.url}/#/trace/{trace}?token={hub.token}")
            page.wait_for_function(DRAWN, timeout=LONGEST_MS)
            for view in VIEWS:
                page.evaluate("place => { location.hash = place }", f"#/trace/{trace}?view={view}")
                page.wait_for_timeout(150)
                page.wait_for_function(CALM, timeout=LONGEST_MS)
                page.wait_for_timeout(150)
                page.screenshot(path=out / f"{trace}-{view}-{width}-{theme}.png", full_page=True)
                if beyond := page.evaluate(TOO_WIDE):
                    print(f"{trace} {view} {width} {theme}: {beyond} pixels too wide", file=sys.stderr)
            page.context.close()


def _page(browser: Browser, theme: str, width: int) -> Page:
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.on("pageerror", lambda error: print(f"error in the page: {error}", file=sys.stderr))
    return page


if __name__ == "__main__":
    main()
