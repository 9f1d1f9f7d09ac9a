"""NaN: a sensor that was switched off has no spread, and dividing by it makes the batch NaN.

stepscope run examples/gallery/nan.py
stepscope run examples/gallery/nan.py --fixed
"""

import argparse

import torch
from torch import nn


class Normalize(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(dim=0)) / (x.std(dim=0) + self.epsilon)  # the fault: 0 / 0 without epsilon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="add a small number to the divisor")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        Normalize(epsilon=1e-6 if args.fixed else 0.0), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(100):
        x = torch.randn(64, 32)
        labels = (x[:, 0] > 0).long()
        if 60 <= step < 63:
            x[:, 7] = 0.0  # sensor 7 is off
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
