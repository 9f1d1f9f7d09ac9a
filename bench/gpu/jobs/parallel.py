"""One model over several ranks: tensor parallel with DTensor (also below FSDP2), and pipeline parallel."""

import torch
import torch.distributed as dist
from common import CLASSES, FEATURES, Report, arguments, rank, seed, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

STEPS = 40
HIDDEN = 128
MICRO_BATCHES = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def blocks():
    return nn.Sequential(Block(), Block(), nn.Linear(FEATURES, CLASSES))


def same_batches(device, source):
    """The ranks with the same source see the same batches."""
    generator = torch.Generator().manual_seed(source)
    for _ in range(STEPS):
        x = torch.randn(32, FEATURES, generator=generator)
        y = torch.randint(0, CLASSES, (32,), generator=generator)
        yield x.to(device), y.to(device)


def tensor_parallel(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model[:2]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(model, device, source, report):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step, (x, y) in enumerate(same_batches(device, source)):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.loss(step, loss)


def tp(device, report):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    train(tensor_parallel(blocks().to(device), mesh), device, 0, report)


def tp_fsdp(device, report):
    """Two ranks share a layer, and two such pairs share the data."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(blocks().to(device), mesh["tp"])
    for block in model[:2]:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, device, mesh["dp"].get_local_rank(), report)


def pipeline(schedule_name, device, report):
    """Each rank has one stage; the last one has the loss."""
    from torch.distributed import pipelining

    stages = dist.get_world_size()
    layers = [Block() for _ in range(2 * stages)]
    module = nn.Sequential(*layers[2 * rank() : 2 * rank() + 2])
    if rank() == stages - 1:
        module.append(nn.Linear(FEATURES, CLASSES))
    module = module.to(device)
    stage = pipelining.PipelineStage(module, rank(), stages, device)
    schedule = getattr(pipelining, schedule_name)(stage, n_microbatches=MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(same_batches(device, 0)):
        if rank() == 0:
            schedule.step(x)
        elif rank() == stages - 1:
            losses = []
            schedule.step(target=y, losses=losses)
            report.loss(step, torch.stack(losses).mean())
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


VARIANTS = {
    "tp": tp,
    "tp_fsdp": tp_fsdp,
    "gpipe": lambda device, report: pipeline("ScheduleGPipe", device, report),
    "1f1b": lambda device, report: pipeline("Schedule1F1B", device, report),
}


def main():
    args = arguments("variant", list(VARIANTS))
    device = start_ranks(args.device)
    seed()
    report = Report()
    VARIANTS[args.variant](device, report)
    report.steps(STEPS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
