"""Which command lines start ranks, and what a run is called after them."""

from __future__ import annotations

import pytest

from stepscope.recorder.identity import is_launcher
from stepscope.records.text import default_name


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        ("python /env/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -u -X dev -W error -m torch.distributed.launch train.py", True),
        ("python -um torch.distributed.run train.py", True),
        ("python -mtorch.distributed.run train.py", True),
        ("python -Xdev /env/bin/accelerate launch train.py", True),
        ("python train.py", False),
        ("python train.py -m torch.distributed.run", False),
        ("python -m pkg.train torchrun", False),
        ("python -c torchrun", False),
        ("python -W torchrun train.py", False),
        ("python --check-hash-based-pycs always", False),
        ("python -", False),
        ("python", False),
    ],
)
def test_launchers_are_known_by_their_command_line(words: str, launcher: bool) -> None:
    assert is_launcher(words.split()) is launcher


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("python -m torch.distributed.run --standalone -m pkg.train --lr 3", "train-now"),
        ("python -m torch.distributed.run fit.py -m x", "fit-now"),
        ("python -m pkg.sub.fit -m x", "fit-now"),
        ("bash -c true", "bash-now"),
    ],
)
def test_a_run_is_called_after_what_trains(words: str, name: str) -> None:
    assert default_name(words.split(), "now") == name
