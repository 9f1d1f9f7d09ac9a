"""The map of ranks and steps, the selected rank and its output, in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples

from tests.hub.run_parts import HOSTILE, record
from tests.page.browsing import expect, fingers_on

STEPS = 240
MAP = "canvas[aria-roledescription=map]"
ESCAPES = "\x1b[31mred\x1b[0m \x1b]0;title\x07"
CLUSTER = Cluster(ranks=4, steps=STEPS, hosts=2, faults=(slow_at(2, "forward", 40.0),))


def line_of(step: int) -> str:
    """A log line; all have the same length in bytes."""
    return f"rank 2 says step {step:4d} {ESCAPES}{HOSTILE}\n"


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 2 is slow and prints a line at the start of each step; one line is very long."""
    root = tmp_path_factory.mktemp("heat") / "runs"
    begins_s = (CLUSTER.series()[2].steps["start_ns"] - CLUSTER.series()[2].steps["start_ns"][0]) / 1e9
    width = len(line_of(0).encode())

    def length(_rank: int, seconds: Any) -> Any:
        return (np.searchsorted(begins_s, seconds, side="right") * width).astype(int)

    run = record(root, "talking", with_samples(CLUSTER, every_s=0.25, first_s=0.0, process={"log_bytes": length}))
    (run / "logs" / "rank-2.log").write_text("".join(map(line_of, range(STEPS))) + "y" * 3_000_000 + "\nlast words\n")
    return root


def box_of(page: Any) -> dict[str, float]:
    canvas = page.locator(f"{MAP}[aria-busy=false]")
    expect(canvas).to_be_visible()
    canvas.scroll_into_view_if_needed()
    box: dict[str, float] = canvas.bounding_box()
    return box


def test_a_click_on_the_slow_rank_shows_it_and_its_output(
    browser_page: Any, serve_folder: Any, open_run: Any, talking: Path
) -> None:
    page = open_run(browser_page(), serve_folder(talking), "talking")
    box = box_of(page)
    expect(page.locator(MAP)).to_have_attribute("aria-label", re.compile("Findings for rank 2"))
    rows = box["height"] - 28  # its axes
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 4 + rows * 2.5 / 4)
    expect(page.get_by_role("heading", name="Rank 2", exact=True)).to_be_visible()
    found = re.search(r"step=(\d+)", page.url)
    assert "rank=2" in page.url
    assert found is not None
    step = int(found[1])
    log = page.get_by_role("log")
    expect(log).to_contain_text(f"step {step} begins")
    # The note before and the one after are a quarter of a second apart: some steps.
    after = log.locator(".log-here + .log-line").inner_text()
    assert abs(int(re.findall(r"step +(\d+)", after)[0]) - step) <= 5
    # Markup and colors are text, or nothing.
    assert "red <img src=x onerror=alert(1)>" in after
    assert page.evaluate("document.querySelectorAll('.log img, .rank-pairs img, .log b').length") == 0
    page.get_by_text("Process and settings").click()
    expect(page.locator(".rank-pairs").first).to_contain_text("node1")
    page.get_by_label("Search the loaded lines").fill(f"step {step:4d}")
    expect(page.locator(".log-line mark")).to_have_count(1)


