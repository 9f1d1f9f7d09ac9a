"""A browser without a window, for tests, benchmarks and pictures of the page: Chromium, driven by Playwright.

    with launched() as browser:
        page = browser.new_page()

Neither is a dependency of ours: whoever asks for a browser where there is none is told what is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["find_chromium", "launched", "what_is_missing"]

CHROMIUM_ENV = "STEPSCOPE_CHROMIUM"
NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
FLAGS = (
    "--no-sandbox",  # in a container there is often nothing to make one with
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    wanted = os.environ.get(CHROMIUM_ENV)
    return shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, NAMES)), None)


def what_is_missing() -> str:
    """In words; empty where there is a browser, and what drives it."""
    if find_chromium() is None:
        return "chromium is not installed"
    return "" if find_spec("playwright") else "playwright is not installed"


@contextmanager
def launched(*flags: str) -> Iterator[Browser]:
    """FileNotFoundError where there is none."""
    missing = what_is_missing()
    if missing:
        raise FileNotFoundError(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()
