"""Hugging Face Trainer: ``state.global_step``, ``state.epoch``, and evaluations by the prefix of their metrics.

Its ``CallbackHandler`` calls all callbacks; we are called before them, with the same state.  ``evaluate`` and
``predict`` have the name: ``eval``, ``eval_DATASET`` with several datasets, ``test``.

The Trainer logs a step after it has counted it: its first one is step 1.
"""

from __future__ import annotations

import functools
from typing import Any

from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.guard import ImportWatch, Patches

__all__ = ["MODULES", "install"]

BY = "transformers"
TRAINER, CALLBACKS = "transformers.trainer", "transformers.trainer_callback"
MODULES = (TRAINER, CALLBACKS)
PREFIX = "metric_key_prefix"


def install(progress: Progress, patches: Patches, watch: ImportWatch) -> None:
    watch.when_imported(CALLBACKS, functools.partial(_hook_callbacks, progress, patches))
    watch.when_imported(TRAINER, functools.partial(_hook_trainer, progress, patches))


def _hook_callbacks(progress: Progress, patches: Patches, module: Any) -> None:
    handler = getattr(module, "CallbackHandler", None)
    for method, see in (("on_train_begin", _begins), ("on_epoch_begin", _epoch_begins), ("on_epoch_end", _epoch_ends)):
        original = getattr(handler, method, None)
        if original is not None:
            patches.set(handler, method, progress.before(original, see))


def _hook_trainer(progress: Progress, patches: Patches, module: Any) -> None:
    trainer = getattr(module, "Trainer", None)
    for method, default in (("evaluate", "eval"), ("predict", "test")):
        original = getattr(trainer, method, None)
        if original is not None:
            patches.set(trainer, method, progress.evaluation(original, functools.partial(_name, default)))


def _name(default: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get(PREFIX, args[3] if len(args) > 3 else default)  # args[0] is self


def _begins(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    progress.training_begins(BY)
    _count(progress, _state(args, kwargs))


def _epoch_begins(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state = _state(args, kwargs)
    _count(progress, state)
    # A number with a fraction, in the middle of an epoch after a resume.
    progress.epoch_begins(int(getattr(state, "epoch", None) or 0))


def _epoch_ends(progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _count(progress, _state(args, kwargs))


def _state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("state", args[2] if len(args) > 2 else None)  # self, args, state, control


def _count(progress: Progress, state: Any) -> None:
    counted = getattr(state, "global_step", None)
    if type(counted) is int:
        progress.counts(BY, counted + 1)
