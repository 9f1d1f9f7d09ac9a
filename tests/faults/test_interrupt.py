"""Ctrl-C and its relatives: the exit code of a bare run, a summary that says so, nothing left running."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

SLEEPER = """
import signal, sys, time
{setup}
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by kill to a group it comes twice: the launcher passes it on
    print("interrupted", flush=True)
    {answer}
"""


@pytest.mark.parametrize(
    ("number", "whole_group", "setup", "answer", "code", "status"),
    [
        pytest.param(signal.SIGINT, False, "", "raise", 130, "interrupted", id="launcher"),
        pytest.param(signal.SIGINT, True, "", "raise", 130, "interrupted", id="group", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, False, "", "", 143, "interrupted", id="SIGTERM", marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, False, "", "", 129, "interrupted", id="SIGHUP", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, False, "", "sys.exit(0)", 0, "finished", id="handled", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, False, "", "sys.exit(9)", 9, "interrupted", id="own-code", marks=pytest.mark.soak),
    ],
)
def test_a_signal(
    start: Callable[..., Any],
    script: Callable[..., Path],
    number: int,
    whole_group: bool,
    setup: str,
    answer: str,
    code: int,
    status: str,
) -> None:
    script(SLEEPER.format(setup=setup, answer=answer or "raise"))
    patient = start("run", "--quiet", "script.py")
    patient.wait_for("ready")
    (os.killpg if whole_group else os.kill)(patient.process.pid, number)
    done = patient.finish()
    assert done.code == code, done.stderr
    summary = patient.summary()
    assert (summary["status"], summary["exit_code"]) == (status, code)
    assert [finding["kind"] for finding in summary["findings"]] == ["insufficient_data"]
    assert ("interrupted" in done.stdout) == (number == signal.SIGINT)
    patient.leaves_nothing()


def test_a_job_that_does_not_react_is_ended_by_the_third(
    start: Callable[..., Any], script: Callable[..., Path]
) -> None:
    script(SLEEPER.format(setup="signal.signal(signal.SIGINT, signal.SIG_IGN)", answer="raise"))
    patient = start("run", "--quiet", "script.py")
    patient.wait_for("ready")
    for _ in range(3):
        os.kill(patient.process.pid, signal.SIGINT)
        time.sleep(0.1)  # two of the same that wait at the same time are one
    done = patient.finish()
    assert done.code == 130
    assert patient.summary()["status"] == "interrupted"
    patient.leaves_nothing()


def test_ctrl_c_at_a_terminal(commands: Any, toy: Path) -> None:
    """Typed, so that the terminal sends it to all of them; and typed again while the summary is made."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(commands.folder)
        words = ["-m", "stepscope", "run", str(toy), "--steps", "10000", "--pause-ms", "5"]
        os.execve(sys.executable, [sys.executable, *words], commands.environment())
    shown = b""
    typed = 0
    while select.select([terminal], [], [], 60)[0]:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:
            break  # nobody holds the other side any more
        if (typed == 0 and b"step 20 " in shown) or (typed == 1 and b"KeyboardInterrupt" in shown):
            os.write(terminal, b"\x03")
            typed += 1
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert typed == 2
    run_dir = commands.newest_run()
    assert re.search(
        rb"stepscope: page: http://127\.0\.0\.1:\d+/#/run/%s\?token=[\w-]{43}\r\n" % run_dir.name.encode(), shown
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("interrupted", 130)
    last = max(map(int, re.findall(rb"rank 0 step (\d+) loss", shown)))
    assert summary["steps"]["total"] in (last + 1, last + 2)  # one may be complete and not yet printed
    assert [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"] == []
    assert b"interrupted" in shown
    assert json.loads((run_dir / "run.json").read_text())["sealed"] is True
    assert commands.survivors() == []


@pytest.mark.soak  # near: the signals above; a job under torchrun: test_kill.py
@pytest.mark.ranks
@pytest.mark.parametrize("whole_group", [pytest.param(False, id="launcher"), pytest.param(True, id="group")])
def test_torchrun(start: Callable[..., Any], job: Path, whole_group: bool) -> None:
    patient = start("run", "--quiet", "--nproc-per-node", "2", job, "--steps", "10000", "--pause-ms", "5")
    patient.wait_for("rank 0 step 20 ", "rank 1 step 20 ")
    (os.killpg if whole_group else os.kill)(patient.process.pid, signal.SIGINT)
    done = patient.finish()
    # As without us: torchrun ends with 1, whatever ended it.
    assert done.code == 1, done.stderr
    summary = patient.summary()
    assert (summary["status"], summary["exit_code"], summary["world_size"]) == ("interrupted", 1, 2)
    assert [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"] == []
    assert min(row["steps"] for row in summary["ranks"]) >= 20
    patient.leaves_nothing()
