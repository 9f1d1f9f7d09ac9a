"""Texts of the page: the verdict and its buttons, a hang with its culprit and line, untrusted strings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from hang_jobs import Job

from stepscope.store.live.failures import write_hang
from tests.hub.run_parts import HOSTILE, record
from tests.page.browsing import expect


def test_the_verdict_leads_to_its_rank_and_steps(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict.get_by_text("critical", exact=True)).to_be_visible()
    expect(verdict).to_contain_text("of the training time")
    bars = verdict.get_by_role("list", name="Median work per step, without the wait for others")
    expect(bars.get_by_role("listitem").filter(has_text="rank 3")).to_contain_text("68.0 ms")
    shown = verdict.get_by_role("button", name="Show rank 3")
    shown.click()
    expect(shown).to_have_attribute("aria-pressed", "true")
    verdict.get_by_role("button", name="Show these steps").click()
    expect(page).to_have_url(re.compile(r"[?]first=1&last=599&rank=3$"))
    verdict.get_by_text("Evidence", exact=True).first.click()
    expect(verdict.get_by_text("arrived last in steps")).to_be_visible()
    assert "{" not in verdict.inner_text()


@pytest.mark.soak  # near: test_page_screens.py
def test_a_link_to_what_is_not_there_says_so(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(), served, "demo")
    page.evaluate("location.hash = '#/'")
    page.evaluate("location.hash = '#/run/demo?rank=77&step=5000'")
    expect(page.get_by_text("This run has no rank 77 and no step 5,000.")).to_be_visible()


def test_a_hang_names_culprit_line_and_who_waits(browser_page: Any, served: Any, open_run: Any) -> None:
    page = open_run(browser_page(width=420), served, "hang")
    hang = page.get_by_role("region", name="The job hung")
    expect(hang).to_contain_text("Ranks 0–2")
    expect(hang.get_by_text("train.py:41 in step").first).to_be_visible()
    expect(hang.get_by_role("button", name="Show rank 3").first).to_be_visible()
    for past in ("What blocked the job", "Waited"):
        expect(hang.get_by_role("heading", name=past)).to_be_visible()
    expect(hang).not_to_contain_text("The job hangs")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_hang_is_shouted_while_it_lasts(browser_page: Any, serve_folder: Any, feed: Any, open_run: Any) -> None:
    run = feed(Cluster(ranks=4, steps=40))
    run.make(20)
    page = open_run(browser_page(), serve_folder(feed.folder), "live")
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("Nothing wrong so far.")
    found = Job(ranks=4, step=20, sequence=7).alone(1).hang()
    write_hang(run.run_dir, found)
    run.say("hang", number=1, kind=found.kind, title=found.title, culprits=[1], victims=[0, 2, 3])
    hang = page.get_by_role("region", name="The job hangs")
    expect(hang.get_by_role("alert")).to_contain_text("The job is hung")
    expect(hang).to_contain_text("all_reduce number 7 of default_pg")
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("Rank 1")
    expect(hang.get_by_role("heading", name="Details of the hang")).to_be_visible()
    expect(page.get_by_role("region", name="Verdict").get_by_text("The job is hung")).to_be_visible()
    expect(hang.get_by_role("heading", name="What blocks the job")).to_be_visible()
    run.end()


@pytest.mark.soak
def test_strings_of_others_stay_text(browser_page: Any, serve_folder: Any, open_run: Any, tmp_path: Path) -> None:
    """Errors, commands, facts and titles never become elements or scripts."""
    folder = tmp_path / "runs"
    run_dir = record(folder, "odd", Cluster(ranks=2, steps=30, facts={"model": {"class": HOSTILE}}).run(), sealed=False)
    error = {"schema": 1, "rank": 1, "pid": 1001, "type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE}
    (run_dir / "errors").mkdir(exist_ok=True)
    (run_dir / "errors" / "1001.json").write_text(json.dumps({**error, "wall_ns": 1, "step": 3, "exit_codes": {}}))
    meta = json.loads((run_dir / "run.json").read_text())
    meta |= {"command": ["python", HOSTILE], "environment": {"NCCL_X": HOSTILE}, "git": {"commit": HOSTILE}}
    (run_dir / "run.json").write_text(json.dumps(meta))
    page = open_run(browser_page(), serve_folder(folder), "odd")
    expect(page.get_by_role("region", name="Verdict")).to_contain_text(f"Rank 1 raised {HOSTILE}")
    context = page.get_by_role("region", name="Context")
    expect(context.get_by_text(HOSTILE).first).to_be_visible()
    context.get_by_text("Environment, 1 variable").click()
    expect(context.get_by_role("row", name="NCCL_X")).to_contain_text(HOSTILE)
    assert page.locator("main img").count() == 0
