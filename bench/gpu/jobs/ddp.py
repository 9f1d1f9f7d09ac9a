"""DistributedDataParallel in its settings."""

import torch
import torch.distributed as dist
from common import Report, Samples, arguments, batches, network, seed, start_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

STEPS = 40
SETTINGS = {
    "plain": {},
    "static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "bf16_hook": {},
    "no_sync": {},
    "workers": {},
}


class Branches(nn.Module):
    """Uses one of its two branches in each step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([network(), network()])
        self.uses = 0

    def forward(self, x):
        self.uses += 1
        return self.branches[self.uses % 2](x)


def train(model, optimizer, device, report):
    for step, (x, y) in enumerate(batches(device, STEPS)):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.loss(step, loss)
    return STEPS


def train_accumulating(model, optimizer, device, report):
    """Gradients are exchanged at every fourth micro-batch."""
    for number, (x, y) in enumerate(batches(device, 4 * STEPS), start=1):
        if number % 4:
            with model.no_sync():
                loss = cross_entropy(model(x), y) / 4
                loss.backward()
        else:
            loss = cross_entropy(model(x), y) / 4
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report.loss(number, loss)
    return STEPS


def train_epochs(model, optimizer, device, report):
    """Loader workers in every epoch, and an evaluation after it."""
    data = Samples(512)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2, pin_memory=device.type == "cuda")
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report.loss(step, loss)
            step += 1
        total = torch.zeros((), device=device)
        with torch.no_grad():
            for x, y in DataLoader(Samples(64), batch_size=16, num_workers=2):
                total += cross_entropy(model.module(x.to(device)), y.to(device))
        dist.all_reduce(total)
        report.evaluation(epoch, total)
    return step


def main():
    args = arguments("variant", list(SETTINGS))
    device = start_ranks(args.device)
    seed()
    model = (Branches() if args.variant == "find_unused" else network()).to(device)
    model = DistributedDataParallel(model, **SETTINGS[args.variant])
    if args.variant == "bf16_hook":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    report = Report()
    how = {"no_sync": train_accumulating, "workers": train_epochs}.get(args.variant, train)
    steps = how(model, optimizer, device, report)
    report.steps(steps)
    dist.barrier()
    # The model goes first: torch 2.13 may hang if it is destroyed after its process group (docs/hangs.md).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
