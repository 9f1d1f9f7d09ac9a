"""Jobs that really stand still, started as a user would: what is told, and what ``--on-hang`` does."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from stepscope.records.hang import HangRecord
from stepscope.store.file_io import read_jsonl
from stepscope.store.live.failures import read_hangs

Run = Callable[..., Any]

pytestmark = pytest.mark.faults

TOY = """
import stepscope

def train(steps):
    for step in range(steps):
        with stepscope.step():
            pass
"""
ALONE = """
import pathlib, sys, time

def wait_for_nothing():
    while not pathlib.Path("go").exists():
        time.sleep(0.01)

train(8)
wait_for_nothing()
train(8)
"""
UNTIL_TOLD = """
while not pathlib.Path("enough").exists():
    train(1)
"""


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run_dir / "events.jsonl")[0] if event["event"] in kinds]


def hangs(run_dir: Path) -> tuple[HangRecord, ...]:
    found, bad = read_hangs(run_dir)
    assert bad == ()
    return found


def begun(commands: Any) -> Path:
    until(commands.newest_run)
    run_dir: Path = commands.newest_run()
    return run_dir


def test_a_job_that_hangs_is_ended_and_fails(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(TOY + ALONE)  # with torch: tests/hangs_real/test_faults_named.py
    done = run_stepscope("run", "--hang-after", "1", "--on-hang", "abort", "script.py")
    assert done.code == 1
    (record,) = hangs(done.run_dir)
    assert (record.over, record.action) == ("aborted", "asked the launcher to end the job")
    assert "stepscope: the job hangs; ending it (--on-hang abort)" in done.stderr
    assert record.title[:40] in done.stderr
    (event,) = events(done.run_dir, "hang")
    assert (event["number"], event["kind"], event["title"]) == (1, record.kind, record.title)
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert record.kind in [finding["kind"] for finding in summary["findings"]]


@pytest.mark.soak
def test_one_that_takes_no_notice_is_killed(
    commands: Any, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process hears nothing but SIGKILL; the launcher gives it ten seconds."""
    script(TOY + ALONE.replace('pathlib.Path("go").exists()', "False"))
    process = commands.start("run", "--hang-after", "1", "--on-hang", "abort", "--quiet", "script.py")
    run_dir = begun(commands)
    until(lambda: events(run_dir, "rank_start"))
    os.kill(events(run_dir, "rank_start")[0]["pid"], signal.SIGSTOP)
    done = commands.finish(process)
    assert done.code == 1
    (record,) = hangs(run_dir)
    assert (record.kind, record.over) == ("hang_host", "aborted")
    assert record.ranks[0].process_state == "T"


def test_a_job_that_comes_back_goes_on(commands: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    script(TOY + ALONE + UNTIL_TOLD)
    process = commands.start("run", "--hang-after", "1", "--on-hang", 'cp "$STEPSCOPE_HANG_FILE" told', "script.py")
    run_dir = begun(commands)
    until(lambda: events(run_dir, "hang"))
    assert json.loads((run_dir / "findings.json").read_text())["findings"][0]["kind"].startswith("hang_")
    until(lambda: events(run_dir, "on_hang_end"))
    assert json.loads((tmp_path / "told").read_text())["number"] == 1
    (tmp_path / "go").touch()
    until(lambda: events(run_dir, "hang_over"))
    (tmp_path / "enough").touch()
    done = commands.finish(process)
    assert done.code == 0
    (record,) = hangs(run_dir)
    assert record.over == "recovered"
    assert record.action.startswith("started the command")
    (over,) = events(run_dir, "hang_over")
    assert over["number"] == 1
    assert over["seconds"] >= 1
    assert "it was a stall" in done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


@pytest.mark.soak
def test_off(commands: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    script(TOY + ALONE.replace('while not pathlib.Path("go").exists():', "for _ in range(200):"))
    done = commands.finish(commands.start("run", "--hang-after", "0", "--quiet", "script.py"))
    assert (done.code, done.stderr) == (0, "")
    assert events(done.run_dir, "hang", "not_a_hang") == []


RANKS = """
import ctypes, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()

def suffer(what):
    if what == "gil" and rank == 1:
        ctypes.PyDLL(None).sleep(600)
    elif what == "kill":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
        os._exit(1)

train(20)
suffer(sys.argv[1])
train(20)
"""

LAUNCH = """
export WORLD_SIZE=2
RANK=0 LOCAL_RANK=0 {python} ranks.py kill &
RANK=1 LOCAL_RANK=1 {python} ranks.py kill
wait
exit 1
"""


@pytest.mark.soak
@pytest.mark.ranks
def test_a_rank_that_keeps_its_gil(run_stepscope: Run, script: Callable[..., Path], forked_ranks: Path) -> None:
    """Its stack is shown, its C call is not interrupted, and the Flight Recorders are kept."""
    script(RANKS, "ranks.py")
    options = ("--hang-after", "4", "--on-hang", "abort", "--quiet")
    done = run_stepscope("run", *options, forked_ranks, "2", "ranks.py", "gil")
    assert done.code == 1
    (record,) = hangs(done.run_dir)
    assert (record.kind, [culprit.rank for culprit in record.culprits], record.victims) == ("hang_host", [1], (0,))
    stuck = record.ranks[1]
    assert (stuck.gil_held, stuck.alive) == (True, True)
    assert stuck.at is not None
    assert "PyDLL" in RANKS.splitlines()[stuck.at.line - 1]
    assert record.collective is not None
    assert record.collective.op == "all_reduce"
    assert sorted(path.name for path in (done.run_dir / "flight").iterdir()) == [
        *("rank_0.json", "rank_1.json", "stacks_0.txt", "stacks_1.txt"),
    ]
    for rank in (0, 1):
        assert "entries" in json.loads((done.run_dir / "flight" / f"rank_{rank}.json").read_text())


@pytest.mark.soak
@pytest.mark.ranks
def test_a_death_that_the_others_do_not_notice(commands: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    """Nobody ends the rank that is left: it is told what happened while it stands still."""
    script(
        RANKS.replace(
            '"gloo")', f'"gloo", init_method="file://{tmp_path}/meet", rank=int(os.environ["RANK"]), world_size=2)'
        ),
        "ranks.py",
    )
    launcher = script(LAUNCH.format(python=sys.executable), "launch.sh")
    process = commands.start("run", "--hang-after", "20", "--quiet", "sh", launcher)
    run_dir = begun(commands)
    until(lambda: events(run_dir, "hang"))
    (event,) = events(run_dir, "hang")
    assert (event["kind"], event["culprits"]) == ("rank_crashed", [1])
    (tmp_path / "go").touch()
    done = commands.finish(process)
    assert done.code == 1
    (record,) = hangs(run_dir)
    assert (record.over, record.ranks[1].alive, record.ranks[0].alive) == ("ended", False, True)
    (vanished,) = [event for event in events(run_dir, "rank_end") if event["rank"] == 1]
    assert vanished["state"] == "vanished"
    assert "oom_kill" not in vanished
