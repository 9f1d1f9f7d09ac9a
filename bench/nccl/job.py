"""A training job on NCCL with one fault; several ranks may share one GPU.

    torchrun --standalone --nproc-per-node 2 bench/nccl/job.py --strategy ddp --fault backward:device:1:20

A fault is WHERE:SIDE:RANK:MS[:FROM_STEP].  WHERE is input, forward, backward, optimizer or between; SIDE is ``host``
(Python sleeps) or ``device`` (a kernel that lasts so long is launched; on a CPU, a busy loop).  It ends after
``--steps`` steps; ``--clean`` more follow without it.  So one process has steps with and without the fault, and the
difference between them is what it costs: two processes on one machine differ by more than a small fault does.

Rank 0 prints one line of JSON at the end (and writes it to ``--out``): how long the steps with and without the fault
took by the wall clock.  Nothing in the loop waits for the device but where one kind of steps ends.

NCCL refuses two ranks on one GPU of one host, and ``NCCL_HOSTID`` decides what a host is: with fewer GPUs than ranks
every rank is a host of its own, and NCCL talks over loopback.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["Fault", "Gate", "Net", "Optimizer", "Samples", "join", "shard", "span_ms", "spans"]

SETTLE = 10
"""Steps after the fault's end that are neither with nor without it."""
LAYERS = 6
WIDTH = {"cuda": 256, "cpu": 128}
"""1.5 MB of gradients on a GPU.  Ranks that share one talk over loopback, a hundred times slower than over NVLink: with
24 MB the exchange took a third of the step, and 20 to 30% longer when all ranks came at the same time (what is sent
early waits in a socket's buffer), so that a job without its fault had a longer exchange than with it."""
BUCKET_MB = 0.5
"""Two layers; the first one has a bucket of its own."""
FORWARD_MS, BACKWARD_MS = 1.5, 3.0
"""Of device time in each layer, in a kernel that sleeps: ranks that share a GPU would slow each other down with real
work, and so little work as they could do side by side would leave the host as what every step waits for."""
CYCLES = 20_000_000
"""Of the kernel by which the device's clock is measured: about 10 ms."""
GATE_TIMEOUT = datetime.timedelta(minutes=15)


class Fault:
    def __init__(self, text: str, rank: int, until: int) -> None:
        where, side, at_rank, ms, from_step = (
            (*text.split(":"), "0")[:5] if text != "none" else ("", "", "-1", "0", "0")
        )
        self.where, self.side, self.ms, self.from_step = where, side, float(ms), int(from_step)
        self.until = until
        self.mine = rank == int(at_rank)
        self.step = 0
        self.cycles = 0
        """How many the device counts in that time; 0: there is no device."""
        self.cycles_per_ms = 0.0

    def work(self, ms: float) -> None:
        """What every rank does in a layer."""
        if self.cycles_per_ms:
            torch.cuda._sleep(int(ms * self.cycles_per_ms))

    def strike(self, where: str) -> None:
        if not (self.mine and where == self.where and self.from_step <= self.step < self.until):
            return
        if self.side == "host":
            time.sleep(self.ms / 1e3)
        elif self.cycles:
            torch.cuda._sleep(self.cycles)
        else:
            end = time.perf_counter() + self.ms / 1e3
            while time.perf_counter() < end:
                pass

    def measure_clock(self) -> None:
        """A kernel sleeps by cycles, and nobody says how long those are."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one loads the kernel
            begin.record()
            torch.cuda._sleep(CYCLES)
            end.record()
            end.synchronize()
        self.cycles_per_ms = CYCLES / begin.elapsed_time(end)
        self.cycles = int(self.ms * self.cycles_per_ms)


class InBackward(torch.autograd.Function):
    """A layer's work in backward and, in one of them, the fault."""

    @staticmethod
    def forward(ctx: Any, x: Any, fault: Fault, strikes: bool) -> Any:
        ctx.fault, ctx.strikes = fault, strikes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        ctx.fault.work(BACKWARD_MS)
        if ctx.strikes:
            ctx.fault.strike("backward")
        return grads[0], None, None


