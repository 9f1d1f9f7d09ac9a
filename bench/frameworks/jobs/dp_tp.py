"""Data and tensor parallelism under torchrun: FSDP2 over two pairs of ranks, each of which shares the layers."""

import torch
import torch.distributed as dist
from common import LEARNING_RATE, Net, arguments, loaders, rank, result, save_own_state
from loop import train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

REPLICAS = 2


def main():
    fault = arguments().fault
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net(fault)
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, foreach=False)
    batches, evaluation = loaders(fault, REPLICAS, mesh["dp"].get_local_rank())

    def save(step):
        save_own_state(fault, step)  # fault: checkpoint

    steps, loss = train(model, optimizer, batches, evaluation, fault, save)
    if rank() == 0:
        result(steps, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
