"""Train with parts of the step compiled, one way after the other, and print what dynamo made of each.

usage: compiled_job.py [CASE…]   → one JSON object per line: case, breaks, graphs, frames, losses
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

STEPS = 5

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

KEPT: list[Any] = []
"""A new optimizer must not get the identity of one that is gone."""


class Own(torch.optim.Optimizer):
    """Dynamo can trace it whole, as it can torch's Muon."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Louder(torch.optim.SGD):
    """Its step has another one inside."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=True, capturable=True),
    "own": lambda p: Own(p, 0.1),
    "louder": lambda p: Louder(p, lr=0.1),
}


def whole(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.to("cpu")
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def until_backward(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager")
    def gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(x), y)
        torch.autograd.backward(loss)
        return loss

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = gradients(x, y)
        optimizer.step()
        return loss

    return step


def compiled_model(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return _eager(torch.compile(model, backend="eager", fullgraph=True), loss_of, optimizer, optimizer.step)


def model_compiled_in_place(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    model.compile(backend="eager", fullgraph=True)
    return _eager(model, loss_of, optimizer, optimizer.step)


def compiled_optimizer(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return _eager(model, loss_of, optimizer, torch.compile(optimizer.step, backend="eager", fullgraph=False))


def both(model: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    fast = torch.compile(model, backend="eager", fullgraph=True)
    return _eager(fast, loss_of, optimizer, torch.compile(optimizer.step, backend="eager"))


def _eager(model: Any, loss_of: nn.Module, optimizer: torch.optim.Optimizer, take_step: Callable[[], Any]) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(model(x), y)
        loss.backward()
        take_step()
        return loss

    return step


CASES: list[tuple[Callable[..., Step], str]] = [
    *((whole, name) for name in OPTIMIZERS),
    *((compiled_optimizer, name) for name in ("sgd", "adamw", "adamw fused", "adamw capturable", "own")),
    *((way, "adamw") for way in (until_backward, compiled_model, model_compiled_in_place, both)),
]


def main() -> None:
    for way, name in CASES:
        case = f"{way.__name__}, {name}"
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layers(x)

        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())
        KEPT.append(optimizer)
        step = way(model, nn.CrossEntropyLoss(), optimizer)
        losses = [float(step(torch.randn(4, 8), torch.randint(3, (4,))).detach()) for _ in range(STEPS)]
        made = {
            "case": case,
            "breaks": sum(counters["graph_break"].values()),
            "graphs": counters["stats"]["unique_graphs"],
            "frames": counters["frames"]["total"],
            "losses": losses,
        }
        print(json.dumps(made), flush=True)


main()
