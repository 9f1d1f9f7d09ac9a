"""Which of a job's processes are ranks: those that train, whoever started them, and no helper of theirs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

WORKERS = """
import os
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 0:
            print("a worker speaks", flush=True)
        # A worker that uses autograd for its augmentation does not train.
        x = torch.ones(4, requires_grad=True)
        return x.detach() * index

def main():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for method in ("fork", "spawn"):
        for x in DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context=method):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            rings = set(os.listdir(os.environ["STEPSCOPE_SESSION"])) - {"run", f"{os.getpid()}.layers"}
            names = ("ring", "stacks", "threads", "workers")
            assert sorted(rings) == [f"{os.getpid()}.{name}" for name in names], rings

if __name__ == "__main__":
    main()
"""


def test_workers_are_no_ranks(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(WORKERS)
    done = run_stepscope("run", "--quiet", "script.py")
    assert (done.code, done.stderr, done.stdout) == (0, "", "a worker speaks\n" * 2)
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert [(row["rank"], row["steps"], row["state"]) for row in summary["ranks"]] == [(0, 12, "exited")]
    assert (summary["status"], summary["errors"], summary["notices"]) == ("finished", [], [])
    assert summary["logs"] == ["logs/main.log"]
    assert summary["phases"]["input"]["share"] > 0


SPAWN = """
import os, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    dist.destroy_process_group()
    print("rank", rank, "has trained", flush=True)
    if rank == 1:
        while os.path.exists(f"/proc/{pids[0]}/fd/0"):  # not those of a zombie
            time.sleep(0.01)
        raise ArithmeticError("one is too many")

if __name__ == "__main__":
    mp.spawn(train, args=(os.path.abspath("meet"),), nprocs=2)
"""


@pytest.mark.soak  # near: an exception in a forked rank, in test_deaths.py
@pytest.mark.ranks
def test_spawned_ranks_of_which_one_raises(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(SPAWN)
    done = run_stepscope("run", "--quiet", "script.py")
    assert done.code == 1
    summary = json.loads((done.run_dir / "summary.json").read_text())
    rows = [(row["rank"], row["steps"], row["state"], row["backend"]) for row in summary["ranks"]]
    assert rows == [(0, 6, "exited", "gloo"), (1, 6, "exception", "gloo")]
    assert (summary["status"], summary["world_size"]) == ("failed", 2)
    assert summary["verdict"]["title"].startswith("Rank 1 raised ArithmeticError: one is too many")
    first, launcher = [(error["rank"], error["type"]) for error in summary["errors"]]
    assert first == (1, "ArithmeticError")
    # Which of the two torch raises depends on which of the ranks it sees to be gone first.
    assert launcher in [(None, "ProcessRaisedException"), (None, "ProcessExitedException")]
    text = (done.run_dir / "summary.txt").read_text()
    assert "Traceback of rank 1" in text
    assert "in train" in text
    logs = {name: (done.run_dir / name).read_text() for name in summary["logs"]}
    assert set(logs) == {"logs/main.log", "logs/rank-0.log", "logs/rank-1.log"}
    assert [logs[f"logs/rank-{rank}.log"].splitlines()[0] for rank in (0, 1)] == [
        "rank 0 has trained",
        "rank 1 has trained",
    ]


CHILD = """
import multiprocessing, sys
import stepscope

def train(pipe):
    for _ in range(4):
        with stepscope.step():
            pass
    print("the child has trained", flush=True)
    pipe.send("done")
    pipe.recv()  # until it is ended, or told to go

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=train, args=(theirs,))
    child.start()
    ours.recv()
    if sys.argv[1] == "raises":
        ours.send("go")
    else:
        getattr(child, sys.argv[1])()
    child.join()
    if sys.argv[1] == "raises":
        raise KeyError("accuracy")
"""


@pytest.mark.soak  # near: the next one
@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_child_that_its_parent_ends_when_it_has_trained(
    run_stepscope: Run, script: Callable[..., Path], how: str
) -> None:
    script(CHILD)
    done = run_stepscope("run", "--quiet", "script.py", how)
    assert (done.code, done.stderr) == (0, "")
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]["total"], summary["attempts"]) == ("finished", 4, [])
    assert [finding["kind"] for finding in summary["findings"]] == ["insufficient_data"]
    assert (done.run_dir / "logs" / "rank-0.log").read_text() == "the child has trained\n"


def test_a_parent_that_fails_when_its_child_has_trained(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(CHILD)
    done = run_stepscope("run", "--quiet", "script.py", "raises")
    assert done.code == 1
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["run"]["attempts"], summary["attempts"]) == ("failed", 1, [])
    assert summary["verdict"]["title"] == "The script raised KeyError: 'accuracy' (after step 3)."
    assert [(row["steps"], row["state"]) for row in summary["ranks"]] == [(4, "exited")]
    assert [(error["rank"], error["script"], error["type"]) for error in summary["errors"]] == [
        (None, True, "KeyError")
    ]


ENDS = """
import os, sys
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train():
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
if os.fork() == 0:
    train()
    os._exit(0)
