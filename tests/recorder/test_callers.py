"""Who runs the loop, by the modules on the stack."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.recorder.facts import Callers


def facts_below(modules: Sequence[str], *, spec: str | None = None) -> dict[str, Any]:
    """What is found when functions of these modules call each other, the first being the outermost."""
    callers = Callers()
    call: Any = callers.walk_stack
    for name in reversed(modules):
        space: dict[str, Any] = {"__name__": name, "__spec__": SimpleNamespace(name=spec), "inner": call}
        exec("def call():\n    inner()", space)
        call = space["call"]
    call()
    return callers.facts()


@pytest.mark.parametrize(
    ("modules", "frameworks"),
    [
        (["__main__", "transformers.trainer", "accelerate.optimizer"], ["transformers", "accelerate"]),
        (["__main__", "trl.trainer.sft_trainer", "transformers.trainer"], ["transformers"]),
        (["lightning.pytorch.trainer.trainer", "lightning.fabric.utilities"], ["lightning"]),
        (["__main__", "lightning.fabric.wrappers"], ["fabric"]),
        (["__main__", "deepspeed.runtime.engine", "deepspeed.runtime.zero.stage_1_and_2"], ["deepspeed"]),
        (["ray.train._internal.session", "lightning.pytorch.trainer"], ["ray", "lightning"]),
        (["megatron.training.training"], ["megatron"]),
    ],
)
def test_frameworks(modules: list[str], frameworks: list[str]) -> None:
    assert facts_below(modules) == {"frameworks": frameworks}


@pytest.mark.parametrize(
    "module", ["__main__", "transformers.models.gpt2.modeling_gpt2", "accelerated.optimizer", "rays"]
)
def test_what_is_imported_and_does_not_run_the_loop_is_none(module: str) -> None:
    assert facts_below([module]) == {}


def test_a_module_that_is_run_as_a_script() -> None:
    assert facts_below(["__main__"], spec="torchtitan.train") == {"frameworks": ["torchtitan"]}


@pytest.mark.parametrize("module", ["torch.distributed.pipelining.stage", "megatron.core.pipeline_parallel.schedules"])
def test_a_schedule_of_a_pipeline(module: str) -> None:
    assert facts_below(["__main__", module])["pipeline"] is True
