"""The first line: how far a run is, and how many of its ranks go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.terminal.documents import Finding, Findings, Judged, Run, Snapshot, Status
from stepscope.terminal.screen import draw_header, draw_verdict, ranks_words

HANG = Finding(kind="hang_deadlock", severity="critical", title="T", ranks=(0, 1), steps=(41, 41))
STATUS = {"status": "running", "ranks": 8, "live_ranks": 8, "world_size": 8, "step": 40}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "8 ranks"),
        ({"live_ranks": 7}, "7 of 8 ranks"),
        ({"still_ranks": 8}, "8 ranks hung"),
        ({"still_ranks": 7, "live_ranks": 7}, "7 of 8 ranks hung"),
        ({"still_ranks": 1}, "1 of 8 ranks hung"),
        ({"still_ranks": 8, "over": True}, "8 ranks"),
    ],
)
def test_ranks_that_stand_still_are_not_told_as_running(fields: dict[str, Any], told: str) -> None:
    assert ranks_words(Status(**{**STATUS, **fields}))[0] == told


def test_while_it_stands_the_step_is_the_one_that_is_told_of_it() -> None:
    known = Snapshot(link="live", run=Run(name="r"), status=Status(**STATUS))
    assert draw_header(known, 80).plain.rstrip() == f"{'r · running · step 40 · 8 ranks':<74}● live"
    stands = replace(known, findings=Findings(findings=(HANG,)), status=Status(**STATUS, still_ranks=8))
    assert draw_header(stands, 80).plain == f"{'r · running · in step 41 · 8 ranks hung':<74}● live"
    over = replace(stands, status=Status(**{**STATUS, "over": True, "status": "interrupted"}))
    assert draw_header(over, 80).plain == f"{'r · interrupted · step 40 · 8 ranks':<74}■ over"


@pytest.mark.parametrize(
    ("fields", "begins", "ends"),
    [
        ({"status": "finished"}, "r · finished · ", "✔ over"),
        ({"status": "failed"}, "r · failed · ", "✖ over"),
        (
            {"status": "crashed", "status_text": "killed (SIGKILL)", "status_severity": "critical"},
            "r · killed (SIGKILL) · ",
            "✖ over",
        ),
        (
            {"status": "failed", "status_text": "finished, then SIGABRT", "status_severity": "warning"},
            "r · finished, then SIGABRT · ",
            "■ over",
        ),
    ],
)
def test_a_run_that_ended_badly_has_no_tick(fields: dict[str, Any], begins: str, ends: str) -> None:
    line = draw_header(Snapshot(link="live", run=Run(name="r"), status=Status(**fields, over=True)), 80).plain
    assert line.startswith(begins)
    assert line.endswith(ends)


def test_early_in_a_run_the_verdict_is_how_many_steps_are_still_needed() -> None:
    judged = Judged(collecting="Collecting: 3 of 10 steps.")
    known = Snapshot(link="live", run=Run(name="r"), status=Status(**STATUS), findings=Findings(judged=judged))
    assert [line.plain.rstrip() for line in draw_verdict(known, 80, 3)] == ["● Collecting: 3 of 10 steps."]
