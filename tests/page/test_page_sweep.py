"""The front of a sweep: in a file, and on the page of a hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from made_sweeps import write_sweep

from tests.hub.run_parts import record
from tests.page.browsing import EVIL_IMAGE, TOO_WIDE, complaints, expect, settled


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), pytest.param("dark", 400, marks=pytest.mark.soak)])
def test_everything_is_drawn_and_fits(browser_page: Any, front_file: Path, axe: str, theme: str, width: int) -> None:
    page = browser_page(offline=True, theme=theme, width=width)
    page.goto(front_file.as_uri())
    expect(page.get_by_role("heading", level=1)).to_have_text("fsdp2")
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.get_by_role("heading", level=2)).to_contain_text("Fastest: fast, ")
    chart = page.get_by_role("application", name=re.compile("^Speed and memory of fsdp2. Fastest: fast"))
    expect(chart.locator(".front-dot")).to_have_count(6)
    expect(chart.locator(".front-line")).to_have_attribute("points", re.compile(r"^(\d[\d.]*,\d[\d.]* ?){5}$"))
    if width > 600:
        expect(chart.locator(".front-name")).to_have_count(6)
    failed = page.get_by_role("list", name="Failed variants").get_by_role("listitem")
    expect(failed).to_have_text(["✖ oom: out of memory", "✖ slow: timed out"])
    expect(page.get_by_role("region", name="Table: Variants").locator("tbody tr")).to_have_count(8)
    assert page.evaluate(TOO_WIDE) == []
    assert page.locator("img").count() == 0, "a name stays a name"
    settled(page)
    assert complaints(page, axe) == []


def test_variants_are_visited_with_keys(browser_page: Any, front_file: Path) -> None:
    page = browser_page(offline=True)
    page.goto(front_file.as_uri())
    chart = page.get_by_role("application")
    announced = page.locator(".plot-frame [aria-live=polite]")
    chart.focus()
    page.keyboard.press("ArrowRight")
    words = "small: speed 49.9 steps/s ±2.0%, step 20.0 ms, peak memory 200 MiB, front ✔ on the front"
    expect(announced).to_have_text(words)
    expect(chart.locator(".tip-title")).to_have_text("small")
    page.keyboard.press("End")
    expect(announced).to_contain_text(EVIL_IMAGE)
    page.keyboard.press("ArrowLeft")
    expect(announced).to_contain_text("front ≈ near it")
    page.keyboard.press("Enter")  # a file has no runs
    expect(page).to_have_url(front_file.as_uri())
    page.keyboard.press("Escape")
    expect(chart.locator(".tip")).to_have_count(0)


def test_the_hub_lists_sweeps_and_points_open_runs(browser_page: Any, serve_folder: Any, tmp_path: Path) -> None:
    write_sweep(tmp_path / "fsdp2")
    for name in ("small-3", "fast-3"):
        record(tmp_path / "fsdp2/runs", name, Cluster(ranks=1, steps=20).run())
    hub = serve_folder(tmp_path / "fsdp2/runs")
    page = browser_page()
    page.goto(f"{hub.url}/#token={hub.token}")
    sweeps = page.get_by_role("region", name="Sweeps")
    expect(sweeps.get_by_role("listitem")).to_contain_text("6 variants · 1 failed · ")
    sweeps.get_by_role("link", name="fsdp2").click()
    expect(page).to_have_url(re.compile("#/sweep/fsdp2$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("fsdp2")
    chart = page.get_by_role("application", name=re.compile("^Speed and memory"))
    chart.locator(".front-hit").first.hover()
    expect(chart.locator(".tip")).to_contain_text("Click or Enter opens its last run")
    chart.locator(".front-hit").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("small-3")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("fsdp2")
    page.keyboard.type("gl")
    expect(sweeps).to_be_visible()


def test_a_sweep_that_is_gone_or_damaged_says_so(browser_page: Any, serve_folder: Any, tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweeps/fsdp2")
    (tmp_path / "sweeps/fsdp2/result.json").write_text("{")
    (tmp_path / "runs").mkdir()
    hub = serve_folder(tmp_path / "runs")
    page = browser_page()
    browser_page.expects(page, "404", "409")
    page.goto(f"{hub.url}/#token={hub.token}")
    expect(page.get_by_role("region", name="Sweeps")).to_contain_text("its result cannot be read")
    page.goto(f"{hub.url}/#/sweep/none")
    expect(page.get_by_role("heading", name="Sweep not found")).to_be_visible()
    page.goto(f"{hub.url}/#/sweep/fsdp2")
    expect(page.get_by_text("Its result cannot be read.")).to_be_visible()
