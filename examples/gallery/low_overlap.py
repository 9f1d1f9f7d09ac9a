"""Low overlap: one bucket holds all gradients, so the exchange begins when backward is over and hides behind nothing.

stepscope run --nproc-per-node 2 examples/gallery/low_overlap.py
stepscope run --nproc-per-node 2 examples/gallery/low_overlap.py --fixed
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="buckets of 4 MB")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = [module for _ in range(8) for module in (nn.Linear(1024, 1024), nn.GELU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(1024, 4)), bucket_cap_mb=4 if args.fixed else 1000
    )  # the fault: "fewer messages are faster"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    for step in range(60):
        x = torch.randn(64, 1024)
        labels = x[:, :4].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
