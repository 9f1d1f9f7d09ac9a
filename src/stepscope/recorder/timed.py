"""The wrapper that all simple hooks share: the call of the original, with a phase around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.recorder import Recorder

__all__ = ["timed"]


def timed(recorder: Recorder, original: Callable[..., Any], phase: int) -> Callable[..., Any]:
    """``original`` with its time booked for ``phase``; straight through where the recorder says not now."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        outer = recorder.enter(phase)
        if outer == NOT_NOW:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.leave(outer)

    return wrapper
