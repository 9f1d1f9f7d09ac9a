"""The list of runs: filters in the address, labels, deleting, and the history above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster

from stepscope.reports import summarize
from stepscope.store.catalog import change_labels, read_labels
from stepscope.store.documents import save_summary
from tests.hub.run_parts import record
from tests.page.browsing import expect

LONG = "a-run-with-a-name-that-is-far-too-long-for-its-column-and-has-no-place-to-break"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for name in ("night-1", "night-2", "night-3", LONG):
        data = Cluster(ranks=2, steps=40, seed=len(name)).run()
        summary = summarize(data)
        summary["metrics"] = {"loss": {"last": 2.5, "step": 39}}
        save_summary(record(folder, name, data), summary, "")
    change_labels(folder / "night-1", add=["nightly"])
    return folder


def names(page: Any) -> Any:
    return page.locator("tbody tr:not(.run-opened) th a")


def test_filters_are_in_the_address(browser_page: Any, serve_folder: Any, runs: Path) -> None:
    hub = serve_folder(runs)
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    expect(names(page)).to_have_count(4)
    expect(page.locator("tbody")).to_contain_text("loss 2.5")
    page.get_by_role("button", name="Show runs with the tag nightly").click()
    expect(names(page)).to_have_count(1)
    page.get_by_role("searchbox").fill("night")
    page.wait_for_url("**/#/?q=night&tag=nightly")
    page.goto(f"{hub.url}/#/?q=night&sort=name")
    expect(names(page)).to_have_text(["night-1", "night-2", "night-3"])
    names(page).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("night-1")
    page.keyboard.type("gl")
    expect(names(page)).to_have_text(["night-1", "night-2", "night-3"])  # as it was left


@pytest.mark.soak  # near: test_page_access.py
def test_names_do_not_wrap_and_nothing_is_cut_off(browser_page: Any, serve_folder: Any, runs: Path) -> None:
    hub = serve_folder(runs, changes=True)
    for width in (1280, 400):
        page = browser_page(width=width)
        page.goto(f"{hub.url}/#token={hub.token}")
        expect(page.locator(".history circle")).to_have_count(4)
        page.get_by_role("button", name=f"Details of {LONG}").click()
        expect(page.get_by_role("button", name="Delete …")).to_be_visible()
        assert names(page).first.evaluate("link => link.getClientRects().length") == 1
        card = page.locator(".run-table").bounding_box()
        table = page.locator(".run-table table").bounding_box()
        assert table["x"] + table["width"] <= card["x"] + card["width"]
        assert card["x"] + card["width"] <= width


def test_a_run_is_renamed_tagged_and_deleted(browser_page: Any, serve_folder: Any, runs: Path) -> None:
    hub = serve_folder(runs, changes=True)
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    page.get_by_role("button", name="Details of night-2").click()
    page.get_by_role("textbox", name="Name", exact=True).fill("Before")
    page.get_by_role("textbox", name="Tags", exact=True).fill("one, two")
    page.get_by_role("textbox", name="Note", exact=True).fill("a note")
    page.get_by_role("button", name="Save").click()
    expect(names(page).filter(has_text="Before")).to_have_count(1)
    labels = read_labels(runs / "night-2")
    assert (labels.name, labels.tags, labels.note) == ("Before", ("one", "two"), "a note")
    page.get_by_role("button", name="Delete …").click()
    dialog = page.get_by_role("dialog", name="Delete Before?")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).not_to_be_visible()
    assert (runs / "night-2").is_dir()
    page.get_by_role("button", name="Delete …").click()
    dialog.get_by_role("button", name="Delete for good").click()
    expect(names(page)).to_have_count(3)
    assert not (runs / "night-2").exists()


def test_a_reader_sees_labels_and_cannot_change_them(browser_page: Any, serve_folder: Any, runs: Path) -> None:
    change_labels(runs / "night-3", note="only\nread")
    hub = serve_folder(runs)
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    page.get_by_role("button", name="Details of night-3").click()
    expect(page.locator(".run-details")).to_contain_text("only\nread")
    expect(page.get_by_role("textbox", name="Tags")).to_have_count(0)
    expect(page.get_by_role("button", name="Delete …")).to_have_count(0)
