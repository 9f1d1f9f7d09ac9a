"""Host to device: ``Tensor.to`` and ``Tensor.cuda`` while the script itself has the word.

Only copies between batches and forward are of interest: inside forward, backward or the optimizer the call goes
straight through.  On a torch built without an accelerator nothing is patched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import FIRST_USER_SLOT, H2D, OTHER

__all__ = ["goes_to_device", "install"]


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if torch.version.cuda or torch.version.hip or torch.backends.mps.is_built() or torch.xpu._is_compiled():
        patches.set(torch.Tensor, "to", _timed(recorder, torch, torch.Tensor.to, goes_to_device))
        patches.set(torch.Tensor, "cuda", _timed(recorder, torch, torch.Tensor.cuda, lambda *_: True))


def goes_to_device(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of ``Tensor.to`` name a device other than the host."""
    target = kwargs.get("device", args[0] if args else kwargs.get("other"))
    if isinstance(target, str):
        return not target.startswith("cpu")
    if isinstance(target, torch.device):
        return bool(target.type != "cpu")
    if isinstance(target, torch.Tensor):
        return bool(target.device.type != "cpu")
    return isinstance(target, int)


def _timed(
    recorder: Recorder, torch: Any, original: Any, wanted: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
) -> Any:
    is_compiling, is_tracing = torch.compiler.is_dynamo_compiling, torch.compiler.is_compiling
    copy = recorder.ledger.timed(original, H2D)

    @functools.wraps(original)
    def maybe_timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        phase = recorder.ledger.phase
        if (
            (phase != OTHER and phase < FIRST_USER_SLOT)
            or is_tracing()
            or self.device.type != "cpu"
            or not wanted(torch, args, kwargs)
        ):
            return original(self, *args, **kwargs)
        return copy(self, *args, **kwargs)

    leave_alone(torch, maybe_timed, with_calls=False)
    return maybe_timed
