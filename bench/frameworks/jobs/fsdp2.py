"""FSDP2 under torchrun: ``fully_shard``, and checkpoints with torch.distributed.checkpoint."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import LEARNING_RATE, Net, arguments, loaders, rank, result, save_own_state
from loop import train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    fault = arguments().fault
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Net(fault)
    for layer in (model.first, model.second, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    batches, evaluation = loaders(fault, dist.get_world_size(), rank())

    def save(step):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"checkpoint/{step}")
        save_own_state(fault, step)  # fault: checkpoint

    steps, loss = train(model, optimizer, batches, evaluation, fault, save)
    dist.all_reduce(loss)
    if rank() == 0:
        result(steps, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
