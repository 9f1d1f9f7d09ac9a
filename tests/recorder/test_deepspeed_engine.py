"""What DeepSpeed's engine does around backward and the optimizer, with a stand-in for the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from clock import FakeClock
from torch import nn

from stepscope.recorder.recorder import Recorder
from tests.recorder.conftest import Recording, _recorded


@pytest.fixture
def clocked_engine(
    make_recorder: Callable[..., Recorder], tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Recording, type]]:
    class DeepSpeedEngine:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()
            clock.advance(3)  # reduces the gradients

        def _take_model_step(self, _: object = None) -> None:
            clock.advance(5)  # the norm of the gradients
            self.optimizer.step()
            clock.advance(7)  # gathers parameters

    module = ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
    with _recorded(make_recorder(now=clock)) as recorder:
        yield Recording(recorder, tmp_path / "session"), DeepSpeedEngine


def test_work_around_backward_and_optimizer_is_theirs(clocked_engine: tuple[Recording, type], clock: FakeClock) -> None:
    recording, engine_class = clocked_engine
    model = nn.Sequential(nn.Linear(4, 4))
    engine = engine_class(model)
    for _ in range(4):
        engine.backward(model(torch.ones(2, 4)).sum())
        engine._take_model_step()
        clock.advance(11)  # the loop, between two steps
    assert recording.spent()[1:] == [{"backward": 3, "optimizer": 12, "other": 11}] * 3
    assert list(recording.steps()["between_ns"])[1:] == [11] * 3
    assert list(recording.steps()["micro_batches"]) == [1] * 4
