"""Gradient accumulation under float16 autocast with a GradScaler: one optimizer step for several micro-batches.

python examples/accumulation.py
stepscope run examples/accumulation.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    torch.manual_seed(0)
    features = torch.randn(args.steps * args.accumulate * args.batch_size, 64)
    targets = features[:, :4].square().sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(features, targets), batch_size=args.batch_size)

    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    step = 0
    for micro_batch, (x, y) in enumerate(loader, start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y) / args.accumulate
        scaler.scale(loss).backward()
        if micro_batch % args.accumulate:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item() * args.accumulate:.4f}")


if __name__ == "__main__":
    main()
