"""A training job on NCCL with one fault; several ranks may share one GPU.

    torchrun --standalone --nproc-per-node 2 bench/nccl/job.py --strategy ddp --fault backward:device:1:20

A fault is WHERE:SIDE:RANK:MS[:FROM_STEP].  WHERE is input, forward, backward, optimizer or between; SIDE is ``host``
(Python sleeps) or ``device`` (a kernel that lasts so long is launched).  Rank 0 prints one line of JSON at the end: how
long the steps took by the wall clock, over those that the fault hits (all but the first ``WARM``, without a fault).

NCCL refuses two ranks on one GPU of one host, and ``NCCL_HOSTID`` decides what a host is: with fewer GPUs than ranks
every rank is a host of its own, and NCCL talks over loopback.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WARM = 30
"""Steps before anything is measured."""
WIDTH, LAYERS = 1024, 6
GHZ = 1.98
"""The clock of an H200, by which a kernel that sleeps counts."""


class Fault:
    def __init__(self, text: str, rank: int) -> None:
        where, side, at_rank, ms, from_step = (*text.split(":"), "0")[:5] if text != "none" else ("", "", "-1", "0", "0")
        self.where, self.side, self.ms, self.from_step = where, side, float(ms), int(from_step)
        self.mine = rank == int(at_rank)
        self.step = 0

    def strike(self, where: str) -> None:
        if not (self.mine and where == self.where and self.step >= self.from_step):
            return
        if self.side == "host":
            time.sleep(self.ms / 1e3)
        else:
            torch.cuda._sleep(int(self.ms * 1e6 * GHZ))


class StrikeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fault.strike("backward")
        return grads[0], None


class Net(nn.Module):
    """The fault of the forward pass comes before the layers, that of the backward pass in the middle of them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.strike("forward")
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == LAYERS // 2:
                x = StrikeInBackward.apply(x, self.fault)
        return x


class Optimizer(torch.optim.SGD):
    fault: Fault

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.fault.strike("optimizer")
        return super().step(closure)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int, batch: int, fault: Fault) -> None:
        self.count, self.fault = count, fault
        self.sample = torch.randn(batch, WIDTH)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fault.strike("input")
        return self.sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("ddp", "fsdp2", "tp"), default="ddp")
    parser.add_argument("--fault", default="none", metavar="WHERE:SIDE:RANK:MS[:FROM]")
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--gate", type=Path, help="a file to lock before the steps, so that jobs take turns")
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _join(rank, world)
    fault = Fault(args.fault, rank)
    net = _shard(Net(fault).to(device), args.strategy, world)
    optimizer = Optimizer(net.parameters(), lr=1e-4)
    optimizer.fault = fault
    loader = torch.utils.data.DataLoader(Samples(args.steps, args.batch, fault), batch_size=None, pin_memory=True)
    with _turn(args.gate, rank):
        ends = _train(net, optimizer, loader, fault, device)
    if rank == 0:
        print(json.dumps(_measured(ends, max(WARM, fault.from_step))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _join(rank: int, world: int) -> torch.device:
    gpus = torch.cuda.device_count()
    if gpus < world:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ["NCCL_IB_DISABLE"] = "1"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _shard(net: Net, strategy: str, world: int) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=8)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in net.layers:
            fully_shard(layer)
        return fully_shard(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    styles = (ColwiseParallel(), RowwiseParallel())
    plan = {f"layers.{number}.0": styles[number % 2] for number in range(LAYERS)}
    return parallelize_module(net, mesh, plan)


class _turn:
    """One job at a time between the gate's locks: rank 0 holds it, the others wait for rank 0."""

    def __init__(self, gate: Path | None, rank: int) -> None:
        self.file = gate.open("a") if gate and rank == 0 else None

    def __enter__(self) -> None:
        dist.barrier()
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        dist.barrier()
        torch.cuda.synchronize()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        if self.file:
            self.file.close()


def _train(
    net: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterator[torch.Tensor], fault: Fault, device: torch.device
) -> list[float]:
    """When each step ended for the host; nothing waits for the device but the first and the last step."""
    ends = []
    for step, batch in enumerate(loader):
        fault.step = step + 1
        x = batch.to(device, non_blocking=True)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fault.strike("between")
        if step + 1 in (WARM, fault.from_step):
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    torch.cuda.synchronize()
    ends[-1] = time.perf_counter()
    return ends


def _measured(ends: list[float], first: int) -> dict[str, float]:
    steps = [(after - before) * 1e3 for before, after in zip(ends[first:], ends[first + 1 :], strict=False)]
    whole = (ends[-1] - ends[first]) * 1e3 / (len(ends) - 1 - first)
    return {"step_ms": round(whole, 3), "median_ms": round(statistics.median(steps), 3), "steps": len(steps)}


if __name__ == "__main__":
    main()
