"""Saving is a checkpoint, whoever does it: torch, distributed checkpointing, safetensors and the frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import FakeClock
from torch import nn

from tests.recorder.conftest import Recording

SAVING = 5_000

SAFETENSORS = """
def serialize_file(tensors, filename, metadata=None):
    clock.advance({saving})
"""
SAFETENSORS_TORCH = """
from safetensors import serialize_file

def save_file(tensors, filename, metadata=None):
    clock.advance({saving})
    serialize_file(tensors, filename, metadata)
"""
FRAMEWORK = """
class {name}:
    def {method}(self, *args):
        clock.advance({saving})
"""


def saved_after_two_steps(recording: Recording, clock: FakeClock, save: Callable[[], object]) -> list[int]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        if number == 1:
            save()
    return [int(ns) for ns in recording.phase("checkpoint")]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes packages that can be imported, and forgets them afterwards."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("safetensors", "transformers", "accelerate", "lightning", "deepspeed"):
            monkeypatch.delitem(sys.modules, name)

    def make(sources: dict[str, str]) -> None:
        for name, source in sources.items():
            path = tmp_path.joinpath("packages", *name.split("."))
            path.mkdir(parents=True, exist_ok=True)
            for folder in (path, *path.relative_to(tmp_path / "packages").parents):
                (tmp_path / "packages" / folder / "__init__.py").touch()
            clock = "from tests.recorder.test_checkpoints import FAKE as clock\n"
            (path / "__init__.py").write_text(clock + source.format(saving=SAVING))
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    return make


class _Clock:
    """Stands for the clock of the test that is running, in the packages it made."""

    now: FakeClock

    def advance(self, nanoseconds: int) -> None:
        self.now.advance(nanoseconds)


FAKE = _Clock()


def test_safetensors(clocked: Recording, clock: FakeClock, packages: Callable[[dict[str, str]], None]) -> None:
    packages({"safetensors": SAFETENSORS, "safetensors.torch": SAFETENSORS_TORCH})
    FAKE.now = clock
    from safetensors.torch import save_file

    spent = saved_after_two_steps(clocked, clock, lambda: save_file({}, "model.safetensors"))
    assert spent == [0, 0, 2 * SAVING, 0]


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        ("transformers.trainer", "Trainer", "_save_checkpoint"),
        ("accelerate.accelerator", "Accelerator", "save_state"),
        ("lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint"),
        ("lightning.fabric.fabric", "Fabric", "save"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint"),
    ],
)
def test_what_frameworks_do_to_save(
    clocked: Recording,
    clock: FakeClock,
    packages: Callable[[dict[str, str]], None],
    module: str,
    name: str,
    method: str,
) -> None:
    packages({module: FRAMEWORK.replace("{name}", name).replace("{method}", method)})
    FAKE.now = clock
    owner: Any = __import__(module, fromlist=[name])
    save = getattr(getattr(owner, name)(), method)
    assert saved_after_two_steps(clocked, clock, save) == [0, 0, SAVING, 0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_distributed_checkpoints(recording: Recording, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        if number == 0:
            dcp.state_dict_saver.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    assert [bool(spent) for spent in recording.phase("checkpoint")] == [False, True, False]
