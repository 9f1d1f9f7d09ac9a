"""A straggler among four ranks: the device of rank 2 runs slower, and every step of the job takes as long as its own.

stepscope run --nproc-per-node 4 examples/gallery/four_ranks.py
stepscope run --nproc-per-node 4 examples/gallery/four_ranks.py --fixed

On a machine with four GPUs the same script uses them, with NCCL.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, is_slow: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
        self.out = nn.Linear(2 * width, width)
        self.is_slow = is_slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_slow:
            time.sleep(0.03)  # the fault, in place of a device with lower clocks
        return x + self.out(self.layers(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="all ranks are equally fast")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.device_count() >= 4 else "cpu"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    is_slow = rank == 2 and not args.fixed
    model = nn.Sequential(*(Block(128, is_slow) for _ in range(4)), nn.Linear(128, 4)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(args.steps):
        x = torch.randn(64, 128, device=device)
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
