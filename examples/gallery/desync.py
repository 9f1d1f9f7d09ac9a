"""Desync: rank 0 alone goes back to its best weights, and from there on the replicas are different models.

stepscope run --nproc-per-node 2 examples/gallery/desync.py
stepscope run --nproc-per-node 2 examples/gallery/desync.py --fixed
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="all ranks load the weights")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    best = copy.deepcopy(model.state_dict())

    for step in range(2000):
        x = torch.randn(64, 64)
        labels = x[:, :4].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 30:
            best = copy.deepcopy(model.state_dict())
        if step == 60 and (rank == 0 or args.fixed):  # the fault: rank 0 only
            model.load_state_dict(best)
        if rank == 0 and step % 400 == 399:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
