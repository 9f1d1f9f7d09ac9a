"""The fleet: every bar and row leads to its runs, names stay text, nothing is cut off on a narrow screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from fleet_document import fleet_document

from stepscope.store.documents import read_meta, write_meta
from tests.hub.run_parts import record
from tests.page.browsing import EVIL, TOO_WIDE, expect

RUNS = ("night", "day", "noon")
USERS = {"night": "anna", "day": "anna", "noon": "ben"}


@pytest.fixture
def served(serve_folder: Any, tmp_path: Path) -> Any:
    data = Cluster(ranks=2, steps=12).run()
    for name in RUNS:
        run_dir = record(tmp_path / "runs", name, data)
        write_meta(run_dir, {**read_meta(run_dir), "user": USERS[name]})
    return serve_folder(tmp_path / "runs")


def open_fleet(page: Any, served: Any, requested: list[str]) -> None:
    def handle(route: Any) -> None:
        requested.append(route.request.url.partition("/api/v1/")[2])
        route.fulfill(json=fleet_document("night", "noon", evil=EVIL))

    page.route(re.compile(r"/api/v1/fleet(\?.*)?$"), handle)
    page.goto(f"{served.url}/#token={served.token}")
    page.get_by_role("link", name="Fleet").click()
    expect(page.locator(".fleet-headline")).to_contain_text("29% of 812,346 GPU hours")


def names(page: Any) -> Any:
    return page.locator("tbody tr:not(.run-opened) th a")


def test_each_bar_of_the_fleet_leads_to_its_runs(browser_page: Any, served: Any) -> None:
    requested: list[str] = []
    page = browser_page()
    open_fleet(page, served, requested)
    expect(page.locator("a.fleet-column")).to_have_count(46)
    week = page.get_by_role("link", name=re.compile(r"^week of 12 Jan 2026: waiting for a slow rank .* h, "))
    assert "useful" not in week.get_attribute("aria-label")
    week.click()
    expect(names(page)).to_have_count(2)
    assert sorted(names(page).all_inner_texts()) == ["night", "noon"]
    expect(page.locator(".list-behind")).to_contain_text("week of 12 Jan 2026 (2 runs)")
    page.go_back()
    page.get_by_role("button", name="team").click()
    expect(page.locator(".fleet-rows .fleet-name")).to_have_text(["team:vision", "team:speech", EVIL, "no tag"])
    suspect = page.get_by_role("row", name=re.compile("gpu-017"))
    expect(suspect).to_contain_text("37 of 41")
    expect(suspect).to_contain_text(">99.9%")
    expect(suspect).to_contain_text("6.2% (5.5% to 7.1%)")
    expect(page.locator(".fleet-totals")).to_contain_text("started 5 Jan 2026 – 23 Nov 2026 (days in UTC)")
    faster = page.locator(".fleet-changes li").filter(has_text="faster since")
    expect(faster).to_contain_text("3 May 2026")
    expect(faster).to_contain_text("3.1% (2.6% to 3.6%) faster")
    suspect.get_by_role("link", name="2 of 42 runs").click()
    expect(page.locator(".list-behind")).to_contain_text("gpu-017")
    page.get_by_role("button", name="Show all runs").click()
    expect(names(page)).to_have_count(3)
    page.get_by_role("combobox", name="User").select_option("ben")
    expect(names(page)).to_have_text(["noon"])
    page.wait_for_url("**/#/?user=ben")
    page.goto(f"{served.url}/#/fleet?days=30")
    expect(page.locator(".fleet-headline")).to_be_visible()
    assert requested[-1] == "fleet?since_days=30"


@pytest.mark.soak  # near: test_each_bar_of_the_fleet_leads_to_its_runs
@pytest.mark.parametrize("width", [390, 1280])
def test_the_fleet_fits_the_screen(browser_page: Any, served: Any, width: int) -> None:
    page = browser_page(width=width)
    open_fleet(page, served, [])
    assert page.evaluate(TOO_WIDE) == []
    page.get_by_role("button", name="host", exact=True).click()
    page.get_by_role("button", name="Show all 30").click()
    expect(page.locator(".fleet-rows > li")).to_have_count(30)
    assert page.evaluate(TOO_WIDE) == []
