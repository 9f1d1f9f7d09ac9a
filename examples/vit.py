"""A small ViT from a config of Transformers in a plain loop: random weights, random pictures, nothing downloaded.

stepscope run examples/vit.py
stepscope run examples/vit.py --fault input
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

SIZE = 32
CLASSES = 10


class Pictures(Dataset):
    def __init__(self, count: int, fault: str) -> None:
        self.count, self.fault = count, fault

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.fault == "input":
            time.sleep(0.01)  # decoding a large JPEG
        return torch.full((3, SIZE, SIZE), float(index % CLASSES)), index % CLASSES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fault", choices=["none", "input", "memory"], default="none")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIZE,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pictures(args.steps * args.batch_size, args.fault), args.batch_size, shuffle=True)

    losses = []
    for step, (pictures, labels) in enumerate(loader, start=1):
        outputs = model(pictures, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.fault == "memory":
            # A graph that is kept with its loss, and the activations with it; .item() would keep the number.
            losses.append(model(pictures.repeat(8, 1, 1, 1), labels=labels.repeat(8)).loss)
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {outputs.loss.item():.4f}")


if __name__ == "__main__":
    main()
