"""The first line: how far a run is, and how many of its ranks go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.terminal.documents import Findings, Run, Snapshot, Status
from stepscope.terminal.screen import draw_header, draw_verdict

STATUS = {"status": "running", "ranks": 8, "live_ranks": 8, "world_size": 8, "step": 40, "ranks_text": "8 ranks"}


def test_a_hang_shows_its_step_and_ranks() -> None:
    known = Snapshot(link="live", run=Run(name="r"), status=Status(**STATUS))
    assert draw_header(known, 80).plain.rstrip() == f"{'r · running · step 40 · 8 ranks':<74}● live"
    hung = {**STATUS, "hung_ranks": 8, "hung_steps": (41, 41), "ranks_text": "8 ranks hung"}
    assert draw_header(replace(known, status=Status(**hung)), 80).plain == (
        f"{'r · running · in step 41 · 8 ranks hung':<74}● live"
    )
    over = replace(known, status=Status(**{**STATUS, "over": True, "status": "interrupted"}))
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


def test_without_findings_the_hub_says_why() -> None:
    findings = Findings(nothing=("Collecting: 3 of 10 steps.", "Hangs are reported at once."))
    known = Snapshot(link="live", run=Run(name="r"), status=Status(**STATUS), findings=findings)
    lines = [line.plain.rstrip() for line in draw_verdict(known, 80, 3)]
    assert lines == ["● Collecting: 3 of 10 steps. Hangs are reported at once."]
