"""Loader slow on one rank: the documents are sorted by length, so the last rank has the articles and the first one the
headlines; and all of an article is tokenized, although only its first 32 tokens are used.

stepscope run --nproc-per-node 2 examples/gallery/slow_loader_one_rank.py
stepscope run --nproc-per-node 2 examples/gallery/slow_loader_one_rank.py --fixed
"""

import argparse
import random
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOKENS = 32
WORDS = ["loss", "rank", "step", "epoch", "batch", "layer", "token", "graph"]


class Documents(Dataset):
    def __init__(self, documents: list[str], cut: bool) -> None:
        self.documents = documents
        self.cut = cut

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        text = self.documents[index]
        tokens = self.tokenize(text[: TOKENS * 8] if self.cut else text)
        return torch.tensor(tokens[:TOKENS]), tokens[0] % 2

    def tokenize(self, text: str) -> list[int]:
        return [sum(word.encode()) % 1000 for word in re.findall(r"\w+", text)]


def make_shard(rank: int, world_size: int) -> list[str]:
    """Headlines and articles, sorted by length; each rank gets as many documents."""
    random.seed(0)
    lengths = sorted([40] * 640 + [6000] * 640)
    share = len(lengths) // world_size
    return [" ".join(random.choices(WORDS, k=length)) for length in lengths[rank * share : (rank + 1) * share]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="cut the text before it is tokenized")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(Documents(make_shard(rank, world_size), cut=args.fixed), batch_size=8, shuffle=True)
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
