"""What ``stepscope.note`` writes, and what frameworks log."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

import pytest

import stepscope
from stepscope.recorder import bootstrap
from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.hooks.notes import LOGGERS, install


class Host:
    def __init__(self, value: Any, device: str = "cpu") -> None:
        self.value = value
        self.device = type("Device", (), {"type": device, "__str__": lambda self: f"{device}:0"})()

    def item(self) -> Any:
        assert self.device.type == "cpu", "a device is never waited for"
        return self.value


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2, 2),
        (True, True),
        (0.5, 0.5),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (Host(0.25), 0.25),
        (Host(math.nan), "nan"),
        (Host(7), 7),
        (Host(0.25, "cuda"), "<tensor on cuda:0>"),
        (None, None),
    ],
)
def test_every_value_is_valid_json(monkeypatch: pytest.MonkeyPatch, value: Any, written: Any) -> None:
    notes: list[bytes] = []
    monkeypatch.setattr(bootstrap, "current", lambda: type("Recorder", (), {"note": staticmethod(notes.append)}))
    stepscope.note(loss=value)
    (text,) = notes
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": written}


class Recorded:
    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.of_ended: list[bool] = []

    def note(self, text: bytes, *, ended: bool = False) -> None:
        self.texts.append(text)
        self.of_ended.append(ended)

    def taken(self) -> dict[str, Any]:
        found = {name: value for text in self.texts for name, value in json.loads(text).items()}
        self.texts.clear()
        return found


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorded, dict[str, Any]]]:
    """Stand-ins for the classes that log, with the hooks in them, by module; each calls its ``passed_on``."""
    made: dict[str, Any] = {}
    for module_name, (class_name, method, argument) in LOGGERS.items():
        scope: dict[str, Any] = {"passed_on": []}
        more = ", scalar_value=None" if argument == "tag" else ""
        exec(  # their signatures are what is tested
            f"class {class_name}:\n"
            f"    def {method}(self, {argument}{more}, step=None):\n"
            f"        for each in passed_on:\n"
            f"            each({argument})\n"
            f"        return step\n",
            scope,
        )
        module = types.ModuleType(module_name)
        vars(module).update(scope)
        made[module_name] = module
        monkeypatch.setitem(sys.modules, module_name, module)
    recorded, patches = Recorded(), Patches()
    install(cast(Any, recorded), patches, ImportWatch())
    yield recorded, made
    patches.undo()
    assert not any("noted" in repr(vars(getattr(made[name], LOGGERS[name][0]))) for name in made), "all undone"


@pytest.mark.parametrize("name", [name for name, logger in LOGGERS.items() if logger[2] != "tag"])
def test_what_a_framework_logs_is_noted(loggers: tuple[Recorded, dict[str, Any]], name: str) -> None:
    recorded, modules = loggers
    class_name, method, argument = LOGGERS[name]
    owner = getattr(modules[name], class_name)()
    logged = {
        "loss": math.nan,
        "learning_rate": 1e-3,
        "epoch": 3,
        "grad_norm": Host(2.0, "cuda"),
        "eval_loss": "2.1",
        7: 1.0,
        "train/samples_per_second": 12,
    }
    noted = {"loss": "nan", "learning_rate": 1e-3, "train/samples_per_second": 12}
    assert getattr(owner, method)(logged, step=5) == 5
    assert recorded.taken() == noted
    assert getattr(owner, method)(**{argument: logged}) is None
    assert recorded.taken() == noted
    for odd in ([1, 2], None, {}):
        getattr(owner, method)(odd)
    assert recorded.taken() == {}
    assert set(recorded.of_ended) == {name.startswith(("transformers", "lightning", "pytorch_lightning"))}


def test_what_a_script_writes_to_tensorboard_is_noted(loggers: tuple[Recorded, dict[str, Any]]) -> None:
    recorded, modules = loggers
    writer = modules["torch.utils.tensorboard.writer"].SummaryWriter()
    writer.add_scalar("Loss/train", 0.5, 3)
    assert recorded.taken() == {"Loss/train": 0.5}
    writer.add_scalar(tag="lr", scalar_value=0.1)
    assert recorded.taken() == {"lr": 0.1}
    writer.add_scalar("temperature", 20.0)
    assert recorded.taken() == {}


def test_values_that_one_logger_passes_to_another_are_noted_once(loggers: tuple[Recorded, dict[str, Any]]) -> None:
    recorded, modules = loggers
    run = modules["wandb.sdk.wandb_run"].Run()
    trainer = modules["transformers.trainer"]
    trainer.passed_on.append(lambda logs: run.log({f"train/{name}": value for name, value in logs.items()}))
    trainer.Trainer().log({"loss": 1.0})
    assert recorded.taken() == {"loss": 1.0}
    run.log({"loss": 2.0})
    assert recorded.taken() == {"loss": 2.0}


def test_of_what_a_framework_logs_no_code_of_the_script_is_run(loggers: tuple[Recorded, dict[str, Any]]) -> None:
    recorded, modules = loggers
    calls: list[str] = []

    class Metrics(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            calls.append("iter")
            return super().__iter__()

        def __getitem__(self, name: str) -> Any:
            calls.append("item")
            return super().__getitem__(name)

    class Lazy:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            raise AttributeError(name)

    run = modules["wandb.sdk.wandb_run"].Run()
    run.log(Metrics(loss=1.5, lr=Lazy(), **{f"loss/{at}": at for at in range(20)}))
    assert calls == []
    assert recorded.taken() == {"loss": 1.5, **{f"loss/{at}": at for at in range(6)}}
