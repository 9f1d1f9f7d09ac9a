"""A small transformer under FSDP2, with the settings that a sweep varies.

stepscope sweep examples/sweep/plan.toml
stepscope sweep examples/sweep/plan.toml --nproc-per-node 1        # on a machine with one GPU

Uses CUDA and NCCL if there is a GPU for every rank, otherwise the CPU and gloo.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY = 512


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def sizes(on_gpu: bool) -> dict[str, int]:
    """Large enough that a step takes some milliseconds."""
    return {"width": 1024, "depth": 12, "length": 512} if on_gpu else {"width": 64, "depth": 2, "length": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step and rank")
    parser.add_argument("--wrap", choices=("model", "block"), default="block", help="what is sharded as one unit")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    args = parser.parse_args()

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    size = sizes(on_gpu)
    model = Model(**size).to(device)
    dtype = torch.bfloat16 if args.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    for place, block in enumerate(model.blocks):
        if args.checkpointing:
            model.blocks[place] = checkpoint_wrapper(block)
        if args.compile:
            model.blocks[place].compile()
        if args.wrap == "block":
            shard(model.blocks[place])
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(dist.get_rank())
    for step in range(1, args.steps + 1):
        tokens = torch.randint(VOCABULARY, (args.batch_size, size["length"] + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}  loss {loss.item():.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
