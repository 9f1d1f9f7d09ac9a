"""What the scripts here train and how they are made slow.  Knows nothing of Stepscope."""

import io
import time

import torch
from torch import nn
from torch.utils.data import Dataset

SIDE = {"small": 16, "tiny": 16, "cnn": 28}
"""Of a picture, by net."""


def pause(seconds):
    """Sleep, but not for nothing: ``sleep(0)`` gives the core away."""
    if seconds:
        time.sleep(seconds)


class Images(Dataset):
    """Random pictures with a label each; fetching the first of a batch takes ``pause_of(number of the batch)``."""

    def __init__(self, length, batch, pause_of, side=16):
        self.length = length
        self.batch = batch
        self.pause_of = pause_of
        self.fetched = 0
        self.picture = torch.randn(1, side, side)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.fetched % self.batch == 0:
            pause(self.pause_of(self.fetched // self.batch))
        self.fetched += 1
        return self.picture, index % 10


class Pause(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx, x, seconds, wait):
        ctx.seconds, ctx.wait = seconds, wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait(ctx.seconds)
        return gradient, None, None


class Net(nn.Module):
    """A small classifier that waits ``forward_s`` in forward and ``backward_s`` in backward."""

    def __init__(self, kind="small", wait=time.sleep):
        super().__init__()
        self.wait = wait
        self.forward_s = self.backward_s = 0.0
        if kind == "tiny":
            self.features, width = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU()), 32
        elif kind == "cnn":
            first = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
            self.features = nn.Sequential(*first, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
            width = 32 * 5 * 5
        else:
            self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
            width = 8 * 12 * 12
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        if self.forward_s:
            self.wait(self.forward_s)
        x = self.features(x)
        if self.backward_s:
            x = Pause.apply(x, self.backward_s, self.wait)
        return self.head(x)


class SlowSGD(torch.optim.SGD):
    pause_s = 0.0
    wait = staticmethod(time.sleep)

    @torch.no_grad()
    def step(self, closure=None):
        if self.pause_s:
            self.wait(self.pause_s)
        return super().step(closure)


class SlowFile(io.BytesIO):
    """A file whose first write takes a while."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def write(self, data):
        pause(self.seconds)
        self.seconds = 0.0
        return super().write(data)


def spin(seconds):
    """Wait without letting go of the core."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class DeviceWait:
    """Keep the GPU busy for so many seconds; the host goes on."""

    def __init__(self):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cycles = 50_000_000
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        self.cycles_per_s = cycles / (begin.elapsed_time(end) / 1000)

    def __call__(self, seconds):
        torch.cuda._sleep(int(seconds * self.cycles_per_s))
