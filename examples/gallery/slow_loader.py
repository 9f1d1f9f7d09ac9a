"""Slow loader: the dataset parses its whole file again for every sample.

stepscope run examples/gallery/slow_loader.py
stepscope run examples/gallery/slow_loader.py --fixed
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Readings(Dataset):
    def __init__(self, path: Path, keep: bool) -> None:
        self.path = path
        self.samples = json.loads(path.read_text()) if keep else None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        samples = self.samples or json.loads(self.path.read_text())  # the fault
        sample = samples[index]
        return torch.tensor(sample["values"]), sample["label"]


def write_samples(path: Path) -> None:
    random.seed(0)
    rows = [[round(random.gauss(0, 1), 3) for _ in range(32)] for _ in range(1000)]
    path.write_text(json.dumps([{"values": row, "label": int(sum(row[:4]) > 0)} for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true", help="parse the file once")
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "readings.json")
        write_samples(path)
        loader = DataLoader(Readings(path, keep=args.fixed), batch_size=8, shuffle=True)
        model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, (values, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 19:
                print(f"step {step + 1}  loss {loss.item():.4f}")
            if step == 79:
                break


if __name__ == "__main__":
    main()
