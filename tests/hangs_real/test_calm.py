"""Real jobs over gloo that only look as if they hung: nothing is told, nothing is ended, nothing is changed.

With a threshold of two seconds and long things of five; ``make hangs`` runs more of them, with those of every day.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hang_cases import FORKED_RANKS, CalmCase

pytestmark = pytest.mark.ranks

RunCase = Callable[..., Any]
LONG_S = 5.0
BY_TORCHRUN = (CalmCase(do="evaluate,checkpoint"),)
CASES = (
    *BY_TORCHRUN,
    # One after the other in one job: starting it takes longer than what is looked at.
    CalmCase(do="evaluate,figures,run_program,checkpoint,save_checkpoint,evaluate_everywhere"),
    CalmCase(do="prepare,first_batch,uneven,workers,copy_data"),
    CalmCase(do="mesh", ranks=4),
    CalmCase(do="compiled"),
    CalmCase(do="ends_apart"),
)


@pytest.mark.soak  # near: the test below, in which a rank evaluates for longer than the threshold
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_is_told(case: CalmCase, run_case: RunCase) -> None:
    ran = run_case(case, "--hang-after", "2", "--on-hang", "abort", seconds=LONG_S, torchrun=case in BY_TORCHRUN)
    assert ran.events("hang", "on_hang") == []
    assert not (ran.run_dir / "hangs").exists()
    assert ran.code == 0, ran.stderr
    assert ran.summary["status"] == "finished"
    assert [finding for finding in ran.summary["findings"] if finding["kind"].startswith(("hang", "rank"))] == []


@pytest.mark.soak  # near: tests/launch/test_unnoticed.py
def test_nothing_is_changed(run_case: RunCase, run_python: Callable[..., Any]) -> None:
    """The watchdog looked while rank 0 evaluated, and the losses are those of a job without it, to the bit."""
    case = CalmCase(do="evaluate_quietly")
    ran = run_case(case, "--hang-after", "1", seconds=4.0)
    assert ran.events("hang") == []
    assert len(ran.reported.not_hangs) > 0
    bare = run_python(FORKED_RANKS, "2", *case.script(0.1))
    assert bare.code == 0
    assert ran.losses() == sorted(line for line in bare.stdout.splitlines() if line.startswith("rank "))
    assert len(ran.losses()) == 24


@pytest.mark.soak  # near: a job that comes back, in tests/agent/test_watchdog_jobs.py
def test_a_stall(run_case: RunCase) -> None:
    """A rank that stands still and goes on is told of, and left alone."""
    ran = run_case(CalmCase(do="stall"), "--hang-after", "1", "--on-hang", "report", seconds=7.0)
    assert ran.code == 0
    (hang,) = ran.events("hang")
    (over,) = ran.events("hang_over")
    assert (hang["kind"], hang["culprits"], hang["victims"]) == ("hang_missing_collective", [1], [0])
    assert over["number"] == hang["number"]
    assert ran.reported.record.over == "recovered"
    assert "it was a stall" in ran.stderr
    stalls = [finding for finding in ran.summary["findings"] if finding["kind"] == "stall"]
    assert [(stall["ranks"], stall["severity"]) for stall in stalls] == [([1], "warning")]
    assert ran.summary["status"] == "finished"
