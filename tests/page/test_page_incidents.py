"""The list of incidents on the page of a run, and the page of one of them, in a browser."""

from __future__ import annotations

import re
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


class Changed:
    """The hub's incident document, changed for the page; ``answers``: one for each request, the last one repeatedly."""

    def __init__(self, page: Any, *answers: dict[str, Any] | None) -> None:
        self._answers = list(answers)
        page.route(re.compile(r"/api/v1/runs/demo/incidents/1$"), self._handle)

    def _handle(self, route: Any) -> None:
        changes = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if changes is None:
            route.fulfill(status=500, json={"error": {"message": "no"}})
            return
        document = route.fetch().json()
        run = {**document["run"], **changes.pop("run", {})}
        route.fulfill(json={**document, "run": run, **changes})


def test_an_incident_page_asks_again_after_a_failure(browser_page: Any, served: Any, open_run: Any) -> None:
    page = browser_page()
    browser_page.expects(page, "500")
    over = {"status_text": "the run is over", "over": True}
    Changed(page, {"run": {"over": False, "status_text": "running"}}, None, {"run": over})
    open_run(page, served, "demo")
    page.clock.install()
    page.get_by_role("region", name="Incidents").get_by_role("link").first.click()
    lead = page.get_by_role("region", name="Incident", exact=True)
    expect(lead).to_contain_text("run: running")
    page.clock.run_for(11_000)
    expect(page.get_by_role("status").filter(has_text="out of date")).to_be_visible()
    page.clock.run_for(11_000)
    expect(lead).to_contain_text("run: the run is over")
    expect(page.get_by_role("status").filter(has_text="out of date")).to_have_count(0)


def test_an_incident_without_git_and_back_from_one_that_cannot_be_shown(
    browser_page: Any, served: Any, open_run: Any
) -> None:
    page = browser_page()
    statement = {"text": "The last good run is day.", "source": {"text": "run.json"}}
    changes = {"run": "day", "statements": [statement], "git": None, "rows": []}
    Changed(page, {"changes": changes}, {"timeline": 7})
    open_run(page, served, "demo")
    listed = page.get_by_role("region", name="Incidents")
    listed.get_by_role("link").first.click()
    expect(page.get_by_text("The last good run is day.")).to_be_visible()
    page.get_by_role("link", name="Run demo").click()
    listed.get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="Internal error in the page")).to_be_visible()
    page.go_back()
    expect(listed).to_be_visible()
