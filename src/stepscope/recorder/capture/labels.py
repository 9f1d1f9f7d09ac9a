"""Labels of steps, phases and sampled layers in what a profiler records: ``stepscope.step 123``, ``stepscope.forward``,
``stepscope.layer decoder.0``.

Only while a profiler is active (the script's or ours), or in each step with ``run --nvtx``.  The ledger then has this
object in place of the timer of the device, which it already calls at each change of phase; at all other times labels
cost nothing.

A label must nest with the ranges that torch and the script record on the same thread.  The recorder ends a step inside
torch's own range of ``Optimizer.step``, so the label of a step ends a little later, where the next phase begins; what
the script does in between (reading the loss) is in the label of the step before it, like in a script that calls
``profiler.step()`` at the end of its loop.  A capture ends there, too (``at_next_phase``).  In what the script itself
profiles, the label of a step is only a mark where it begins: a range of the script around the body of its loop begins
before the first phase, and one label may not cross another.

Layers are labeled by the hooks of a sampled step (``recorder/layers/sampled_step.py``), in forward.  A phase inside a
layer (an exchange) ends the labels of its layers and begins them anew.  In backward there are only NVTX ranges: torch's
profiler has its own ranges there, in which the marks between layers begin and do not end.  NVTX ranges that are started
and ended by their number may cross those that the script pushes and pops, and end on another thread.  For torch's
profiler, the analysis of the trace finds the layer by autograd's sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.guard import failsafe, immortal
from stepscope.recorder.ledger import DeviceMarks
from stepscope.recorder.recorder import Recorder
from stepscope.records.capture import BACKWARD_END, LAYER_LABEL, PHASE_LABEL, PROFILER_STEP, STEP_LABEL
from stepscope.records.steps import OTHER
from stepscope.ring.layout import CODE_MASK, ENTER, TIME_SHIFT

__all__ = ["Labels"]


class Labels:
    """Owned by the recorder; called on the training thread."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        self._torch = torch
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._name_of = recorder.phase_name
        self._always: set[str] = set()
        self._users: set[str] = set()
        self._inner: DeviceMarks | None = None
        self._nvtx: Any = None
        self._phase: _Label | None = None
        self._steps: list[_Label] = []
        self._layers: list[_Label] = []
        """Layers that are being called, the outermost first."""
        self._backward_ranges: list[Any] = []
        """The NVTX range of the layer whose backward runs; autograd may run it on a thread of its own."""
        self._next: int | None = None
        """The step that begins at the next change of phase."""
        self.at_next_phase: Callable[[], object] | None = None
        """To be called when the next phase begins: outside of torch's ranges of the step that has ended."""
        self.numbers_steps = False
        """Whether steps are also labeled as torch's profiler does (``ProfilerStep#123``): in our own captures."""

    @property
    def active(self) -> bool:
        return bool(self._users)

    def forget(self) -> None:
        """In a forked child, and when hooks are removed: the labels in progress are never ended."""
        immortal([self._phase, self._steps, self._layers])
        self._phase, self._steps, self._layers, self._next = None, [], [], None
        self._backward_ranges = []  # their numbers may be reused
        self._users = set(self._always)
        self.numbers_steps, self.at_next_phase = False, None
        self.detach()

    def use_nvtx(self, nvtx: Any = None) -> None:
        """Label all steps from now on, also as NVTX ranges: torch's, where it was built with them, unless others are
        given."""
        self._nvtx = _nvtx(self._torch) if nvtx is None else nvtx
        self._always = {"nvtx"}
        self._users |= self._always

    @failsafe
    def begin(self, user: str) -> None:
        """A profiler has started."""
        if get_ident() != self._ledger.thread:
            return
        first = not self._users or self.numbers_steps
        self._users.add(user)
        if first:
            self._begin_step(self._recorder.step)
            if self._ledger.phase != OTHER:
                self._phase = self._label(PHASE_LABEL + self._name_of(self._ledger.phase))
        self.attach()
        self._recorder.attend()

    @failsafe
    def end(self, user: str) -> None:
        """That profiler is about to stop."""
        self._users.discard(user)
        self.at_next_phase = None
        if not self._users and get_ident() == self._ledger.thread:
            self._end_step()
            self._next = None
            self.detach()

    def attach(self) -> None:
        """See the changes of phase from now on, together with the timer of the device if it times this step."""
        if self._users and self._ledger.device is not self:
            self._inner, self._ledger.device = self._ledger.device, self

    def detach(self) -> None:
        if self._ledger.device is self:
            self._ledger.device = self._inner
        self._inner = None

    @failsafe
    def step_ends(self, step: int) -> None:
        """This step has just ended, and its last phase with it."""
        if self._next is not None:  # no phase has begun since the last one ended
            self._begin_step(self._next)
        self._end_phase()
        self._next = step + 1
        if not self._steps:
            self._begin_step(step + 1)

    @failsafe
    def mark(self, ended: int, begun: int) -> None:
        inner = self._inner
        if self.at_next_phase is not None:
            self._before_phase(begun)
        if inner is not None:
            inner.mark(ended, begun)
        if not self._users:
            return
        layers = [label.name for label in self._layers] if self._next is None else []
        self._end_phase()
        if self._next is not None:
            self._begin_step(self._next)
        if begun != OTHER:
            self._phase = self._label(PHASE_LABEL + self._name_of(begun))
            self._layers = [self._label(name) for name in layers]

    @failsafe
    def layer_begins(self, name: str) -> None:
        """A module with this name is called, in a sampled step."""
        if self._users and get_ident() == self._ledger.thread:
            self._layers.append(self._label(LAYER_LABEL + name))

    @failsafe
    def layer_ends(self, name: str) -> None:
        """It has returned; calls inside it that have not did so with an exception."""
        if all(label.name != LAYER_LABEL + name for label in self._layers):
            return  # its label ended with the profiler, or with a phase that an exception ended
        while self._layers.pop().end() != LAYER_LABEL + name:
            pass

    @failsafe
    def backward_reaches(self, name: str) -> None:
        """Autograd is about to run the backward of this module, in a sampled step; that of the last one is over."""
        self.backward_ends()
        if self._nvtx is not None and self._users:
            self._backward_ranges.append(self._nvtx.range_start(f"{LAYER_LABEL}{name}{BACKWARD_END}"))

    @failsafe
    def backward_ends(self) -> None:
        """No module's backward runs any longer."""
        ranges, self._backward_ranges = self._backward_ranges, []
        for number in ranges:
            self._nvtx.range_end(number)

    def _before_phase(self, begun: int) -> None:
        """Do what was to be done before this phase, whose word was just written: so its word is written anew."""
        ledger, call = self._ledger, self.at_next_phase
        if call is None or ledger.body[ledger.at - 1] & CODE_MASK != begun + ENTER or self._recorder.capturing:
            return  # a phase has ended, or a CUDA graph is being captured
        self.at_next_phase = None
        ledger.at -= 1
        call()
        ledger.body[ledger.at] = (ledger.now() << TIME_SHIFT) + begun + ENTER
        ledger.at += 1

    def stall_begins(self, phase: int) -> bool | None:
        return False if self._inner is None else self._inner.stall_begins(phase)

    def stall_ends(self) -> None:
        if self._inner is not None:
            self._inner.stall_ends()

    def _begin_step(self, step: int) -> None:
        self._end_step()
        self._next = None
        names = [f"{PROFILER_STEP}{step}"] if self.numbers_steps else []
        mark = "script" in self._users
        self._steps = [self._label(name, mark=mark) for name in (*names, f"{STEP_LABEL}{step}")]

    def _end_step(self) -> None:
        self._end_phase()
        while self._steps:
            self._steps.pop().end()

    def _end_phase(self) -> None:
        while self._layers:
            self._layers.pop().end()
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.end()

    def _label(self, name: str, *, mark: bool = False) -> _Label:
        return _Label(self._torch, self._nvtx, name, mark=mark)


