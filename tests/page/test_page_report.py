"""report.html opened from a file without a network: it is complete, and no text of a run is interpreted."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.app import write_copy
from stepscope.notebook.cells import frame_of_page
from tests.hub.run_parts import HOSTILE
from tests.page.browsing import expect

DATA = re.compile(rb'(id="stepscope-data">)([^<]*)(<)')


@pytest.fixture(scope="session")
def copies(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("copies")
    made = {name: folder / f"{number}.html" for number, name in enumerate(("demo", "hang", HOSTILE, "empty"))}
    for name, path in made.items():
        write_copy(runs_folder / name, path)
    return made


@pytest.fixture
def opened(browser_page: Any, copies: dict[str, Path]) -> Callable[..., Any]:
    def open_it(name: str, route: str = "", **look: Any) -> Any:
        page = browser_page(offline=True, **look)
        page.goto(copies[name].as_uri() + route)
        page.wait_for_selector("main[aria-busy=false]")
        return page

    return open_it


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), pytest.param("dark", 420, marks=pytest.mark.soak)])
def test_the_fault_is_seen_without_a_network(opened: Callable[..., Any], theme: str, width: int) -> None:
    page = opened("demo", theme=theme, width=width)
    expect(page.get_by_role("region", name="Verdict").get_by_role("heading").first).to_contain_text("Rank 3 is")
    expect(page.get_by_role("heading", name="About this copy")).to_be_visible()
    expect(page.locator(".chip", has_text="copy")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "demo" in page.title()


@pytest.mark.soak  # near: test_page_charts.py
def test_steps_and_a_rank_are_chosen_by_the_address_and_by_hand(opened: Callable[..., Any]) -> None:
    page = opened("demo", "#/run/demo?first=100&last=200&rank=0")
    expect(page.get_by_role("heading", name="Rank 0").first).to_be_visible()
    expect(page.locator("pre, .log, [role=log]").filter(has_text="line 99").first).to_be_visible()
    page.keyboard.press("a")
    expect(page).not_to_have_url(re.compile("first=100"))
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name="Rank 1").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download “Step time” as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 601


@pytest.mark.soak  # near: test_page_words.py
def test_a_hang_and_an_empty_run_are_told(opened: Callable[..., Any]) -> None:
    expect(opened("hang").get_by_text("Rank 3 had not called all_reduce").first).to_be_visible()
    page = opened("empty")
    expect(page.get_by_role("heading", name="About this copy")).to_be_visible()


@pytest.mark.soak
def test_hostile_words_stay_words(opened: Callable[..., Any], copies: dict[str, Path]) -> None:
    page = opened(HOSTILE)
    expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    assert copies[HOSTILE].read_bytes().count(b"<script") == 2


def test_in_the_frame_of_a_notebook(browser_page: Any, copies: dict[str, Path], tmp_path: Path) -> None:
    """There it cannot change its address and has no storage."""
    notebook = tmp_path / "notebook.html"
    notebook.write_text(frame_of_page(copies["demo"].read_text(), title="demo", height=900))
    page = browser_page(offline=True)
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("region", name="Verdict").get_by_role("heading").first).to_contain_text("Rank 3 is")
    frame.get_by_role("button", name=re.compile("theme|dark", re.IGNORECASE)).first.click()
    frame.get_by_role("region", name="Verdict").get_by_role("button", name="Show these steps").first.click()
    expect(frame.get_by_role("region", name="Verdict")).to_be_visible()
    assert page.url == notebook.as_uri()


@pytest.mark.parametrize(
    "damage",
    ["changed", *(pytest.param(damage, marks=pytest.mark.soak) for damage in ("cut", "emptied", "without answers"))],
)
def test_a_damaged_copy_says_so(browser_page: Any, copies: dict[str, Path], tmp_path: Path, damage: str) -> None:
    whole = copies["demo"].read_bytes()
    found = DATA.search(whole)
    assert found is not None
    data = found[2]
    inside = gzip.decompress(base64.b64decode(data))
    other = {
        "cut": data[: len(data) // 2],
        "emptied": b"",
        "changed": data[:1000] + b"AAAA" + data[1004:],
        "without answers": base64.b64encode(gzip.compress(inside.replace(b'"answers"', b'"nothing"', 1))),
    }[damage]
    broken = tmp_path / "broken.html"
    broken.write_bytes(whole.replace(data, other, 1))
    page = browser_page(offline=True)
    page.goto(broken.as_uri())
    expect(page.get_by_role("heading", name="This copy of a run cannot be opened")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("cannot be used")


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.soak), 420])
def test_a_report_is_downloaded_and_opens_without_its_hub(
    browser_page: Any, serve_folder: Any, feed: Any, open_run: Any, tmp_path: Path, width: int
) -> None:
    """Of an active run: what is known now."""
    feed().make(30)
    page = open_run(browser_page(width=width), serve_folder(feed.folder), "live")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download report").click()
    assert download.value.suggested_filename == "live.html"
    saved = tmp_path / "live.html"
    download.value.save_as(saved)
    copy = browser_page(offline=True)
    copy.goto(saved.as_uri())
    expect(copy.get_by_role("heading", level=1)).to_have_text("live")
    expect(copy.get_by_role("list", name="Progress")).to_contain_text("step 29")
    expect(copy.get_by_role("button", name="Download report")).to_have_count(0)
