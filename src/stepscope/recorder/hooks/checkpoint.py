"""Checkpoints: ``torch.save``, distributed checkpointing, safetensors, and what frameworks do around them.

The frameworks end up in one of the first three, but also collect state, write files and delete old ones: so their
methods that save a checkpoint are timed as a whole.  Modules that the script has not imported are not imported here;
they are hooked when it does.
"""

from __future__ import annotations

from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import CHECKPOINT

__all__ = ["FUNCTIONS", "METHODS", "install"]

FUNCTIONS = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "safetensors": ("serialize_file",),
    "safetensors.torch": ("save_file", "save_model", "save"),
}
"""By module.  ``async_save`` copies before it returns.  For safetensors the inner function as well: while
``safetensors.torch`` is importing torch, its own functions do not exist yet."""

METHODS = {
    "transformers.trainer": ("Trainer", ("_save_checkpoint", "save_model")),
    "accelerate.accelerator": ("Accelerator", ("save_state", "save_model")),
    "lightning.pytorch.trainer.trainer": ("Trainer", ("save_checkpoint",)),
    "pytorch_lightning.trainer.trainer": ("Trainer", ("save_checkpoint",)),
    "lightning.fabric.fabric": ("Fabric", ("save",)),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", ("save_checkpoint", "save_16bit_model")),
}
"""By module: a class and its methods."""


def install(recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch) -> None:
    def time(owner: Any, names: tuple[str, ...]) -> None:
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:
                patches.set(owner, name, recorder.ledger.timed(original, CHECKPOINT))

    def when_imported(module_name: str, class_name: str | None, names: tuple[str, ...]) -> None:
        def patch(module: Any) -> None:
            owner = module if class_name is None else getattr(module, class_name, None)
            if owner is not None:
                time(owner, names)

        watch.when_imported(module_name, patch)

    time(torch, ("save",))
    for module_name, names in FUNCTIONS.items():
        when_imported(module_name, None, names)
    for module_name, (class_name, names) in METHODS.items():
        when_imported(module_name, class_name, names)
