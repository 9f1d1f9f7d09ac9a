"""Leak: a hook that was added to look at the activations keeps those of every step.

stepscope run examples/gallery/leak.py
stepscope run examples/gallery/leak.py --fixed
"""

import argparse

import torch
from torch import nn


class Activations:
    """The outputs of a layer, for a histogram after training."""

    def __init__(self, keep_all: bool) -> None:
        self.keep_all = keep_all
        self.outputs: list[torch.Tensor] = []

    def __call__(self, layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if not self.keep_all:
            self.outputs.clear()
        self.outputs.append(output.detach())  # the fault: nothing ever removes them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="keep those of the last step")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 4))
    activations = Activations(keep_all=not args.fixed)
    model[0].register_forward_hook(activations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(800):
        x = torch.randn(256, 64)
        labels = x[:, :4].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 199:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    values = torch.cat(activations.outputs).flatten()
    print("activations", torch.histc(values, bins=10).long().tolist())


if __name__ == "__main__":
    main()
