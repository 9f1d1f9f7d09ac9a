"""The panel of the layers: map, table, rank and sample, keys, and nothing for axe to complain about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.hub.app import make_copy
from tests.page.browsing import TOO_WIDE, complaints, expect, settled

NARROW = 400


@pytest.fixture(scope="module")
def layers_report(layers_folder: Path) -> Path:
    report = layers_folder.parent / "report.html"
    report.write_bytes(make_copy(layers_folder / "gpt", wall_ns=7))
    return report


def test_map_table_rank_and_sample(browser_page: Any, layers_served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), layers_served, "gpt")
    panel = page.get_by_role("region", name="Layers", exact=True)
    expect(panel).to_contain_text("Rank 3, the fullest of 4 ranks, in step 900 (10 samples)")
    expect(page.get_by_role("navigation", name="Sections")).to_contain_text("Layers")
    page.get_by_role("navigation", name="Sections").get_by_role("button", name="Layers").click()

    treemap = panel.get_by_role("application", name="Memory by layer: GPT, 2.4 GiB.")
    expect(treemap.locator("rect.cell").first).to_be_visible()
    expect(treemap.locator("text").filter(has_text="layers.3")).to_be_visible()
    treemap.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    expect(treemap.locator("[aria-live]")).to_contain_text("layers")
    expect(treemap.locator("[aria-live]")).to_contain_text("activations")
    page.keyboard.press("Enter")
    crumbs = panel.get_by_role("navigation", name="Modules around this map")
    expect(crumbs).to_contain_text("layers")
    crumbs.get_by_role("button", name="GPT").click()
    expect(crumbs).to_have_count(0)

    panel.get_by_role("button", name="Table", exact=True).click()
    table = panel.get_by_role("region", name="Table of layers")
    expect(table.get_by_role("row").nth(1)).to_contain_text("GPT")
    expect(table.get_by_role("button", name="layers ModuleList")).to_have_attribute("aria-expanded", "true")
    table.get_by_role("button", name="3 Block").click()
    expect(table).to_contain_text("attention")

    flame = panel.get_by_role("application", name="Time by layer: GPT, forward 24.4 ms, backward 37.4 ms.")
    expect(flame.locator("text").filter(has_text="forward: GPT 24.4 ms")).to_be_visible()
    gradients = panel.get_by_role("region", name="Gradients by layer")
    expect(gradients.get_by_role("row")).to_have_count(13)
    gradients.get_by_role("button", name="Zeros").click()
    expect(gradients.get_by_role("row").nth(1)).to_contain_text("embed")

    panel.get_by_label("Rank of the layers").select_option("1")
    expect(panel).to_contain_text("Rank 1 in step 900 (10 samples)")
    panel.get_by_label("Sample of the layers").select_option("200")
    expect(panel).to_contain_text("Rank 1 in step 200 (10 samples)")
    page.wait_for_url("**step=200&rank=1")
    panel.get_by_role("button", name="Map", exact=True).click()
    expect(panel.locator("rect.cell").first).to_be_visible()


@pytest.mark.soak  # near: test_map_table_rank_and_sample
def test_a_narrow_window_and_a_link(browser_page: Any, layers_served: Any, open_run: Any, axe: str) -> None:
    page = open_run(browser_page(theme="dark", width=NARROW), layers_served, "gpt", rank=2, step=150)
    panel = page.get_by_role("region", name="Layers", exact=True)
    expect(panel).to_contain_text("Rank 2 in step 100 (10 samples)")
    settled(page)
    assert page.evaluate(TOO_WIDE) == []
    assert complaints(page, axe) == []
    panel.get_by_role("button", name="Table", exact=True).click()
    assert page.evaluate(TOO_WIDE) == []
    assert complaints(page, axe) == []


def test_no_panel_without_samples(browser_page: Any, layers_served: Any, open_run: Any) -> None:
    page = settled(open_run(browser_page(), layers_served, "plain"))
    expect(page.get_by_role("region", name="Layers", exact=True)).to_have_count(0)


@pytest.mark.soak  # near: the test above
def test_a_report_has_the_last_sample(browser_page: Any, layers_report: Path) -> None:
    page = browser_page()
    page.goto(layers_report.as_uri())
    panel = page.get_by_role("region", name="Layers", exact=True)
    expect(panel).to_contain_text("Rank 3, the fullest of 4 ranks, in step 900 (10 samples)")
    panel.get_by_label("Rank of the layers").select_option("0")
    expect(panel).to_contain_text("Rank 0 in step 900 (10 samples)")
    expect(panel.get_by_label("Sample of the layers")).to_have_count(0)
