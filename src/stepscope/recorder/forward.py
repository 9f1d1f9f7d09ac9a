"""Forward: find the outermost modules the script calls with gradients, and time those alone.

*Looking.*  During the first steps ``nn.Module.__call__`` is replaced.  The replacement acts on outermost calls only,
and for the length of such a call it puts the original back, so that everything below — inner modules, dynamo's
tracing — runs on untouched classes.  A module with parameters whose outermost call gives an output that requires
gradients is a *root*: the model, or a GAN's two models.  (A loss module is none: what happens between the return of a
root and backward is booked as forward anyway.)

*Timing.*  The class of a root gets a ``__call__`` that times its roots and passes everything else through: the
instance is not touched, so copying, pickling or saving a model carries nothing of ours, and FSDP2, which changes a
model's class, inherits it.  For a script that calls ``model.forward(x)``, ``forward`` of the class is wrapped instead.
While dynamo traces, a wrapper is nothing but the call of the original (``is_dynamo_compiling`` is a constant there).

*Looking again.*  When backward ran in a step without any forward, and now and then anyway (a model may have joined),
the search is on again.  Rarely, because every assignment to a class makes the interpreter forget what it had learnt
about that class, and CPython stops learning after a thousand of them.

Without gradients the same modules are evaluated, not trained: their time is ``eval``, and so is the input waited for
just before.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType
from typing import Any

from stepscope.recorder import autocast
from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD, EVAL, FORWARD, INPUT
from stepscope.records.slot import FLAG_DISCOVERY
from stepscope.ring.words import ENTER, TIME_SHIFT

__all__ = ["ForwardProbe"]

LOOK_STEPS = 3
"""A search goes on for this many steps."""
MAX_LOOKS = 64
"""Searches in the life of a process; a loop without modules would search for ever."""
MAX_IDLE_CALLS = 64
"""Outermost calls without any sign of training (an inference process) after which the search rests."""
MAX_FRAMES = 40

Call = Callable[..., Any]


class ForwardProbe:
    def __init__(self, recorder: Recorder, torch: Any, patches: Patches) -> None:
        self._recorder = recorder
        self._torch = torch
        self._module: Any = torch.nn.Module
        self._original: Call = torch.nn.Module.__call__
        self._patches = patches
        self._is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self._grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._roots: dict[int, bool] = {}
        """id of a root → was it in training mode when found."""
        self._classes: set[tuple[type, str]] = set()
        self._inside = False
        self._looking = 0
        self._looks = 0
        self._idle_calls = 0
        recorder.when_forked(self._forget_call)
        self._looker = self._make_looker()
        for ours in (self._looker, self._look_at, self._untouched):
            leave_alone(torch, ours, with_calls=False)
        leave_alone(torch, self._arm, with_calls=True)
        self._look(LOOK_STEPS)

    # -- looking --------------------------------------------------------------------------------------------------

    def after_step(self, *, found: bool, due: bool) -> bool:
        """At a step's end: has the search gone on long enough, or is a new one due?"""
        if self._looking:
            self._looking -= 1
            self._arm(self._looking > 0)
        elif (due or not found) and self._looks < MAX_LOOKS:
            self._look(1 if found else LOOK_STEPS)
        if self._looking:
            self._recorder.flags |= FLAG_DISCOVERY
        return self._looking > 0

    def _look(self, steps: int) -> None:
        self._looks += 1
        self._looking = steps
        self._idle_calls = 0
        self._arm(True)

    def _arm(self, on: bool) -> None:
        # Not through ``patches``: this happens around every outermost call while looking; ``disarm`` restores it.
        self._module.__call__ = self._looker if on else self._original

    def _forget_call(self) -> None:
        """In a forked child: whatever call was under way is its parent's."""
        self._inside = False

    def disarm(self) -> None:
        """Take everything out of the way."""
        self._looking = 0
        self._arm(False)
        self._roots.clear()

    def _make_looker(self) -> Call:
        original, is_compiling = self._original, self._is_compiling

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands for nn.Module.__call__
            if is_compiling() or self._inside:
                return original(module, *args, **kwargs)
            return self._look_at(original, module, args, kwargs)

        return __call__

    def _look_at(self, call: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An outermost call while looking: run it on untouched classes, then see what it was."""
        ledger = self._recorder.ledger
        candidate = ledger.phase not in (INPUT, BACKWARD) and self._grad_enabled() and self._may_be_root(module)
        precision = self._precision(module) if candidate else None
        outer = ledger.enter(FORWARD) if candidate else NOT_NOW
        try:
            output = self._untouched(call, module, args, kwargs)
        finally:
            if outer != NOT_NOW:
                ledger.leave(outer)
        if candidate:
            self._consider(module, output, precision)
        return output

    def _untouched(self, call: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, with the search out of the way for everything below it."""
        inside, self._inside = self._inside, True
        self._arm(False)
        try:
            return call(module, *args, **kwargs)
        finally:
            self._inside = inside
            if self._looking and not inside:
                self._arm(True)

    @failsafe
    def _may_be_root(self, module: Any) -> bool:
        return any(parameter.requires_grad for parameter in module.parameters())

    @failsafe
    def _precision(self, module: Any) -> str | None:
        return autocast.around_call(self._torch, module)

    @failsafe
    def _consider(self, module: Any, output: Any, precision: str | None) -> None:
        self._idle_calls += 1
        if self._idle_calls > MAX_IDLE_CALLS and self._recorder.ring is None:
            self._arm(False)  # until a first step shows that this process trains
        trained = _requiring_grad(self._torch, output)
        if trained is not None:
            self._recorder.forward_seen = True
            # caller: _consider < failsafe < _look_at < __call__ < the script
            owner = _direct_forward(self._module, sys._getframe(4))
            root, method = (module, "__call__") if owner is None else (owner, "forward")
            if self._add_root(root, method):
                self._recorder.objects.meet_root(root, precision, str(trained.dtype).removeprefix("torch."))

    # -- timing ---------------------------------------------------------------------------------------------------

    def _add_root(self, module: Any, method: str) -> bool:
        """Whether it was none before."""
        key = id(module)
        if key in self._roots:
            return False
        self._roots[key] = bool(module.training)
        weakref.finalize(module, self._roots.pop, key, None).atexit = False
        cls = type(module)
        if not any((base, method) in self._classes for base in cls.__mro__):
            self._classes.add((cls, method))
            timer = self._make_timer(self._unpatched(cls, method))
            leave_alone(self._torch, timer, with_calls=False)
            self._patches.set(cls, method, timer)
            if method == "forward":
                self._keep_scriptable()
        return True

    def _unpatched(self, cls: type, method: str) -> Call:
        found: Call = getattr(cls, method)
        return self._original if found is self._looker else found

    def _make_timer(self, original: Call) -> Call:
        is_compiling, grad_enabled, roots, recorder = (
            self._is_compiling,
            self._grad_enabled,
            self._roots,
            self._recorder,
        )
        ledger, now = recorder.ledger, recorder.ledger.now

        @functools.wraps(original)
        def timed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            trained = roots.get(id(module))
            if trained is None:
                if self._looking and not self._inside:
                    return self._look_at(original, module, args, kwargs)
                return original(module, *args, **kwargs)
            phase = FORWARD if grad_enabled() and (module.training or not trained) else EVAL
            recorder.forward_seen = True
            # Written out like ``Ledger.timed``, for the same reason.
            outer = ledger.phase
            if outer == phase or get_ident() != ledger.thread:
                return original(module, *args, **kwargs)
            at = ledger.at
            ledger.body[at] = (now() << TIME_SHIFT) + phase + ENTER
            ledger.at = at + 1
            ledger.phase = phase
            if ledger.device is not None:
                ledger.device.mark(outer, phase)
            try:
                if self._looking:
                    return self._untouched(original, module, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                at = ledger.at
                ledger.body[at] = (now() << TIME_SHIFT) + outer
                ledger.at = at + 1
                if ledger.device is not None:
                    ledger.device.mark(ledger.phase, outer)
                ledger.phase = outer
                if at > ledger.limit:
                    ledger.turn()

        return timed

    def _keep_scriptable(self) -> None:
        """``torch.jit.script`` reads a class's ``forward`` as source: give it back the user's own first."""
        script = self._torch.jit.script

        @functools.wraps(script)
        def unwrapped_script(*args: Any, **kwargs: Any) -> Any:
            for cls, method in list(self._classes):
                if method == "forward":
                    self._patches.undo(cls)
                    self._classes.discard((cls, method))
            return script(*args, **kwargs)

        if not hasattr(script, "__wrapped__"):
            self._patches.set(self._torch.jit, "script", unwrapped_script)


def _requiring_grad(torch: Any, output: Any) -> Any:
    """A tensor in an output that requires gradients, or None.  Looks into containers, not far."""
    values = [output]
    for _ in range(32):
        if not values:
            return None
        value = values.pop()
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return value
        elif isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list | tuple):
            values.extend(value)
        elif hasattr(value, "__dict__"):
            values.extend(_plain(vars(value).values()))
    return None


def _plain(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None and not isinstance(value, str | int | float | type)]


def _direct_forward(module_class: type, frame: FrameType | None) -> Any:
    """The outermost module whose ``forward`` is being run by the script itself, found on the stack."""
    owner = None
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "forward":
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, module_class):
                owner = candidate
        frame = frame.f_back
    return owner
