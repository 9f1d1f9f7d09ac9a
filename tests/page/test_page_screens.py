"""The other screens: the list, the comparison, sign-in, and all failures."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from fakes.cluster import Cluster

from stepscope.hub.api.auth import Readers
from stepscope.hub.app import make_app
from stepscope.hub.ingest.tail import Tail
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.runs import Runs
from stepscope.store.documents import read_meta
from tests.hub.run_parts import HOSTILE, READER, Hub
from tests.page.browsing import expect

UNREACHABLE = ("net::ERR_", "failed: ")
"""The browser's own messages when a hub dies."""


def sideways(page: Any) -> int:
    """By how many pixels the page can be scrolled sideways."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_from_the_list_to_two_runs_compared_and_back(browser_page: Any, served: Any) -> None:
    page = browser_page()
    page.goto(f"{served.url}/#token={served.token}")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(6)
    assert "token" not in page.url
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("columnheader", name="Run")).to_have_attribute("aria-sort", "ascending")
    page.keyboard.press("/")
    page.keyboard.type("DEM")
    expect(rows).to_have_count(1)
    page.get_by_role("checkbox", name="Compare demo").check()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("checkbox", name="Compare one").check()
    page.get_by_role("link", name="Compare", exact=True).click()
    headline = page.get_by_role("region", name="Which is faster")
    expect(headline).to_contain_text("one is 4")
    expect(headline).to_contain_text("% faster than demo, but this does not compare like with like.")
    expect(headline).to_contain_text("Changed: world size 8 → 1")
    figures = page.get_by_role("region", name="Figures")
    expect(figures.get_by_role("row", name="mean step")).to_contain_text("faster (99% certain)")
    expect(figures.get_by_role("row", name="loss")).to_contain_text("0.08")
    findings = page.get_by_role("region", name="Findings", exact=True)
    expect(findings).to_contain_text("No longer found")
    expect(findings).to_contain_text("Rank 3 is")
    assert page.url.endswith("#/compare/demo/one")
    page.keyboard.press("s")
    expect(headline).to_contain_text("slower than one")
    expect(findings).to_contain_text("New")
    page.go_back()
    expect(headline).to_contain_text("faster than demo")
    # A third run is another column; another baseline is one click away.
    page.get_by_label("Add a run").focus()  # loads the list
    page.get_by_label("Add a run").select_option("hang")
    expect(figures.get_by_role("columnheader")).to_have_count(3)
    assert page.url.endswith("#/compare/demo/one/hang")
    page.get_by_role("region", name="C: hang").get_by_role("button", name="Make baseline").click()
    expect(page.get_by_role("region", name="A: hang")).to_contain_text("baseline")
    page.get_by_role("button", name="Remove demo").click()
    expect(figures.get_by_role("columnheader")).to_have_count(2)
    page.go_back()
    page.get_by_role("link", name="demo", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("demo")
    expect(page).to_have_title("✖ demo · finished · Stepscope")
    page.keyboard.press("]")
    page.keyboard.press("]")
    page.wait_for_url("**/#/run/demo?rank=1")
    page.keyboard.type("gl")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    expect(rows).to_have_count(6)


def test_a_hub_of_one_run_opens_it(browser_page: Any, serve_folder: Any, feed: Any) -> None:
    feed().make(3)
    hub = serve_folder(feed.folder)
    page = browser_page(width=420)
    page.goto(f"{hub.url}/#token={hub.token}")
    expect(page.get_by_role("heading", level=1)).to_have_text("live")
    assert sideways(page) == 0
    page.get_by_role("link", name="Stepscope: all runs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.soak  # near: test_page_keyboard.py
def test_keys_are_shown_and_never_taken_from_a_field(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("t")  # nothing happens behind it
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("/")
    page.keyboard.type("t3")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    expect(page.get_by_label("Rank", exact=True)).to_have_value("t3")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_way_in_keeps_the_address_and_a_session_that_ends_is_taken_up_again(
    browser_page: Any, serve_folder: Any, feed: Any
) -> None:
    run = feed()
    run.make(5)
    hub = serve_folder(feed.folder)
    page = browser_page()
    browser_page.expects(page, "401", *UNREACHABLE)
    page.goto(f"{hub.url}/#/run/live?rank=2")
    field = page.get_by_label("Token")
    expect(field).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not the hub’s token")
    field.fill(hub.token)
    page.keyboard.press("Enter")
    expect(page.get_by_role("list", name="Progress")).to_contain_text("step 4")
    assert page.url.endswith("#/run/live?rank=2")
    hub.stop()
    hub.token = "another-token-of-the-tests"
    hub.start()
    banner = page.get_by_role("region", name="Your session has expired.")
    expect(banner).to_be_visible()
    expect(page.get_by_role("list", name="Progress")).to_contain_text("step 4")
    run.make(5)
    banner.get_by_label("Token").fill(hub.token)
    page.keyboard.press("Enter")
    expect(banner).to_have_count(0)
    expect(page.get_by_role("list", name="Progress")).to_contain_text("step 9")
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, history.state])")
    assert "token-of" not in kept
    assert "token-of" not in page.content()


def test_a_hub_that_dies_is_waited_for_and_nothing_that_was_seen_is_lost(
    browser_page: Any, serve_folder: Any, feed: Any, open_run: Any
) -> None:
    run = feed()
    run.make(5)
    hub = serve_folder(feed.folder)
    page = browser_page()
    browser_page.expects(page, *UNREACHABLE)
    open_run(page, hub, "live")
    hub.stop()
    banner = page.get_by_role("region", name="The hub is not responding.")
    expect(banner).to_contain_text("Last update")
    expect(banner).not_to_contain_text("To open the run again")  # this hub does not end with its run
    expect(page.get_by_role("status").first).to_contain_text("connection lost")
    expect(page.get_by_role("region", name="Step time")).to_be_visible()
    run.make(5)
    hub.start()
    expect(banner).to_have_count(0)
    expect(page.get_by_role("list", name="Progress")).to_contain_text("step 9")


@pytest.mark.soak  # near: a hub that dies
def test_a_hub_that_ends_with_its_run_is_not_a_lost_connection(browser_page: Any, feed: Any, open_run: Any) -> None:
    run = feed()
    run.make(5)
    live = LiveRun(name="live", run_dir=run.run_dir, meta=read_meta(run.run_dir))
    tail = Tail(run.run_dir, live)
    tail.poll()
    live.tick()
    runs = Runs.of_live(run.run_dir, live)
    hub = Hub(lambda: make_app(runs, Readers(READER)))
    hub.token = READER  # type: ignore[attr-defined]
    try:
        page = browser_page()
        browser_page.expects(page, *UNREACHABLE)  # what was just asked when it went
        open_run(page, hub, "live")
        expect(page.get_by_role("status").first).to_contain_text("live")
        hub.in_loop(lambda: runs.live()[0].conclude("failed"))
        banner = page.get_by_role("region", name="The run has ended: failed.")
        expect(banner).to_contain_text(f"To open the run again: stepscope serve {run.run_dir} --open")
        expect(page.get_by_role("status").first).to_contain_text("failed")
    finally:
        hub.close()
    expect(banner).to_be_visible()
    expect(page.get_by_role("region", name="Step time")).to_be_visible()


@pytest.mark.soak
def test_names_of_any_kind_are_only_text(browser_page: Any, served: Any, tmp_path: Any) -> None:
    page = browser_page(width=420)
    page.goto(f"{served.url}/#token={served.token}")
    link = page.get_by_role("link", name=HOSTILE, exact=True)
    expect(link).to_be_visible()
    assert sideways(page) == 0
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    assert sideways(page) == 0
    page.goto(f"{served.url}/#/compare/{quote(HOSTILE, safe='')}/demo")
    expect(page.get_by_role("heading", level=2, name=HOSTILE)).to_be_visible()
    assert sideways(page) == 0
    assert page.locator("main img").count() == 0
    browser_page.expects(page, "404")
    for name in ("javascript:alert(1)", "..", "\u202egnp", "x" * 3000):
        page.goto(f"{served.url}/#/run/{quote(name, safe='')}")
        expect(page.get_by_role("heading", name="Run not found")).to_be_visible()
        assert sideways(page) == 0


def test_a_run_without_a_step_says_what_is_known(
    browser_page: Any, serve_folder: Any, feed: Any, open_run: Any, served: Any
) -> None:
    run = feed(Cluster(ranks=3, steps=10))
    (run.run_dir / "logs").mkdir(exist_ok=True)
    (run.run_dir / "logs" / "main.log").write_text("reading the corpus\n")
    page = open_run(browser_page(), serve_folder(feed.folder), "live")
    expect(page.get_by_role("region", name="Output")).to_contain_text("reading the corpus")
    empty = page.get_by_role("region", name="No step has ended yet")
    expect(empty).to_contain_text("3 processes have started")
    run.make(4)
    expect(page.get_by_role("region", name="Step time")).to_be_visible()
    expect(empty).to_have_count(0)
    over = open_run(browser_page(), served, "empty")
    expect(over.get_by_role("region", name="The run ended before its first step")).to_be_visible()
    expect(over.get_by_role("list", name="Progress")).not_to_contain_text("yet")
