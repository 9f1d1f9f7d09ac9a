"""Checkpoints: ``torch.save``, and ``save`` of distributed checkpointing once the script has imported it."""

from __future__ import annotations

from typing import Any

from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import CHECKPOINT

__all__ = ["install"]


def install(recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch) -> None:
    def patch_save(module: Any) -> None:
        patches.set(module, "save", recorder.ledger.timed(module.save, CHECKPOINT))

    patch_save(torch)
    watch.when_imported("torch.distributed.checkpoint", patch_save)
