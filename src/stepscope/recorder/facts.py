"""Facts about the live objects of the training: loader, model, DDP, FSDP, optimizer, who runs the loop, the process.

The hooks show the objects as they meet them, outside of the hot path: a loader when an iterator is taken, a root when
it is found, an optimizer at the end of a step at which the recorder looks around.  They are held by weak references,
never changed and never called; of tensors only size and dtype are read.  Nothing is imported: what the script has not
loaded is not there.  The recorder writes what is known into the ring's header (``records/facts.py`` has the form).
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.autocast import seen_in
from stepscope.recorder.callers import Callers
from stepscope.recorder.global_steps import GlobalSteps
from stepscope.recorder.guard import failsafe
from stepscope.recorder.loaders import Loaders
from stepscope.recorder.model import ModelWalk

__all__ = ["LiveObjects"]

LOOK_NS = 500_000
"""A look counts modules for so long at most, and goes on after the next step."""
MAX_OBJECTS = 16
"""Roots and optimizers; a script that makes new ones for ever is not followed for ever."""


class LiveObjects:
    """What the recorder of this process has met."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._loaders = Loaders()
        self._callers = Callers()
        self.global_steps = GlobalSteps()
        self._roots: list[_Root] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._failed: list[Callable[..., dict[str, Any] | None]] = []
        self.facts: dict[str, Any] = {}

    # -- meeting --------------------------------------------------------------------------------------------------

    def meet_loader(self, loader: Any, step: int) -> None:
        self._once_failed_never_again(self._meet_loader, loader, step)

    def meet_root(self, module: Any, autocast: str | None, output_dtype: str) -> None:
        if len(self._roots) < MAX_OBJECTS:
            self._roots.append(_Root(module, autocast, output_dtype))
            self._once_failed_never_again(self._of_callers)

    @failsafe
    def meet_optimizer(self, optimizer: Any) -> None:
        known = any(reference() is optimizer for reference in self._optimizers)
        if not known and len(self._optimizers) < MAX_OBJECTS:
            self._optimizers.append(weakref.ref(optimizer))

    @failsafe
    def _meet_loader(self, loader: Any, step: int) -> dict[str, Any]:
        self._loaders.taken(loader, step)
        return {}

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self, step: int, ended_by: Any = None) -> bool:
        """Bring ``facts`` up to date; whether to be asked again after the very next step.

        ``ended_by`` is the optimizer that ended the last one.
        """
        until_ns = self._now() + LOOK_NS
        self.facts = {
            **self.facts,
            **self._once_failed_never_again(self._of_process),
            **self._once_failed_never_again(self._of_callers),
            **self._once_failed_never_again(self._of_loader, step),
            **self._once_failed_never_again(self._of_optimizer),
            **self._once_failed_never_again(self._of_model, until_ns),
        }
        self.facts |= self._once_failed_never_again(self._of_global_steps, step, ended_by)
        if "ddp" in self.facts:
            reducer = self._once_failed_never_again(self._of_reducer)
            self.facts["ddp"] = {**self.facts["ddp"], **reducer}
        return self._of_model not in self._failed and any(root.walk.facts is None for root in self._roots)

    def last_look(self, step: int, *, in_order: bool) -> None:
        """At the end of the process, whose objects may be half gone: what needs none of them.

        ``in_order``: the script came to its end, so that whatever it has not closed by now it never will.
        """
        self.facts = {**self.facts, **self._loaders.facts(step)}
        if in_order:
            self.facts |= self._once_failed_never_again(self._of_process_group)
            self.facts |= self._once_failed_never_again(self._of_global_steps_at_end, step)

    def _once_failed_never_again(self, part: Callable[..., dict[str, Any] | None], *args: Any) -> dict[str, Any]:
        """A part that stumbles over a script's objects would do so each time: it is told once and left out."""
        if part in self._failed:
            return {}
        found = part(*args)
        if found is None:
            self._failed.append(part)
        return found or {}

    @failsafe
    def _of_loader(self, step: int) -> dict[str, Any]:
        self._loaders.choose()
        return self._loaders.facts(step)

    @failsafe
    def _of_callers(self) -> dict[str, Any]:
        self._callers.look()
        return self._callers.facts()

    @failsafe
    def _of_global_steps(self, step: int, optimizer: Any) -> dict[str, Any]:
        if step == 1:
            return self.global_steps.facts(self.facts.get("frameworks", []), optimizer)
        return self.global_steps.facts_later(step)

    @failsafe
    def _of_global_steps_at_end(self, step: int) -> dict[str, Any]:
        return self.global_steps.facts_later(step, at_end=True)

    @failsafe
    def _of_optimizer(self) -> dict[str, Any]:
        """Of the optimizer with the most tensors."""
        alive = [optimizer for optimizer in (known() for known in self._optimizers) if optimizer is not None]
        if not alive:
            return {}
        tensors, optimizer = max(((_tensors(one), one) for one in alive), key=lambda pair: pair[0])
        group = optimizer.param_groups[0] if optimizer.param_groups else {}
        settings = {name: _bool_or_none(group.get(name)) for name in ("fused", "foreach")}
        return {"optimizer": {"class": type(optimizer).__name__, **settings, "tensors": tensors}}

    @failsafe
    def _of_model(self, until_ns: int) -> dict[str, Any]:
        """Of the root with the most parameters, once all of them are counted."""
        for root in self._roots:
            if root.walk.facts is None:
                root.count(self._now, until_ns)
        if not self._roots or any(root.walk.facts is None for root in self._roots):
            return {}
        largest = self._largest()
        return {**(largest.walk.facts or {}), "autocast": largest.autocast}

    @failsafe
    def _of_reducer(self) -> dict[str, Any]:
        return self._largest().walk.reducer_facts()

    def _largest(self) -> _Root:
        return max(self._roots, key=lambda root: root.walk.parameters)

    @failsafe
    def _of_process_group(self) -> dict[str, Any]:
        """Whether there still is one; {} where there was none."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return {}
        if distributed.is_initialized():
            return {"process_group_open": True}
        return {"process_group_open": False} if {"ddp", "fsdp", "mesh"} & set(self.facts) else {}

    @failsafe
    def _of_process(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"gc": {"enabled": gc.isenabled(), "thresholds": list(gc.get_threshold())}}
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            facts["threads"] = torch.get_num_threads()
            if torch.cuda.is_initialized():
                facts["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
                facts["tf32"] = _tf32(torch)
        return facts


class _Root:
    """A root and what was seen of its first call."""

    def __init__(self, module: Any, autocast: str | None, output_dtype: str) -> None:
        self.walk = ModelWalk(module)
        self.autocast = autocast
        self._output_dtype = output_dtype

    def count(self, now: Callable[[], int], until_ns: int) -> None:
        self.walk.go_on(now, until_ns)
        module = self.walk.root()
        if self.walk.facts is not None and self.autocast is None and module is not None:
            self.autocast = seen_in(module, self._output_dtype, self.walk.dtype)


def _tensors(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _bool_or_none(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _tf32(torch: Any) -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        # Since 2.9; asking for the older name is then an error for those who set the newer.
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return bool(matmul.allow_tf32)
