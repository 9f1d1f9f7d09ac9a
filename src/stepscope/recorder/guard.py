"""The one place where our own errors are swallowed: a failing hook must never reach the training script.

``failsafe`` wraps each function that torch or the interpreter calls on our behalf.  What it swallows it counts, and the
count stands in the ring's header, so that a summary can say that something is missing.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["failsafe", "failures", "on_failure", "warn"]

P = ParamSpec("P")
R = TypeVar("R")

_count = 0
_listener: Callable[[int], None] | None = None


def failures() -> int:
    return _count


def on_failure(listener: Callable[[int], None] | None) -> None:
    """Call ``listener`` with the new count after each failure (the recorder writes it into the ring)."""
    global _listener
    _listener = listener


def failsafe(hook: Callable[P, R]) -> Callable[P, R | None]:
    """``hook``, but an exception of its own becomes None and a count."""

    @functools.wraps(hook)
    def safe(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return hook(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the boundary that the module docstring speaks of
            _note_failure(hook.__name__)
            return None

    return safe


def warn(message: str) -> None:
    """One line for the user, written past ``sys.stderr`` so that it cannot raise in the script."""
    try:
        os.write(2, f"stepscope: {message}\n".encode())
    except OSError:
        pass


def _note_failure(name: str) -> None:
    global _count
    _count += 1
    if _count == 1:
        error: Any = sys.exc_info()[1]
        frame = traceback.extract_tb(error.__traceback__)[-1]
        warn(
            f"a hook of ours failed and was ignored: {type(error).__name__}: {error} "
            f"({name}, {os.path.basename(frame.filename)}:{frame.lineno}); the run goes on"  # noqa: PTH119
        )
    if _listener is not None:
        _listener(_count)
