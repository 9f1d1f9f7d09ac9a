"""A loop that Stepscope cannot recognize: no DataLoader, no ``torch.optim``; the script marks its own steps.

python examples/custom_loop.py                  # records itself, into ./runs
stepscope run examples/custom_loop.py
STEPSCOPE=0 python examples/custom_loop.py      # every call below does nothing
"""

import argparse

import torch

import stepscope


@stepscope.phase("augment")
def augment(batch: torch.Tensor) -> torch.Tensor:
    return batch + 0.05 * torch.randn_like(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    stepscope.init()
    torch.manual_seed(0)
    data = torch.randn(4096, 32)
    truth = torch.randn(32, 1)
    weight = torch.zeros(32, 1, requires_grad=True)

    for step in range(1, args.steps + 1):
        with stepscope.step():
            batch = augment(data[torch.randint(len(data), (256,))])
            with stepscope.phase("loss"):
                loss = (batch @ weight - batch @ truth).square().mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with stepscope.phase("update"), torch.no_grad():
                weight -= 0.1 * gradient
            stepscope.note(loss=loss.item())
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