@pytest.mark.soak  # near: test_page_keyboard.py
def test_the_keyboard_does_the_same(browser_page: Any, serve_folder: Any, open_run: Any, talking: Path) -> None:
    page = open_run(browser_page(theme="dark"), serve_folder(talking), "talking")
    box_of(page)
    page.locator(MAP).focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowDown", "ArrowRight"):  # the first goes to what was found
        page.keyboard.press(key)
    expect(page.locator(".heat [aria-live]")).to_contain_text("rank 2, step")
    expect(page.locator(".heat-tip")).to_contain_text("rank 2")
    page.keyboard.press("+")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"first=\d+&last=\d+"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Rank 2", exact=True)).to_be_visible()
    page.keyboard.press("Home")
    expect(page).not_to_have_url(re.compile("first="))
    page.get_by_role("button", name="Next rank").click()
    expect(page.get_by_role("heading", name="Rank 3", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Output of rank 3")).to_have_count(0)  # it printed nothing
    page.get_by_role("button", name="Worst rank").click()
    expect(page.get_by_role("heading", name="Rank 2", exact=True)).to_be_visible()
    page.get_by_role("button", name="Close the rank").click()
    expect(page.get_by_role("heading", name="Rank 2", exact=True)).to_have_count(0)


@pytest.mark.soak  # near: a click on the slow rank, above
def test_the_end_of_a_log_with_a_huge_line(browser_page: Any, serve_folder: Any, open_run: Any, talking: Path) -> None:
    page = open_run(browser_page(width=420), serve_folder(talking), "talking", rank=2)
    log = page.get_by_role("log")
    expect(log).to_contain_text("last words")
    log.get_by_role("button", name="Earlier").first.click()
    expect(log.get_by_role("button", name="2.86 MiB more")).to_be_visible()
    log.get_by_role("button", name="2.86 MiB more").click()
    expect(log.get_by_role("button", name="2.80 MiB more")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_new_steps_are_put_behind_the_map(browser_page: Any, serve_folder: Any, feed: Any, open_run: Any) -> None:
    run = feed()
    run.make(40)
    hub = serve_folder(feed.folder)
    page = browser_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url) if "/heat" in request.url else None)
    open_run(page, hub, "live")
    box_of(page)
    run.make(15)
    page.wait_for_function("() => performance.getEntriesByName('stepscope:drawn').at(-1)?.detail.step >= 54")
    expect(page.locator(f"{MAP}[aria-busy=false]")).to_be_visible()
    page.wait_for_timeout(400)
    firsts = [int(re.findall(r"first=(\d+)", url)[0]) for url in requests]
    assert firsts[0] == 0
    assert set(firsts[1:]) <= set(range(24, 56))
    assert len(firsts) > 1
    run.end()


@pytest.mark.soak  # near: the tests above; one rank alone is in test_page_charts.py
def test_one_rank_has_no_map_but_its_panel_and_a_run_without_notes_of_its_logs_says_so(
    browser_page: Any, served: Any, open_run: Any
) -> None:
    page = open_run(browser_page(), served, "one")
    expect(page.get_by_role("heading", name="Rank 0", exact=True)).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("line 99")
    assert page.locator(MAP).count() == 0
    open_run(page, served, "demo", rank=0, step=100)
    expect(page.get_by_text("This run has no record of its log sizes.")).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("line 99")


@pytest.mark.soak  # near: the mouse, above
def test_two_fingers_come_nearer_and_move_it_and_one_scrolls_the_page(
    browser_page: Any, serve_folder: Any, open_run: Any, talking: Path
) -> None:
    page = open_run(browser_page(), serve_folder(talking), "talking")
    box = box_of(page)
    drag = fingers_on(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + 40

    def view() -> tuple[int, int]:
        expect(page).to_have_url(re.compile(r"first=\d+&last=\d+"))
        first, last = re.findall(r"first=(\d+)&last=(\d+)", page.url)[0]
        return int(first), int(last)

    drag((x - 50, y, x - 150, y), (x + 50, y, x + 150, y))
    expect(page.locator(f"{MAP}[aria-busy=false]")).to_be_visible()
    near = view()
    assert STEPS / 4 < near[1] - near[0] + 1 < STEPS / 2
    page_at = page.evaluate("scrollY")
    drag((x - 50, y, x + 50, y + 30), (x + 50, y, x + 150, y + 30))
    expect(page).not_to_have_url(re.compile(f"first={near[0]}&"))
    moved = view()
    assert moved[0] < near[0]
    assert abs((moved[1] - moved[0]) - (near[1] - near[0])) <= 1
    assert page.evaluate("scrollY") == page_at
    drag((x, y + 60, x, y - 60))
    page.wait_for_function("before => scrollY > before", arg=page_at)
    assert view() == moved


@pytest.mark.soak
def test_it_says_from_which_step_on_a_phase_is_known(
    browser_page: Any, serve_folder: Any, feed: Any, open_run: Any
) -> None:
    run = feed()
    run.make(1068)
    page = open_run(browser_page(), serve_folder(feed.folder), "live", first=2, last=20)
    box_of(page)
    page.get_by_label("Metric").select_option("forward")
    note = page.locator(".heat-note")
    expect(note).to_contain_text("forward: available from step 44 on.")
    expect(page.locator(f"{MAP}[aria-busy=false]")).to_be_visible()  # nothing is to be waited for
    note.get_by_role("button", name="Show these steps").click()
    expect(page).to_have_url(re.compile("first=44&last=1067"))
    expect(note).to_have_count(0)
    expect(page.locator(".heat-legend")).to_be_visible()
    run.end()
