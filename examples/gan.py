"""Two models, two optimizers: a small GAN that learns a ring of eight Gaussians.

python examples/gan.py
stepscope run examples/gan.py
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NOISE = 8


def ring(count: int) -> torch.Tensor:
    angle = 2 * math.pi * torch.randint(8, (count,)) / 8
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loss_of = nn.BCEWithLogitsLoss()
    loader = DataLoader(TensorDataset(ring(args.steps * args.batch_size)), batch_size=args.batch_size)

    for step, (real,) in enumerate(loader, start=1):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        fake = generator(torch.randn(len(real), NOISE))
        critic_loss = loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        generator_loss = loss_of(critic(fake), ones)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()

        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  critic {critic_loss.item():.4f}  generator {generator_loss.item():.4f}")


if __name__ == "__main__":
    main()
