"""On a phone (390 pixels) every screen fits, and every table keeps the column that names its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.page.browsing import TOO_WIDE, UNNAMED_ROWS, run_address, settled

PHONE = 390
UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true })"


def wrong_on(page: Any) -> list[str]:
    settled(page)
    page.evaluate(UNFOLD)
    settled(page)
    return [*page.evaluate(TOO_WIDE), *page.evaluate(UNNAMED_ROWS)]


def test_runs_the_list_and_a_comparison(browser_page: Any, served: Any) -> None:
    page = browser_page(width=PHONE)
    page.goto(run_address(served.url, "demo", served.token, rank=3))
    settled(page)
    found = {"demo": wrong_on(page)}
    for screen in ("run/hang", "run/gpu", "", "compare/demo/gpu"):
        page.evaluate("fragment => { location.hash = `#/${fragment}` }", screen)
        page.wait_for_selector("main:not([aria-busy=true])")
        found[screen] = wrong_on(page)
    assert {screen: wrong for screen, wrong in found.items() if wrong} == {}


def test_layers(browser_page: Any, layers_served: Any, open_run: Any) -> None:
    page = open_run(browser_page(width=PHONE), layers_served, "gpt")
    page.get_by_role("region", name="Layers", exact=True).get_by_role("button", name="Table", exact=True).click()
    assert wrong_on(page) == []


@pytest.mark.parametrize("name", ["trace", "flight", "sweep"])
def test_pages_of_files(browser_page: Any, files: dict[str, Path], front_file: Path, name: str) -> None:
    page = browser_page(offline=True, width=PHONE)
    page.goto({**files, "sweep": front_file}[name].as_uri())
    page.wait_for_selector("main[aria-busy=false]")
    assert wrong_on(page) == []
