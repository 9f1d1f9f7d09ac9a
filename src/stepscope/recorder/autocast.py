"""Mixed precision: in which dtype does autocast run the model?

Seen without entering the model: autocast is on around the call of a root; or its ``forward`` is wrapped in one (by a
decorator, or by Accelerate); or the parameters are wide and the output is narrow.
"""

from __future__ import annotations

from typing import Any

from stepscope.recorder.model import unwrapped

__all__ = ["around_call", "seen_in"]

NARROW = ("bfloat16", "float16")
MAX_WRAPPERS = 8


def around_call(torch: Any, module: Any) -> str | None:
    """The dtype of the autocast that is on now for the device of the module; None: none is."""
    device = next(module.parameters()).device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def seen_in(module: Any, output_dtype: str, parameter_dtype: str) -> str | None:
    """The same from the outside, after the call."""
    for each in (module, unwrapped(module)):
        wrapped = _wrapped_in(each.forward)
        if wrapped is not None:
            return wrapped
    return output_dtype if output_dtype in NARROW and parameter_dtype == "float32" else None


def _wrapped_in(function: Any) -> str | None:
    """The dtype of an enabled ``torch.autocast`` among the variables of a wrapper, or of what it wraps."""
    for _ in range(MAX_WRAPPERS):
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                continue
            if type(value).__name__ == "autocast" and getattr(value, "_enabled", False):
                return str(value.fast_dtype).removeprefix("torch.")
        function = getattr(function, "__wrapped__", None)
    return None
