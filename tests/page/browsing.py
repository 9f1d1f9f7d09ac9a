"""A browser for the tests of the page: pages that record all problems, and hubs to open.

Everything of Playwright that a test needs is taken from here (``from tests.page.browsing import Page, expect``): where
it is not installed, these tests are skipped, and their files must still be read.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from fakes.browser import what_is_missing

from stepscope.page.assets import is_built
from tests.hub.run_parts import ServedFolder

if what_is_missing():
    Browser = BrowserContext = ConsoleMessage = Page = Request = expect = None
else:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect

__all__ = [
    "EVIL",
    "EVIL_IMAGE",
    "LIVE_STEPS",
    "TOO_WIDE",
    "UNNAMED_ROWS",
    "Browser",
    "BrowserContext",
    "LoopOfPlaywright",
    "Page",
    "Pages",
    "ServedFolder",
    "ServedProcess",
    "complaints",
    "expect",
    "fingers_on",
    "run_address",
    "settled",
    "why_skipped",
]

EVIL_IMAGE = "<img src=x onerror=alert(1)>"
EVIL = f"</script>{EVIL_IMAGE}"
"""In names of files, groups, kernels and variants: it must stay text."""
WITHOUT = "browser tests: "
"""Prefix of the skip reason; ``tests/conftest.py`` repeats it at the end."""
LOOK_MS = 50
CALM_S = 60.0
LIVE_STEPS = 1200
"""That a run which goes on can make."""
LOCAL = ("data", "blob", "about", "file")
ASKED_FOR = "net::ERR_ABORTED"
"""The page aborted a request, as it does when a newer one replaces it."""


def why_skipped() -> str:
    """Why the page cannot be tested in a browser; empty if it can."""
    missing = what_is_missing() or ("" if is_built() else "the page is not built")
    return WITHOUT + missing if missing else ""


class LoopOfPlaywright:
    """Playwright's event loop counts as running in this thread from its start on, and other tests start their own.

    Between two tests of the page it is therefore taken away.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)

    @contextmanager
    def here(self) -> Iterator[None]:
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


