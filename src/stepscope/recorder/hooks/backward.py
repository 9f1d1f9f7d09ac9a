"""Hooks on backward: torch.autograd.backward and grad, and DeepSpeed's engine around backward and optimizer.

``Tensor.backward`` calls ``torch.autograd.backward`` too.  Checkpointing runs forward again inside it; that is part of
backward and needs no pairing of hooks.

``grad`` is also called for a part of a loss: the penalty of a critic's gradient, the forces of an energy, a weight
between two losses.  It then keeps the graph, because backward passes through it again, or it is called inside another
phase (a model's forward).  Such a call belongs to what is around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.hooks.compiled import break_at, leave_alone
from stepscope.recorder.hooks.loss import StepValues
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import BACKWARD, FIRST_USER_SLOT, OPTIMIZER, OTHER

__all__ = ["install", "install_deepspeed"]


# -- Autograd ---------------------------------------------------------------------------------------------------------

KEEPS_GRAPH_ARGUMENTS = {"retain_graph": 3, "create_graph": 4}
"""Arguments of ``grad`` that keep the graph, and their positions."""


def install(recorder: Recorder, torch: Any, patches: Patches, values: StepValues) -> None:
    backward = recorder.ledger.timed(torch.autograd.backward, BACKWARD, None if values.off else values)
    break_at(backward)
    patches.set(torch.autograd, "backward", backward)
    grad = _timed_grad(recorder.ledger, torch)
    leave_alone(torch, grad, with_calls=False)  # dynamo traces the original
    patches.set(torch.autograd, "grad", grad)


def _timed_grad(ledger: Ledger, torch: Any) -> Callable[..., Any]:
    original, is_compiling = torch.autograd.grad, torch.compiler.is_dynamo_compiling
    timed = ledger.timed(original, BACKWARD)

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or OTHER < ledger.phase < FIRST_USER_SLOT or _keeps_graph(args, kwargs):
            return original(*args, **kwargs)
        return timed(*args, **kwargs)

    return grad


def _keeps_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) or (len(args) > at and args[at]) for name, at in KEEPS_GRAPH_ARGUMENTS.items())


# -- DeepSpeed --------------------------------------------------------------------------------------------------------
# DeepSpeed's engine does more than torch's backward and optimizer, and its time counts as the same phases.
#
# Around backward it reduces the gradients; around the step of the optimizer that it was given, its own optimizers
# (which are not torch's) compute the norm of the gradients, cast, and gather parameters.  The step still ends with that
# of the inner optimizer: what follows opens the next step, as part of the phase.

DEEPSPEED_METHODS = {"backward": BACKWARD, "_take_model_step": OPTIMIZER}
"""Methods of the engine; its ``step`` calls the second once the gradients of all batches are there."""


def install_deepspeed(recorder: Recorder, patches: Patches, watch: ImportWatch) -> None:
    def patch(module: Any) -> None:
        engine = getattr(module, "DeepSpeedEngine", None)
        for name, phase in DEEPSPEED_METHODS.items():
            original = getattr(engine, name, None)
            if original is not None:
                patches.set(engine, name, recorder.ledger.timed(original, phase))

    watch.when_imported("deepspeed.runtime.engine", patch)
