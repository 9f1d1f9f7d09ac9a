"""How quick the page is, in a real browser without a window: loading, following, an hour of it, and the demo's fault.

    python bench/page.py load               # a past run of 8 ranks × 36,000 steps: from its address to its picture
    python bench/page.py latency            # 1,000 simulated ranks: from a step's end to its pixels
    python bench/page.py memory             # an hour of a live run, faster than it would pass: what the tab holds
    python bench/page.py demo               # `stepscope demo`: from its start to the verdict in the page
    python bench/page.py --json FILE all

Needs Chromium and Playwright (``make test`` installs both) and the built page (``make page``).  What the page says of
itself is one mark per drawing on the browser's timeline (``web/src/run/drawn.ts``), set after the frame was shown.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.browser import what_is_missing
from page_demo import measure_demo
from page_latency import measure_latency
from page_load import measure_load
from page_memory import measure_memory

from stepscope.page.assets import STATIC, is_built

MEASURES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "load": measure_load,
    "latency": measure_latency,
    "memory": measure_memory,
    "demo": measure_demo,
}


def script_bytes() -> dict[str, int]:
    """Of all scripts and style sheets together, packed as the hub sends them."""
    files = [path for path in STATIC.rglob("*") if path.suffix in (".js", ".css")]
    packed = {path: len(gzip.compress(path.read_bytes(), 9, mtime=0)) for path in files}
    return {
        "script_gzip_bytes": sum(size for path, size in packed.items() if path.suffix == ".js"),
        "style_gzip_bytes": sum(size for path, size in packed.items() if path.suffix == ".css"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*MEASURES, "all"))
    parser.add_argument("--ranks", type=int, default=1000, help="latency: simulated (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="latency: how long (default: %(default)s)")
    parser.add_argument("--steps-per-s", type=float, default=2.0, help="latency (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=36_000, help="load: of the run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="load, demo: how often (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="memory: of simulated time (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    missing = what_is_missing() or ("" if is_built() else "the page is not built (make page)")
    if missing:
        parser.error(missing)
    found: dict[str, Any] = script_bytes()
    print(f"script {found['script_gzip_bytes'] / 1e3:.1f} kB, style {found['style_gzip_bytes'] / 1e3:.1f} kB, gzip")
    for name in MEASURES if args.what == "all" else (args.what,):
        work = Path(tempfile.mkdtemp(prefix="stepscope-page-"))
        try:
            found[name] = MEASURES[name](work, args)
        finally:
            shutil.rmtree(work)
        print(f"{name}: {json.dumps(found[name], indent=1)}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
        about = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "machine": machine, "load1": os.getloadavg()[0]}
        args.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
