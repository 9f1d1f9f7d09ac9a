"""Ranks that exchange gradients rarely, by design, or never, by mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

JOB = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def train(rank, meet, kind):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    if kind != "alone":
        model = nn.parallel.DistributedDataParallel(model)
    data = TensorDataset(torch.randn(8 * 2 * 60, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x,) in enumerate(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))):
        if kind == "local":
            with model.no_sync():
                loss = model(x).pow(2).mean()
                loss.backward()
        else:
            loss = model(x).pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "local" and step % 8 == 7:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
        if step % 10 == 0:
            dist.all_reduce(loss.detach().clone())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=(os.path.abspath("meet"), sys.argv[1]), nprocs=2, start_method="fork")
"""
WRONG = {"replica_desync", "no_gradient_exchange"}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["alone", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("local", "ddp"))])
def test_an_exchange_that_is_missing_is_reported_and_averaging_is_not(
    run_stepscope: Run, script: Callable[..., Path], kind: str
) -> None:
    done = run_stepscope("run", "--quiet", script(JOB, "train.py"), kind)
    assert (done.code, done.stderr) == (0, "")
    summary = json.loads((done.run_dir / "summary.json").read_text())
    found = [finding for finding in summary["findings"] if finding["kind"] in WRONG]
    if kind != "alone":
        assert found == []
        assert not [line for finding in summary["findings"] for line in finding["advice"] if "network" in line]
        return
    (wrong,) = found
    assert wrong == summary["findings"][0]
    assert (wrong["severity"], wrong["ranks"]) == ("critical", [])
    assert wrong["title"] == (
        "2 ranks split the data (DistributedSampler) but never exchange gradients: each trains a different model."
    )
    assert (wrong["evidence"]["most_exchanged_bytes"], wrong["evidence"]["model_bytes"]) == (4, 4 * (544 + 1056 + 33))
