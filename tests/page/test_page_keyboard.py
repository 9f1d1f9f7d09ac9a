"""The page by keyboard alone: everything is reachable, the focus is visible, and going back works."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.page.browsing import Page, expect, settled

MOST_TABS = 120
WHERE = """
() => {
  const one = document.activeElement;
  const style = getComputedStyle(one);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const words = (one.getAttribute("aria-label") ?? one.innerText ?? "").trim();
  return { seen, words, body: one === document.body };
}
"""


def tab_to(page: Page, words: str) -> str:
    """Press Tab until an element with this name has the focus; the focus is visible at each stop."""
    passed = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        at = page.evaluate(WHERE)
        assert at["seen"] or at["body"], f"nobody sees that this has the focus: {at}"
        passed.append(at["words"][:60])
        if at["words"].startswith(words):
            return str(at["words"])
    pytest.fail(f"{words!r} is not reached by Tab, but {passed}")


def test_a_walk_by_keyboard(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    settled(page)
    # past the bar at once
    assert tab_to(page, "Skip to content") == "Skip to content"
    page.keyboard.press("Enter")
    # the finding: what it rests on, and its steps
    tab_to(page, "Evidence")
    page.keyboard.press("Enter")
    expect(page.locator("section.verdict details[open]")).not_to_have_count(0)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("first=1&last=599"))
    # a step of the chart
    tab_to(page, "Step time over")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("step=3\\b"))
    # a rank
    tab_to(page, "Show rank 6")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("rank=6\\b"))
    expect(page.get_by_role("region", name="Rank 6", exact=True)).to_be_focused()
    # the keys there are, and back
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    # the list, and another run
    tab_to(page, "Stepscope")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="gpu", exact=True)).to_be_visible()
    tab_to(page, "gpu")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("gpu")
    page.go_back()
    page.go_back()
    expect(page).to_have_url(re.compile("first=1&last=599&step=3&rank=6"))
    expect(page.get_by_role("heading", level=1)).to_have_text("demo")
