"""``stepscope.init()`` in a script that nobody of ours launched: the same recording, by ranks that find each other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

Run = Callable[..., Any]

ALONE = """
import os, stat, sys, threading, time
import stepscope
stepscope.init(name="mine")
import torch

@stepscope.phase("prepare")
def prepare():
    time.sleep(0.002)
    return torch.ones(2, 4)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x = prepare()
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
    stepscope.note(step=step, word="ü")
so_far = stepscope.summary()
print(so_far["status"], so_far["steps"]["total"], so_far["phases"]["prepare"]["share"] > 0.1, flush=True)
session = os.environ["STEPSCOPE_SESSION"]
print(oct(stat.S_IMODE(os.stat(os.path.dirname(session)).st_mode)), oct(stat.S_IMODE(os.stat(session).st_mode)))
print([thread.name for thread in threading.enumerate()])
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
print(sum(os.readlink(fd).startswith("socket:") for fd in fds if os.path.lexists(fd)))
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
"""


def ended(run_dir: Path) -> dict[str, Any]:
    """The summary, which the agent writes when the ranks are gone."""
    deadline = time.monotonic() + 30
    while not (run_dir / "summary.json").exists():
        assert time.monotonic() < deadline, f"no summary in {run_dir}"
        time.sleep(0.05)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def test_a_plain_python(run_python: Run, script: Callable[..., Path], tmp_path: Path) -> None:
    script(ALONE, "train.py")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    done = run_python("train.py", "--lr", "1")
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["running 12 True", "0o700 0o700", "['MainThread']", "0", "no child"]
    run_dir = tmp_path / "runs" / "mine-2"
    assert done.stderr == (
        f"stepscope: a run named mine already exists; this one is named mine-2\nstepscope: recording to {run_dir}\n"
    )
    summary = ended(run_dir)
    assert (summary["status"], summary["world_size"], summary["steps"]["total"]) == ("finished", 1, 12)
    assert summary["run"]["command"][1:] == ["train.py", "--lr", "1"]
    meta = json.loads((run_dir / "run.json").read_text())
    assert (meta["sealed"], meta["launcher"], meta["end"]) == (True, None, None)
    assert not Path(meta["session"]).exists()
    assert (run_dir / "logs" / "main.log").read_text() == done.stdout
    notes = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [note["values"] for note in notes if note["event"] == "note"][-2:] == [{"step": 11}, {"word": "ü"}]
    assert summary["notices"] == []


SET_BACK = """
import time
import stepscope
stepscope.init(name="mine")
real = time.time_ns
time.time_ns = lambda: real() - 3600 * 10**9  # somebody sets the time of day
for step in range(4):
    with stepscope.step():
        pass
"""


def test_setting_the_time_of_day_moves_no_step(run_python: Run, script: Callable[..., Path], tmp_path: Path) -> None:
    """The rank that began the run chose its clock; the agent has the same."""
    script(SET_BACK, "train.py")
    done = run_python("train.py")
    assert done.code == 0, done.stderr
    run_dir = tmp_path / "runs" / "mine"
    ended(run_dir)
    run = open_run(run_dir)
    (rank,) = run.ranks
    ahead_ns = run.meta["created_wall_ns"] - run.meta["created_mono_ns"]
    assert rank.anchor_wall_ns - rank.anchor_mono_ns == pytest.approx(ahead_ns, abs=10**9)


RANKS = """
import os
import stepscope
stepscope.init()
for step in range(8):
    with stepscope.step():
        pass
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and step == 3:
        raise ArithmeticError("once")
"""


@pytest.mark.soak  # near: test_torchrun_itself_restarts_and_each_attempt_is_kept in test_processes.py
@pytest.mark.ranks
def test_the_ranks_of_a_plain_torchrun_that_starts_them_twice(
    run_python: Run, script: Callable[..., Path], tmp_path: Path
) -> None:
    script(RANKS, "train.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    done = run_python(*torchrun, "train.py")
    assert done.code == 0, done.stderr
    run_dir = only_run(tmp_path)
    assert done.stderr.count(f"stepscope: recording to {run_dir}\n") == 1
    summary = ended(run_dir)
    assert (summary["status"], summary["world_size"]) == ("finished", 2)
    assert [(row["rank"], row["steps"], row["state"]) for row in summary["ranks"]] == [
        (0, 8, "exited"),
        (1, 8, "exited"),
    ]
    assert (summary["run"]["attempt"], summary["run"]["attempts"]) == (1, 2)
    assert json.loads((run_dir / "run.json").read_text())["sealed"] is True
    assert "logs/rank-1.attempt-1.log" in summary["logs"]


STALE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from stepscope.records.run_clock import process_start_ticks

def parent():
    # What an agent that was killed leaves behind, in the very session that these ranks will find.
    base = Path(f"/dev/shm/stepscope-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    session = base / f"{os.getpid()}-{process_start_ticks(os.getpid())}"
    session.mkdir(mode=0o700)
    (session / "agent.lock").write_text("/nowhere/a run of long ago\\n")
    for rank in ("0", "1"):
        environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, __file__, "child"], env=environment, check=True)
        time.sleep(0.3)

def child():
    import stepscope
    stepscope.init()
    for step in range(5):
        with stepscope.step():
            time.sleep(0.001)
    events = Path(os.environ["STEPSCOPE_RUN_DIR"], "events.jsonl")
    if os.environ["RANK"] == "0":
        while not events.exists():
            time.sleep(0.01)
        agent = json.loads(events.read_text().splitlines()[0])["pid"]
        os.kill(agent, signal.SIGKILL)
        while os.path.exists(f"/proc/{agent}/fd/0"):
            time.sleep(0.01)

child() if sys.argv[1:] else parent()
"""


