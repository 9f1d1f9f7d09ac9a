"""A small data-parallel job on NCCL that stops, or only looks as if it did; several ranks may share one GPU.

    torchrun --standalone --nproc-per-node 2 bench/nccl/hang_job.py --do sleep --rank 1 --step 20

In step ``--step`` rank ``--rank`` does what ``--do`` says.  The line on which its host then stands follows a comment
``stops: NAME``, by which ``nccl/hangs.py`` finds it.  ``--marks FILE`` gets a line of JSON when it begins.  Nothing
waits for the device but every tenth step, so that hosts run ahead as they do in real jobs.  ``--device cpu`` runs on
gloo.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, BATCH = 512, 4, 64
COUNTS = 1 << 20
"""Of what the ranks share each step: so many that NCCL sends them in pieces."""
GHZ = 1.98
"""The clock of an H200, by which a kernel that sleeps counts."""
FOREVER_S = 3600.0
READ_EVERY = 10


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Job:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = args.device == "cuda"
        if args.do == "late_init" and self.rank == args.rank:
            self.mark()
            time.sleep(args.seconds)
        self.device = self.join()
        net = Net().to(self.device)
        self.net = self.sharded(net) if args.strategy == "fsdp2" else nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.counts = torch.ones(COUNTS, device=self.device)

    def join(self) -> torch.device:
        """NCCL refuses two ranks on one GPU of one host: with fewer GPUs than ranks each rank is a host of its own."""
        timeout = datetime.timedelta(seconds=self.args.timeout) if self.args.timeout else None
        if not self.cuda:
            dist.init_process_group("gloo", timeout=timeout)
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        if gpus < self.ranks:
            os.environ["NCCL_HOSTID"] = f"host{self.rank}"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            os.environ["NCCL_IB_DISABLE"] = "1"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
        return device

    def sharded(self, net: Net) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.args.device, (self.ranks,))
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        sharded: Any = fully_shard(net, mesh=mesh)
        return sharded

    def mark(self) -> None:
        if self.args.marks:
            line = {"do": self.args.do, "rank": self.rank, "wall_ns": time.time_ns()}
            with self.args.marks.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def train(self) -> None:
        for step in range(self.args.steps):
            loss = self.step()
            if step % READ_EVERY == READ_EVERY - 1:
                loss.item()
            hit = step == self.args.step and self.rank == self.args.rank
            if hit and self.args.do in ON_HOST:
                self.mark()
                ON_HOST[self.args.do](self)
            if step == self.args.step and self.args.do in MEETING:
                dist.barrier()  # the others wait here for what one of them did
            self.share(hit=hit)
        self.finish()

    def step(self) -> torch.Tensor:
        x = torch.randn(BATCH, WIDTH, device=self.device)
        loss: torch.Tensor = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def finish(self) -> None:
        dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()

    # -- collectives --------------------------------------------------------------------------------------------------

    def share(self, *, hit: bool) -> None:
        """Add up what the ranks counted."""
        if hit and self.args.do in IN_SHARE:
            self.mark()
            IN_SHARE[self.args.do](self)
        else:
            dist.all_reduce(self.counts)
            self.counts.fill_(1.0)

    def skip(self) -> None:
        pass

    def size(self) -> None:
        # stops: size
        dist.all_reduce(torch.ones(2 * COUNTS, device=self.device))
        self.wait()

    def op(self) -> None:
        # stops: op
        dist.all_gather([torch.empty_like(self.counts) for _ in range(self.ranks)], self.counts)
        self.wait()

    def recv(self) -> None:
        # stops: recv
        dist.recv(torch.empty(8, device=self.device), src=(self.rank + 1) % self.ranks)
        self.wait()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # -- the host -----------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        # stops: sleep
        time.sleep(FOREVER_S)

    def lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        # stops: lock
        lock.acquire()

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kernel(self) -> None:
        torch.cuda._sleep(int(FOREVER_S * 1e9 * GHZ))

    # -- no hangs -----------------------------------------------------------------------------------------------------

    def long_kernel(self) -> None:
        torch.cuda._sleep(int(self.args.seconds * 1e9 * GHZ))

    def save_checkpoint(self) -> None:
        path = Path(self.args.marks or "/tmp/hang_job").with_suffix(f".{os.getpid()}.pt")
        until = time.monotonic() + self.args.seconds
        while time.monotonic() < until:
            torch.save({"counts": self.counts, "net": self.net.state_dict()}, path)
        path.unlink(missing_ok=True)

    def evaluate(self) -> None:
        net = self.net.module if isinstance(self.net, nn.parallel.DistributedDataParallel) else self.net
        until = time.monotonic() + self.args.seconds
        with torch.no_grad():
            while time.monotonic() < until:
                net(torch.randn(BATCH, WIDTH, device=self.device)).sum().item()


ON_HOST = {
    "sleep": Job.sleep,
    "lock": Job.lock,
    "stop": Job.stop,
    "kill": Job.kill,
    "kernel": Job.kernel,
    "long_kernel": Job.long_kernel,
    "checkpoint": Job.save_checkpoint,
    "evaluate": Job.evaluate,
}
IN_SHARE = {"skip": Job.skip, "size": Job.size, "op": Job.op, "recv": Job.recv}
MEETING = ("checkpoint", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--do", choices=("nothing", "late_init", *ON_HOST, *IN_SHARE), default="nothing")
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=25)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=25.0, help="how long the long things take that are no hangs")
    parser.add_argument("--timeout", type=float, help="of the process group, in seconds")
    parser.add_argument("--marks", type=Path)
    job = Job(parser.parse_args())
    job.train()
    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del job
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
