"""What the benchmarks of the page share: hubs as processes, pages that note when something was drawn, quantiles."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["Hub", "drawings", "open_page", "served", "spread", "wait_until"]

NOTED = """
window.__drawn = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntriesByName("stepscope:drawn")) {
    window.__drawn.push([entry.detail.step, performance.timeOrigin + entry.startTime, entry.startTime]);
  }
}).observe({ type: "mark", buffered: true });
"""
LONGEST_MS = 120_000.0
LOOK_MS = 20.0


@dataclass(frozen=True, kw_only=True)
class Hub:
    url: str
    token: str
    pid: int

    def address(self, run: str) -> str:
        return f"{self.url}/#/run/{quote(run, safe='')}?token={self.token}"


@contextmanager
def served(folder: Path) -> Iterator[Hub]:
    """``stepscope serve`` of a folder."""
    token = folder.parent / "reader-token"
    command = [sys.executable, "-m", "stepscope", "serve", str(folder), "--port", "0", "--token-file", str(token)]
    environment = dict(os.environ)
    # An installed package is compiled; the first start compiles a checkout, where that is not forbidden.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        yield Hub(url=url, token=token.read_text().strip(), pid=process.pid)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def open_page(browser: Browser, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """In a context of its own, so that nothing is cached; errors in it are told."""
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    page.add_init_script(NOTED)
    page.on("pageerror", lambda error: print(f"error in the page: {error}", file=sys.stderr))
    page.set_default_timeout(LONGEST_MS)
    try:
        yield page
    finally:
        context.close()


def wait_until(page: Page, expression: str) -> None:
    """As Playwright's own, which the page's Content-Security-Policy forbids.  TimeoutError after two minutes."""
    until_s = time.monotonic() + LONGEST_MS / 1e3
    while not page.evaluate(expression):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not in two minutes: {expression}")
        page.wait_for_timeout(LOOK_MS)


def drawings(page: Page) -> list[tuple[int, float, float]]:
    """Of each drawing since the last call: its newest step; when it was on screen, in ms since 1970 and since load."""
    found: list[Any] = page.evaluate("window.__drawn.splice(0)")
    return [(int(step), float(wall_ms), float(own_ms)) for step, wall_ms, own_ms in found]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The middle, the worst twentieth, the most."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, int(0.95 * len(ordered)))
    return {
        "count": len(ordered),
        "p50": round(statistics.median(ordered), digits),
        "p95": round(ordered[at], digits),
        "max": round(ordered[-1], digits),
    }
