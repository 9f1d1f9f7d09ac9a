"""The panel of goodput, and the advice after a failure, in a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.hub.app import write_copy
from stepscope.records.series import RankSeries, RankState
from stepscope.store.documents import read_meta, write_meta
from tests.hub.run_parts import WALL_NS, record
from tests.page.browsing import expect

SECOND = 10**9


def attempt(number: int, *, steps: int, began_s: float, ended_s: float) -> list[RankSeries]:
    """Steps of about 0.1 s; a checkpoint of 0.5 s after step 80."""
    saves = tuple(slow_at(rank, "checkpoint", 500.0, range(80, 81)) for rank in range(2))
    made = Cluster(ranks=2, steps=steps, attempt=number, phases_ms={"forward": 99.0}, faults=saves).series()
    ends: tuple[RankState, RankState] = ("vanished", "vanished") if number == 0 else ("exited", "exception")
    times = {"anchor_wall_ns": WALL_NS + round(began_s * SECOND), "ended_wall_ns": WALL_NS + round(ended_s * SECOND)}
    return [replace(series, state=state, **times) for series, state in zip(made, ends, strict=True)]


@pytest.fixture
def failed_run(tmp_path: Path) -> Path:
    """Two attempts within 40 s; the second repeats 19 steps, then its rank 1 raises an exception with markup in it."""
    first = attempt(0, steps=100, began_s=4.0, ended_s=15.0)
    second = attempt(1, steps=150, began_s=20.0, ended_s=37.0)
    run = replace(Cluster(ranks=2, steps=1).run(), ranks=(*first, *second))
    run_dir = record(tmp_path / "runs", "failed", run, sealed=False)
    end = {"status": "failed", "exit_code": 1, "wall_ns": WALL_NS + 40 * SECOND}
    write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": WALL_NS, "end": end})
    pid = second[1].identity.pid
    error = {"rank": 1, "pid": pid, "type": "ValueError", "message": "no <b>label</b>", "wall_ns": end["wall_ns"]}
    (run_dir / "errors").mkdir(exist_ok=True)
    (run_dir / "errors" / f"{pid}.json").write_text(json.dumps(error))
    write_copy(run_dir, tmp_path / "report.html")
    return run_dir


def test_goodput_by_attempt_and_the_advice_after_a_failure(
    failed_run: Path, browser_page: Any, serve_folder: Any, open_run: Any, tmp_path: Path
) -> None:
    hub_page, copy_page = browser_page(width=390), browser_page(offline=True)
    open_run(hub_page, serve_folder(failed_run.parent), "failed")
    copy_page.goto((tmp_path / "report.html").as_uri())
    for page in (hub_page, copy_page):
        panel = page.get_by_role("region", name="Goodput")
        expect(panel.locator(".card-about")).to_have_text(
            "58% of 40.0 s was useful training; 1 restart, 19 steps lost and repeated (estimated)"
        )
        rows = panel.get_by_role("list", name="Attempts").get_by_role("listitem")
        expect(rows).to_have_text(["attempt 015.0 s, 55% useful", "attempt 125.0 s, 61% useful"])
        expect(rows.first.get_by_role("img")).to_have_accessible_name(
            "start-up 4.00 s (27%), compile 200 ms (1%), training 8.19 s (55%), checkpoints 500 ms (3%), "
            "lost and repeated 2.11 s (14%)"
        )
        widths = rows.evaluate_all(
            "rows => rows.map(row => [...row.querySelectorAll('.goodput-part')]"
            ".reduce((sum, part) => sum + parseFloat(part.style.width), 0))"
        )
        assert [round(width) for width in widths] == [60, 100]
        expect(
            panel.get_by_text("attempt 0: 19 steps lost and repeated, estimated from the last checkpoint")
        ).to_be_visible()
        advice = page.get_by_role("region", name="Verdict").locator(".aftermath")
        expect(advice).to_contain_text("Stop: The script raised an exception; the same code raises it again.")
        advice.get_by_text("Why", exact=True).click()
        expect(advice.get_by_text("no <b>label</b>").first).to_be_visible()
    assert hub_page.evaluate("document.documentElement.scrollWidth") <= 390
