"""Without gradients a model is evaluated or infers, whichever model it is and wherever it is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clock import FakeClock
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.recorder.conftest import Recording

MODEL, WRAPPER, INPUT, LOSS = 200, 50, 7_000, 30


class Clocked(nn.Module):
    """Takes ``MODEL`` nanoseconds."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(MODEL)
        result: torch.Tensor = self.layer(x)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Clocked:
        twin = type(self)(self.clock)
        twin.load_state_dict(self.state_dict())
        return twin


class Wrapper(nn.Module):
    """What DDP is to its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


class SlowWrapper(Wrapper):
    """Takes ``WRAPPER`` nanoseconds itself."""

    def forward(self, x: torch.Tensor) -> Any:
        self.module.clock.advance(WRAPPER)  # type: ignore[operator, union-attr]
        return super().forward(x)


class OfAnotherClass(Clocked):
    pass


class Unrelated(nn.Module):
    """A class that no root has anything to do with."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.body = Clocked(clock).layer
        self.clock = clock

    def forward(self, x: torch.Tensor) -> Any:
        self.clock.advance(MODEL)
        return self.body(x)


class Batches(list[torch.Tensor]):
    """A dataset of which every item takes ``INPUT`` nanoseconds."""

    def __init__(self, number: int, clock: FakeClock) -> None:
        super().__init__(torch.ones(4) for _ in range(number))
        self.clock = clock

    def __getitem__(self, index: Any) -> Any:
        self.clock.advance(INPUT)
        return super().__getitem__(index)


def loader(number: int, clock: FakeClock) -> DataLoader[Any]:
    return DataLoader(Batches(number, clock), batch_size=None)  # type: ignore[arg-type]


TRAINED = {"input": INPUT, "forward": MODEL}


def evaluated_by(name: str, model: nn.Module, clock: FakeClock) -> Callable[[torch.Tensor], Any]:
    if name == "averaged":
        return torch.optim.swa_utils.AveragedModel(model.module)
    if name == "unrelated":
        return Unrelated(clock)
    return {"itself": model, "module": model.module, "copy": copy.deepcopy(model.module)}[name]  # type: ignore[return-value]


@pytest.mark.parametrize("evaluated", ["itself", "module", "copy", "averaged", "unrelated"])
def test_an_evaluation_long_after_the_first_steps(clocked: Recording, clock: FakeClock, evaluated: str) -> None:
    model = Wrapper(Clocked(clock))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = evaluated_by(evaluated, model, clock)
    for number, x in enumerate(loader(12, clock)):
        model(x).sum().backward()
        optimizer.step()
        if number == 9:
            with torch.no_grad():
                for y in loader(3, clock):
                    other(y)
    assert clocked.spent() == [TRAINED] * 10 + [{**TRAINED, "eval": 3 * (INPUT + MODEL)}, TRAINED]


def test_the_mode_of_a_wrapper_is_that_of_its_model(clocked: Recording, clock: FakeClock) -> None:
    """Lightning takes DDP into eval mode for a validation, and afterwards only the model in it back."""
    model = SlowWrapper(Clocked(clock))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(loader(8, clock)):
        model(x).sum().backward()
        optimizer.step()
        if number in (3, 5):
            model.train(number == 5)
            model.module.eval()
            for y in loader(2, clock):
                model(y)
            model.module.train()
    trained = {"input": INPUT, "forward": WRAPPER + MODEL}
    evaluated = {**trained, "eval": 2 * (INPUT + WRAPPER + MODEL)}
    assert clocked.spent() == [trained] * 4 + [evaluated, trained, evaluated, trained]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_teacher_in_every_step(clocked: Recording, clock: FakeClock, frozen: bool, first: bool) -> None:
    """Its batch was waited for to train with, and the loss around its call is forward as ever."""
    model, teacher = Clocked(clock), Unrelated(clock).requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def teach(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(frozen):
            wanted: torch.Tensor = teacher(x)
            return wanted

    for x in loader(8, clock):
        early = teach(x) if first else None
        output = model(x)
        clock.advance(LOSS)
        wanted = teach(x) if early is None else early
        clock.advance(LOSS)
        (output - wanted).sum().backward()
        optimizer.step()
    expected = {"input": INPUT, "forward": MODEL + 2 * LOSS, "eval": MODEL}
    assert clocked.spent() == [expected] * 8
    assert (clocked.steps()["forwards"] == 1).all()


def test_gradients_through_a_frozen_model_are_training(clocked: Recording, clock: FakeClock) -> None:
    """A perceptual loss: part of what lies between the model and backward."""
    model, judge = Clocked(clock), Unrelated(clock).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader(6, clock):
        judge(model(x).expand(4)).sum().backward()
        optimizer.step()
    assert clocked.spent() == [{"input": INPUT, "forward": 2 * MODEL}] * 6


def test_a_model_that_is_no_longer_frozen_is_trained(clocked: Recording, clock: FakeClock) -> None:
    head, body = Clocked(clock), Unrelated(clock).requires_grad_(False)
    optimizer = torch.optim.SGD([*head.parameters(), *body.parameters()], lr=0.1)
    for number, x in enumerate(loader(12, clock)):
        if number == 6:
            body.requires_grad_(True)
        (head(x) + body(x)).sum().backward()
        optimizer.step()
    frozen = {"input": INPUT, "forward": MODEL, "eval": MODEL}
    unfrozen = {"input": INPUT, "forward": 2 * MODEL}
    assert clocked.spent() == [frozen] * 6 + [unfrozen] * 6


def test_a_reentrant_checkpoint_is_not_an_evaluation(clocked: Recording, clock: FakeClock) -> None:
    model = Clocked(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader(6, clock):
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
        optimizer.step()
    assert clocked.spent() == [{"input": INPUT, "forward": MODEL, "backward": MODEL}] * 6


def test_a_second_model_is_found_though_the_first_one_teaches_it(clocked: Recording, clock: FakeClock) -> None:
    first, second = Clocked(clock), Unrelated(clock)
    for student, teacher in ((first, None), (second, first)):
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(6):
            x = torch.ones(4)
            if teacher is not None:
                with torch.no_grad():
                    teacher(x)
            student(x).sum().backward()
            optimizer.step()
    assert clocked.spent()[7:] == [{"forward": MODEL, "eval": MODEL}] * 5
