"""What the jobs that stop, and those that only seem to, are made of.  Knows nothing of Stepscope.

A job of these never outlives its deadline: the kernel ends each process by an alarm, and one that is stopped and hears
no alarm dies with the process that started it.
"""

import argparse
import ctypes
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 32
BATCH = 4
PR_SET_PDEATHSIG = 1


def limit_life(seconds):
    """The alarm ends this process whatever it does then, also with the GIL held, but not while it is stopped."""
    signal.alarm(seconds)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def options(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pause-ms", type=float, default=50.0, help="after each step")
    parser.add_argument("--deadline", type=int, default=90, help="seconds after which nothing of the job is left")
    parser.add_argument("--marks", type=Path, help="file that gets a line of JSON when something of note begins")
    return parser


class Items(Dataset):
    """Numbers without end, for practical purposes; ``before(batch)`` is called when the first of a batch is fetched."""

    def __init__(self, before, length=1_000_000):
        self.before, self.length = before, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index % BATCH == 0:
            self.before(index // BATCH)
        return torch.full((WIDTH,), index % 7 / 7), torch.tensor([1.0])


class Job:
    """A process group, a small net and a loop: what every job here begins with."""

    def __init__(self, args):
        self.args = args
        limit_life(args.deadline)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.ranks > 1:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 * args.deadline))
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.model = self.net
        self.optimizer = None

    def data_parallel(self):
        if self.ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loader(self, before=lambda batch: None, workers=0, length=1_000_000):
        deadline = self.args.deadline
        started = {"worker_init_fn": lambda _: limit_life(deadline)} if workers else {}
        return DataLoader(Items(before, length), batch_size=BATCH, num_workers=workers, **started)

    def step(self, batch):
        """Forward, backward, optimizer; the loss."""
        x, y = batch
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        time.sleep(self.args.pause_ms / 1000)
        return loss.detach()

    def say(self, step, loss):
        """The loss, exactly, in one write, which the lines of other ranks cannot come between."""
        sys.stdout.write(f"rank {self.rank} step {step} loss {loss.item().hex()}\n")
        sys.stdout.flush()

    def mark(self, what, **more):
        """Write down that this begins now."""
        if self.args.marks:
            line = {"what": what, "rank": self.rank, "pid": os.getpid(), "wall_ns": time.time_ns(), **more}
            with self.args.marks.open("a") as marks:
                marks.write(json.dumps(line) + "\n")

    def end(self):
        if self.ranks > 1:
            # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
            self.model = self.optimizer = None
            dist.destroy_process_group()
