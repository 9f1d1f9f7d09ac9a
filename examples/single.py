"""One process: a small CNN on synthetic images, fed by a DataLoader.  It does not use Stepscope.

python examples/single.py
stepscope run examples/single.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bright squares on noise; the label is the quadrant the square lies in."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 4
        image = 0.3 * torch.randn(1, 16, 16)
        row, column = 8 * (label // 2) + 1, 8 * (label % 2) + 1
        image[:, row : row + 6, column : column + 6] += 1.0
        return image, label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = nn.CrossEntropyLoss()
    loader = DataLoader(Shapes(args.steps * args.batch_size), batch_size=args.batch_size, num_workers=args.workers)

    for step, (images, labels) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
