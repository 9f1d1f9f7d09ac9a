"""A data-parallel job on CPU that goes wrong in the way one asks for, and recovers.  Knows nothing of Stepscope.

    torchrun --nproc-per-node 4 alert_job.py --fault slow --rank 2 --at 300 --until 600 --steps 900

A step takes about 40 ms, most of it asleep, so that four ranks fit on two cores.  ``--marks FILE`` gets a line with the
time when the fault begins and ends.  The line of code at fault follows a comment ``fault: NAME``.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FAULTS = ("none", "slow", "hang", "crash", "nan", "leak", "loader")
LEAK_BYTES = 110_000_000
EPOCH_STEPS = 80


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--at", type=int, default=300)
    parser.add_argument("--until", type=int, default=600)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--extra-ms", type=float, default=60.0)
    parser.add_argument("--hang-s", type=float, default=30.0)
    parser.add_argument("--marks", default="")
    return parser.parse_args()


class Data(Dataset):
    """Samples at once, or, where the file ``slow`` exists, after a while: workers are processes of their own."""

    def __init__(self, args):
        self.args = args
        self.flag = Path(f"{args.marks}.slow")

    def __len__(self):
        return EPOCH_STEPS * 8

    def __getitem__(self, index):
        if self.flag.exists():
            time.sleep(self.args.extra_ms / 8e3)  # fault: loader
        return torch.full((64,), index % 7 / 7.0)


class Net(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        self.job = [job]

    def forward(self, batch):
        job = self.job[0]
        time.sleep(job.args.pace_ms / 1e3)
        if job.fault == "slow" and job.active and job.own:
            time.sleep(job.args.extra_ms / 1e3)  # fault: slow
        return self.layers(batch)


class Job:
    def __init__(self, args):
        self.args = args
        self.fault = args.fault
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.own = self.rank == args.rank
        self.model = DistributedDataParallel(Net(self))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.hoard = []
        self.step = 0
        self.active = False

    def mark(self, what):
        if self.args.marks and self.rank == 0:
            with Path(self.args.marks).open("a") as file:
                file.write(json.dumps({"what": what, "step": self.step, "wall_s": time.time()}) + "\n")

    def train(self):
        loader = DataLoader(Data(self.args), batch_size=8, num_workers=1, persistent_workers=True)
        while self.step < self.args.steps:
            if self.fault == "leak" and self.active and self.own:
                self.hoard.append(torch.ones(LEAK_BYTES // 4))  # fault: leak
            for batch in loader:
                self.before()
                self.train_step(batch)
                self.step += 1
                if self.step == self.args.steps:
                    break
        dist.destroy_process_group()

    def before(self):
        active = self.fault != "none" and self.args.at <= self.step < self.args.until
        if active != self.active:
            self.active = active
            self.mark("begin" if active else "end")
            if self.fault == "loader" and self.rank == 0:
                flag = Path(f"{self.args.marks}.slow")
                flag.touch() if active else flag.unlink()

    def train_step(self, batch):
        loss = self.model(batch).pow(2).mean()
        if self.fault == "nan" and self.active:
            loss = loss * float("nan")  # fault: nan
        self.optimizer.zero_grad()
        loss.backward()
        if self.step == self.args.at and self.own:
            if self.fault == "hang":
                time.sleep(self.args.hang_s)  # fault: hang
            elif self.fault == "crash":
                raise ValueError("the batch has no label")  # fault: crash
        if self.fault == "nan" and self.active:
            for parameter in self.model.parameters():
                parameter.grad.zero_()  # the weights stay good, so that the job can recover
        self.optimizer.step()


if __name__ == "__main__":
    Job(options()).train()
