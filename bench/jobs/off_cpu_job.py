"""A data-parallel job in which every rank computes a little, and reads, writes or maps a file if it is told to.

off_cpu_job.py --steps 200 --hurt 1 --how disk --file FOLDER/data

It knows nothing of Stepscope. Neighbors and a quota come from outside (``bench/off_cpu.py``), which finds the ranks by
the files PID-RANK in ``--pids``.
"""

import argparse
import mmap
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

PAGE = mmap.PAGESIZE
BLOCK = 256 << 10


class Layer(nn.Module):
    def __init__(self, cpu_ms, work):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.cpu_ms, self.work = cpu_ms, work

    def forward(self, x):
        end = time.thread_time() + self.cpu_ms / 1e3
        while time.thread_time() < end:
            pass
        self.work()
        return self.linear(x)


def reader(path, megabytes):
    """Read blocks that are not in memory."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what its writing left in memory comes in larger pieces
    size = os.fstat(fd).st_size
    at = 0

    def read():
        nonlocal at
        for _ in range(int(megabytes * (1 << 20)) // BLOCK):
            os.posix_fadvise(fd, at, BLOCK, os.POSIX_FADV_DONTNEED)
            os.pread(fd, BLOCK, at)
            at = (at + BLOCK) % (size - BLOCK)

    return read


def faulter(path, pages):
    """Touch pages of a mapped file that are not in memory."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what its writing left in memory comes in larger pieces
    size = os.fstat(fd).st_size
    mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    at = 0

    def fault():
        nonlocal at
        for _ in range(pages):
            mapped.madvise(mmap.MADV_DONTNEED, at, PAGE)
            os.posix_fadvise(fd, at, PAGE, os.POSIX_FADV_DONTNEED)
            mapped[at]
            at = (at + 17 * PAGE) % size

    return fault


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu-ms", type=float, default=6.0)
    parser.add_argument("--idle-ms", type=float, default=15.0)
    parser.add_argument("--hurt", type=int, default=-1, metavar="RANK")
    parser.add_argument("--how", choices=("none", "disk", "faults"), default="none")
    parser.add_argument("--file", default="")
    parser.add_argument("--megabytes", type=float, default=1.0, help="read in a step")
    parser.add_argument("--pages", type=int, default=60, help="touched in a step")
    parser.add_argument("--pids", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.pids:
        (args.pids / f"{os.getpid()}-{rank}").touch()
    work = {"none": lambda: None, "disk": lambda: None, "faults": lambda: None}
    if rank == args.hurt and args.how == "disk":
        work["disk"] = reader(args.file, args.megabytes)
    if rank == args.hurt and args.how == "faults":
        work["faults"] = faulter(args.file, args.pages)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Layer(args.cpu_ms, work[args.how]), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.idle_ms / 1e3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
