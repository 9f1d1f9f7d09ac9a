"""A small data-parallel job in which one rank may be slower than the others: what ``stepscope demo`` runs.

Does not use Stepscope.  Started by torchrun, or by ranks.py in the same folder:
  slow_rank.py --slow-rank 2 --slow-phase forward --slow-ms 30
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PHASES = ("input", "forward", "backward", "optimizer")
BATCH = 16


class Images(Dataset):
    """Random labeled pictures; loading a batch takes ``pause_s`` longer."""

    def __init__(self, length, pause_s):
        self.length, self.pause_s = length, pause_s
        self.loaded = 0
        self.picture = torch.randn(1, 16, 16)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.loaded % BATCH == 0 and self.pause_s:
            time.sleep(self.pause_s)
        self.loaded += 1
        return self.picture, index % 10


class SlowGradient(torch.autograd.Function):
    """The identity, with a gradient that takes a while."""

    @staticmethod
    def forward(ctx, x, pause_s):
        ctx.pause_s = pause_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.pause_s)
        return gradient, None


class Net(nn.Module):
    """A small classifier whose forward and backward take longer by the given times."""

    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        convolutions = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 12 * 12, 10))

    def forward(self, x):
        if self.forward_s:
            time.sleep(self.forward_s)
        x = self.layers(x)
        return SlowGradient.apply(x, self.backward_s) if self.backward_s else x


class SlowSGD(torch.optim.SGD):
    pause_s = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        if self.pause_s:
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

    pictures = Images(BATCH * args.steps * dist.get_world_size(), pause["input"])
    data = DataLoader(pictures, batch_size=BATCH, sampler=DistributedSampler(pictures))
    model = DistributedDataParallel(Net(pause["forward"], pause["backward"]))
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    optimizer.pause_s = pause["optimizer"]
    loss_of = nn.CrossEntropyLoss()
    for step, (images, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    # The model goes first.  Otherwise torch 2.13 hangs now and then: one of gloo's threads needs the GIL to release the
    # last exchange, and is joined, with the GIL held, when the model is destroyed.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
