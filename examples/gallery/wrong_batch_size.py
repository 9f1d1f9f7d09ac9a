"""Wrong batch size: the batch is divided among the ranks, but rank 0 kept the size from before there were others.

stepscope run --nproc-per-node 3 examples/gallery/wrong_batch_size.py
stepscope run --nproc-per-node 3 examples/gallery/wrong_batch_size.py --fixed
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="the same share for each rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    batch_size = GLOBAL_BATCH // world_size
    if rank == 0 and not args.fixed:
        batch_size = GLOBAL_BATCH  # the fault
    features = torch.randn(60 * GLOBAL_BATCH * world_size, 64)
    dataset = TensorDataset(features, features[:, :4].argmax(dim=1))
    loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset), drop_last=True)

    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, 4))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for step, (x, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.4f}")
        if step == 59:
            break

    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
