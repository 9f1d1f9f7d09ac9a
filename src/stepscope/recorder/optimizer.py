"""The optimizer: its time, and with its return the end of a step.

Torch's global optimizer hooks see every ``Optimizer.step``.  An optimizer that steps another one inside its own step
(Lookahead, ZeRO wrappers) is one step: only the outermost return counts.  ``GradScaler.step`` is patched besides,
because it may decide not to step at all: the iteration then still ends, and says so.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from stepscope.records.phases import OPTIMIZER
from stepscope.records.slot import FLAG_SKIPPED
from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.timed import timed

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    def __init__(self, recorder: Recorder, torch: Any, patches: Patches) -> None:
        self._recorder = recorder
        self._open: list[tuple[int, int]] = []
        """Steps under way: (id of the optimizer, the phase outside it)."""
        self._returned = 0
        module: Any = import_module("torch.optim.optimizer")  # torch.optim itself hides the name
        # Dynamo leaves a function with this mark alone: a compiled optimizer step calls the hooks as they are.
        before, after = failsafe(self._before), failsafe(self._after)
        before._torchdynamo_disable = after._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._handles = [
            module.register_optimizer_step_pre_hook(before),
            module.register_optimizer_step_post_hook(after),
        ]
        self._patch_scaler(torch.amp.GradScaler, patches)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: object, _args: object, _kwargs: object) -> None:
        key = id(optimizer)
        if self._open:
            self._drop_unreturned(key)
        self._open.append((key, self._recorder.enter(OPTIMIZER)))

    def _after(self, optimizer: object, _args: object, _kwargs: object) -> None:
        if not self._open:
            return
        _, outer = self._open.pop()
        if outer != NOT_NOW:
            self._recorder.leave(outer)
        if not self._open:
            self._returned += 1
            self._recorder.end_optimizer(optimizer)

    def _drop_unreturned(self, key: int) -> None:
        """An optimizer that steps while it is stepping: its last step never returned, an exception went through it."""
        for at, (open_key, outer) in enumerate(self._open):
            if open_key == key:
                if outer != NOT_NOW:
                    self._recorder.leave(outer)
                del self._open[at:]
                return

    def _patch_scaler(self, scaler: Any, patches: Patches) -> None:
        original = timed(self._recorder, scaler.step, OPTIMIZER)

        @functools.wraps(scaler.step)
        def step(grad_scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            returned = self._returned
            result = original(grad_scaler, optimizer, *args, **kwargs)
            if returned == self._returned:
                self._recorder.end_optimizer(optimizer, FLAG_SKIPPED)
            return result

        patches.set(scaler, "step", step)
