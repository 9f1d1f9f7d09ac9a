"""A small data-parallel job in which one rank may be slower than the others: what ``stepscope demo`` runs.

Knows nothing of Stepscope.  Started by torchrun:  slow_rank.py --slow-rank 2 --slow-phase forward --slow-ms 30
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PHASES = ("input", "forward", "backward", "optimizer")


class Images(Dataset):
    """Random pictures with a label each."""

    def __init__(self, length, pause_s):
        self.length = length
        self.pause_s = pause_s
        self.picture = torch.randn(1, 16, 16)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return self.picture, index % 10


class Pause(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 12 * 12, 10)

    def forward(self, x):
        time.sleep(self.forward_s)
        return self.head(Pause.apply(self.features(x), self.backward_s))


class SlowSGD(torch.optim.SGD):
    pause_s = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        time.sleep(self.pause_s)
        return super().step(closure)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-phase", choices=PHASES, default="forward")
    parser.add_argument("--slow-ms", type=float, default=30.0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pause = dict.fromkeys(PHASES, 0.0)
    if rank == args.slow_rank:
        pause[args.slow_phase] = args.slow_ms / 1000

    batch = 16
    data = DataLoader(Images(batch * args.steps, pause["input"] / batch), batch_size=batch)
    model = DistributedDataParallel(Net(pause["forward"], pause["backward"]))
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    optimizer.pause_s = pause["optimizer"]
    loss_of = nn.CrossEntropyLoss()
    for step, (pictures, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model(pictures), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
