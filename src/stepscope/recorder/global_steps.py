"""How many steps the training had behind it when this process took its first one: after a resume it is not 0.

A framework counts them, in an object that is remembered (weakly) when it is made: the trainer of Hugging Face, that of
Lightning, the engine of DeepSpeed.  A plain script has them in its optimizer, if that counts its steps.  Both are read
once, when the first step has just ended, inside the optimizer's step: the framework has not counted that step yet, the
optimizer has.  Of a tensor on a device the value is not asked for: that would wait for the device.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches

__all__ = ["GlobalSteps", "install"]

OWNERS = {
    "transformers.trainer": ("Trainer", "transformers", ("state", "global_step")),
    "lightning.pytorch.trainer.trainer": ("Trainer", "lightning", ("global_step",)),
    "pytorch_lightning.trainer.trainer": ("Trainer", "lightning", ("global_step",)),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "deepspeed", ("global_steps",)),
}
"""By module: the class whose objects count, the framework as in the fact ``frameworks``, and where they count."""
OPTIMIZER = "optimizer"
"""Who counts where no framework does."""


class GlobalSteps:
    def __init__(self) -> None:
        self._owners: list[tuple[weakref.ref[Any], str, tuple[str, ...]]] = []

    def meet(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        self._owners = [one for one in self._owners if one[0]() is not None]
        self._owners.append((weakref.ref(owner), framework, names))

    def facts(self, frameworks: list[str], optimizer: Any) -> dict[str, Any]:
        """After the first step, which ``optimizer`` ended below these frameworks, the outermost first.

        {}: nobody counts.
        """
        for framework in frameworks:
            for reference, made_by, names in reversed(self._owners):
                counted = reference()
                if counted is not None and made_by == framework:
                    for name in names:
                        counted = getattr(counted, name, None)
                    return _told(framework, counted)
        counted = _counted_by(optimizer)
        return {} if counted is None else _told(OPTIMIZER, counted - 1)


def _told(by: str, first: Any) -> dict[str, Any]:
    return {"global_step": {"by": by, "first": first}} if type(first) is int and first >= 0 else {}


def _counted_by(optimizer: Any) -> int | None:
    """How many steps an optimizer has taken, by the state of its first parameter."""
    torch: Any = sys.modules.get("torch")
    states = getattr(optimizer, "state", None)
    if torch is None or not isinstance(states, dict):
        return None
    state = next(iter(states.values()), None)
    counted: Any = state.get("step") if isinstance(state, dict) else None
    if type(counted) is torch.Tensor and counted.device.type == "cpu" and counted.numel() == 1:
        counted = counted.item()
    return int(counted) if type(counted) in (int, float) and counted >= 1 else None


def install(meet: Callable[[Any, str, tuple[str, ...]], None], patches: Patches, watch: ImportWatch) -> None:
    """Have ``meet`` told of each object that counts, once it is made."""

    def when_imported(module_name: str, class_name: str, framework: str, names: tuple[str, ...]) -> None:
        def patch(module: Any) -> None:
            cls = getattr(module, class_name, None)
            if cls is None:
                return
            original = cls.__init__

            @functools.wraps(original)
            def __init__(owner: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for theirs
                original(owner, *args, **kwargs)
                told(owner, framework, names)

            patches.set(cls, "__init__", __init__)

        watch.when_imported(module_name, patch)

    told = failsafe(meet)
    for module_name, (class_name, framework, names) in OWNERS.items():
        when_imported(module_name, class_name, framework, names)
