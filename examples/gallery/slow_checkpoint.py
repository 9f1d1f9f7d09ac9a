"""Slow checkpoint: every tenth step saves model and optimizer, compressed; the numbers hardly get smaller.

stepscope run examples/gallery/slow_checkpoint.py
stepscope run examples/gallery/slow_checkpoint.py --fixed
"""

import argparse
import gzip
import tempfile
from pathlib import Path

import torch
from torch import nn


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, compress: bool) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if compress:  # the fault
        with gzip.open(path, "wb") as file:
            torch.save(state, file)
    else:
        torch.save(state, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="save as it is, and less often")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with tempfile.TemporaryDirectory() as folder:
        for step in range(100):
            x = torch.randn(64, 256)
            labels = x[:, :4].argmax(dim=1)
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (50 if args.fixed else 10) == 9:
                save(Path(folder, "checkpoint.pt"), model, optimizer, compress=not args.fixed)
                print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