@pytest.mark.faults
def test_a_stale_lock_and_an_agent_that_was_killed(
    run_python: Run, script: Callable[..., Path], tmp_path: Path
) -> None:
    """The first rank finds a dead agent's lock and begins a run; the second finds another and goes on with that run."""
    script(STALE, "train.py")
    done = run_python("train.py")
    assert done.code == 0, done.stderr
    run_dir = only_run(tmp_path)
    assert done.stderr == f"stepscope: recording to {run_dir}\n"
    summary = ended(run_dir)
    assert [(row["rank"], row["steps"], row["state"]) for row in summary["ranks"]] == [
        (0, 5, "exited"),
        (1, 5, "exited"),
    ]
    assert (summary["status"], summary["world_size"]) == ("finished", 2)
    meta = json.loads((run_dir / "run.json").read_text())
    assert meta["sealed"] is True
    assert not Path(meta["session"]).exists()


KILLED = """
import json, os, signal, time
from pathlib import Path
import stepscope
stepscope.init()
run_dir = Path(os.environ["STEPSCOPE_RUN_DIR"])
events = run_dir / "events.jsonl"
while not events.exists() or not events.read_text().endswith("\\n"):
    time.sleep(0.01)
os.kill(json.loads((run_dir / "events.jsonl").read_text().splitlines()[0])["pid"], signal.SIGKILL)
for step in range(10):
    with stepscope.step():
        time.sleep(0.001)
"""


@pytest.mark.soak  # near: the stale lock and the agent that was killed
@pytest.mark.faults
def test_when_the_agent_is_killed_the_report_reads_the_rings(
    run_python: Run, run_stepscope: Run, script: Callable[..., Path], tmp_path: Path
) -> None:
    script(KILLED, "train.py")
    assert run_python("train.py").code == 0
    run_dir = only_run(tmp_path)
    session = Path(json.loads((run_dir / "run.json").read_text())["session"])
    assert not (run_dir / "summary.json").exists()
    assert list(session.glob("*.ring")) != []
    shown = run_stepscope("report", run_dir)
    assert shown.code == 0
    summary = ended(run_dir)
    assert (summary["status"], summary["steps"]["total"]) == ("finished", 10)
    died = "The agent died before the run ended; there are no host and GPU samples after that."
    assert died in summary["notices"]
    assert died in " ".join(shown.stdout.split())
    assert not session.exists()


def test_ctrl_c(commands: Any, script: Callable[..., Path], tmp_path: Path) -> None:
    script(
        """
        import time
        import stepscope
        stepscope.init()
        for step in range(10_000):
            with stepscope.step():
                time.sleep(0.001)
            if step == 20:
                print("ready", flush=True)
        """,
        "train.py",
    )
    process = commands.start_python("train.py")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert commands.finish(process).code == -signal.SIGINT
    summary = ended(only_run(tmp_path))
    assert (summary["status"], summary["ranks"][0]["state"]) == ("interrupted", "exception")
    assert summary["steps"]["total"] >= 21
    assert [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"] == []


UNGUARDED = """
import sys
import stepscope
stepscope.init(dir=sys.argv[1] if len(sys.argv) > 1 else "runs")
stepscope.init()
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(12, 4))
    for (x,) in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    print("trained")
"""


@pytest.mark.soak  # near: test_workers_are_no_ranks in test_processes.py
def test_workers_that_call_it_again_are_no_ranks(run_python: Run, script: Callable[..., Path], tmp_path: Path) -> None:
    script(UNGUARDED, "train.py")
    done = run_python("train.py")
    assert (done.code, done.stdout) == (0, "trained\n"), done.stderr
    summary = ended(only_run(tmp_path))
    assert [(row["rank"], row["steps"]) for row in summary["ranks"]] == [(0, 6)]
    assert summary["logs"] == ["logs/main.log"]


@pytest.mark.faults
def test_where_nothing_can_be_written_the_script_runs_unrecorded(
    run_python: Run, script: Callable[..., Path], tmp_path: Path
) -> None:
    script(
        "import stepscope\nstepscope.init(dir='taken')\nstepscope.note(a=1)\nprint(stepscope.summary())\n"
        "import os; print(os.getpid())\n"
    )
    (tmp_path / "taken").touch()
    done = run_python("script.py")
    summary, pid = done.stdout.splitlines()
    assert (done.code, summary) == (0, "{}")
    assert list(Path(f"/dev/shm/stepscope-{os.getuid()}").glob(f"{pid}-*")) == []
    assert done.stderr == "stepscope: this process is not recorded: cannot create a run in taken: File exists\n"
