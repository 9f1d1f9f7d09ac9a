"""A real elastic job: two torchruns that meet, one of which joins late and is killed; all of it is one run."""

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

dist.init_process_group("gloo")
rank, world, counted = dist.get_rank(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
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
        Path(f"of-{world}-counted-{counted}").touch()
    step += 1
    time.sleep(0.01)
dist.destroy_process_group()
"""

DRIVER = """
import os, signal, socket, subprocess, sys, time
from pathlib import Path

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]

def torchrun(host):
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "elastic"]
    conf = f"is_host={host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    options += ["--rdzv-conf", conf]
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *options, "train.py"])

def until(name, job):
    while not Path(name).exists():
        assert job.poll() is None, f"over before {name}"
        time.sleep(0.05)

first = torchrun(host=1)
until("of-1-counted-0", first)
second = torchrun(host=0)
until("of-2-counted-0", first)
workers = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
for pid in (second.pid, *map(int, workers)):
    os.kill(pid, signal.SIGKILL)
second.wait()
until("of-1-counted-1", first)
Path("over").touch()
sys.exit(first.wait())
"""


@pytest.mark.ranks
def test_a_node_that_joins_and_dies_makes_three_attempts(run_stepscope: Run, script: Callable[..., Path]) -> None:
    """torchrun counts nothing when the second node joins; only its death is a failure to the first."""
    script(TRAIN, "train.py")
    script(DRIVER, "driver.py")
    # torch 2.13 keeps the address of the first round to itself when the rounds share a store: nobody could join.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = run_stepscope("run", "--quiet", "driver.py", env=env)
    assert done.code == 0, done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("finished", 1)
    assert (summary["run"]["attempt"], summary["run"]["attempts"]) == (2, 3)
    rows = summary["attempts"]
    assert [(row["attempt"], row["ranks"], row["world_size"]) for row in rows] == [(0, 1, 1), (1, 2, 2), (2, 1, 1)]
    assert [row["end"].partition(" (")[0] for row in rows] == [
        "started again with 2 ranks",
        "rank 1 vanished without a word",
        "ended in order",
    ]
    assert all(row["last_step"] >= 3 and row["seconds"] > 0 for row in rows)
    assert not [notice for notice in summary["notices"] if "also said" in notice]
    assert not [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"]
    assert "3 attempts; all figures are of attempt 2\n" in (done.run_dir / "summary.txt").read_text()
