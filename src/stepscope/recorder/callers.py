"""Who runs the training loop: frameworks and pipeline schedules, by the modules whose functions are on the stack.

A script may import any of them and use none, so the stack decides and not ``sys.modules``.  It is walked where the
recorder looks around anyway: when a model is found (then the stack has what calls it, a pipeline's schedule for one)
and at the end of some steps (then it has what calls the optimizer).  Only names of modules are read.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["Callers"]

MAX_FRAMES = 200
FRAMEWORKS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "accelerate.optimizer": "accelerate",
    "accelerate.accelerator": "accelerate",
    "deepspeed.runtime": "deepspeed",
    "ray.train": "ray",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
"""A module, or a package of which any module counts, and what the framework is called."""
SCHEDULES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel", "deepspeed.runtime.pipe")
"""Packages that run the stages of a pipeline."""


class Callers:
    """What was seen on the stack so far."""

    def __init__(self) -> None:
        self._frameworks: list[str] = []
        self._pipeline = False

    def look(self) -> None:
        """At the stack of whoever calls this."""
        seen = []
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            module = _module_of(frame.f_globals)
            framework = next((name for package, name in FRAMEWORKS.items() if _is_within(module, package)), None)
            if framework is not None:
                seen.append(framework)
            self._pipeline = self._pipeline or any(_is_within(module, package) for package in SCHEDULES)
            frame = frame.f_back
        # The outermost first; of one that was seen before, the place stays.
        self._frameworks += [name for name in dict.fromkeys(reversed(seen)) if name not in self._frameworks]

    def facts(self) -> dict[str, Any]:
        # Lightning's trainer is built upon Fabric, whose modules are then no sign of a loop of its own.
        names = [name for name in self._frameworks if name != "fabric" or "lightning" not in self._frameworks]
        return {**({"frameworks": names} if names else {}), **({"pipeline": True} if self._pipeline else {})}


def _module_of(namespace: dict[str, Any]) -> str:
    """Its name; of one that is run as a script (``python -m torchtitan.train``) what it is imported as."""
    name = namespace.get("__name__")
    if name == "__main__":
        name = getattr(namespace.get("__spec__"), "name", None)
    return name if isinstance(name, str) else ""


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
