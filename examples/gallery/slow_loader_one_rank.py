"""Loader slow on one rank: the documents of rank 1 are on a network disk, those of the other rank were copied.

stepscope run --nproc-per-node 2 examples/gallery/slow_loader_one_rank.py
stepscope run --nproc-per-node 2 examples/gallery/slow_loader_one_rank.py --fixed
"""

import argparse
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOKENS = 64


class Documents(Dataset):
    def __init__(self, length: int, on_network_disk: bool) -> None:
        self.length = length
        self.on_network_disk = on_network_disk

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        tokens = self.read(index)
        return torch.tensor(tokens), tokens[0] % 2

    def read(self, index: int) -> list[int]:
        if self.on_network_disk:
            time.sleep(0.01)  # the fault, in place of a slow read
        return [random.randrange(1000) for _ in range(TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="all documents were copied")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    documents = Documents(480, on_network_disk=rank == 1 and not args.fixed)
    loader = DataLoader(documents, batch_size=8)
    model = nn.Sequential(nn.EmbeddingBag(1000, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step, (tokens, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(tokens), labels)
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