os.wait()
train()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.soak  # near: test_a_bare_fork_that_unwinds_to_the_end
def test_ends_that_run_no_exit_handlers(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(ENDS)
    done = run_stepscope("run", "--quiet", "script.py")
    assert (done.code, done.stderr) == (0, "")
    summary = json.loads((done.run_dir / "summary.json").read_text())
    # The child is a helper of its rank, not an attempt of its own.
    assert [(row["steps"], row["state"]) for row in summary["ranks"]] == [(4, "exited")]
    assert summary["attempts"] == []
    assert summary["status"] == "finished"
    assert [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"] == []


FORKED = """
import os, sys
import stepscope
def train():
    for _ in range(4):
        with stepscope.step():
            pass
    if sys.argv[1] == "raises":
        raise ValueError("no such batch")
if os.fork() == 0:
    train()  # and on to the end of the script, as a rank of its own
else:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(
    ("how", "state", "status"),
    [("raises", "exception", "failed"), pytest.param("ends", "exited", "finished", marks=pytest.mark.soak)],
)
def test_a_bare_fork_that_unwinds_to_the_end(
    run_stepscope: Run, script: Callable[..., Path], how: str, state: str, status: str
) -> None:
    script(FORKED)
    done = run_stepscope("run", "--quiet", "script.py", how)
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert [(row["steps"], row["state"]) for row in summary["ranks"]] == [(4, state)]
    assert (summary["status"], done.code) == (status, int(how == "raises"))
    errors = [(error["type"], error["message"], error["step"]) for error in summary["errors"]]
    assert errors == ([("ValueError", "no such batch", 4)] if how == "raises" else [])


@pytest.mark.soak  # near: names that are taken and sessions of their own, in tests/store/test_create.py
def test_two_runs_at_once_do_not_meet(commands: Any, toy: Path, tmp_path: Path) -> None:
    started = [commands.start("run", "--quiet", "--name", "same", toy, "--steps", str(20 + n)) for n in range(2)]
    for process in started:
        assert commands.finish(process).code == 0
    summaries = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("same", "same-2")]
    assert sorted(summary["steps"]["total"] for summary in summaries) == [20, 21]
    assert {summary["world_size"] for summary in summaries} == {1}
    assert {summary["status"] for summary in summaries} == {"finished"}


@pytest.mark.ranks
def test_torchrun_itself_restarts_and_each_attempt_is_kept(run_stepscope: Run, script: Callable[..., Path]) -> None:
    """``stepscope run torchrun --max-restarts 1 …``: the first attempt fails, the second does not.

    Rank 0 fails once rank 1 is as far: torchrun ends a rank that has barely started together with the one that failed.
    """
    script(
        """
        import os, pathlib, signal, time
        import stepscope
        reached = pathlib.Path("rank-1-is-here")
        for step in range(8):
            with stepscope.step():
                pass
            if step < 3 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
                continue
            if os.environ["RANK"] == "1":
                reached.touch()
                signal.pause()  # until torchrun ends it
            while not reached.exists():
                time.sleep(0.01)
            raise AssertionError
        """
    )
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or "torchrun"
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    done = run_stepscope("run", "--quiet", torchrun, *options, "script.py")
    assert done.code == 0, done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["run"]["attempt"], summary["run"]["attempts"]) == ("finished", 1, 2)
    assert [(row["rank"], row["steps"]) for row in summary["ranks"]] == [(0, 8), (1, 8)]
    assert summary["notices"] == []
    assert [(row["attempt"], row["ranks"], row["last_step"], row["end"]) for row in summary["attempts"]] == [
        (0, 2, 3, "rank 0 raised AssertionError (in step 4)"),
        (1, 2, 7, "ended normally"),
    ]
    logs = {"logs/main.log", *(f"logs/rank-{rank}{end}.log" for rank in (0, 1) for end in ("", ".attempt-1"))}
    assert set(summary["logs"]) == logs
