"""Tensor parallelism under torchrun: two ranks share every layer and read the same samples."""

import torch
import torch.distributed as dist
from common import LEARNING_RATE, Net, arguments, loaders, rank, result, save_own_state
from loop import train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    fault = arguments().fault
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Net(fault)
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, foreach=False)
    batches, evaluation = loaders(fault, 1, 0)

    def save(step):
        save_own_state(fault, step)  # fault: checkpoint

    steps, loss = train(model, optimizer, batches, evaluation, fault, save)
    if rank() == 0:
        result(steps, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
