"""How many steps the training had behind it when this process took its first one."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.recorder.facts import STEP_COUNTERS, GlobalSteps, install_step_counters
from stepscope.recorder.guard import ImportWatch, Patches
from tests.recorder.conftest import Recording


class Trainer:
    """Counts like those of Hugging Face, Lightning and DeepSpeed."""

    def __init__(self, steps: Any) -> None:
        self.state = SimpleNamespace(global_step=steps)
        self.global_step = self.global_steps = steps


def train(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        (parameter * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("module_name", STEP_COUNTERS)
def test_what_a_framework_counts(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class_name, framework, _ = STEP_COUNTERS[module_name]
    own = type(class_name, (Trainer,), {"__init__": Trainer.__init__})
    module = ModuleType(module_name)
    setattr(module, class_name, own)
    monkeypatch.setitem(sys.modules, module_name, module)
    steps, patches, watch = GlobalSteps(), Patches(), ImportWatch()
    install_step_counters(steps.meet, patches, watch)
    watch.remove()
    trainer = own(500)
    assert steps.facts([framework], None) == {"global_step": {"by": framework, "first": 500}}
    assert steps.facts(["ray"], None) == {}
    patches.undo()
    assert own.__init__ is Trainer.__init__
    del trainer
    assert steps.facts([framework], None) == {}


def test_the_outermost_framework_is_asked_and_of_it_the_newest() -> None:
    steps, made = GlobalSteps(), [Trainer(3), Trainer(4), Trainer(5)]
    for trainer, framework in zip(made, ("transformers", "transformers", "deepspeed"), strict=True):
        steps.meet(trainer, framework, ("global_step",))
    assert steps.facts(["transformers", "deepspeed"], None) == {"global_step": {"by": "transformers", "first": 4}}


@pytest.mark.parametrize("strange", [None, -1, 2.5, "500"])
def test_what_is_no_count_is_left_out(strange: Any) -> None:
    steps, trainer = GlobalSteps(), Trainer(strange)
    steps.meet(trainer, "lightning", ("global_step",))
    assert steps.facts(["lightning"], None) == {}


def test_an_optimizer_that_was_loaded_goes_on_counting(recording: Recording) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    earlier = torch.optim.Adam([parameter])
    earlier.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    optimizer = torch.optim.Adam([parameter])
    optimizer.load_state_dict(earlier.state_dict())
    train(optimizer, parameter, 4)
    assert recording.facts()["global_step"] == {"by": "optimizer", "first": 7}


def test_an_optimizer_that_does_not_count_tells_nothing(recording: Recording) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    train(torch.optim.SGD([parameter], lr=0.1), parameter, 4)
    assert "global_step" not in recording.facts()


def test_a_count_on_a_device_is_not_asked_for() -> None:
    on_device = SimpleNamespace(state={0: {"step": torch.tensor(7.0, device="meta")}})
    assert GlobalSteps().facts([], on_device) == {}


def counting(first: int) -> tuple[GlobalSteps, Trainer]:
    steps, trainer = GlobalSteps(), Trainer(first)
    steps.meet(trainer, "lightning", ("global_step",))
    assert steps.facts(["lightning"], None) == {"global_step": {"by": "lightning", "first": first}}
    return steps, trainer


def test_where_the_framework_counts_otherwise_both_counts_are_kept() -> None:
    """Lightning counts the steps of each optimizer: here two in a step of ours."""
    steps, trainer = counting(240)
    trainer.global_step = 240 + 2 * 99 + 1
    both = {"global_step": {"by": "lightning", "first": 240, "last": 439, "at": 99}}
    assert steps.facts_later(100) == both
    trainer.global_step += 1  # the last step has been counted
    assert steps.facts_later(100, at_end=True) == both


@pytest.mark.parametrize("counted", [339, 340, 100, None, 2.5])
def test_as_expected_or_anew_the_count_tells_nothing_more(counted: Any) -> None:
    steps, trainer = counting(240)
    trainer.global_step = counted
    assert steps.facts_later(100) == {}


def test_who_is_gone_or_followed_by_another_is_not_asked_any_more() -> None:
    for another in (False, True):
        steps, trainer = counting(0)
        trainer.global_step = 500
        second = Trainer(0)
        if another:
            steps.meet(second, "lightning", ("global_step",))
        else:
            del trainer
        assert steps.facts_later(100) == {}


def test_a_critic_that_steps_five_times_has_counted_more(recording: Recording) -> None:
    critic, generator = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    of_critic = torch.optim.Adam([critic])
    of_critic.state[critic] = {"step": torch.tensor(50.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    of_generator = torch.optim.Adam([generator])
    for _ in range(100):
        train(of_critic, critic, 5)
        train(of_generator, generator, 1)
    # Five steps of the critic came before the generator was known; after 100 steps it has been stepped 95 times.
    assert recording.facts()["global_step"] == {"by": "optimizer", "first": 50, "last": 524, "at": 99}


def test_two_may_wait_for_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and steps are both found in ``transformers.trainer``."""
    (tmp_path / "waited_for_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    watch = ImportWatch()
    messages: list[tuple[str, str]] = []

    def tell(name: str, module: ModuleType) -> None:
        messages.append((name, module.__name__))

    for name in ("first", "second"):
        watch.when_imported("waited_for_by_two", partial(tell, name))
    try:
        __import__("waited_for_by_two")
    finally:
        watch.remove()
        sys.modules.pop("waited_for_by_two", None)
    assert messages == [("first", "waited_for_by_two"), ("second", "waited_for_by_two")]
