"""One process that trains in an unusual way."""

import torch
from common import FEATURES, Report, arguments, batches, network, seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

STEPS = 60


def gradscaler(model, device, report):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16, growth_interval=20)
    for step, (x, y) in enumerate(batches(device, STEPS)):
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        report.loss(step, loss)
    return STEPS


def bf16(model, device, report):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step, (x, y) in enumerate(batches(device, STEPS)):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report.loss(step, loss)
    return STEPS


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=index % 2 == 1 and x.requires_grad)
        return self.head(x)


def checkpointing(_, device, report):
    model = Checkpointed().to(device)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.05), device, report)


def accumulation(model, device, report):
    """Four micro-batches to a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(batches(device, 4 * STEPS), start=1):
        loss = cross_entropy(model(x), y) / 4
        loss.backward()
        report.loss(number, loss)
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return STEPS


def fused(model, device, report):
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), device, report)


def two_optimizers(model, device, report):
    """Two networks that are trained in turn, as in a GAN."""
    other = network().to(device)
    first = torch.optim.Adam(model.parameters(), lr=1e-3)
    second = torch.optim.Adam(other.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(batches(device, STEPS)):
        loss = cross_entropy(model(x), y)
        first.zero_grad()
        loss.backward()
        first.step()
        distance = (other(x) - model(x).detach()).square().mean()
        second.zero_grad()
        distance.backward()
        second.step()
        report.loss(2 * step, loss)
        report.loss(2 * step + 1, distance)
    return STEPS


def closure(model, device, report):
    """An optimizer that computes the loss itself, several times in each step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step, (x, y) in enumerate(batches(device, 20)):

        def again(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        report.loss(step, optimizer.step(again))
    return 20


def streams(model, device, report):
    """The next batch is copied on one stream while the other computes; a metric runs on a third."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    copies, compute, metrics = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    host = [(x.pin_memory(), y.pin_memory()) for x, y in batches("cpu", STEPS)]

    def fetch(index):
        with torch.cuda.stream(copies):
            return tuple(part.to(device, non_blocking=True) for part in host[index])

    compute.wait_stream(torch.cuda.current_stream())
    following = fetch(0)
    for step in range(STEPS):
        with torch.cuda.stream(compute):
            compute.wait_stream(copies)
            x, y = following
            for part in (x, y):
                part.record_stream(compute)
            if step + 1 < STEPS:
                following = fetch(step + 1)
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report.loss(step, loss)
        metrics.wait_stream(compute)
        with torch.cuda.stream(metrics):
            norm = sum(each.detach().square().sum() for each in model.parameters())
            report.evaluation(step, norm)
        compute.wait_stream(metrics)
    torch.cuda.synchronize()
    return STEPS


def compiled(model, device, report):
    model = torch.compile(model)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device, report)


def compiled_reduce_overhead(model, device, report):
    model = torch.compile(model, mode="reduce-overhead")
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-3), device, report)


def plain(model, optimizer, device, report):
    for step, (x, y) in enumerate(batches(device, STEPS)):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.loss(step, loss)
    return STEPS


VARIANTS = {
    "gradscaler": gradscaler,
    "bf16": bf16,
    "checkpointing": checkpointing,
    "accumulation": accumulation,
    "fused": fused,
    "two_optimizers": two_optimizers,
    "closure": closure,
    "streams": streams,
    "compile": compiled,
    "compile_reduce_overhead": compiled_reduce_overhead,
}


def main():
    args = arguments("variant", list(VARIANTS))
    seed()
    device = torch.device(args.device)
    report = Report()
    steps = VARIANTS[args.variant](network().to(device), device, report)
    report.steps(steps)


if __name__ == "__main__":
    main()
