"""Two steps of a model whose layers differ in width, so that the shapes in a trace say which layer an operator is of.

python backward.py checkpoint|reentrant|several|compiled FILE

``checkpoint`` and ``reentrant`` compute each block again in backward, ``several`` accumulates two micro-batches of two
forward calls each, and ``compiled`` has compiled blocks.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint


class ScaledBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return ScaledBy.apply(x, self.weight)


class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(width, out), nn.LayerNorm(out), Scale(out)

    def forward(self, x):
        return self.scale(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first, self.second, self.shared = Block(31, 37), Block(37, 41), nn.Linear(41, 41)
        self.case = case

    def forward(self, x):
        for block in (self.first, self.second):
            if self.case in ("checkpoint", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.case == "reentrant")
            else:
                x = block(x)
        return self.shared(self.shared(x).relu()).square().mean()


def main():
    case, path = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 31, requires_grad=case == "reentrant")
    if case == "compiled":
        model.first.compile()
        model.second.compile()
    several = case == "several"

    def step():
        optimizer.zero_grad()
        for _ in range(1 + several):
            sum(model(batch) for _ in range(1 + several)).backward()
        optimizer.step()

    step()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        for _ in range(3):
            step()
            profiler.step()
    profiler.export_chrome_trace(path)
    text = Path(path).read_text()
    Path(path).write_text(text.replace(path, f"{case}.json"))


if __name__ == "__main__":
    main()
