"""The optimizer: its time, and with its return the end of a step.

Torch's global optimizer hooks see every ``Optimizer.step``.  An optimizer that steps another one inside its own step
(Lookahead, ZeRO wrappers) is one step: only the outermost return counts.  ``GradScaler.step`` is patched besides,
because it may decide not to step at all: the iteration then still ends, and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import OPTIMIZER
from stepscope.records.slot import FLAG_SKIPPED

__all__ = ["OptimizerHooks"]

Hook = Callable[[object, object, object], None]


class OptimizerHooks:
    def __init__(self, recorder: Recorder, torch: Any, patches: Patches) -> None:
        self._recorder = recorder
        self._open: list[tuple[int, int]] = []
        """Steps under way: (id of the optimizer, the phase outside it)."""
        self._returned = 0
        module: Any = import_module("torch.optim.optimizer")  # torch.optim itself hides the name
        before, after = self._make_hooks()
        # Dynamo leaves a function with this mark alone: a compiled optimizer step calls the hooks as they are.
        before._torchdynamo_disable = after._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._handles = [
            module.register_optimizer_step_pre_hook(before),
            module.register_optimizer_step_post_hook(after),
        ]
        self._patch_scaler(torch.amp.GradScaler, patches)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_hooks(self) -> tuple[Hook, Hook]:
        recorder, ledger, under_way = self._recorder, self._recorder.ledger, self._open

        def before(optimizer: object, _args: object, _kwargs: object) -> None:
            if under_way:
                self._drop_unreturned(id(optimizer))
            under_way.append((id(optimizer), ledger.enter(OPTIMIZER)))

        def after(optimizer: object, _args: object, _kwargs: object) -> None:
            if not under_way:
                return
            outer = under_way.pop()[1]
            if not under_way:
                self._returned += 1
                recorder.end_step(0, outer, optimizer)
            elif outer != NOT_NOW:
                ledger.leave(outer)

        return before, after

    def _drop_unreturned(self, key: int) -> None:
        """An optimizer that steps while it is stepping: its last step never returned, an exception went through it."""
        for at, (open_key, outer) in enumerate(self._open):
            if open_key == key:
                if outer != NOT_NOW:
                    self._recorder.ledger.leave(outer)
                del self._open[at:]
                return

    def _patch_scaler(self, scaler: Any, patches: Patches) -> None:
        original = self._recorder.ledger.timed(scaler.step, OPTIMIZER)

        @functools.wraps(scaler.step)
        def step(grad_scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            returned = self._returned
            result = original(grad_scaler, optimizer, *args, **kwargs)
            if returned == self._returned:
                self._recorder.end_step(FLAG_SKIPPED, NOT_NOW, optimizer)
            return result

        patches.set(scaler, "step", step)
