"""Hang: each rank decides alone when to stop early, so the first one that stops leaves the other in an all_reduce.

stepscope run --on-hang abort --nproc-per-node 2 examples/gallery/hang.py
stepscope run --nproc-per-node 2 examples/gallery/hang.py --fixed
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def is_good_enough(loss: torch.Tensor, everywhere: bool) -> bool:
    if everywhere:  # all ranks see the same number
        loss = loss.detach().clone()
        dist.all_reduce(loss, dist.ReduceOp.MAX)
    return loss.item() < 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="stop on all ranks together")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    noise = [0.3, 0.01][rank % 2]  # the labels of rank 1 are the cleanest

    for step in range(400):
        x = torch.randn(64, 16)
        y = x[:, :1] + noise * torch.randn(64, 1)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.4f}")
        if is_good_enough(loss, everywhere=args.fixed):  # the fault: this rank's loss only
            break

    dist.barrier()  # before rank 0 saves the model
    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
