"""The job of ``stepscope demo`` with its page open: the slow rank is named during the run, and the end is shown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.commands.demo import SCRIPT
from tests.page.browsing import expect, run_address

START_S = 60.0


@pytest.mark.soak  # near: test_page_smoke.py, and the demo in tests/launch/test_newcomer.py
@pytest.mark.ranks
def test_the_demos_fault_is_seen_while_it_runs(
    browser_page: Any, commands: Any, tmp_path: Path, forked_ranks: Path
) -> None:
    job = (forked_ranks, "3", SCRIPT, "--steps", "200", "--slow-rank", "2")
    demo = commands.start("run", "--dir", "runs", "--name", "demo", *job)
    place = tmp_path / "runs" / "demo" / "hub.json"
    until_s = time.monotonic() + START_S
    while not place.exists():
        assert demo.poll() is None and time.monotonic() < until_s
        time.sleep(0.02)
    about = json.loads(place.read_text())
    page = browser_page()
    page.goto(run_address(about["url"], "demo", about["token"]))
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict).to_contain_text("Rank 2 is", timeout=100_000)
    assert demo.poll() is None
    expect(page.locator("header.bar")).to_contain_text("running")
    assert commands.finish(demo).code == 0
    expect(page.locator("header.bar")).to_contain_text("finished")
    expect(verdict).to_contain_text("Rank 2 is")
    expect(page.locator("header.bar")).not_to_contain_text("lost")
