"""Forks of a process that trains on a device: whatever way they are made and end, nothing of ours touches the device.

Without a GPU a stand-in takes CUDA's place (``tests/support/cuda_stand_in.py``): like the real one, its events abort a
forked child that destroys them.  With a GPU, ``make gpu`` has the same forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

FORKS = '''
import gc, multiprocessing, os, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from cuda_stand_in import Device

class Follows(Device):
    """Its clock is the host's, as on a real device, where a step includes what passes between two of them."""
    ms = property(lambda self: time.perf_counter() * 1e3, lambda self, ms: None)


device = Follows()
device.put_into(torch)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def loaders():
    for _ in range(2):  # an evaluation, or the next epoch
        for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=2):
            train(1)


def persistent():
    loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            train(1)


def processes():
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join()
    print("code", child.exitcode)


def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        print(sum(workers.map(abs, range(-3, 3))))


def bare(end):
    child = os.fork()
    if not child:
        gc.collect()
        end(0)
    print("status", os.waitpid(child, 0)[1])


def grandchild():
    child = os.fork()
    if not child:
        inner = os.fork()
        sys.exit(0 if not inner else os.waitpid(inner, 0)[1])
    print("status", os.waitpid(child, 0)[1])


def inside_a_phase():
    import stepscope
    for _ in range(10):
        hold, let_go = os.pipe()
        with stepscope.phase("forking"):
            child = os.fork()
            if not child:
                os.read(hold, 1)  # the phase ends in the child when its parent has gone on
        if not child:
            os._exit(0)
        train(5)
        os.write(let_go, b".")
        os.waitpid(child, 0)


def trains_itself():
    child = os.fork()
    if not child:
        train(3)
        sys.exit(0)
    print("status", os.waitpid(child, 0)[1])


train(24)
sys.stdout.flush()
ways = {"loaders": loaders, "persistent": persistent, "processes": processes, "pool": pool,
        "exit": lambda: bare(sys.exit),
        "quick exit": lambda: bare(os._exit), "grandchild": grandchild, "trains itself": trains_itself,
        "inside a phase": inside_a_phase}
for way in sys.argv[2:]:
    ways[way]()
train(8)
print("end", model.weight.sum().item())
'''
WAYS = ("loaders", "persistent", "processes", "pool", "exit", "quick exit", "grandchild", "inside a phase")
FEW = ("loaders", "exit")
ITSELF = "trains itself"


@pytest.mark.parametrize(
    "ways",
    [FEW, *(pytest.param(ways, marks=pytest.mark.soak) for ways in (WAYS, *((way,) for way in (*WAYS, ITSELF))))],
    ids=", ".join,
)
def test_a_fork_of_a_process_that_uses_a_device(
    run_stepscope: Any, script: Callable[..., Path], root: Path, ways: tuple[str, ...]
) -> None:
    path = script(FORKS)
    words = (str(root / "tests" / "support"), *ways)
    bare = subprocess.run([sys.executable, path, *words], capture_output=True, text=True, check=True, cwd=path.parent)
    done = run_stepscope("run", "--quiet", "script.py", *words)
    assert (done.code, done.stdout, done.stderr) == (0, bare.stdout, "")
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [finding for finding in summary["findings"] if finding["kind"] == "rank_crashed"] == []
    if ITSELF not in ways:  # then there are two, one after the other, of the same rank
        more = {"loaders": 8, "persistent": 8, "inside a phase": 50}
        assert summary["steps"]["total"] == 32 + sum(more.get(way, 0) for way in ways)
        timed = duckdb.sql(f"SELECT count(device_wall_ns) FROM '{done.run_dir}/steps.parquet'").fetchall()
        assert timed[0][0] > 0, "the device was timed"
