"""Accessibility: axe finds no problem on any screen in any state, and everything fits a narrow window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.hub.run_parts import HOSTILE
from tests.page.browsing import TOO_WIDE, Page, ServedFolder, complaints, run_address, settled

NARROW = 420


def states(page: Page, hub: ServedFolder, *, some: bool) -> Iterator[str]:
    """Visit every screen in every normal state, or four that differ most; yield its name."""

    def shows(fragment: str) -> None:
        page.evaluate("fragment => { location.hash = fragment }", fragment)
        page.wait_for_selector("main:not([aria-busy=true])")
        settled(page)

    page.goto(f"{hub.url}/#/")
    settled(page)
    yield "signing in"
    page.goto(run_address(hub.url, "demo", hub.token))
    page.reload()
    settled(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    yield "a run, unfolded"
    if not some:
        shows("#/run/demo?first=100&last=300&step=212&rank=3")
        yield "a rank of it"
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]")
        yield "the keys"
        page.keyboard.press("Escape")
        for run in ("hang", "one", "empty", "gpu", HOSTILE):
            shows(f"#/run/{quote(run, safe='')}")
            yield f"the run {run}"
        shows("#/run/none")
        yield "no such run"
    shows("#/")
    yield "the list"
    shows("#/compare/demo/gpu/one")
    yield "three runs compared"


@pytest.mark.soak  # near: pages of traces in test_page_files.py, and a run in test_page_layers.py
def test_axe_finds_nothing(browser_page: Any, served: Any, axe: str) -> None:
    """In both themes; each state is visited once, then the theme is switched."""
    page = browser_page()
    browser_page.expects(page, "401", "404")
    found = {state: complaints(page, axe) for state in states(page, served, some=False)}
    assert {state: wrong for state, wrong in found.items() if wrong} == {}
    assert len(found) == 12


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["some", "all"])
def test_nothing_is_wider_than_a_narrow_window(browser_page: Any, served: Any, some: bool) -> None:
    page = browser_page(width=NARROW)
    browser_page.expects(page, "401", "404")
    found = {state: page.evaluate(TOO_WIDE) for state in states(page, served, some=some)}
    assert {state: wide for state, wide in found.items() if wide} == {}
    assert len(found) == (4 if some else 12)


COLORLESS = """
(kinds) => kinds.filter((kind) => [...document.querySelectorAll(kind)]
  .every((one) => /rgba\\(0, 0, 0, 0\\)|rgb\\(255, 255, 255\\)/.test(getComputedStyle(one).backgroundColor)))
"""


@pytest.mark.soak  # near: axe, above
def test_with_forced_colors_and_on_paper_bars_and_legends_are_still_there(browser_page: Any, served: Any) -> None:
    page = browser_page()
    page.emulate_media(forced_colors="active")
    page.goto(run_address(served.url, "demo", served.token, rank=3))
    settled(page)
    page.wait_for_selector(".rank-two span")
    bars = [".legend .swatch", ".rank-bar span", ".wm-pair-bar", ".bars-fill", ".price-bar.now", ".rank-two span"]
    assert page.evaluate(COLORLESS, [*bars, "button[aria-pressed=true]"]) == []
    page.emulate_media(forced_colors="none", media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.rank-bar span')).printColorAdjust") == "exact"
    assert page.locator(".card-tools:visible, .bar .tools:visible").count() == 0
