"""The list of incidents on the page of a run, and the page of one of them, in a browser."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect


def test_an_incident_has_its_own_page(browser_page: Any, served: Any, open_run: Any) -> None:
    page = browser_page(width=390)
    open_run(page, served, "demo")
    listed = page.get_by_role("region", name="Incidents")
    listed.get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="Incident 1", exact=True)).to_be_visible()
    assert page.url.endswith("#/run/demo/incident/1")
    for name in ("Onset", "Impact", "Around the onset", "Timeline"):
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    assert page.locator("main .source").count() > 5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("link", name="Run demo").click()
    expect(listed).to_be_visible()
