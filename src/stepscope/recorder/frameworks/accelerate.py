"""Accelerate: the number that a script gives to ``accelerator.log`` with its values, which trackers show.

Accelerate has no counter.  A number is taken for that of a step only when two calls in a row agree that it
grows as the steps do; scripts also log by epoch or by sample.
"""

from __future__ import annotations

import functools
from typing import Any

from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.guard import ImportWatch, Patches

__all__ = ["MODULES", "install"]

BY = "accelerate"
MODULES = ("accelerate.accelerator",)


def install(progress: Progress, patches: Patches, watch: ImportWatch) -> None:
    watch.when_imported(MODULES[0], functools.partial(_hook_log, progress, patches))


def _hook_log(progress: Progress, patches: Patches, module: Any) -> None:
    accelerator = getattr(module, "Accelerator", None)
    original = getattr(accelerator, "log", None)
    if original is not None:
        patches.set(accelerator, "log", progress.before(original, _Logged().see))


class _Logged:
    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        """A Stepscope step, and the number it was logged with."""

    def see(self, progress: Progress, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number = kwargs.get("step", args[2] if len(args) > 2 else None)  # self, values, step
        if type(number) is not int or progress.by not in ("", BY):
            return
        step = progress.step if progress.forward_seen else progress.step - 1
        last, self._last = self._last, (step, number)
        if last is not None and step > last[0] and number - last[1] == step - last[0]:
            if progress.by == "":
                progress.training_begins(BY)
                progress.counts(BY, *((number - step, 0) if number >= step else reversed(last)))
            else:
                progress.counts(BY, number, step)
