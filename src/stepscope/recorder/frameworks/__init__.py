"""What a framework knows and the hooks on torch do not: numbers of steps in its logs, epochs, names of evaluations.

One file per framework.  Each waits until the script imports the framework, and hooks the methods that call its
callbacks.  Nothing is added to a trainer's list of callbacks: scripts compare that list, and frameworks write its
members into checkpoints.  Nothing is hooked that runs in every step: numbers of steps are compared at the beginning and
the end of an epoch, and the steps between them follow.  ``STEPSCOPE_FRAMEWORKS=0`` leaves all of it out.
"""

from __future__ import annotations

from collections.abc import Mapping

from stepscope.recorder.frameworks import accelerate, hugging_face, lightning, torchtitan
from stepscope.recorder.frameworks.progress import Progress
from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.paths import ENV_FRAMEWORKS

__all__ = ["MODULES", "install"]

MODULES = (*hugging_face.MODULES, *lightning.MODULES, *accelerate.MODULES, *torchtitan.MODULES)
"""Modules that are hooked when the script imports them."""


def install(recorder: Recorder, patches: Patches, watch: ImportWatch, environment: Mapping[str, str]) -> None:
    if environment.get(ENV_FRAMEWORKS) == "0":
        return
    progress = Progress(recorder)
    for framework in (hugging_face, lightning, accelerate, torchtitan):
        framework.install(progress, patches, watch)