class _Label:
    """One range in progress; ``mark``: for torch's profiler it is over at once."""

    __slots__ = ("_nvtx", "_range", "_record", "_unnoticed", "name")

    def __init__(self, torch: Any, nvtx: Any, name: str, *, mark: bool) -> None:
        self.name, self._unnoticed = name, _Unnoticed(torch._C)
        # NVTX ranges that start and end need not nest with those that the script pushes and pops.
        self._nvtx, self._range = nvtx, None if nvtx is None else nvtx.range_start(name)
        self._record = torch.autograd.profiler.record_function(name)
        with self._unnoticed:
            self._record.__enter__()
        if mark:
            self._end_record()

    def end(self) -> str:
        """Return the name."""
        if self._record is not None:
            self._end_record()
        if self._nvtx is not None:
            self._nvtx.range_end(self._range)
        return self.name

    def _end_record(self) -> None:
        record, self._record = self._record, None
        with self._unnoticed:
            record.__exit__(None, None, None)


class _Unnoticed:
    """Within this context, modes of the script do not see torch's functions, and a tracer does not record them."""

    __slots__ = ("_c", "_dispatch", "_function", "_tracing")

    def __init__(self, c: Any) -> None:
        self._c = c

    def __enter__(self) -> None:
        self._tracing = self._c._get_tracing_state()
        if self._tracing is not None:
            self._c._set_tracing_state(None)
        self._function, self._dispatch = self._c.DisableTorchFunction(), self._c._DisableTorchDispatch()
        self._function.__enter__()
        self._dispatch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._dispatch.__exit__(None, None, None)
        self._function.__exit__(None, None, None)
        if self._tracing is not None:
            self._c._set_tracing_state(self._tracing)


def _nvtx(torch: Any) -> Any:
    """torch's NVTX functions; None in a build without them."""
    try:
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("stepscope"))
    except (RuntimeError, AttributeError):  # its stand-in for NVTX lacks these functions, or they raise
        return None
    return torch.cuda.nvtx
