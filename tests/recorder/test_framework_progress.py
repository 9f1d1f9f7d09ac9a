"""Numbers of steps, epochs and evaluations, from the methods in which frameworks call their callbacks.

The frameworks are not installed here: small classes stand for their trainers, with the names and the order of calls of
the real ones, which ``tests/frameworks/test_progress_recorded.py`` runs.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.recorder import frameworks
from stepscope.recorder.frameworks import accelerate, hugging_face, lightning, torchtitan
from stepscope.recorder.guard import ImportWatch, Patches, failures
from stepscope.records.identity import epochs_of, logged_steps
from stepscope.records.steps import COMM, FLAG_EXPLICIT
from stepscope.ring import RingState
from tests.recorder.conftest import Recording

# -- Stand-ins --------------------------------------------------------------------------------------------------------


class CallbackHandler:
    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def on_train_begin(self, args: Any, state: Any, control: Any) -> Any:
        return control

    def on_epoch_begin(self, args: Any, state: Any, control: Any) -> Any:
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any) -> Any:
        return control


class Trainer:
    """Hugging Face's: two epochs of four steps, an evaluation every two."""

    def __init__(self, step: Callable[[], None], datasets: Any = 1) -> None:
        self.step, self.datasets = step, datasets
        self.state = SimpleNamespace(global_step=0, epoch=0.0)
        self.callback_handler = CallbackHandler([])

    def train(self, *, resumed_at: int = 0, epochs: int = 2) -> None:
        state, handler = self.state, self.callback_handler
        state.global_step, state.epoch = resumed_at, resumed_at / 4
        handler.on_train_begin(None, state, None)
        for epoch in range(resumed_at // 4, epochs):
            handler.on_epoch_begin(None, state, None)
            for number in range(4):
                self.step()
                state.global_step += 1
                state.epoch = epoch + (number + 1) / 4
                if number % 2:
                    self.evaluate()
            handler.on_epoch_end(None, state, None)

    def evaluate(self, datasets: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        datasets = self.datasets if datasets is None else datasets
        if isinstance(datasets, dict):
            for name, dataset in datasets.items():
                self.evaluate(dataset, metric_key_prefix=f"{metric_key_prefix}_{name}")
        return {f"{metric_key_prefix}_loss": 1}

    def predict(self, dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> None:
        if dataset is None:
            raise ValueError("no dataset")


class _EvaluationLoop:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def run(self) -> list[Any]:
        return []


class _PredictionLoop(_EvaluationLoop):
    def run(self) -> list[Any]:
        return []


class _TrainingEpochLoop:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self._batches_that_stepped = trainer, 0

    def on_run_start(self, fetcher: Any) -> None: ...

    def begin_at(self, batches: Any) -> None:
        self._batches_that_stepped = batches

    def count(self, batches: int) -> None:
        self._batches_that_stepped += batches


class _FitLoop:
    """Lightning's: counts batches, and of a GAN's step the optimizers."""

    def __init__(self, step: Callable[[], None], *, batches: int = 4, stride: int = 1) -> None:
        self.step, self.batches, self.stride = step, batches, stride
        stage = SimpleNamespace(value="sanity_check")
        self.trainer = SimpleNamespace(current_epoch=0, state=SimpleNamespace(stage=stage))
        self.epoch_loop, self.val_loop = _TrainingEpochLoop(self.trainer), _EvaluationLoop(self.trainer)

    def run(self, epochs: int) -> None:
        self.val_loop.run()
        self.trainer.state.stage.value = "validate"
        self.on_run_start()
        for _ in range(epochs):
            self.epoch_loop.on_run_start(None)
            for _ in range(self.batches):
                self.step()
                self.epoch_loop.count(self.stride)
            self.val_loop.run()
            self.on_advance_end()
            self.trainer.current_epoch += 1

    def on_run_start(self) -> None: ...

    def on_advance_end(self) -> None: ...


class Accelerator:
    def log(self, values: dict[str, float], step: int | None = None, log_kwargs: Any = None) -> None: ...


class MetricsProcessor:
    """torchtitan's, which logs the first step and every fifth."""

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float) -> None: ...


class Validator:
    def validate(self, model_parts: Any, step: int) -> None: ...


MODULES: dict[str, tuple[type, ...]] = {
    "torchtitan.components.metrics": (MetricsProcessor,),
    "torchtitan.components.validate": (Validator,),
    "transformers.trainer": (Trainer,),
    "transformers.trainer_callback": (CallbackHandler,),
    "lightning.pytorch.loops.fit_loop": (_FitLoop,),
    "lightning.pytorch.loops.training_epoch_loop": (_TrainingEpochLoop,),
    "lightning.pytorch.loops.evaluation_loop": (_EvaluationLoop,),
    "lightning.pytorch.loops.prediction_loop": (_PredictionLoop,),
    "accelerate.accelerator": (Accelerator,),
}


@pytest.fixture
def patches(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """The stand-ins, hooked."""
    for name, classes in MODULES.items():
        module = ModuleType(name)
        for cls in classes:
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
    patches, watch = Patches(), ImportWatch()
    frameworks.install(recording.recorder, patches, watch, {})
    watch.remove()
    before = failures()
    yield patches
    patches.undo()
    assert failures() == before
    assert [cls for classes in MODULES.values() for cls in classes if any(map(_is_hooked, vars(cls).values()))] == []


def _is_hooked(value: Any) -> bool:
    return hasattr(value, "__wrapped__")


@pytest.fixture
def step(recording: Recording) -> Callable[[], None]:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def take_step() -> None:
        (parameter * 2).sum().backward()
        optimizer.step()

    return take_step


def evaluations(recording: Recording) -> list[tuple[str, int, int]]:
    return [(row["name"], row["count"], row["after"]) for row in recording.facts()["evaluations"]]


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def test_hugging_face(recording: Recording, patches: Patches, step: Callable[[], None]) -> None:
    trainer = Trainer(step)
    trainer.train()
    with pytest.raises(ValueError, match="no dataset"):
        trainer.predict(None)
    facts = recording.facts()
    assert facts["progress"] == {"by": "transformers", "numbers": [[0, 1]], "epochs": [[0, 0], [4, 1]]}
    assert logged_steps(facts, 2, 7) == (3, 8)
    assert evaluations(recording) == [("eval", 4, 8), ("test", 1, 8)]
    assert trainer.callback_handler.callbacks == []
    # The trainer has nothing of ours that a pickle would need.
    assert vars(pickle.loads(pickle.dumps(trainer.callback_handler))) == {"callbacks": []}


def test_a_resumed_training_and_another_one_in_the_same_process(
    recording: Recording, patches: Patches, step: Callable[[], None]
) -> None:
    Trainer(step).train(resumed_at=4)
    Trainer(step, {"short": 1, "long": 1}).train(epochs=1)
    facts = recording.facts()
    assert facts["progress"]["numbers"] == [[0, 5], [4, 1]]
    assert (logged_steps(facts, 0, 3), logged_steps(facts, 3, 4), logged_steps(facts, 4, 4)) == ((5, 8), None, (1, 1))
    assert epochs_of(facts, 3, 4) == (1, 0)
    assert evaluations(recording) == [("eval", 2, 4), ("eval_short", 2, 8), ("eval_long", 2, 8)]


# -- Lightning --------------------------------------------------------------------------------------------------------


def test_lightning(recording: Recording, patches: Patches, step: Callable[[], None]) -> None:
    fit = _FitLoop(step)
    fit.epoch_loop.begin_at(40)  # resumed
    fit.trainer.current_epoch = 10
    fit.run(2)
    _PredictionLoop(fit.trainer).run()
    facts = recording.facts()
    assert facts["progress"] == {"by": "lightning", "numbers": [[0, 40]], "epochs": [[0, 10], [4, 11]]}
    assert evaluations(recording) == [("sanity_check", 1, 0), ("validate", 2, 8), ("predict", 1, 8)]


def test_numbers_that_grow_otherwise_than_steps_are_left_out(
    recording: Recording, patches: Patches, step: Callable[[], None]
) -> None:
    """As with a critic that is stepped five times for each step of a generator: five batches are one step."""
    _FitLoop(step, stride=5).run(2)
    assert recording.facts()["progress"] == {"by": "lightning", "numbers": [], "epochs": [[0, 0], [4, 1]]}
    Trainer(step).train()
    assert recording.facts()["progress"]["numbers"] == [[8, 1]]


def test_the_first_call_of_a_second_optimizer_is_a_step_of_ours(
    recording: Recording, patches: Patches, step: Callable[[], None]
) -> None:
    def batch() -> None:
        if recording.recorder.step == 0:
            step()
        step()

    _FitLoop(batch).run(2)
    assert recording.facts()["progress"]["numbers"] == [[1, 0]]


# -- Accelerate -------------------------------------------------------------------------------------------------------


def test_accelerate_when_two_numbers_agree(recording: Recording, patches: Patches, step: Callable[[], None]) -> None:
    accelerator = Accelerator()
    for number in range(501, 521):
        step()
        if number % 5 == 0:
            accelerator.log({"loss": 1.0}, step=number)
        if number == 510:
            accelerator.log({"val_loss": 1.0}, step=3)  # of an epoch
    assert recording.facts()["progress"] == {"by": "accelerate", "numbers": [[0, 501]], "epochs": []}


def test_accelerate_by_epoch_tells_nothing(recording: Recording, patches: Patches, step: Callable[[], None]) -> None:
    for epoch in range(3):
        for _ in range(4):
            step()
        Accelerator().log({"loss": 1.0}, epoch)
    Accelerator().log({"loss": 1.0})
    assert "progress" not in recording.facts()


# -- torchtitan -------------------------------------------------------------------------------------------------------


def train_titan(step: Callable[[], None], *, resumed_at: int, steps: int) -> None:
    processor, validator = MetricsProcessor(), Validator()
    for number in range(resumed_at + 1, steps + 1):
        step()
        if number == 1 or number % 5 == 0:
            processor.log(number, 1.0, 1.0, 1.0)
        if number % 10 == 0:
            validator.validate([], number)


@pytest.mark.parametrize("resumed_at", [0, 102])
def test_torchtitan_from_what_it_logs(
    recording: Recording, patches: Patches, step: Callable[[], None], resumed_at: int
) -> None:
    train_titan(step, resumed_at=resumed_at, steps=resumed_at + 21)
    facts = recording.facts()
    assert facts["progress"] == {"by": "torchtitan", "numbers": [[0, resumed_at + 1]], "epochs": []}
    assert logged_steps(facts, 3, 20) == (resumed_at + 4, resumed_at + 21)
    last = 20 if resumed_at == 0 else 18  # steps here until the last validation, of step 20 or 120
    assert evaluations(recording) == [("validate", 2, last)]


# -- Limits -----------------------------------------------------------------------------------------------------------


def test_a_sweep_keeps_the_last_trainings_and_the_first_names(
    recording: Recording, patches: Patches, step: Callable[[], None]
) -> None:
    for number in range(12):
        trainer = Trainer(step)
        trainer.train(epochs=1)
        trainer.evaluate(metric_key_prefix=f"trial_{number}" * 20)
    facts = recording.facts()
    assert facts["progress"]["numbers"] == [[4 * number, 1] for number in range(4, 12)]
    trials = [(f"trial_{number}" * 20)[:40] for number in range(5)]
    assert [name for name, _, _ in evaluations(recording)] == ["eval", *trials]


def test_a_run_of_many_epochs_writes_ever_more_rarely(recording: Recording, patches: Patches) -> None:
    """A hub keeps every version of the facts."""
    trainer = Trainer(lambda: None)
    trainer.step = fast_steps(recording)
    versions: set[str] = set()
    for _ in range(60):
        trainer.train(epochs=10)
        versions.add(str(recording.facts()))
    assert len(versions) < 30
    written = recording.facts()
    assert written["progress"]["epochs"] == [] and 1000 < written["evaluations"][0]["count"] < 1200
    recording.recorder.set_state(RingState.EXITED)
    facts = recording.facts()
    assert facts["progress"]["epochs"][-1] == [60 * 40 - 4, 9] and facts["evaluations"][0]["count"] == 1200


def fast_steps(recording: Recording) -> Callable[[], None]:
    """Steps as the script marks them."""
    recording.recorder.begin()
    return partial(recording.recorder.end_step, FLAG_EXPLICIT)


def test_only_rank_0_writes(recording: Recording, patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Trainer(fast_steps(recording)).train()
    assert "progress" not in recording.facts() and "evaluations" not in recording.facts()


def test_a_logged_loss_belongs_to_the_step_that_ended(recording: Recording) -> None:
    """A Trainer gathers the loss from all ranks first, and evaluates before it logs that."""
    recorder, end_step = recording.recorder, fast_steps(recording)
    end_step()
    for ended in (False, True):
        recorder.ledger.leave(recorder.ledger.enter(COMM))
        recorder.note(b'{"loss":1.0}', ended=ended)
    assert recording.noted_steps() == [1, 0]
    recorder.forward_seen = True
    recorder.note(b'{"loss":1.0}', ended=True)
    assert recording.noted_steps() == [1, 0, 1]


@pytest.mark.parametrize("strange", [None, "4", 2.5, -1])
def test_what_is_no_count_is_left_out(
    strange: Any, recording: Recording, patches: Patches, step: Callable[[], None]
) -> None:
    fit = _FitLoop(step)
    fit.epoch_loop.begin_at(strange)
    fit.trainer.current_epoch = strange
    fit.epoch_loop.on_run_start(None)
    CallbackHandler([]).on_epoch_begin(None, SimpleNamespace(global_step=strange, epoch=None), None)
    step()
    assert recording.facts().get("progress", {}).get("numbers", []) == ([[0, 0]] if strange == -1 else [])


def test_one_setting_switches_it_off(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, watch = Patches(), ImportWatch()
    frameworks.install(recording.recorder, patches, watch, {"STEPSCOPE_FRAMEWORKS": "0"})
    assert watch not in sys.meta_path
    frameworks.install(recording.recorder, patches, watch, {})
    assert watch in sys.meta_path
    watch.remove()


def test_a_forked_child_begins_anew(recording: Recording, patches: Patches, step: Callable[[], None]) -> None:
    trainer = Trainer(step)
    trainer.train()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        recording.recorder.forget()
        trainer.evaluate()
        os.write(write, repr([row["name"] for row in recording.recorder.objects.facts["evaluations"]]).encode())
        os.write(write, repr(recording.recorder.objects.facts.get("progress")).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 1 << 16) == b"['eval']None"
    os.close(read)
    assert evaluations(recording) == [("eval", 4, 8)]


def test_all_hooked_modules_are_expected() -> None:
    """Frameworks import torch while their own modules are imported; ``bootstrap`` announces these names earlier."""
    assert set(frameworks.MODULES) == {
        name for framework in (hugging_face, lightning, accelerate, torchtitan) for name in framework.MODULES
    }
