"""FSDP2 on CPU (gloo): a small transformer, each block and the root sharded with ``fully_shard``.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
stepscope run --nproc-per-node 2 examples/fsdp2.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY = 64
LENGTH = 32


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.flatten(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Model(width=64, depth=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(rank)
    for step in range(1, args.steps + 1):
        # Each sequence counts upwards from a random start: the next token is always the last one plus one.
        start = torch.randint(VOCABULARY, (args.batch_size, 1))
        tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}  loss {loss.item():.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
