"""Backward: the time inside ``torch.autograd.backward``, which ``Tensor.backward`` calls too, and inside ``grad``.

Checkpointing runs forward again inside it; that is part of backward and needs no pairing of hooks.

``grad`` is also called for a part of a loss: the penalty of a critic's gradient, the forces of an energy, a weight
between two losses.  It then keeps the graph, because backward comes through it again, or it is called inside of
another phase (a model's forward).  Such a call belongs to what is around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.dynamo import break_at, leave_alone
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD, FIRST_USER_SLOT, OTHER

__all__ = ["install"]

KEEPING = {"retain_graph": 3, "create_graph": 4}
"""Arguments of ``grad`` that keep the graph, and where they stand."""


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    backward = recorder.ledger.timed(torch.autograd.backward, BACKWARD)
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
    return any(kwargs.get(name) or (len(args) > at and args[at]) for name, at in KEEPING.items())
