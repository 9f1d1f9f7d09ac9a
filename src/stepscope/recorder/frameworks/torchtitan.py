"""torchtitan: the number of the step that its metrics are logged with, and its validations.

Its trainer counts from 1 and continues after a checkpoint.  ``MetricsProcessor.log`` is called after the step, every
``log_freq`` steps, by all ranks; nothing is hooked that runs in every step.
"""

from __future__ import annotations

import functools
from typing import Any

from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.guard import ImportWatch, Patches

__all__ = ["MODULES", "install"]

BY = "torchtitan"
METRICS, VALIDATION = "torchtitan.components.metrics", "torchtitan.components.validate"
MODULES = (METRICS, VALIDATION)


def install(progress: Progress, patches: Patches, watch: ImportWatch) -> None:
    watch.when_imported(METRICS, functools.partial(_hook_metrics, progress, patches))
    watch.when_imported(VALIDATION, functools.partial(_hook_validation, progress, patches))


def _hook_metrics(progress: Progress, patches: Patches, module: Any) -> None:
    processor = getattr(module, "MetricsProcessor", None)
    original = getattr(processor, "log", None)
    if original is not None:
        patches.set(processor, "log", progress.before(original, _logs))


def _hook_validation(progress: Progress, patches: Patches, module: Any) -> None:
    validator = getattr(module, "Validator", None)
    original = getattr(validator, "validate", None)
    if original is not None:
        patches.set(validator, "validate", progress.evaluation(original, lambda *_: "validate"))


def _logs(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    number = kwargs.get("step", args[1] if len(args) > 1 else None)  # self, step
    step = progress.step if progress.forward_seen else progress.step - 1
    if type(number) is not int or step < 0 or progress.by not in ("", BY):
        return
    if progress.by == "":
        progress.training_begins(BY)
        if number >= step:  # the first log after a resume is many steps after the first step
            progress.counts(BY, number - step, 0)
            return
    progress.counts(BY, number, step)
