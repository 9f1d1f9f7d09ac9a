"""What the jobs share: their arguments, seeds, small models and data, ranks on one GPU, and how they report losses."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 64
CLASSES = 10


def arguments(flag, choices):
    """``--device`` and one flag that says which variant to train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(f"--{flag}", choices=choices, required=True)
    return parser.parse_args()


def seed():
    """The same numbers in every run."""
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def rank():
    return int(os.environ.get("RANK", "0"))


def network(hidden=128):
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


class Samples(torch.utils.data.Dataset):
    """Random samples, each by its own seed, so that every worker makes the same ones."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(FEATURES, generator=generator), index % CLASSES


def batches(device, count, size=32):
    """Batches made on the CPU, which has the same generator everywhere."""
    generator = torch.Generator().manual_seed(99 + rank())
    for _ in range(count):
        x = torch.randn(size, FEATURES, generator=generator)
        y = torch.randint(0, CLASSES, (size,), generator=generator)
        yield x.to(device), y.to(device)


class Report:
    """Keeps losses on the device, so that no step waits for it, and prints them at the end.

    ``live``: prints each at once, for jobs that do not reach their end.
    """

    def __init__(self, *, live=False):
        self._live = live
        self._kept = []

    def loss(self, number, value, kind="loss"):
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self._kept.append((kind, number, value))
        if self._live:
            self._print()

    def evaluation(self, number, value):
        self.loss(number, value, kind="eval")

    def steps(self, count):
        """The job's own count of steps; prints everything."""
        self._print()
        line(f"steps {rank()} {count}")

    def _print(self):
        for kind, number, value in self._kept:
            line(f"{kind} {rank()} {number} {float(value).hex()}")
        self._kept.clear()


def line(text):
    """In one write, so that lines of several ranks do not mix."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def share_gpu():
    """Let every rank use the only GPU: NCCL accepts it when each rank seems to be on a host of its own."""
    os.environ["NCCL_HOSTID"] = f"host{rank()}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"


def share_gpu_in_framework():
    """The same for a framework that starts the process group and chooses the device by the local rank."""
    if "RANK" in os.environ:
        share_gpu()
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank()))


def start_ranks(device):
    """Join the process group; the device to use."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    return torch.device("cuda:0")
