"""DeepSpeed's engine does more than torch's backward and optimizer, and books it where they are.

Around backward it reduces the gradients; around the step of the optimizer that it was given, its own optimizers (which
are not torch's) compute the norm of the gradients, cast, and gather parameters.  The step still ends with that of the
optimizer inside: what follows there opens the next one, as part of the phase.
"""

from __future__ import annotations

from typing import Any

from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD, OPTIMIZER

__all__ = ["install"]

METHODS = {"backward": BACKWARD, "_take_model_step": OPTIMIZER}
"""Of the engine; the second is what its ``step`` does once the gradients of all batches are there."""


def install(recorder: Recorder, patches: Patches, watch: ImportWatch) -> None:
    def patch(module: Any) -> None:
        engine = getattr(module, "DeepSpeedEngine", None)
        for name, phase in METHODS.items():
            original = getattr(engine, name, None)
            if original is not None:
                patches.set(engine, name, recorder.ledger.timed(original, phase))

    watch.when_imported("deepspeed.runtime.engine", patch)