@dataclass
class _Watch:
    """Records the problems of one page."""

    context: BrowserContext
    allowed: list[re.Pattern[str]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    origin: str | None = None

    def listen(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("request", self._request)
        page.on("requestfailed", self._failed)
        page.on("dialog", lambda dialog: (self.troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def unexpected(self) -> list[str]:
        return [trouble for trouble in self.troubles if not any(pattern.search(trouble) for pattern in self.allowed)]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in LOCAL:
            self.origin = self.origin or parts.scheme
        elif self.origin is None:
            self.origin = parts.netloc
        elif parts.netloc != self.origin:
            self.troubles.append(f"asked elsewhere: {request.url}")

    def _failed(self, request: Request) -> None:
        if request.failure != ASKED_FOR:
            self.troubles.append(f"failed: {request.url}: {request.failure}")


class Pages:
    """Opens pages, each in a separate context, and checks that they had no problems."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._watched: dict[Page, _Watch] = {}

    def __call__(self, theme: str = "light", width: int = 1280, height: int = 900, **more: Any) -> Page:
        """``more`` is passed to Playwright's ``new_context``."""
        scheme: Any = theme
        context = self._browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": height}, reduced_motion="reduce", **more
        )
        page = context.new_page()
        self._watched[page] = watch = _Watch(context)
        watch.listen(page)
        return page

    def expects(self, page: Page, *patterns: str) -> None:
        """Allow problems that match one of these: ``expects(page, "401")``."""
        self._watched[page].allowed += map(re.compile, patterns)

    def troubles(self, page: Page) -> list[str]:
        """All problems so far: ``error: …``, ``warning: …``, ``failed: …``, ``asked elsewhere: …``, ``dialog: …``."""
        return list(self._watched[page].troubles)

    def close(self) -> list[str]:
        """Close all pages; return the unexpected problems."""
        found = [trouble for watch in self._watched.values() for trouble in watch.unexpected()]
        for watch in self._watched.values():
            watch.context.close()
        self._watched.clear()
        return found


def run_address(url: str, run: str, token: str = "", **route: int) -> str:
    """The address of a run's screen; with a token, opening it signs in."""
    query: dict[str, int | str] = {**route, **({"token": token} if token else {})}
    return f"{url}/#/run/{quote(run, safe='')}" + (f"?{urlencode(query)}" if query else "")


class ServedProcess:
    """The same with ``stepscope serve``, which can be killed: ``kill``, then ``start`` again on the same port."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], folder: Path, token_file: Path) -> None:
        self._start = start
        self.folder = folder
        self._token_file = token_file
        self.port = 0
        self.start()
        self.token = token_file.read_text().strip()

    def start(self) -> None:
        self.process = self._start("serve", self.folder, "--port", str(self.port), "--token-file", self._token_file)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.url = self.process.stdout.readline().split()[0]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


TOO_WIDE = """
() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => `${one.tagName} ${one.className} ${one.getBoundingClientRect().right}`).slice(0, 8)
"""
"""To be evaluated: what does not fit the window."""
UNNAMED_ROWS = """
() => [...document.querySelectorAll("table")].filter((table) => table.getClientRects().length > 0).flatMap((table) => {
  const box = table.closest(".scrolls") ?? table.parentElement;
  const cell = table.querySelector("tbody th[scope=row], tbody tr > :first-child:not([colspan])");
  if (cell === null) return [];
  box.scrollLeft = box.scrollWidth;
  const [name, room] = [cell.getBoundingClientRect(), box.getBoundingClientRect()];
  const hidden = box.scrollWidth - box.clientWidth;
  box.scrollLeft = 0;
  const lost = name.left < room.left - 1 || name.right > room.right + 1 || name.right > innerWidth + 1;
  const cut = cell.scrollWidth > cell.clientWidth + 1;
  const crowds = hidden > 0 && name.width > 0.6 * room.width;
  return lost || cut || crowds ? [`${box.getAttribute("aria-label")}: ${[lost, cut, crowds]} ${cell.innerText}`] : [];
})
"""
"""To be evaluated: tables whose first column, which names the rows, is out of view when the others are scrolled to, is
cut, or leaves no room for them."""
COLORS = {"runOnly": ["color-contrast"]}
"""The only difference between the themes."""


def complaints(page: Page, axe: str) -> list[str]:
    """What axe finds wrong, in both themes."""
    page.evaluate(axe)
    found = _violations(page, {})
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    found += _violations(page, COLORS)
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    return found


def _violations(page: Page, rules: dict[str, Any]) -> list[str]:
    asked = json.dumps({"resultTypes": ["violations"], **rules})
    wrong = page.evaluate(f"axe.run(document, {asked}).then((found) => found.violations)")
    return [f"{row['id']} {node['html'][:200]}" for row in wrong for node in row["nodes"]]


def settled(page: Page, quiet_ms: int = 250) -> Page:
    """Wait until there are no new requests and no changes on the page for a while; a stream stays open."""
    before, since = None, 0
    until_s = time.monotonic() + CALM_S
    while since < quiet_ms:
        assert time.monotonic() < until_s, f"the page never comes to rest: {before}"
        now = page.evaluate("[performance.getEntriesByType('resource').length, document.body.innerText]")
        since = since + LOOK_MS if now == before else 0
        before = now
        page.wait_for_timeout(LOOK_MS)
    return page


def fingers_on(page: Page) -> Callable[..., None]:
    """Touch gesture: each finger moves from one point to another at the same time, as ``(x, y, to_x, to_y)``."""
    hand = page.context.new_cdp_session(page)

    def drag(*fingers: tuple[float, float, float, float]) -> None:
        for part in range(11):
            at = [{"x": a + (c - a) * part / 10, "y": b + (d - b) * part / 10} for a, b, c, d in fingers]
            hand.send("Input.dispatchTouchEvent", {"type": "touchMove" if part else "touchStart", "touchPoints": at})
        hand.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    return drag
