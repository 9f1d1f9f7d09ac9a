"""``python altered.py ALTERATION[,ALTERATION] SCRIPT [ARGUMENT …]``: run a public program with something changed.

The checkout stays as it is.  ``episodes`` ends actor_critic.py after 150 episodes; every other alteration is a fault.
``@RANK`` after a fault gives it to one rank.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

EPISODES = 150
FIRST_STEP = 12
"""From which faults that are not there from the start begin."""


def episodes() -> None:
    original = itertools.count

    def count(*arguments):
        return iter(range(1, EPISODES + 1)) if arguments == (1,) else original(*arguments)

    itertools.count = count


def slow_data() -> None:
    """Every sample of MNIST takes longer to read."""
    from torchvision.datasets import MNIST

    original = MNIST.__getitem__

    def __getitem__(self, index):  # noqa: N807 - it replaces that of the dataset
        time.sleep(0.01)  # fault: slow_data
        return original(self, index)

    MNIST.__getitem__ = __getitem__


def slow_forward() -> None:
    from torch import nn

    original = nn.LayerNorm.forward

    def forward(self, tensor):
        time.sleep(0.02)  # fault: slow_forward
        return original(self, tensor)

    nn.LayerNorm.forward = forward


def slow_save() -> None:
    """The file system is slow."""
    from torch import serialization

    original = serialization._save

    def save(*arguments, **options):
        time.sleep(4)  # fault: slow_save
        return original(*arguments, **options)

    serialization._save = save


def _each_step(act) -> None:
    """Call ``act`` with the number of each step before an optimizer changes the weights."""
    from torch.optim import optimizer

    numbers = itertools.count()
    optimizer.register_optimizer_step_pre_hook(lambda own, *_: act(next(numbers), own))


def leak() -> None:
    import torch

    held = []
    _each_step(lambda step, own: held.append(torch.ones(2**20)))  # fault: leak


def nan() -> None:
    def act(step, own):
        if step == FIRST_STEP:
            own.param_groups[0]["params"][0].grad.view(-1)[0] = float("nan")  # fault: nan

    _each_step(act)


def crash() -> None:
    def act(step, own):
        if step == FIRST_STEP:
            raise RuntimeError("the injected fault of make public")  # fault: crash

    _each_step(act)


def slow_between() -> None:
    """A callback between two steps."""
    _each_step(lambda step, own: time.sleep(0.15))  # fault: slow_between


def main() -> None:
    alterations, script, *arguments = sys.argv[1:]
    for text in alterations.split(","):
        name, _, rank = text.partition("@")
        if not rank or rank == os.environ.get("RANK"):
            globals()[name]()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
