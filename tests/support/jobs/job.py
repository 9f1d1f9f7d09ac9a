"""A small job that trains for a while and ends as it is told: on its own or data-parallel under torchrun.

Knows nothing of Stepscope.  ``job.py --steps 20 --fault 1:7:raise`` raises on rank 1 when step 7 is complete; other
faults are ``exit=CODE``, ``signal=NUMBER`` and ``hang``.  Each loss is printed exactly, as a hexadecimal float.
"""

import argparse
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def suffer(fault):
    what, _, number = fault.partition("=")
    if what == "raise":
        raise ValueError("told to raise")
    if what == "exit":
        sys.exit(int(number))
    if what == "signal":
        os.kill(os.getpid(), int(number))
    while True:
        signal.pause()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="after each step")
    parser.add_argument("--fault", default="", metavar="RANK:STEP:WHAT")
    args = parser.parse_args()

    torch.manual_seed(0)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    if world_size > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = micro_batch = 0
    while step < args.steps:
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y) / args.accumulate
            loss.backward()
            micro_batch += 1
            if micro_batch % args.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            # One write, which the lines of other ranks cannot come between.
            sys.stdout.write(f"rank {rank} step {step} loss {loss.item().hex()}\n")
            sys.stdout.flush()
            time.sleep(args.pause_ms / 1000)
            if args.fault.startswith(f"{rank}:{step}:"):
                suffer(args.fault.split(":")[2])
            step += 1
            if step == args.steps:
                break
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
