"""Slow rank: a check that was added to find a bug still runs on rank 0, and the other rank waits for it.

stepscope run --nproc-per-node 2 examples/gallery/slow_rank.py
stepscope run --nproc-per-node 2 examples/gallery/slow_rank.py --fixed
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, check_rank: bool) -> None:
        super().__init__()
        self.check_rank = check_rank
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.head = nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.layers(x)
        if self.check_rank:  # the fault: "are the features collapsing?"
            self.check_features(features.detach())
        return self.head(features)

    def check_features(self, features: torch.Tensor) -> None:
        singular_values = torch.linalg.svdvals(features)
        assert singular_values[0] > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="without the check")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Encoder(check_rank=rank == 0 and not args.fixed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(400):
        x = torch.randn(256, 256)
        labels = x[:, :4].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