class Net(nn.Module):
    """The fault of the forward pass comes before the layers, that of the backward pass in the middle of them."""

    def __init__(self, fault: Fault, width: int) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        self.fault.strike("forward")
        for number, layer in enumerate(self.layers):
            x = InBackward.apply(layer(x), self.fault, number == LAYERS // 2)
            self.fault.work(FORWARD_MS)
        return x


class Optimizer(torch.optim.SGD):
    fault: Fault

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        self.fault.strike("optimizer")
        return super().step(closure)


class Samples(torch.utils.data.Dataset):
    def __init__(self, count: int, batch: int, width: int, fault: Fault) -> None:
        self.count, self.fault = count, fault
        self.sample = torch.randn(batch, width)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.fault.strike("input")
        return self.sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2", "tp"), default="ddp")
    parser.add_argument("--fault", default="none", metavar="WHERE:SIDE:RANK:MS[:FROM]")
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="steps without the fault after those")
    parser.add_argument("--warm", type=int, default=30, help="first steps that are not measured")
    parser.add_argument("--batch", type=int, help="default: 1024, or 32 on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gate", type=Path, help="a file to lock before the steps, so that jobs take turns")
    parser.add_argument("--out", type=Path, help="what is measured goes there too")
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(rank, world, args.device)
    fault = Fault(args.fault, rank, args.steps)
    width = WIDTH[args.device]
    batch = args.batch or (1024 if args.device == "cuda" else 32)
    samples = Samples(args.steps + args.clean, batch, width, fault)
    with Gate(args.gate, rank, world):
        if args.device == "cuda":
            fault.measure_clock()
        net = shard(Net(fault, width).to(device), args.strategy, world)
        optimizer = Optimizer(net.parameters(), lr=1e-4)
        optimizer.fault = fault
        loader = torch.utils.data.DataLoader(samples, batch_size=None, pin_memory=args.device == "cuda")
        marks = spans(args.steps, args.clean, args.warm, fault.from_step if fault.where else 0)
        ends = _train(net, optimizer, loader, fault, device, {at for pair in marks.values() for at in pair})
        # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
        del net
    if rank == 0:
        measured = json.dumps({name: span_ms(ends, *pair) for name, pair in marks.items()})
        print(measured, flush=True)
        if args.out:
            args.out.write_text(measured + "\n")
    dist.destroy_process_group()


def join(rank: int, world: int, kind: str) -> Any:
    """Be this rank of the job, on the device that is returned."""
    if kind == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < world:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ["NCCL_IB_DISABLE"] = "1"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def shard(net: Any, strategy: str, world: int) -> Any:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    if strategy == "fsdp2":
        for layer in net.layers:
            fully_shard(layer)
        return fully_shard(net)
    device = "cuda" if next(net.parameters()).is_cuda else "cpu"
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    styles = (ColwiseParallel(), RowwiseParallel())
    plan = {f"layers.{number}.0": styles[number % 2] for number in range(LAYERS)}
    return parallelize_module(net, mesh, plan)


class Gate:
    """One job at a time between the gate's locks: rank 0 holds it, the others wait for rank 0.

    They wait for keys of the job's store: a barrier of NCCL is a kernel that spins, and would take time on the device
    from the job whose turn it is.
    """

    def __init__(self, path: Path | None, rank: int, world: int) -> None:
        self.path, self.rank, self.world = path, rank, world
        self.file: Any = None
        self.count = 0
        self.store: Any = dist.distributed_c10d._get_default_store()

    def __enter__(self) -> None:
        self.gather()
        if self.path and self.rank == 0:
            self.file = self.path.open("a")
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.follow()

    def __exit__(self, *failure: object) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if failure[0] is None:
            self.gather()
        if self.file:
            self.file.close()
        if failure[0] is None:
            self.follow()

    def gather(self) -> None:
        """Rank 0 goes on when all ranks are here."""
        self.count += 1
        if self.rank:
            self.store.set(f"gate/{self.count}/{self.rank}", "here")
        else:
            self.store.wait([f"gate/{self.count}/{rank}" for rank in range(1, self.world)], GATE_TIMEOUT)

    def follow(self) -> None:
        """The others go on when rank 0 is here."""
        self.count += 1
        if self.rank:
            self.store.wait([f"gate/{self.count}"], GATE_TIMEOUT)
        else:
            self.store.set(f"gate/{self.count}", "open")


def _train(net: Any, optimizer: Any, loader: Any, fault: Fault, device: Any, waits: set[int]) -> list[float]:
    """When each step ended for the host; it waits for the device after as many steps as ``waits`` says."""
    ends = [time.perf_counter()]
    batches = iter(loader)
    for step in range(len(loader)):
        fault.step = step
        x = next(batches).to(device, non_blocking=True)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fault.strike("between")
        if device.type == "cuda" and step + 1 in waits:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return ends


def spans(steps: int, clean: int, warm: int, from_step: int) -> dict[str, tuple[int, int]]:
    """Which steps are measured: ``with`` the fault (all of a healthy job), ``before`` it and ``after`` it."""
    found = {"with": (max(warm, from_step), steps)}
    if from_step > warm:
        found["before"] = (warm, from_step)
    if clean > SETTLE:
        found["after"] = (steps + SETTLE, steps + clean)
    return found


def span_ms(ends: Sequence[float], first: int, stop: int) -> dict[str, float]:
    """Steps ``first`` to ``stop`` (not with it); ``ends`` begins with the loop's start."""
    laps = [(after - before) * 1e3 for before, after in zip(ends[first:stop], ends[first + 1 : stop + 1], strict=True)]
    whole = (ends[stop] - ends[first]) * 1e3 / (stop - first)
    return {"step_ms": round(whole, 4), "median_ms": round(statistics.median(laps), 4), "steps": stop - first}


if __name__ == "__main__":
    main()
