"""A DDP communication hook that takes long on all ranks: it is neither waiting nor transfer, and is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

Run = Callable[..., Any]

HOOK = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def average(bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

def slow_call(state, bucket):
    time.sleep(0.05)
    return average(bucket).then(lambda future: future.value()[0] / 2)

def slow_reply(state, bucket):
    def scale(future):
        time.sleep(0.05)
        return future.value()[0] / 2
    return average(bucket).then(scale)

def train(rank, meet, hook):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    model.register_comm_hook(None, hook)
    assert model._comm_hooks == [(hook, None)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        loss = model(torch.randn(8, 16)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(loss.item().hex(), flush=True)
    dist.destroy_process_group()
    # Otherwise one bare run in eight hangs: a thread of gloo that destroys the reply's function needs the GIL, while
    # the main thread holds it and waits for that thread.
    os._exit(0)

if __name__ == "__main__":
    hook = {"call": slow_call, "reply": slow_reply}[sys.argv[1]]
    mp.start_processes(train, args=(os.path.abspath("meet"), hook), nprocs=2, start_method="fork")
"""


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["call", pytest.param("reply", marks=pytest.mark.soak)])
def test_a_slow_hook_is_named(run_stepscope: Run, run_python: Run, script: Callable[..., Path], where: str) -> None:
    path = script(HOOK, "train.py")
    done = run_stepscope("run", "--quiet", path, where)
    assert (done.code, done.stderr) == (0, "")
    if where == "reply":
        (path.parent / "meet").unlink(missing_ok=True)
        assert done.stdout == run_python(path, where).stdout, "the numbers are those of the script alone"
    summary = json.loads((done.run_dir / "summary.json").read_text())
    first = summary["findings"][0]
    line = next(number for number, text in enumerate(HOOK.splitlines(), 1) if f"def slow_{where}" in text)
    hook = f"slow_{where}, train.py:{line}"
    assert summary["facts"]["ddp"]["comm_hook"] == hook
    assert (first["kind"], first["ranks"]) == ("comm_hook_bound", [])
    assert first["severity"] in ("warning", "critical")
    if first["phase"] == "comm":
        assert where == "reply"
        assert f"DDP's communication hook ({hook}) runs in it." in first["title"]
    else:  # an exchange that is over at once replies within the call of the hook
        assert first["phase"] == "comm_hook"
        assert f"slow_{where}" in first["title"]
    assert [series.hook_failures for series in open_run(done.run_dir).ranks] == [0, 0]
