"""Forward: find the outermost modules the script calls with gradients, and time only those.

*Search.*  During the first steps ``nn.Module.__call__`` is replaced.  The replacement acts on outermost calls only, and
restores the original during such a call, so that everything below — inner modules, dynamo's tracing — runs on untouched
classes.  A module with parameters whose outermost call returns an output that requires gradients is a *root*: the
model, or a GAN's two models.  (A loss module is not a root: the time between the return of a root and backward counts
as forward anyway.)

*Timing.*  The class of a root gets a ``__call__`` that times its roots and passes everything else through.  The
instance is not touched, so copying, pickling or saving a model carries nothing of Stepscope, and FSDP2, which changes a
model's class, inherits it.  If a script calls ``model.forward(x)``, the class's ``forward`` is wrapped instead.  While
dynamo traces, a wrapper is only the call of the original (``is_dynamo_compiling`` is a constant there).

*New searches.*  The search starts again when backward ran in a step without any forward, and now and then anyway (a
model may have joined).  Rarely, because every assignment to a class makes the interpreter drop its specializations for
that class, and CPython stops specializing after a thousand of them.

*The mode* of a wrapper is that of its model: for a validation Lightning switches DDP to eval mode together with its
model, and afterwards switches only the model back.  A model that was trained in training mode and is called in eval
mode is evaluated, even with gradients.  If a step has no other forward, the script forgot to switch back: the next
calls in that mode are forward.

*Without gradients* any model is being evaluated or used for inference: its time is ``eval``.  It may be a root, what a
root wraps (``ddp.module``), any other instance of these classes (an EMA copy, a reference model), or a model of another
class (a teacher, a reward model, a frozen encoder), whose class the search finds.  Since evaluation may begin long
after the first steps, a search also starts the first times a loader is iterated, and ends with the next call of a
model.  Inside forward and backward nothing changes: a reentrant checkpoint runs without gradients as well.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from threading import get_ident
from types import FrameType
from typing import Any

from stepscope.recorder import model
from stepscope.recorder.guard import Patches, failsafe
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.variables import attributes_of, first_of, variable_of
from stepscope.records.steps import BACKWARD, EVAL, FIRST_USER_SLOT, FLAG_DISCOVERY, FORWARD, INPUT, OTHER
from stepscope.ring.layout import ENTER, TIME_SHIFT

__all__ = ["ForwardProbe"]

SEARCH_STEPS = 3
"""Length of a search, in steps."""
MAX_SEARCHES = 64
"""Searches per process; a loop without modules would search forever."""
MAX_IDLE_CALLS = 64
"""Outermost calls without any sign of training (an inference process) after which the search pauses."""
MAX_EXPECTATIONS = 64
"""Searches per process that begin with a loader."""
EXPECTED_CALLS = 8
"""Outermost calls of modules that are not models after which such a search ends."""
EXPECTED_OF_LOADER = 2
"""How many iterations of one loader start a search."""
MAX_FRAMES = 40
MAX_WRAPPERS = 8
INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")
"""Attribute in which a wrapper holds its model: DDP, DeepSpeed and EMA; ``torch.compile``; FSDP; Fabric."""
CHECKPOINTING = ("checkpoint.py", "checkpointing.py")
"""Files whose ``forward`` runs modules without gradients, to run them again in backward."""

IN_EVAL_MODE, IN_TRAINING_MODE, CHECKPOINTED = 0, 1, 2
"""How a root was trained when it was found."""

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
        self._roots: dict[int, tuple[int, weakref.ref[Any] | None]] = {}
        """id of a root, or of what it wraps → how it was trained when found, and for a wrapper the model inside."""
        self._frozen: dict[int, bool] = {}
        """ids of models that had no trainable parameters when found."""
        self._iterations: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """How often each loader was iterated."""
        self._expecting = 0
        """Outermost calls left in a search that a loader started."""
        self._expectations = 0
        self._classes: set[tuple[type, str]] = set()
        self._in_eval_mode: dict[int, int] = {}
        """ids of roots that were called in eval mode, but with gradients → the step of the last such call."""
        self._inside = False
        self._steps_to_search = 0
        self._searches = 0
        self._idle_calls = 0
        recorder.when_forked(self._forget_call)
        self._searcher = self._make_searcher()
        for ours in (self._searcher, self._call_in_search, self._untouched):
            leave_alone(torch, ours, with_calls=False)
        leave_alone(torch, self._arm, with_calls=True)
        self._search(SEARCH_STEPS)

    # -- Search ---------------------------------------------------------------------------------------------------

    def after_step(self, *, found: bool, due: bool) -> bool:
        """Handle the end of a step: end a search that lasted long enough, or start a new one if due."""
        self._expecting = 0
        self._note_search()
        if self._in_eval_mode:
            self._trust_eval_mode(found)
        if self._steps_to_search:
            self._steps_to_search -= 1
            self._note_search()
            self._arm(self._steps_to_search > 0)
        elif (due or not found) and self._searches < MAX_SEARCHES:
            self._search(1 if found else SEARCH_STEPS)
        if self._steps_to_search:
            self._recorder.flags |= FLAG_DISCOVERY
        return self._steps_to_search > 0

    def _trust_eval_mode(self, found: bool) -> None:
        """A step had no other forward than that of a model in eval mode: from now on it is trained in that mode."""
        latest = self._recorder.step - 1
        for key, step in self._in_eval_mode.items():
            if not found and step >= latest and key in self._roots:
                self._roots[key] = (IN_EVAL_MODE, self._roots[key][1])
        self._in_eval_mode.clear()

    def _search(self, steps: int) -> None:
        self._searches += 1
        self._steps_to_search = steps
        self._idle_calls = 0
        self._note_search()
        self._arm(True)

    @failsafe
    def expect_evaluation(self, loader: Any) -> None:
        """A loader is iterated: check whether the next model called is a new one."""
        iterated = self._iterations.get(loader, 0)
        self._iterations[loader] = iterated + 1
        known = iterated >= EXPECTED_OF_LOADER or self._expectations >= MAX_EXPECTATIONS
        if not (known or self._steps_to_search or self._expecting or self._inside) and self._recorder.step:
            self._expectations += 1
            self._expecting = EXPECTED_CALLS
            self._note_search()
            self._arm(True)

    def _arm(self, on: bool) -> None:
        # Not through ``patches``: this happens around every outermost call of a search; ``disarm`` restores it.
        self._module.__call__ = self._searcher if on else self._original

    def _note_search(self) -> None:
        """For hooks in C."""
        self._recorder.searching = self._steps_to_search > 0 or self._expecting > 0

    def _forget_call(self) -> None:
        """In a forked child: a call in progress belongs to the parent."""
        self._inside = False

    def disarm(self) -> None:
        """Remove everything."""
        self._steps_to_search = 0
        self._expecting = 0
        self._note_search()
        self._arm(False)
        self._roots.clear()
        self._frozen.clear()
        self._in_eval_mode.clear()

    def _make_searcher(self) -> Call:
        original, is_compiling = self._original, self._is_compiling

        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it replaces nn.Module.__call__
            if is_compiling() or self._inside:
                return original(module, *args, **kwargs)
            return self._call_in_search(original, module, args, kwargs)

        return __call__

    def _call_in_search(self, call: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an outermost call during a search on untouched classes, then see what it was."""
        ledger = self._recorder.ledger
        phase = self._phase_of(module, args, kwargs) or OTHER
        precision = self._precision(module) if phase == FORWARD else None
        outer = NOT_NOW if phase == OTHER else ledger.enter(phase)
        try:
            output = self._untouched(call, module, args, kwargs)
        finally:
            if outer != NOT_NOW:
                ledger.leave(outer)
        self._note_call()
        if phase == FORWARD:
            self._consider(module, output, precision)
        elif phase == EVAL:
            self._consider_inference(module)
        return output

    def _untouched(self, call: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call with the search disabled for everything below it."""
        inside, self._inside = self._inside, True
        self._arm(False)
        try:
            return call(module, *args, **kwargs)
        finally:
            self._inside = inside
            if (self._steps_to_search or self._expecting) and not inside:
                self._arm(True)

    @failsafe
    def _phase_of(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """What an outermost call may turn out to be; OTHER: not relevant."""
        phase = self._recorder.ledger.phase
        trainable = {parameter.requires_grad for _, parameter in model.named_parameters(module)}
        if not trainable or phase in (INPUT, BACKWARD):
            return OTHER
        if self._grad_enabled():
            if True in trainable:
                return FORWARD
            infers = _requiring_grad(self._torch, (args, kwargs)) is None  # else gradients pass through: a loss
        elif _is_checkpointed(sys._getframe(3)):  # _phase_of < failsafe < _call_in_search < __call__
            return FORWARD
        else:
            infers = True
        return EVAL if infers and _is_free(phase) else OTHER

    @failsafe
    def _precision(self, module: Any) -> str | None:
        return model.autocast_around_call(self._torch, module)

    def _note_call(self) -> None:
        """Count a call; without any sign of training the search pauses until this process takes its first step."""
        if self._expecting == 1:
            self._end_expectation()
        elif self._expecting:
            self._expecting -= 1
        self._idle_calls += 1
        if self._idle_calls > MAX_IDLE_CALLS and self._recorder.ring is None:
            self._arm(False)

    @failsafe
    def _consider(self, module: Any, output: Any, precision: str | None) -> None:
        checkpointed = not self._grad_enabled()
        trained = _tensor_in(self._torch, output, lambda _: True) if checkpointed else None
        trained = _requiring_grad(self._torch, output) if trained is None else trained
        if trained is not None:
            self._recorder.forward_seen = True
            # caller: _consider < failsafe < _call_in_search < __call__ < the script
            owner = _direct_forward(self._module, sys._getframe(4))
            root, method = (module, "__call__") if owner is None else (owner, "forward")
            trains = _innermost(root).training
            how = CHECKPOINTED if checkpointed else IN_TRAINING_MODE if trains else IN_EVAL_MODE
            if self._add_root(root, method, how):
                self._recorder.objects.meet_root(root, precision, str(trained.dtype).removeprefix("torch."))

    @failsafe
    def _consider_inference(self, module: Any) -> None:
        """Time the class of a model that was called without gradients, unless it is a single layer."""
        self._end_expectation()
        if type(module).__module__.startswith("torch.nn.") and not module._modules:
            return
        if self._grad_enabled():
            self._frozen[id(module)] = True
            weakref.finalize(module, self._frozen.pop, id(module), None).atexit = False
        self._time_class(type(module), "__call__")

    def _end_expectation(self) -> None:
        """The model that a loader's iteration led to was called."""
        if self._expecting:
            self._expecting = 0
            self._note_search()
            self._arm(self._steps_to_search > 0)

    # -- Timing ---------------------------------------------------------------------------------------------------

    def _add_root(self, module: Any, method: str, how: int) -> bool:
        """Return whether it is new."""
        if id(module) in self._roots:
            return False
        models = (module, *_wrapped_by(module))
        for part in models:
            if id(part) not in self._roots:
                self._roots[id(part)] = (how, None if part is models[-1] else weakref.ref(models[-1]))
                weakref.finalize(part, self._roots.pop, id(part), None).atexit = False
                self._time_class(type(part), method if part is module else "__call__")
        return True

    def _time_class(self, cls: type, method: str) -> None:
        if any((base, method) in self._classes for base in cls.__mro__):
            return
        self._classes.add((cls, method))
        timer = self._make_timer(self._unpatched(cls, method))
        leave_alone(self._torch, timer, with_calls=False)
        self._patches.set(cls, method, timer)
        if method == "forward":
            self._keep_scriptable()

    def _unpatched(self, cls: type, method: str) -> Call:
        found: Call = getattr(cls, method)
        return self._original if found is self._searcher else found

    def _make_timer(self, original: Call) -> Call:
        is_compiling, grad_enabled, roots, frozen, recorder = (
            self._is_compiling,
            self._grad_enabled,
            self._roots,
            self._frozen,
            self._recorder,
        )
        ledger, now = recorder.ledger, recorder.ledger.now

        @functools.wraps(original)
        def timed(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            root = roots.get(id(module))
            outer = ledger.phase
            if root is None:
                if grad_enabled() and not (id(module) in frozen and self._infers(module, args, kwargs)):
                    if (self._steps_to_search or self._expecting) and not self._inside:
                        return self._call_in_search(original, module, args, kwargs)
                    return original(module, *args, **kwargs)
                phase = EVAL
            elif (grad_enabled() or root[0] == CHECKPOINTED) and (
                not root[0] or (module.training if root[1] is None else _trains(root[1], module))
            ):
                phase = FORWARD
                recorder.forward_seen = True
            else:
                phase = EVAL
                self._note_evaluation(module)
            if phase == EVAL and OTHER < outer < FIRST_USER_SLOT:  # ``_is_free``
                return original(module, *args, **kwargs)
            # Inlined like ``Ledger.timed``, for the same reason.
            if outer == phase or get_ident() != ledger.thread:
                return original(module, *args, **kwargs)
            at = ledger.at
            ledger.body[at] = (now() << TIME_SHIFT) + phase + ENTER
            ledger.at = at + 1
            ledger.phase = phase
            try:
                if ledger.device is not None:
                    ledger.device.mark(outer, phase)
                if self._expecting:
                    self._end_expectation()
                if self._steps_to_search:
                    return self._untouched(original, module, args, kwargs)
                return original(module, *args, **kwargs)
            finally:
                at, ended = ledger.at, ledger.phase
                ledger.phase = outer  # first, as in ``Ledger.leave``
                ledger.body[at] = (now() << TIME_SHIFT) + outer
                ledger.at = at + 1
                if ledger.device is not None:
                    ledger.device.mark(ended, outer)
                if at > ledger.limit:
                    ledger.turn()

        if recorder.native is None:
            return timed
        leave_alone(self._torch, timed, with_calls=False)
        return recorder.native.forward(recorder, original, timed, is_compiling, roots, frozen, grad_enabled)

    @failsafe
    def _note_evaluation(self, root: Any) -> None:
        if self._grad_enabled():
            self._in_eval_mode[id(root)] = self._recorder.step
        if self._recorder.explicit:  # steps may be evaluations, which is no reason to search for another model
            self._recorder.forward_seen = True

    @failsafe
    def _infers(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a model that was frozen when found still is, and no gradients pass through it."""
        _, first = next(model.named_parameters(module), ("", None))
        if first is None or first.requires_grad:
            self._frozen.pop(id(module), None)
            return False
        return _requiring_grad(self._torch, (args, kwargs)) is None

    def _keep_scriptable(self) -> None:
        """Unwrap ``forward`` before ``torch.jit.script``, which reads it as source."""
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


def _is_free(phase: int) -> bool:
    """Whether a call without gradients counts as evaluation in this phase: not inside input, forward, backward …"""
    return phase == OTHER or phase >= FIRST_USER_SLOT


def _wrapped_by(module: Any) -> Iterator[Any]:
    """The models inside DDP, ``torch.compile`` and other wrappers, outermost first."""
    for _ in range(MAX_WRAPPERS):
        children = module._modules  # of a scripted module: an object that has no ``get``
        module = next((children[name] for name in INSIDE if name in children and children[name] is not None), None)
        if module is None:
            return
        yield module


def _innermost(module: Any) -> Any:
    return [module, *_wrapped_by(module)][-1]


def _trains(model: weakref.ref[Any], wrapper: Any) -> bool:
    """Whether the model inside a wrapper is in training mode."""
    inside = model()
    return bool((wrapper if inside is None else inside).training)


def _is_checkpointed(frame: FrameType | None) -> bool:
    """Whether activation checkpointing is what runs the module without gradients."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename.endswith(CHECKPOINTING):
            return True
        frame = frame.f_back
    return False


MOST_VALUES = 32
PLAIN = (type(None), bool, int, float, str, type)


def _requiring_grad(torch: Any, output: Any) -> Any:
    return _tensor_in(torch, output, lambda tensor: tensor.requires_grad)


def _tensor_in(torch: Any, output: Any, wanted: Callable[[Any], bool]) -> Any:
    """A matching tensor in an output, or None.  Searches containers to a limited depth."""
    values = [output]
    for _ in range(MOST_VALUES):
        if not values:
            return None
        value = values.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            if wanted(value):
                return value
        elif issubclass(kind, list | tuple | dict):
            values.extend(first_of(value, MOST_VALUES))
        else:
            found = dict.values(attributes_of(value) or {})
            values.extend(islice((inside for inside in found if type(inside) not in PLAIN), MOST_VALUES))
    return None


def _direct_forward(module_class: type, frame: FrameType | None) -> Any:
    """The outermost module whose ``forward`` the script itself is running, found on the stack."""
    owner = None
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "forward":
            candidate = variable_of(frame, "self")
            if issubclass(type(candidate), module_class):
                owner = candidate
        frame = frame.f_back
    return owner
