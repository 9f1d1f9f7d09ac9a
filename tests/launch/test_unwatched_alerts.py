"""Jobs that nobody watches and that go wrong: the messages that arrive at a webhook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alerts import CASES, HEALTHY, Case, receiving, run_case

CRASH = """
import time
import stepscope

for step in range(100):
    with stepscope.step(), stepscope.phase("work"):
        time.sleep(0.02)
        if step == 40:
            raise ValueError("the batch has no label")
"""
ALONE = (pytest.mark.soak, pytest.mark.alone)
SLOW = {"leak", "loader", "node"}
"""Each takes more than a minute; `make alerts` has them, too."""
TROUBLE = [pytest.param(case, id=case.id, marks=pytest.mark.long if case.id in SLOW else ALONE) for case in CASES]


@pytest.mark.faults
def test_a_crash_is_one_message_that_names_the_line(run_stepscope: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CRASH)
    with receiving() as (url, arrived):
        done = run_stepscope("run", "--quiet", str(script), env={"STEPSCOPE_ALERT": url})
        assert done.code == 1
    (message,) = [each.body for each in arrived]
    assert (message["status"], message["kind"], message["severity"]) == ("firing", "rank_crashed", "critical")
    assert message["line"] == "train.py:9"
    assert message["since_step"] == 39
    assert message["link"].endswith(f"/#/run/{message['run']}/incident/1")
    assert "raised ValueError: the batch has no label" in message["title"]


REFUSED = """
import os, pathlib, subprocess

(outbox,) = [path / "outbox.jsonl" for path in pathlib.Path("runs").glob("*/alerts")]
outbox.touch()
os.truncate(outbox, 65 << 20)  # larger than the limit: nothing is written to it
nowhere = subprocess.DEVNULL
subprocess.Popen(["sh", "-c", 'sleep 2; : >"$0"', outbox], start_new_session=True, stdout=nowhere, stderr=nowhere)
raise OSError(28, "No space left on device")
"""


@pytest.mark.soak  # near: what a full disk refused is written later, in tests/alerts/test_outbox.py
@pytest.mark.faults
def test_the_end_of_a_job_is_sent_although_the_disk_refused_it_first(
    run_stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CRASH.partition("        if")[0] + REFUSED)
    with receiving() as (url, arrived):
        done = run_stepscope("run", "--quiet", str(script), env={"STEPSCOPE_ALERT": url})
        assert done.code == 1
    assert [(each.body["status"], each.body["kind"]) for each in arrived] == [("firing", "rank_crashed")]


@pytest.mark.ranks
@pytest.mark.faults
@pytest.mark.parametrize("case", TROUBLE)
def test_trouble_is_one_message_and_one_when_it_is_over(case: Case, tmp_path: Path) -> None:
    assert run_case(case, tmp_path / case.id).faults() == []


@pytest.mark.soak  # near: the same job without load, in `make alerts`
@pytest.mark.alone
@pytest.mark.ranks
def test_a_healthy_job_beside_bursts_of_load_sends_nothing(tmp_path: Path) -> None:
    assert run_case(HEALTHY, tmp_path / "healthy", load="bursts").faults() == []
