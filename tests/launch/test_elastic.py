"""A real elastic job: torchruns that meet, join late, are killed and replaced; all of it is one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

TRAIN = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist

rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
meet = f"file://{Path.cwd()}/meet-{os.environ['MASTER_PORT']}"  # the port is of this round, and may be taken by now
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
over = torch.zeros(1)
step = 0
while not over.item():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    over.fill_(Path("over").exists())
    dist.all_reduce(over)
    if rank == 0 and step == 3:
        Path(f"of-{world}-{os.getpid()}").touch()
    step += 1
    time.sleep(0.01)
dist.destroy_process_group()
"""

DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path

port = sys.argv[1]

def torchrun(host):
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"]
    # A torchrun that a busy machine stops for some seconds is not dead yet.
    conf = f"is_host={host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=15"
    options += ["--rdzv-conf", conf]
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *options, "train.py"])

def until(size, times):
    # So many rounds of that size have made some steps.
    while len(list(Path().glob(f"of-{size}-*"))) < times:
        assert first.poll() is None, f"over before {size}"
        time.sleep(0.05)

first = torchrun(host=1)
until(1, times=1)
second = torchrun(host=0)
until(2, times=1)
if "replace" in sys.argv:
    workers = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    for pid in (second.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    second.wait()
    until(1, times=2)
    second = torchrun(host=0)
    until(2, times=2)
Path("over").touch()
sys.exit(first.wait() or second.wait())
"""
# torch 2.13 keeps the address of the first round to itself when the rounds share a store: nobody could join.
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
Row = tuple[int, int, str]


@pytest.fixture
def attempts(run_stepscope: Run, script: Callable[..., Path], port: Callable[[], int]) -> Callable[..., list[Row]]:
    """Runs the job and gives, per attempt that the summary tells of, its number, its ranks and how it ended."""

    def attempts(*words: str) -> list[Row]:
        script(TRAIN, "train.py")
        script(DRIVER, "driver.py")
        done = run_stepscope("run", "--quiet", "driver.py", str(port()), *words, env=ENV, timeout_s=240)
        assert done.code == 0, done.stderr
        summary = json.loads((done.run_dir / "summary.json").read_text())
        rows = summary["attempts"]
        assert (summary["status"], summary["world_size"]) == ("finished", 2)
        assert (summary["run"]["attempt"], summary["run"]["attempts"]) == (len(rows) - 1, len(rows))
        assert all(row["ranks"] == row["world_size"] and row["last_step"] >= 3 and row["seconds"] > 0 for row in rows)
        assert not [notice for notice in summary["notices"] if "also claimed" in notice]
        assert not [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"]
        text = (done.run_dir / "summary.txt").read_text()
        assert f"{len(rows)} attempts; all figures are from attempt {len(rows) - 1}\n" in text
        return [(row["attempt"], row["ranks"], row["end"].partition(" (")[0]) for row in rows]

    return attempts


@pytest.mark.soak
@pytest.mark.ranks
def test_a_node_that_joins_begins_an_attempt_that_torchrun_does_not_count(
    attempts: Callable[..., list[Row]],
) -> None:
    assert attempts() == [(0, 1, "started again with 2 ranks"), (1, 2, "ended normally")]


@pytest.mark.soak
@pytest.mark.ranks
def test_a_node_that_is_killed_and_one_that_takes_its_place(attempts: Callable[..., list[Row]]) -> None:
    """The death is counted once, by the torchrun that is left; the one that comes for the dead begins at nought."""
    assert attempts("replace") == [
        (0, 1, "started again with 2 ranks"),
        (1, 2, "rank 1 vanished"),
        (2, 1, "started again with 2 ranks"),
        (3, 2, "ended normally"),
    ]
