"""Hooks in C (``native_hooks.c``) for ordinary steps: an optional part, used by default where it has been tried.

What torch and the script meet is a function in Python in each case, with the name, the attributes and the signature of
the original.  All it does is check for dynamo where the hook in Python does, and call the hook in C.  So
``torch.compile``, ``inspect``, ``pickle``, ``copy`` and tracebacks see hooks as they know them, and dynamo never meets
a callable without code.  These frames cost 7 µs of a step in all; it is the price of not having to know what else
inspects the functions.

A hook in C decides whether a call is ordinary, and calls the hook in Python if it is not.  Both use the same fields,
which belong to objects of C: ``LedgerFields`` and ``StepFields`` are bases of the ledger and of the recorder here.

Without the extension, or with one that was built from another source, hooks are in Python: nothing is printed, and
``stepscope doctor`` reports it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import NOT_NOW, CallObserver, LedgerMethods
from stepscope.recorder.recorder import Recorder
from stepscope.records.paths import ENV_C_HOOKS
from stepscope.records.steps import FORWARD, OPTIMIZER
from stepscope.ring.layout import (
    ENTER,
    HEAD_WORD,
    RESERVE_WORDS,
    STEP_ABOUT,
    STEP_END,
    TAG_SHIFT,
    TIME_SHIFT,
    TURN_WORDS,
    WRAP,
)

__all__ = ["NativeHooks", "are_wanted", "extension", "recorder_class"]

EXTENSION = "stepscope.recorder.hooks.native_hooks"
INTERFACE = 1
"""Of this module and the extension; count up when an argument of ``Hook`` or a field changes."""
IN_TRAINING_MODE = 1
"""``forward.IN_TRAINING_MODE``, which imports more than is needed here; a test compares."""
LAYOUT = (
    TIME_SHIFT, ENTER, STEP_END, TURN_WORDS, RESERVE_WORDS, HEAD_WORD, TAG_SHIFT, STEP_ABOUT, WRAP, NOT_NOW,
    IN_TRAINING_MODE,
)  # fmt: skip

IS_GIL_ENABLED: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""From Python 3.13 on it may be off."""

TRIED_MACHINES = ("x86_64",)
TRIED_PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
"""With torch, on real jobs.  Elsewhere hooks in C are used only if the setting asks for them."""

Call = Callable[..., Any]


def are_wanted(python: tuple[int, int] = sys.version_info[:2], machine: str = os.uname().machine) -> bool:
    """Whether this process should have hooks in C, by the setting or by default."""
    setting = os.environ.get(ENV_C_HOOKS)
    if setting in ("0", "1"):
        return setting == "1"
    return python in TRIED_PYTHONS and machine in TRIED_MACHINES


def extension(is_gil_enabled: Callable[[], bool] = IS_GIL_ENABLED) -> Any:
    """The extension, or None: it was not built, was built from another source, or Python runs without a GIL."""
    if not is_gil_enabled():
        return None
    try:
        module: Any = importlib.import_module(EXTENSION)
    except ImportError:
        return None
    fits = getattr(module, "INTERFACE", None) == INTERFACE and getattr(module, "LAYOUT", None) == LAYOUT
    return module if fits else None


@failsafe
def recorder_class() -> type[Recorder] | None:
    """A recorder with hooks in C; None if they are not available."""
    module = extension()
    return None if module is None else _recorder_class(module)


def _recorder_class(module: Any) -> type[Recorder]:
    hooks = NativeHooks(module)

    class NativeLedger(module.LedgerFields, LedgerMethods):  # type: ignore[misc]
        __slots__ = ("_on_refusal", "now")
        _enter, _leave = LedgerMethods.enter, LedgerMethods.leave  # for what is not ordinary

        def timed(self, original: Call, phase: int, observer: CallObserver | None = None) -> Call:
            return hooks.timed(self, original, LedgerMethods.timed(self, original, phase, observer), phase, observer)

    class NativeRecorder(Recorder, module.StepFields):  # type: ignore[misc]
        ledger_class = NativeLedger
        native = hooks

    return NativeRecorder


class NativeHooks:
    """Makes the functions that call hooks in C; ``python`` is the hook in Python that does the same."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def _hook(
        self,
        kind: int,
        ledger: Any,
        recorder: Any,
        original: Any,
        python: Call,
        phase: int,
        observer: Any = None,
        *more: Any,
    ) -> Call:
        roots, frozen, grad_enabled = more or (None, None, None)
        made: Call = self._module.Hook(
            kind, ledger, recorder, original, python, phase, observer, roots, frozen, grad_enabled
        )
        return made

    def timed(self, ledger: Any, original: Call, python: Call, phase: int, observer: CallObserver | None) -> Call:
        recorder = None if observer is None else observer.recorder
        call = self._hook(self._module.TIMED, ledger, recorder, original, python, phase, observer)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return timed

    def forward(
        self,
        recorder: Recorder,
        original: Call,
        python: Call,
        is_compiling: Callable[[], bool],
        roots: dict[int, Any],
        frozen: dict[int, bool],
        grad_enabled: Callable[[], bool],
    ) -> Call:
        kind = self._module.FORWARD
        call = self._hook(kind, recorder.ledger, recorder, original, python, FORWARD, None, roots, frozen, grad_enabled)

        @functools.wraps(original)
        def timed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            return call(module, *args, **kwargs)

        return timed

    def optimizer(
        self,
        recorder: Recorder,
        python_before: Call,
        python_after: Call,
        under_way: list[tuple[int, int]],
        is_compiling: Callable[[], bool],
        traced: Any,
    ) -> tuple[Call, Call]:
        kinds, ledger = self._module, recorder.ledger
        begin = self._hook(kinds.BEFORE_STEP, ledger, recorder, under_way, python_before, OPTIMIZER)
        end = self._hook(kinds.AFTER_STEP, ledger, recorder, under_way, python_after, OPTIMIZER)

        def before(optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_compiling():
                return None
            return begin(optimizer, args, kwargs)

        def after(optimizer: object, args: object, kwargs: object) -> None:
            if is_compiling():
                traced.optimizer = optimizer
                return
            end(optimizer, args, kwargs)

        return before, after
