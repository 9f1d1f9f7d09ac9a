"""The optimizer: its time, and the end of a step when it returns.

Torch's global optimizer hooks see every ``Optimizer.step``.  An optimizer that steps another one inside its own step
(Lookahead, ZeRO wrappers) counts as one step: only the outermost return counts.  ``GradScaler.step`` is patched as
well, because it may decide not to step at all: the iteration then still ends, with a flag.

A closure given to ``step`` is the script's own code: LBFGS, SAM and Lightning run forward and backward in it.  The
optimizer gets a replacement for it, which switches back to the phase around the optimizer; so the optimizer's time is
only what it does itself.

In a function compiled by ``torch.compile``, torch's usual optimizers break the graph, so torch's wrapper around their
``step``, and with it the hooks, can be kept out of the graph.  A step that dynamo traces as a whole (Muon, a class in
the script) becomes part of a graph, in which no hook runs: that step ends where the compiled function returns, and the
optimizer's time is not known.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from threading import get_ident
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.hooks.compiled import around_regions, leave_alone
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.variables import variable_of
from stepscope.records.steps import FLAG_SKIPPED, OPTIMIZER
from stepscope.ring.layout import ENTER, TIME_SHIFT

__all__ = ["OptimizerHooks"]

Call = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PreHook = Callable[[object, tuple[Any, ...], dict[str, Any]], Arguments | None]
PostHook = Callable[[object, object, object], None]
CLOSURE = "closure"
PLAIN_CALLABLES = (FunctionType, MethodType, functools.partial)
"""Closures that can be replaced; an object of another class may be used for more than a call."""
STEP_WRAPPER, WRAPPED_IN = "wrapper", "torch/optim/optimizer.py"
"""The function that torch puts around each ``step``, which calls the hooks."""


class TracedStep:
    """The optimizer whose step ran as part of a compiled graph, set by the graph itself."""

    optimizer: object = None


class OptimizerHooks:
    def __init__(self, recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch) -> None:
        self._recorder = recorder
        self._torch = torch
        self._is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self._traced = TracedStep()
        self._open: list[tuple[int, int]] = []
        """Steps in progress on the training thread: (id of the optimizer, the phase outside it)."""
        self._elsewhere: dict[int, list[int]] = {}
        """ids of optimizers on the other threads, by thread."""
        recorder.when_forked(self._open.clear)
        recorder.when_forked(self._elsewhere.clear)
        self._own_code: dict[FunctionType, CodeType] = {}
        """Functions that got a copy of their code, and the original code."""
        module: Any = import_module("torch.optim.optimizer")  # torch.optim itself hides the name
        before, after = self._make_hooks()
        for hook in (before, after):
            leave_alone(torch, hook, with_calls=True)
        self._handles = [
            module.register_optimizer_step_pre_hook(before),
            module.register_optimizer_step_post_hook(after),
        ]
        self._patch_scaler(torch, patches)
        self._keep_out_of_graphs(torch, module.Optimizer, patches)
        around_regions(
            watch, patches, lambda: functools.partial(self._end_traced_step, self._recorder.optimizer_returns)
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for step, code in self._own_code.items():
            step.__code__ = code

    def _make_hooks(self) -> tuple[PreHook, PostHook]:
        recorder, ledger, under_way = self._recorder, self._recorder.ledger, self._open
        is_compiling, traced, now, code = self._is_compiling, self._traced, ledger.now, OPTIMIZER + ENTER

        def before(optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if is_compiling():
                return None
            replaced = self._replace_closure(args, kwargs) if len(args) > 1 or kwargs else None
            if recorder.trail is not None and recorder.step >= recorder.trail.due and get_ident() == ledger.thread:
                recorder.trail.before_update(optimizer)
            outer = ledger.phase
            if under_way or outer == OPTIMIZER or get_ident() != ledger.thread:
                self._begin_unusual(optimizer)
                return replaced
            # Inlined like ``Ledger.timed``, for the same reason.
            at = ledger.at
            ledger.body[at] = (now() << TIME_SHIFT) + code
            ledger.at = at + 1
            ledger.phase = OPTIMIZER
            under_way.append((id(optimizer), outer))  # if the next line raises, as if the step had not returned
            if ledger.device is not None:
                ledger.device.mark(outer, OPTIMIZER)
            return replaced

        def after(optimizer: object, _args: object, _kwargs: object) -> None:
            if is_compiling():
                traced.optimizer = optimizer
                return
            if get_ident() != ledger.thread:
                self._end_elsewhere(optimizer)
                return
            if not under_way:
                return
            outer = under_way.pop()[1]
            try:
                if not under_way:
                    self._recorder.optimizer_returns += 1
                    recorder.end_step(0, outer, optimizer)
                elif outer != NOT_NOW:
                    ledger.leave(outer)
            except BaseException:  # of a signal handler, which may have come before the phase ended
                ledger.phase = ledger.phase if outer == NOT_NOW else outer
                raise

        if recorder.native is None:
            return before, after
        return recorder.native.optimizer(recorder, before, after, under_way, is_compiling, traced)

    @failsafe
    def _replace_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The arguments of ``step`` with the closure replaced; None: unchanged.

        The first argument is the optimizer.
        """
        if len(args) > 1 and isinstance(args[1], PLAIN_CALLABLES):
            return (args[0], self._outside_optimizer(args[1]), *args[2:]), kwargs
        if isinstance(kwargs.get(CLOSURE), PLAIN_CALLABLES):
            return args, {**kwargs, CLOSURE: self._outside_optimizer(kwargs[CLOSURE])}
        return None

    def _outside_optimizer(self, closure: Call) -> Call:
        """Wrap ``closure`` so that it runs in the phase around the outermost optimizer that is stepping."""
        ledger, under_way = self._recorder.ledger, self._open

        @functools.wraps(closure)
        def outside(*args: Any, **kwargs: Any) -> Any:
            around = under_way[0][1] if under_way else NOT_NOW
            if ledger.phase != OPTIMIZER or around == NOT_NOW or get_ident() != ledger.thread:
                return closure(*args, **kwargs)
            ledger.leave(around)
            try:
                return closure(*args, **kwargs)
            finally:
                if get_ident() == ledger.thread:
                    ledger.enter(OPTIMIZER)

        leave_alone(self._torch, outside, with_calls=False)
        return outside

    def _keep_out_of_graphs(self, torch: Any, base: Any, patches: Patches) -> None:
        """Let dynamo skip torch's wrapper around the ``step`` of optimizers that break the graph anyway.

        The wrapper has the same code for all classes; these classes get a copy of it, which can be marked.
        """
        original = base._patch_step_function

        @failsafe
        def mark(cls: type) -> None:
            step = getattr(cls, "step", None)
            inner = getattr(getattr(step, "__wrapped__", None), "__code__", None)
            breaks = isinstance(inner, CodeType) and "graph_break" in inner.co_names
            if isinstance(step, FunctionType) and hasattr(step, "hooked") and breaks and step not in self._own_code:
                self._own_code[step] = step.__code__
                step.__code__ = step.__code__.replace()
                leave_alone(torch, step, with_calls=False)

        @functools.wraps(original)
        def _patch_step_function(optimizer: Any) -> None:
            known = hasattr(type(optimizer).step, "hooked")
            original(optimizer)
            if not known:
                mark(type(optimizer))

        for cls in _subclasses(base):  # classes that already have instances
            mark(cls)
        patches.set(base, "_patch_step_function", _patch_step_function)

    @failsafe
    def _end_traced_step(self, returned: int) -> None:
        """End a step that was part of a compiled function; ``returned``: steps that had returned before its call."""
        optimizer = self._traced.optimizer
        if optimizer is not None:
            self._traced.optimizer = None
            if returned == self._recorder.optimizer_returns and not self._open:
                self._recorder.optimizer_returns += 1
                self._recorder.end_step(0, NOT_NOW, optimizer)

    @failsafe
    def _begin_unusual(self, optimizer: object) -> None:
        """Begin a step inside another, after one that never returned, on another thread, or at the first activity."""
        ledger, key = self._recorder.ledger, id(optimizer)
        if get_ident() == ledger.thread:
            self._drop_unreturned(key)
        outer = ledger.enter(OPTIMIZER)
        if get_ident() == ledger.thread:
            self._open.append((key, outer))
        else:
            self._elsewhere.setdefault(get_ident(), []).append(key)

    @failsafe
    def _end_elsewhere(self, optimizer: object) -> None:
        """End a step on a thread that has not trained so far; before the first step it may be the training thread."""
        keys = self._elsewhere.get(get_ident(), [])
        if id(optimizer) in keys:
            del keys[keys.index(id(optimizer)) :]  # those above it never returned
            if not keys:
                self._elsewhere.pop(get_ident(), None)
                if not self._recorder.step:
                    self._recorder.optimizer_returns += 1
                    self._recorder.end_step(0, NOT_NOW, optimizer)

    def _drop_unreturned(self, key: int) -> None:
        """Drop steps that ended with an exception: more are open than there are ``step`` calls on the stack.

        The call that is just beginning is there already.  A class whose ``step`` calls that of its base is there twice.
        """
        running = _stepping(sys._getframe(1)) if self._open else Counter()
        running[key] -= 1
        for at, (open_key, outer) in enumerate(self._open):
            running[open_key] -= 1
            if running[open_key] < 0:
                if outer != NOT_NOW:
                    self._recorder.ledger.leave(outer)
                del self._open[at:]
                return

    def _patch_scaler(self, torch: Any, patches: Patches) -> None:
        scaler, is_compiling = torch.amp.GradScaler, self._is_compiling
        original = scaler.step
        timed = self._recorder.ledger.timed(original, OPTIMIZER)

        @functools.wraps(original)
        def step(grad_scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(grad_scaler, optimizer, *args, **kwargs)
            returned = self._recorder.optimizer_returns
            result = timed(grad_scaler, optimizer, *args, **kwargs)
            if returned == self._recorder.optimizer_returns:
                self._recorder.end_step(FLAG_SKIPPED, NOT_NOW, optimizer)
            return result

        leave_alone(torch, step, with_calls=False)
        patches.set(scaler, "step", step)


def _stepping(frame: FrameType | None) -> Counter[int]:
    """The ids of the optimizers whose ``step`` is running, if torch has wrapped it, and how many times."""
    found: Counter[int] = Counter()
    while frame is not None:
        if frame.f_code.co_name == STEP_WRAPPER and frame.f_code.co_filename.endswith(WRAPPED_IN):
            found[id(variable_of(frame, "self"))] += 1
        frame = frame.f_back
    return found


def _subclasses(cls: Any) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
