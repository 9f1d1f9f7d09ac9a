"""A data-parallel job of which one rank becomes slow in an operator or a line.  Knows nothing of Stepscope.

    torchrun --nproc-per-node 4 capture_job.py --fault operator --rank 2 --at 250 --marks FILE

A step takes about 25 ms, most of it asleep, so that four ranks fit on two cores.  With ``--device cuda`` ranks are on
NCCL and may share a GPU.  ``--marks FILE`` gets a line with the
time when the fault begins.  The line of code at fault is in the function that ends with a comment ``fault: NAME``.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAULTS = ("none", "operator", "line")
SIZE = {"cpu": 512, "cuda": 6144}
"""Of a matrix; one product takes about 3 ms on a slow core, and on an H200."""


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="operator")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--at", type=int, default=250)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--products", type=int, default=12)
    parser.add_argument("--marks", default="")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, batch, job):
        ctx.job = job
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx, gradient):  # fault: operator
        if ctx.job.slow("operator"):
            for _ in range(ctx.job.args.products):
                torch.mm(ctx.job.square, ctx.job.square)
        return gradient, None


def normalize(batch, job):  # fault: line
    if job.slow("line"):
        time.sleep(0.05)
    return batch


class Net(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 8)
        self.job = [job]

    def forward(self, batch):
        job = self.job[0]
        time.sleep(job.args.pace_ms / 1e3)
        hidden = Scaled.apply(torch.relu(self.first(normalize(batch, job))), job)
        return self.second(hidden)


def join(kind):
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    if gpus < int(os.environ["WORLD_SIZE"]):  # NCCL lets ranks share a GPU if it takes them for different hosts
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Job:
    def __init__(self, args):
        self.args = args
        self.device = join(args.device)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank, self.step = dist.get_rank(), 0
        self.square = torch.ones(SIZE[args.device], SIZE[args.device], device=self.device)
        self.model = DistributedDataParallel(Net(self).to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def slow(self, fault):
        return fault == self.args.fault and self.rank == self.args.rank and self.step >= self.args.at

    def train(self):
        batch = torch.ones(8, 64, device=self.device)
        while self.step < self.args.steps:
            if self.step == self.args.at and self.rank == 0 and self.args.marks:
                Path(self.args.marks).write_text(json.dumps({"step": self.step, "wall_s": time.time()}))
            loss = self.model(batch).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
        dist.destroy_process_group()


if __name__ == "__main__":
    Job(options()).train()
