"""How many steps the training had behind it when this process took its first one: after a resume it is not 0.

A framework counts them, in an object that is remembered (weakly) when it is made: the trainer of Hugging Face, that of
Lightning, the engine of DeepSpeed.  A plain script has them in its optimizer, if that counts its steps.  Both are read
when the first step has just ended, inside the optimizer's step: the framework has not counted that step yet, the
optimizer has.  Of a tensor on a device the value is not asked for: that would wait for the device.

Whoever told is asked again at later looks.  Lightning counts the steps of all optimizers, a GAN's critic is stepped
several times in a step of ours: where the two counts part, both are kept.
"""

from __future__ import annotations

import contextlib
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
        self._first: dict[str, Any] = {}
        """What was told after the first step."""
        self._told_by: weakref.ref[Any] | None = None
        """Who told it: the object that has the number, or the optimizer."""
        self._name = ""

    def meet(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        self._owners = [one for one in self._owners if one[0]() is not None]
        self._owners.append((weakref.ref(owner), framework, names))
        if self._first.get("by") == framework:  # another training begins, and its steps are counted from somewhere else
            self._told_by = None

    def facts(self, frameworks: list[str], optimizer: Any) -> dict[str, Any]:
        """After the first step, which ``optimizer`` ended below these frameworks, the outermost first.

        {}: nobody counts.
        """
        for framework in frameworks:
            for reference, made_by, names in reversed(self._owners):
                counts = reference()
                if counts is not None and made_by == framework:
                    for name in names[:-1]:
                        counts = getattr(counts, name, None)
                    return self._told(framework, counts, names[-1], getattr(counts, names[-1], None))
        counted = _counted_by(optimizer)
        return {} if counted is None else self._told(OPTIMIZER, optimizer, "", counted - 1)

    def facts_later(self, step: int, *, at_end: bool = False) -> dict[str, Any]:
        """After so many steps of ours; {}: as is to be expected from the first one, or nobody can be asked any more.

        ``at_end``: no step is being ended, so the framework has counted the last one as well.
        """
        counts = self._told_by() if self._told_by is not None else None
        if counts is None:
            return {}
        counted = getattr(counts, self._name, None) if self._name else _counted_by(counts)
        if type(counted) is not int:
            return {}
        last = counted - 1 if at_end or not self._name else counted
        ahead = last - (self._first["first"] + step - 1)
        if last < self._first["first"] or abs(ahead) <= 1:  # where a script marks its steps, one may be under way
            return {}
        return {"global_step": {**self._first, "last": last, "at": step - 1}}

    def _told(self, by: str, counts: Any, name: str, first: Any) -> dict[str, Any]:
        if type(first) is not int or first < 0:
            return {}
        self._first, self._name = {"by": by, "first": first}, name
        with contextlib.suppress(TypeError):  # not every object can be held weakly
            self._told_by = weakref.ref(counts)
        return {"global_step": dict(self._first)}


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
