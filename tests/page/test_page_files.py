"""Pages of traces and Flight Recorder dumps, opened from a file without a network: complete, usable, and inert."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_files import data_in

from stepscope.cli.main import run_command
from tests.page.browsing import EVIL, TOO_WIDE, complaints, expect


@pytest.fixture
def opened(browser_page: Any, files: dict[str, Path]) -> Callable[..., Any]:
    def open_it(name: str, **look: Any) -> Any:
        page = browser_page(offline=True, **look)
        page.goto(files[name].as_uri())
        page.wait_for_selector("main[aria-busy=false]")
        return page

    return open_it


def unfold(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")


def views_of(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The parts by the title of their view; of traces also those of the rank that is shown first."""
    if "views" not in report:
        return {"": report["parts"]}
    of_rank = report["of_ranks"][str(report["rank"])]
    pair = report["pairs"].values() if report["pair"] else ()
    parts = [*report["parts"], *of_rank, *(part for found in pair for part in found)]
    return {title: [part for part in parts if part["view"] == key] for key, title, _ in report["views"]}


def show_view(page: Any, title: str) -> None:
    tab = page.get_by_role("navigation", name="Views").get_by_role("button", name=title, exact=True)
    if title and tab.count():
        tab.click()


@pytest.mark.parametrize("name", [pytest.param("trace", marks=pytest.mark.soak), "flight"])
def test_everything_is_there_and_fits_and_axe_finds_nothing(
    opened: Callable[..., Any], files: dict[str, Path], axe: str, name: str
) -> None:
    """Light and wide, then dark and narrow."""
    page = opened(name)
    report = data_in(files[name].read_bytes())[0]["report"]
    for view in views_of(report):
        show_view(page, view)
        unfold(page)
        assert complaints(page, axe) == []
    show_view(page, "Overview")
    unfold(page)
    for theme, width in (("light", 1280), ("dark", 400)):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        verdict = page.get_by_role("region", name="Verdict")
        expect(verdict.get_by_role("heading", level=2)).to_have_text(report["verdict"]["title"])
        for told in [report["verdict"], *report["others"]]:
            sides = (text for side in told["sides"] for text, _ in side["items"])
            for line in [told["title"], *told["advice"], *sides]:
                expect(verdict.get_by_text(line).first).to_be_visible()
        for view, parts in views_of(report).items():
            show_view(page, view)
            unfold(page)
            for part in parts:
                expect(page.get_by_role("heading", name=part["title"], exact=True, level=2)).to_be_visible()
            assert page.evaluate(TOO_WIDE) == []
        show_view(page, "Overview")
        unfold(page)
        assert page.evaluate(TOO_WIDE) == []
    assert page.locator("img").count() == 0, "a name stays a name"
    assert report["name"] in page.title()


def test_a_table_is_sorted_and_downloaded(opened: Callable[..., Any]) -> None:
    page = opened("trace")
    show_view(page, "Kernels")
    table = page.get_by_role("region", name="Table: Kernels by name")
    expect(table.get_by_title(EVIL)).to_be_visible()
    table.get_by_role("button", name="total").click()
    expect(table.locator("th[aria-sort=descending]")).to_have_text(re.compile("total"))
    expect(table.locator("tbody tr").first.locator("td").first).to_have_text("ampere_sgemm_128x64_nn")
    table.get_by_role("button", name="total").click()
    expect(table.locator("tbody tr").first.locator("td").first).to_have_attribute("title", EVIL)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download “Kernels by name” as CSV").click()
    head, *rows = Path(download.value.path()).read_text().splitlines()
    assert head.startswith("name,count,total,")
    assert len(rows) == 3


def test_the_timeline_with_keys(opened: Callable[..., Any]) -> None:
    page = opened("trace")
    show_view(page, "Timeline")
    box = page.get_by_role("application", name=re.compile("^Timeline: step 0 of rank 1"))
    announced = page.locator("[data-part=timeline] [aria-live=polite]")
    box.focus()
    page.keyboard.press("ArrowDown")
    expect(announced).to_contain_text("rank 1, critical path")
    page.keyboard.press("ArrowDown")
    expect(announced).to_have_text("all_reduce: transfer: 1.00 ms from 14.0 ms, rank 1, collectives")
    page.keyboard.press("ArrowDown")
    expect(announced).to_have_text("ProfilerStep#0: 20.0 ms from 0, rank 1, thread 4000")
    page.keyboard.press("ArrowDown")
    expect(announced).to_have_text(re.compile("level 2$"))
    before = announced.text_content()
    page.keyboard.press("ArrowLeft")
    expect(announced).not_to_have_text(before)
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    expect(announced).to_contain_text("aten::mm: 50.0 µs from 10.0 µs")
    page.keyboard.press("Escape")
    expect(announced).to_have_text("")


PICTURE = "document.querySelector('.timeline canvas').toDataURL()"


def test_the_timeline_with_the_mouse(opened: Callable[..., Any]) -> None:
    page = opened("trace", height=1400)
    show_view(page, "Timeline")
    card = page.locator("[data-part=timeline]")
    canvas = card.locator("canvas")
    canvas.scroll_into_view_if_needed()
    place = canvas.bounding_box()
    assert place is not None
    page.mouse.move(
        place["x"] + place["width"] / 2, place["y"] + 94
    )  # the main thread, below axis, rank, path and collectives
    expect(card.locator(".timeline-tip")).to_contain_text("ProfilerStep#0")
    expect(card.locator(".timeline-tip")).to_contain_text("20.0 ms")
    whole = page.evaluate(PICTURE)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function(f"before => {PICTURE} !== before", arg=whole)
    zoomed = page.evaluate(PICTURE)
    page.mouse.down()
    page.mouse.move(place["x"] + 200, place["y"] + 94, steps=4)
    page.mouse.up()
    page.wait_for_function(f"before => {PICTURE} !== before", arg=zoomed)
    card.get_by_role("button", name="Show all").click()
    page.mouse.move(1, 1)
    expect(card.locator(".timeline-tip")).to_have_count(0)
    page.wait_for_function(f"before => {PICTURE} === before", arg=whole)


WIDE_TABLES = """
[...document.querySelectorAll(".report-table .scrolls")].filter((one) => one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.getAttribute("aria-label"))
"""


@pytest.mark.parametrize(
    "name",
    [
        "param_dlrm_8rank",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("hta_nccl_data_1of2", "kineto_resnet50_w0", "hta_cp_simple_add", "hta_df_index_resolver_1of2")
        ),
    ],
)
def test_real_traces(name: str, shared_data: Path, tmp_path: Path, browser_page: Any) -> None:
    out = tmp_path / "page.html"
    assert run_command(["trace", str(shared_data / "traces" / name), "--html", str(out)]) == 0
    assert out.stat().st_size < 1_500_000
    page = browser_page(offline=True)
    page.goto(out.as_uri())
    for view in views_of(data_in(out.read_bytes())[0]["report"]):
        show_view(page, view)
        unfold(page)
        if view == "Timeline":
            expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
        assert page.evaluate(TOO_WIDE) == []
        assert page.evaluate(WIDE_TABLES) == [], "tables fit 1,280 pixels"
