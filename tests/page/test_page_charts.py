"""Charts: zooming loads finer data, marks lead to their steps, and the table has the hub's data."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.page.browsing import Page, expect, fingers_on


def _chart(page: Page) -> Any:
    chart = page.get_by_role("application", name=re.compile("^Step time over"))
    expect(chart.locator("canvas")).to_be_visible()
    chart.scroll_into_view_if_needed()
    return chart


def _dragged(page: Page, chart: Any, begin: float, end: float) -> None:
    """Drag from one fraction of the plotting area to another."""
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (begin + end) / 2 * box["width"], y)
    page.mouse.move(box["x"] + end * box["width"], y)
    page.mouse.up()


def test_a_stretch_is_dragged_and_the_keyboard_moves_on(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    chart = _chart(page)
    _dragged(page, chart, 0.25, 0.5)
    expect(page).to_have_url(re.compile(r"first=1[45]\d&last=(29|30)\d$"))  # and no step: a drag is no click
    expect(chart).to_have_accessible_name(re.compile("steps 1[45]"))
    chart.locator(".u-over").click(position={"x": 300, "y": 60})
    expect(page).to_have_url(re.compile(r"step=\d+"))

    window = page.get_by_role("slider", name=re.compile("Visible steps"))
    window.press("Home")
    expect(page).to_have_url(re.compile(r"first=0&last=1[45]\d"))
    window.press("Escape")
    expect(page).not_to_have_url(re.compile("first="))

    chart.press("Home")
    chart.press("ArrowRight")
    expect(page.locator(".plot-frame [aria-live]").first).to_have_text(
        re.compile("^Step 1: step, mean [0-9.]+ ms, .*forward")
    )
    chart.press("Enter")
    expect(page).to_have_url(re.compile("step=1$"))


@pytest.mark.soak
def test_two_fingers_come_nearer_and_move_it_and_one_scrolls_the_page(
    browser_page: Any, served: Any, open_run: Any
) -> None:
    page = open_run(browser_page(), served, "demo")
    box = _chart(page).locator(".u-over").bounding_box()
    assert box is not None
    drag, x, y = fingers_on(page), box["x"] + box["width"] / 2, box["y"] + 60

    def view(seen: str) -> tuple[int, int]:
        expect(page).to_have_url(re.compile(seen))
        first, last = re.findall(r"first=(\d+)&last=(\d+)", page.url)[0]
        return int(first), int(last)

    drag((x - 50, y, x - 150, y), (x + 50, y, x + 150, y))
    near = view(r"first=\d+&last=\d+")
    assert abs(near[1] - near[0] + 1 - 200) <= 1  # a third of the 600 steps
    page_at = page.evaluate("scrollY")
    drag((x - 50, y, x + 50, y + 30), (x + 50, y, x + 150, y + 30))
    moved = view(f"first=(?!{near[0]}&)")
    assert abs(near[0] - moved[0] - 200 * 100 / box["width"]) <= 1
    assert moved[1] - moved[0] == near[1] - near[0]
    assert page.evaluate("scrollY") == page_at
    drag((x, y, x - 100, y))
    back = view(f"first=(?!{moved[0]}&)")
    assert abs(back[0] - near[0]) <= 1
    drag((x, y + 60, x, y - 60))
    page.wait_for_function("before => scrollY > before", arg=page_at)
    drag((x - 300, y - 60, x - 20, y - 60), (x + 300, y - 60, x + 20, y - 60))
    expect(page).not_to_have_url(re.compile("first="))  # all of it is no window, and none of this chose a step
    expect(page).not_to_have_url(re.compile("step="))


@pytest.mark.soak  # near: test_a_stretch_is_dragged_and_the_keyboard_moves_on
def test_a_long_run_is_asked_for_finer_steps(browser_page: Any, served: Any, open_run: Any) -> None:
    """The run has 600 steps and the page requests 600 bins, so the first request is made coarser here."""
    page = browser_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.route(
        re.compile(r"/steps\?bins=600$"), lambda route: route.continue_(url=route.request.url.replace("600", "20"))
    )
    open_run(page, served, "demo")
    chart = _chart(page)
    with page.expect_response(re.compile(r"/steps\?first=")) as answer:
        _dragged(page, chart, 0.25, 0.5)
    steps_answer = answer.value.json()
    assert set(steps_answer["steps"]) == {1}
    assert steps_answer["first"][0] <= 150 <= 299 <= steps_answer["last"][-1]
    chart.press("Home")
    chart.press("ArrowRight")
    expect(page.locator(".plot-frame [aria-live]").first).to_have_text(re.compile(r"^Step 1[45]\d: "))
    assert sum("/steps?first=" in url for url in requests) == 1


def test_a_mark_leads_to_its_rank_and_steps(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    _chart(page)
    mark = page.get_by_role("list", name="Found at these steps").get_by_role(
        "button", name=re.compile("^Critical, .*Rank 3 ")
    )
    mark.focus()
    expect(page.locator(".mark-band.critical")).to_be_visible()
    mark.press("Enter")
    expect(page).to_have_url(re.compile("rank=3"))


def test_the_table_adds_up_to_what_the_hub_says(browser_page: Any, served: Any, open_run: Any) -> None:
    page = browser_page()
    with page.expect_response(re.compile(r"/steps\?")) as answer:
        open_run(page, served, "demo")
    _chart(page)
    steps_answer = answer.value.json()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download “Step time” as CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert len(rows) == len(steps_answer["first"]) == 600
    for name, values in steps_answer["mean_ns"].items():
        column = {"wall": "mean_ns", "work": "work_mean_ns"}.get(name, f"{name}_mean_ns")
        if column in rows[0]:
            assert sum(int(row[column]) for row in rows) == sum(values), name
    phases = [name for name in rows[0] if name.endswith("_mean_ns") and name != "work_mean_ns"]
    for row in rows:  # the hub holds them in single precision
        assert sum(int(row[name]) for name in phases) == pytest.approx(int(row["mean_ns"]), rel=1e-6)


@pytest.mark.soak  # near: the other charts of this run
def test_memory_that_creeps_says_when_it_is_full(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(theme="dark"), served, "gpu")
    steps = page.get_by_role("region", name="Step time")
    expect(steps.get_by_text("device time by phase, mean over ranks")).to_be_visible()
    steps.get_by_role("button", name="host", exact=True).click()
    expect(steps.get_by_text("host time by phase, mean over ranks")).to_be_visible()
    expect(page.get_by_role("application", name=re.compile(r"^Map of work without waiting \(device\)"))).to_be_visible()
    ranks = page.get_by_role("region", name="Ranks by cost")
    expect(ranks.get_by_text("device time, mean of all steps after warm-up")).to_be_visible()
    phases = page.get_by_role("region", name="Worst vs. other rank")
    expect(phases.get_by_text("device time per step, mean of all steps after warm-up")).to_be_visible()
    expect(phases.get_by_role("row", name=re.compile("^forward .*host "))).to_be_visible()
    expect(page.get_by_text(re.compile(r"100 MiB more per step; full at step [\d,]+, after another "))).to_be_visible()
    machines = page.get_by_role("region", name="Hosts and GPUs")
    machines.get_by_label("Figure").select_option(label="GPU throttled, share of the time")
    expect(
        page.get_by_role("application", name=re.compile("^GPU throttled, share of the time of 2; worst is .*last 0"))
    ).to_be_visible()
    expect(page.get_by_role("region", name="Metrics")).to_have_count(0)


@pytest.mark.soak  # near: test_page_keyboard.py
def test_sections_and_show_rank_scroll_to_their_place(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    sections = page.get_by_role("navigation", name="Sections")
    expect(sections.get_by_role("button", name="Verdict")).to_have_attribute("aria-current", "true")
    page.get_by_role("region", name="Verdict").get_by_role("button", name="Show rank 3").click()
    rank = page.get_by_role("region", name="Rank 3", exact=True)
    expect(rank).to_be_in_viewport()
    expect(rank).to_be_focused()
    expect(sections.get_by_role("button", name="Rank 3", exact=True)).to_have_attribute("aria-current", "true")
    sections.get_by_role("button", name="Context").click()
    expect(page.get_by_role("region", name="Context")).to_be_in_viewport()
    sections.get_by_role("button", name="Verdict").click()
    expect(page.get_by_role("region", name="Verdict")).to_be_in_viewport()


def test_one_rank_has_shares_and_its_noted_numbers_but_no_empty_panels(
    browser_page: Any, served: Any, open_run: Any
) -> None:
    page = open_run(browser_page(), served, "one")
    expect(page.get_by_role("heading", name="Where a step’s time goes")).to_be_visible()
    expect(page.get_by_role("button", name="slowest rank")).to_have_count(0)
    expect(page.get_by_role("region", name="Rank 0", exact=True)).to_be_visible()
    expect(page.get_by_role("application", name=re.compile("^Phases of rank 0"))).to_have_count(0)
    expect(page.get_by_role("region", name="Collectives")).to_have_count(0)
    metrics = page.get_by_role("region", name="Metrics")
    expect(metrics.get_by_role("heading", name="loss 0.08", exact=True)).to_be_visible()
    expect(metrics.get_by_role("heading", name="steps per second")).to_be_visible()
    chart = metrics.get_by_label("loss over 50 points: first 4, last 0.08")
    expect(chart.locator("canvas")).to_be_visible()
    with page.expect_download() as download:
        metrics.get_by_role("button", name="Download “Metrics” as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[:3] == ["name,step,value", "loss,0,4", "loss,1,2"]
    # Zoomed in, the charts show the same steps as all others.
    page.goto(f"{served.url}/#/run/one?first=10&last=19")
    expect(metrics.get_by_label("loss over 10 points: first 0.3636, last 0.2")).to_be_visible()
