"""Smoke test of the page in a browser: the problem is shown, new steps are drawn, no errors."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.page.assets import STATIC, find_asset
from tests.hub.run_parts import HOSTILE
from tests.page.browsing import LIVE_STEPS, expect


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_the_fault_is_seen_first(browser_page: Any, served: Any, open_run: Any, theme: str) -> None:
    page = open_run(browser_page(theme=theme), served, "demo")
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.get_by_role("heading").first).to_contain_text("Rank 3 is")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert "token" not in page.url


def test_steps_are_drawn_as_they_come(browser_page: Any, serve_folder: Any, feed: Any, open_run: Any) -> None:
    run = feed()
    run.make(20)
    hub = serve_folder(feed.folder)
    page = open_run(browser_page(), hub, "live")
    bar = page.locator("header.bar")
    expect(bar).to_contain_text("running")
    expect(bar).to_contain_text("step 19")
    verdict = page.get_by_role("region", name="Verdict")
    while "Rank 2 is" not in verdict.inner_text():  # which is shown once two checks agree
        assert run.made < LIVE_STEPS, verdict.inner_text()
        run.make(2)
        page.wait_for_timeout(200)
    run.end()
    expect(bar).to_contain_text("finished")
    expect(bar).to_contain_text(f"step {run.made - 1}")


def test_what_is_loaded_is_small() -> None:
    """The hub sends it compressed; names contain a checksum, so there is exactly one of each."""
    scripts, styles = sorted(STATIC.rglob("*.js")), sorted(STATIC.rglob("*.css"))
    assert (len(scripts), len(styles)) == (1, 1)
    packed = find_asset(f"assets/{scripts[0].name}")
    assert packed is not None
    assert len(packed.packed) <= 300_000


def test_hostile_names_are_only_text(browser_page: Any, served: Any, open_run: Any) -> None:
    """A script that ran would open a dialog, which counts as a problem of the page."""
    page = open_run(browser_page(), served, HOSTILE)
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    page.goto(f"{served.url}/#/")
    expect(page.get_by_role("link", name=HOSTILE)).to_be_visible()
    assert page.locator("img").count() == 0
