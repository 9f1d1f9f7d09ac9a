"""Lightning's Trainer: steps as its loggers number them, epochs, and evaluations by their stage.

The stages are ``sanity_check``, ``validate``, ``test`` and ``predict``.  Loggers number steps from 0, by
``_batches_that_stepped``: unlike ``global_step`` it grows by one however many optimizers a batch steps.
"""

from __future__ import annotations

import functools
from typing import Any

from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.guard import ImportWatch, Patches

__all__ = ["MODULES", "install"]

BY = "lightning"
PACKAGES = ("lightning.pytorch.loops", "pytorch_lightning.loops")
FIT, EPOCH, EVALUATION, PREDICTION = "fit_loop", "training_epoch_loop", "evaluation_loop", "prediction_loop"
MODULES = tuple(f"{package}.{name}" for package in PACKAGES for name in (FIT, EPOCH, EVALUATION, PREDICTION))


def install(progress: Progress, patches: Patches, watch: ImportWatch) -> None:
    hooks = {FIT: _hook_fit, EPOCH: _hook_epoch, EVALUATION: _hook_evaluation, PREDICTION: _hook_prediction}
    for package in PACKAGES:
        for name, hook in hooks.items():
            watch.when_imported(f"{package}.{name}", functools.partial(hook, progress, patches))


def _hook_fit(progress: Progress, patches: Patches, module: Any) -> None:
    loop = getattr(module, "_FitLoop", None)
    for method, see in (("on_run_start", _begins), ("on_advance_end", _epoch_ends)):
        original = getattr(loop, method, None)
        if original is not None:
            patches.set(loop, method, progress.before(original, see))


def _hook_epoch(progress: Progress, patches: Patches, module: Any) -> None:
    loop = getattr(module, "_TrainingEpochLoop", None)
    original = getattr(loop, "on_run_start", None)  # follows its ``reset``, which corrects the counter after a resume
    if original is not None:
        patches.set(loop, "on_run_start", progress.before(original, _epoch_begins))


def _hook_evaluation(progress: Progress, patches: Patches, module: Any) -> None:
    loop = getattr(module, "_EvaluationLoop", None)
    original = getattr(loop, "run", None)
    if original is not None:
        patches.set(loop, "run", progress.evaluation(original, _stage))


def _hook_prediction(progress: Progress, patches: Patches, module: Any) -> None:
    loop = getattr(module, "_PredictionLoop", None)
    original = getattr(loop, "run", None)
    if original is not None:
        patches.set(loop, "run", progress.evaluation(original, lambda *_: "predict"))


def _stage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stage = getattr(getattr(args[0].trainer, "state", None), "stage", None)
    return getattr(stage, "value", None)


def _begins(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    progress.training_begins(BY)


def _epoch_begins(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _count(progress, args[0])
    progress.epoch_begins(args[0].trainer.current_epoch)


def _epoch_ends(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _count(progress, getattr(args[0], "epoch_loop", None))


def _count(progress: Progress, epoch_loop: Any) -> None:
    counted = getattr(epoch_loop, "_batches_that_stepped", None)
    if type(counted) is int:
        progress.counts(BY, counted)
