"""SIGKILL of a rank, of the agent, of the launcher: no completed step is lost or doubled, and the summary says it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults


TWO = """
import os, pathlib, signal, sys, time
import stepscope

rank, waits = os.environ["RANK"], pathlib.Path("rank-0-waits")
for step in range(8):
    with stepscope.step():
        pass
    sys.stdout.write(f"rank {rank} step {step}\\n")
sys.stdout.flush()
if rank == "0":
    waits.touch()
    signal.pause()  # until torchrun ends it
while not waits.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
def test_a_rank(start: Callable[..., Any], script: Callable[..., Path]) -> None:
    """Ranks that train with torch: tests/launch/test_deaths.py."""
    patient = start("run", "--quiet", "--nproc-per-node", "2", script(TWO))
    done = patient.finish()
    assert done.code == 1
    summary = patient.summary()
    assert (summary["status"], summary["exit_code"]) == ("crashed", 1)
    crash = summary["findings"][0]
    assert (crash["kind"], crash["ranks"], crash["severity"]) == ("rank_crashed", [1], "critical")
    assert (crash["evidence"]["signal"], crash["evidence"]["last_step"]) == ("SIGKILL", 7)
    rows = {row["rank"]: row for row in summary["ranks"]}
    assert (rows[1]["state"], rows[1]["steps"], rows[1]["lost"]) == ("vanished", 8, 0)
    assert rows[0]["steps"] == done.stdout.count("rank 0 step") == 8
    text = (patient.run_dir() / "summary.txt").read_text()
    assert text.startswith("✖ Rank 1 was killed by SIGKILL (in step 8).")
    patient.leaves_nothing()


def test_the_agent(start: Callable[..., Any], toy: Path, run_stepscope: Callable[..., Any]) -> None:
    patient = start("run", "--quiet", toy, "--steps", "150", "--pause-ms", "10")
    for kill in range(2):
        patient.wait_for(f"step {40 * (kill + 1)} ")
        patient.until(lambda kill=kill: len(patient.events("agent_start")) == kill + 1)
        os.kill(patient.agent(), signal.SIGKILL)
    done = patient.finish()
    assert done.code == 0
    # Started again each time, and the last one ended in order.
    assert [len(patient.events(kind)) for kind in ("agent_start", "agent_end")] == [3, 1]
    assert len(patient.events("rank_start")) == 1
    summary = patient.summary()
    # On a busy machine two starts in a row take longer than samples may be missing without a word.
    gaps = [notice for notice in summary["notices"] if notice.endswith("the agent stopped and was restarted.")]
    assert (summary["status"], summary["notices"]) == ("finished", gaps)
    row = summary["ranks"][0]
    assert (row["steps"], row["last_step"], row["lost"], row["torn"]) == (150, 149, 0, 0)
    query = "select count(*) as n, count(distinct step) as d, min(step) as a, max(step) as z from steps"
    rows = run_stepscope("sql", "--json", patient.run_dir(), query)
    assert json.loads(rows.stdout) == [{"n": 150, "d": 150, "a": 0, "z": 149}]
    patient.leaves_nothing()


def test_the_launcher(
    start: Callable[..., Any], toy: Path, alive: Callable[[int], bool], run_stepscope: Callable[..., Any]
) -> None:
    patient = start("run", "--name", "same", toy, "--steps", "100", "--pause-ms", "10")
    patient.wait_for("step 5 ")
    patient.until(patient.ranks)
    (pid,) = patient.ranks().values()
    os.kill(patient.process.pid, signal.SIGKILL)
    assert patient.finish().code == -signal.SIGKILL
    # The job goes on, the agent with it; together they bring it to its end.
    patient.until((patient.run_dir() / "summary.json").exists)
    assert not alive(pid)
    summary = patient.summary()
    assert (summary["status"], summary["exit_code"], summary["steps"]["total"]) == ("finished", None, 100)
    assert summary["notices"] == ["The launcher died before it could record how the run ended."]
    assert summary["ranks"][0]["state"] == "exited"
    patient.leaves_nothing()
    repeated = run_stepscope("run", "--quiet", "--name", "same", "true")
    assert (repeated.code, repeated.run_dir.name) == (0, "same-2")


@pytest.mark.soak  # near: tests/launch/test_deaths.py
@pytest.mark.ranks
def test_an_exception_on_one_rank(start: Callable[..., Any], job: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    options = ("--standalone", "--nproc-per-node", "2")
    patient = start("run", torchrun, *options, job, "--steps", "20", "--fault", "1:7:raise")
    done = patient.finish()
    assert done.code == 1
    text = (patient.run_dir() / "summary.txt").read_text()
    assert text.startswith("✖ Rank 1 raised ValueError: told to raise (in step 8).\n")
    assert "Traceback of rank 1, step 8" in text
    assert text.count("ValueError: told to raise") == 1, "in the title, and not again below the traceback"
    assert "ChildFailedError" not in text
    summary = patient.summary()
    assert summary["status"] == "failed"
    first = summary["errors"][0]
    assert (first["rank"], first["type"], first["step"], first["victim"]) == (1, "ValueError", 8, False)
    launcher = summary["errors"][-1]
    assert (launcher["rank"], launcher["type"], launcher["exit_codes"]["1"]) == (None, "ChildFailedError", 1)
    assert {row["rank"]: row["state"] for row in summary["ranks"]}[1] == "exception"
    assert (patient.run_dir() / "logs" / "rank-1.log").read_text().rstrip().endswith("ValueError: told to raise")
    patient.leaves_nothing()
