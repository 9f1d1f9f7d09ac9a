"""DistributedDataParallel on CPU (gloo): every rank trains on its own part of the data.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
stepscope run --nproc-per-node 2 examples/ddp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    features = torch.randn(args.steps * args.batch_size * world_size, 64)
    labels = (features[:, :8].sum(dim=1) > 0).long()
    dataset = TensorDataset(features, labels)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=DistributedSampler(dataset))

    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}  loss {loss.item():.4f}")

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
