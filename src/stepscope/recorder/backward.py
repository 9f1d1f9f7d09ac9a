"""Backward: the time inside ``torch.autograd.backward``, which ``Tensor.backward`` calls too.

Checkpointing runs forward again inside it; that is part of backward and needs no pairing of hooks.
"""

from __future__ import annotations

from typing import Any

from stepscope.recorder.dynamo import break_at
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD

__all__ = ["install"]


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    backward = recorder.ledger.timed(torch.autograd.backward, BACKWARD)
    break_at(backward)
    patches.set(torch.autograd, "backward", backward)
