"""A job of known pace for pairs of runs: DDP on gloo, each phase a pause and a little arithmetic."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FORWARD_MS, OPTIMIZER_MS = 120.0, 30.0
"""Long enough that the exchange, in which a late rank catches up a part of its delay, is a small part of the step."""


class Paced(nn.Module):
    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.pause_s = pause_s

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause_s)
        return self.layers(batch)


class PacedSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(OPTIMIZER_MS / 1e3)
        return super().step(closure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--forward-ms", type=float, default=0.0, help="more time in forward, on all ranks")
    parser.add_argument("--rank-ms", type=float, default=0.0, help="more time in forward, on rank 1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    pause_ms = FORWARD_MS + args.forward_ms + (args.rank_ms if rank == 1 else 0.0)
    model = DistributedDataParallel(Paced(pause_ms / 1e3))
    optimizer = PacedSGD(model.parameters(), lr=0.01)
    for _ in range(args.steps):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
