"""Facts of whole runs: from the live objects of several ranks to the sealed run and its summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

Run = Callable[..., Any]

DDP = """
import os, warnings
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 256), nn.Linear(256, 1024), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
    def forward(self, x):
        return self.used(self.frozen(x))

class Wrapper(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.inner = DistributedDataParallel(Net(), **kwargs)
        self.norm = nn.SyncBatchNorm(4)  # DDP takes none on a CPU
    def forward(self, x):
        return self.inner(x)

def train(rank, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    groups = [dist.new_group([0]), dist.new_group([1])]
    options = dict(find_unused_parameters=True, bucket_cap_mb=3, gradient_as_bucket_view=True, broadcast_buffers=False)
    warnings.simplefilter("ignore", FutureWarning)  # torch is about to give broadcast_buffers another name
    if os.environ["KIND"] == "stages":
        options["process_group"] = groups[rank]
    model = Wrapper(**options)
    data = TensorDataset(torch.zeros(24, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        if os.environ["KIND"] == "stages":
            sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=(os.path.abspath("meet"),), nprocs=2, start_method="fork")
"""


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["world", pytest.param("stages", marks=pytest.mark.soak)])
def test_ddp(run_stepscope: Run, script: Callable[..., Path], kind: str) -> None:
    script(DDP)
    done = run_stepscope("run", "--quiet", "script.py", env={"KIND": kind})
    assert (done.code, done.stderr) == (0, "")
    facts = [series.facts for series in open_run(done.run_dir).ranks]
    gradients = 4 * 256 + 256 + 256 * 1024 + 1024
    for rank, found in enumerate(facts):
        assert found["ddp"] == {
            "bucket_mb": 3.0,
            "find_unused_parameters": True,
            "static_graph": False,
            "gradient_as_bucket_view": True,
            "broadcast_buffers": False,
            "gradient_mb": round(gradients * 4 / 2**20, 3),
            "group": "default_pg" if kind == "world" else f"group {rank + 1}",
            "buckets": 1,
            "bucket_sizes_mb": [round(gradients * 4 / 2**20, 3)],
            "tensors": 4,
            "batchnorm": 0,
            "iterations": 2,
            "unused": "same",
        }
        assert found["process_group_open"] is False
        assert found["peers"] == ([[0, 2, 1]] if kind == "world" else [[rank, 1, 1]])
        assert (found["model"]["class"], found["model"]["modules"]) == ("Wrapper", 7)
        assert (found["model"]["batchnorm"], found["model"]["sync_batchnorm"]) == (0, 1)
        assert found["model"]["parameters"] == gradients + 4 * 4 + 4 + 4 + 4
        assert (found["loader"]["num_workers"], found["loader"]["sampler"]) == (rank, "DistributedSampler")
        assert found["loader"]["set_epoch_missing"] is (kind == "world")
        assert found["loader"]["length"] == 3
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert summary["facts"] == facts[0]
    assert summary["facts_differ"] == ["loader.num_workers", "loader.prefetch_factor"]
    assert [row["hook_failures"] for row in summary["ranks"]] == [0, 0]


MESH = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.up(x).relu()).clone()

def train(rank, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=(os.path.abspath("meet"),), nprocs=4, start_method="fork")
"""


@pytest.mark.soak
@pytest.mark.ranks
def test_a_mesh_of_data_and_tensor_parallelism(run_stepscope: Run, script: Callable[..., Path]) -> None:
    script(MESH)
    done = run_stepscope("run", "--quiet", "script.py")
    assert done.code == 0, done.stderr
    ranks = open_run(done.run_dir).ranks
    # Ranks that share a layer have the same work as those that share a batch: all are compared.
    assert [series.facts["peers"] for series in ranks] == [[[0, 4, 1]]] * 4
    for series in ranks:
        assert series.hook_failures == 0
        assert series.facts["mesh"] == {"names": ["dp", "tp"], "shape": [2, 2]}
        assert (series.facts["model"]["class"], series.facts["model"]["parameters"]) == ("Net", 280)
        assert "ddp" not in series.facts
        fsdp = series.facts["fsdp"]
        assert (fsdp["version"], fsdp["units"], fsdp["parameters"], fsdp["strategy"]) == (2, 1, 280, "full_shard")
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert summary["settings"] == ["FSDP2: 1 unit, kept after forward, fp32 parameters, fp32 reduction, no offload"]
