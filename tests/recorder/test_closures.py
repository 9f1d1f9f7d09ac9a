"""A closure given to ``optimizer.step`` is the script's code: only what the optimizer itself does is its time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clock import FakeClock
from torch import nn

from stepscope.records.steps import OTHER
from tests.recorder.conftest import Recording

BEFORE_MODEL, FORWARD, LOSS, BACKWARD, UPDATE = 1_000, 200, 30, 4_000, 50_000
Closure = Callable[[], torch.Tensor]


class Clocked(nn.Module):
    """Takes ``FORWARD`` nanoseconds, and ``BACKWARD`` in backward."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock.advance(FORWARD)
        result: torch.Tensor = self.layer(x)
        result.register_hook(lambda _: self._clock.advance(BACKWARD))
        return result


class Plain(torch.optim.SGD):
    """Calls the closure once and then takes ``UPDATE`` nanoseconds."""

    def __init__(self, model: nn.Module, clock: FakeClock) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self._clock = clock

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self._clock.advance(UPDATE)
        return loss


class SharpnessAware(torch.optim.Optimizer):
    """Like SAM: a second forward and backward, and another optimizer's step inside its own."""

    def __init__(self, inner: Plain, clock: FakeClock) -> None:
        super().__init__(inner.param_groups, {})
        self._inner = inner
        self._clock = clock

    def step(self, closure: Closure) -> torch.Tensor:  # type: ignore[override]
        repeated = torch.enable_grad()(closure)
        repeated()
        self._clock.advance(UPDATE)
        result: torch.Tensor = self._inner.step(repeated)
        return result


def make_closure(model: nn.Module, clock: FakeClock) -> Closure:
    x = torch.ones(2, 4)

    def closure() -> torch.Tensor:
        model.zero_grad()
        clock.advance(BEFORE_MODEL)
        output = model(x)
        clock.advance(LOSS)
        loss: torch.Tensor = output.square().sum()
        loss.backward()
        return loss

    return closure


ONE_PASS = {"other": BEFORE_MODEL, "forward": FORWARD + LOSS, "backward": BACKWARD, "optimizer": UPDATE}


@pytest.mark.parametrize("by_name", [True, False])
def test_inside_a_closure_each_phase_is_itself(clocked: Recording, clock: FakeClock, by_name: bool) -> None:
    model = Clocked(clock)
    optimizer = Plain(model, clock)
    closure = make_closure(model, clock)
    for _ in range(6):
        optimizer.step(closure=functools.partial(closure)) if by_name else optimizer.step(closure)
    assert clocked.spent() == [ONE_PASS] * 6
    assert clocked.recorder.ledger.phase == OTHER


def test_two_passes_and_an_optimizer_within_the_optimizer(clocked: Recording, clock: FakeClock) -> None:
    model = Clocked(clock)
    optimizer = SharpnessAware(Plain(model, clock), clock)
    for _ in range(6):
        optimizer.step(make_closure(model, clock))
    assert clocked.spent() == [{name: 2 * ns for name, ns in ONE_PASS.items()}] * 6
    assert (clocked.steps()["micro_batches"] == 2).all()


def test_a_closure_that_raises_leaves_the_ledger_straight(clocked: Recording, clock: FakeClock) -> None:
    model = Clocked(clock)
    optimizer = Plain(model, clock)
    closure = make_closure(model, clock)

    def failing() -> torch.Tensor:
        closure()
        raise torch.OutOfMemoryError("CUDA out of memory")

    for number in range(6):
        try:
            optimizer.step(failing if number == 3 else closure)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
    both = {name: (1 if name == "optimizer" else 2) * ns for name, ns in ONE_PASS.items()}
    assert clocked.spent() == [ONE_PASS] * 3 + [both, ONE_PASS]
    assert clocked.recorder.ledger.phase == OTHER


class Counting:
    """A closure that is an object, of which an optimizer may ask more than a call."""

    def __init__(self, closure: Closure) -> None:
        self.calls = 0
        self._closure = closure

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self._closure()


def test_an_object_that_is_called_as_a_closure_is_left_as_it_is(clocked: Recording, clock: FakeClock) -> None:
    class Asking(Plain):
        def step(self, closure: Any = None) -> Any:
            assert closure.calls == 0
            result = super().step(closure)
            assert closure.calls == 1
            return result

    model = Clocked(clock)
    Asking(model, clock).step(Counting(make_closure(model, clock)))
    assert len(clocked.steps()) == 1


def test_the_losses_of_lbfgs_are_the_same_to_the_bit(clocked: Recording, clock: FakeClock) -> None:
    def losses(given: Callable[[Closure], Any]) -> list[float]:
        torch.manual_seed(0)
        model = Clocked(clock)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        closure = make_closure(model, clock)
        return [float(optimizer.step(given(closure)).detach()) for _ in range(4)]

    assert losses(lambda closure: closure) == losses(Counting)
    assert "optimizer" not in clocked.spent()[1]  # LBFGS itself takes no time on this clock


def test_a_step_that_calls_that_of_its_base_is_one(clocked: Recording, clock: FakeClock) -> None:
    """Torch wraps the ``step`` of a class when the first optimizer of it is made: here of both, so it is run twice."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    model = Clocked(clock)
    optimizer = Plain(model, clock)
    for _ in range(6):
        optimizer.step(make_closure(model, clock))
    assert clocked.spent() == [ONE_PASS] * 6
