"""The tasks of a node that meet: who leads, who follows, and what becomes of the others when the leader dies."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.cli.launch import slurm_tasks
from stepscope.cli.launch.command import SlurmStep
from stepscope.cli.launch.helpers import JobEnd, worst_end
from stepscope.cli.launch.slurm_tasks import Leader, Member
from stepscope.records.paths import session_root

STEP = SlurmStep(job=7, step=0, restarts=0, nodes=1, node=0, tasks=3, task=0, tasks_here=3, task_here=0, first_host="a")
FINE = JobEnd(exit_code=0, status="finished")
FAILED = JobEnd(exit_code=3, status="failed")
PLACES = (Path("runs/x"), Path("memory/x"))


def member(number: int, base: Path) -> Member:
    return Member(replace(STEP, task=number, task_here=number), base)


def test_they_hear_where_the_run_is_and_say_how_they_ended(tmp_path: Path) -> None:
    leader = Leader(STEP, tmp_path)
    first, second = member(1, tmp_path), member(2, tmp_path)
    assert first.wait(0.1) == "the first task on this node did not announce the run"
    leader.announce(*PLACES)
    assert first.wait() == second.wait() == PLACES
    assert not leader.over()
    first.ended(FAILED)
    assert not leader.over()
    second.ended(FINE)
    assert leader.over()
    assert worst_end([FINE, *leader.ends()]) == FAILED
    leader.close()
    assert list(tmp_path.iterdir()) == []


def test_without_a_run_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    leader = Leader(STEP, tmp_path)
    leader.refuse("the disk is full")
    other = member(1, tmp_path)
    assert other.wait() == "the disk is full"
    other.ended(FINE)
    leader.close()


def test_a_task_that_never_began_or_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(STEP, tmp_path)
    leader.announce(*PLACES)
    killed = member(1, tmp_path)
    killed.wait()
    assert not leader.over()
    monkeypatch.setattr(slurm_tasks, "MISSING_TASK_S", 0.0)
    assert not leader.over()  # it holds the lock
    killed.ended(FINE)  # with its last descriptor the lock goes, whether it says something or not
    assert leader.over()
    leader.close()


def test_a_second_command_of_the_same_step_is_another_run(tmp_path: Path) -> None:
    """``srun bash -c 'stepscope run a.py; stepscope run b.py'``: each task goes on by itself."""
    leader = Leader(STEP, tmp_path)
    leader.announce(*PLACES)
    first = member(1, tmp_path)
    first.wait()
    first.ended(FINE)
    early = member(1, tmp_path)  # its leader is not done with the first command yet
    assert isinstance(early.wait(0.1), str)
    leader.close()
    second = Leader(STEP, tmp_path)
    second.announce(Path("runs/y"), PLACES[1])
    assert early.wait() == (Path("runs/y"), PLACES[1])
    early.ended(FAILED)
    assert second.ends() == [FAILED]
    second.close()


def test_a_leader_that_was_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    dead = Leader(STEP, tmp_path)
    dead.announce(*PLACES)
    leader = Leader(STEP, tmp_path)
    assert isinstance(member(2, tmp_path).wait(0.1), str)
    assert leader.ends() == []
    for one in (leader, dead):
        one.close()


@pytest.mark.faults
def test_a_dead_leader_hurts_nobody(nodes: Any, commands: Any, tmp_path: Path) -> None:
    """Two tasks as srun starts them; the first one's launcher is killed, and all goes on to its end."""
    job = os.getpid()
    step = {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here",
    }  # fmt: skip
    tasks = []
    for number in (1, 0):
        own = {**step, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        tasks.append(commands.start("run", "--quiet", nodes.toy, "over", env=own))
    other, leader = tasks
    for task in tasks:
        assert task.stdout.readline().endswith("step 0\n")
    os.kill(leader.pid, signal.SIGKILL)
    assert other.stdout.readline() == "rank 1 step 1\n"
    nodes.over()
    rest = other.stdout.read()  # by the same reader, which may hold some of it already
    done = commands.finish(other)
    assert (done.code, done.stderr) == (0, "")
    run_dir = tmp_path / "runs" / f"toy-slurm-{job}"
    nodes.until((run_dir / "summary.json").exists)
    rows = json.loads((run_dir / "summary.json").read_text())["ranks"]
    printed = 1 + leader.stdout.read().count(" step "), 2 + rest.count(" step ")
    assert [(row["rank"], row["steps"]) for row in rows] == list(enumerate(printed))
    assert list(session_root().glob(f"slurm-{job}.*")) == []
