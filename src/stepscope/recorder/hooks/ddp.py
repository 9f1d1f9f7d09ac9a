"""Hooks on DDP and FSDP: waits for peers that never pass through Work.wait, on the host and on the device.

All other waits are in ``recorder/hooks/collectives.py``.

DDP communicates in C++.  Its own logging says how long the exchange of gradients continued after this rank had computed
its own: that was waiting.  (This costs 4 µs a step.)  On a GPU measuring it waits for the device, so DDP's own rate is
kept, the first ten iterations and every hundredth, and the figures are only read: a sample now and then distinguishes a
rank whose backward is slow from those that wait for it.

A script may give DDP a communication hook, a Python function that DDP calls for every bucket of gradients.  Its own
time is neither computing gradients nor waiting, so it is a separate phase, ``comm_hook`` (a wait inside it is
``comm``, as everywhere).  DDP gets a wrapper of a plain function or method, and remembers the script's own.  Where
autograd runs on other threads (on a GPU) the hook is not timed.

Before forward DDP broadcasts the model's buffers (BatchNorm's, a table of positions).  On a CPU that blocks until the
last rank has arrived, and is ``comm``; on a GPU the host continues, and ``install_stream_waits`` covers the wait of the
device.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

from stepscope.recorder.guard import Patches, failsafe
from stepscope.recorder.hooks.collectives import CollectiveCalls
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import BACKWARD, COMM, COMM_HOOK_PHASE, OTHER
from stepscope.ring.layout import DDP_COMM, DDP_COMPUTE, DDP_EXPOSED, DDP_SAMPLED_COMPUTE, data_word

__all__ = ["install", "install_stream_waits"]


# -- Waits on the host ------------------------------------------------------------------------------------------------


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    figures = DdpFigures()
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it replaces DDP's
        original(self, *args, **kwargs)
        if figures.watch(self):
            recorder.watch_backward(figures)

    patches.set(ddp, "__init__", __init__)
    if hasattr(ddp, "register_comm_hook"):
        patches.set(ddp, "register_comm_hook", _timing_hooks(ddp.register_comm_hook, recorder))
    if hasattr(ddp, "_sync_buffers"):
        sync_buffers = _timed_on_cpu(ddp._sync_buffers, recorder.ledger, torch.compiler.is_dynamo_compiling)
        leave_alone(torch, sync_buffers, with_calls=False)
        patches.set(ddp, "_sync_buffers", sync_buffers)


def _timing_hooks(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @failsafe
    def timed(hook: Any) -> Any:
        slot = recorder.slot_of(COMM_HOOK_PHASE) if type(hook) in (FunctionType, MethodType) else OTHER
        return None if slot == OTHER else recorder.ledger.timed(hook, slot)

    @failsafe
    def remember(ddp: Any, hook: Any, wrapper: Any) -> None:
        """What DDP's attributes hold, and compiled autograd uses, is the script's own function."""
        hooks = ddp._comm_hooks
        if hooks and hooks[-1][0] is wrapper:
            hooks[-1] = (hook, hooks[-1][1])

    @functools.wraps(original)
    def register_comm_hook(self: Any, state: Any, hook: Any) -> Any:
        wrapper = timed(hook)
        if wrapper is None:
            return original(self, state, hook)
        result = original(self, state, wrapper)
        remember(self, hook, wrapper)
        return result

    return register_comm_hook


def _timed_on_cpu(original: Callable[..., Any], ledger: Ledger, is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    blocking = ledger.timed(original, COMM)

    @functools.wraps(original)
    def _sync_buffers(self: Any) -> Any:
        if is_compiling() or getattr(self, "device_type", None) != "cpu":
            return original(self)
        return blocking(self)

    return _sync_buffers


class DdpFigures:
    """DDP's own figures on the last synchronized backward that it measured."""

    def __init__(self) -> None:
        self.every_step = False
        """Whether there is something to read at the end of each step."""
        self._sampled = 0
        """The last sample that was recorded."""
        self._watched: list[weakref.ref[Any]] = []
        """The DDP modules.  Not their loggers: a logger keeps the reducer alive, and with it all gradients."""

    @failsafe
    def watch(self, ddp: Any) -> bool:
        if next(ddp.parameters()).device.type == "cpu":
            # Before the first backward: after that, DDP does not change its rate.
            ddp.reducer._set_ddp_runtime_logging_sample_rate(1)
            self.every_step = True
        self._watched.append(weakref.ref(ddp))
        return True

    def words(self) -> list[int]:
        """Data words for the step that ends; none if there is nothing new."""
        compute, comm, exposed = self._read()
        if self.every_step:
            return [data_word(DDP_COMPUTE, compute), data_word(DDP_COMM, comm), data_word(DDP_EXPOSED, exposed)]
        if compute == self._sampled:
            return []
        self._sampled = compute
        return [data_word(DDP_SAMPLED_COMPUTE, compute), data_word(DDP_COMM, comm)]

    def _read(self) -> tuple[int, int, int]:
        """Nanoseconds spent computing gradients, communicating them, and communicating after computing had ended.

        Zeros where nothing was measured.  DDP counts computing from the end of forward, whatever the script does before
        backward: only the third says how long this rank waited.
        """
        compute = comm = exposed = 0
        for reference in self._watched:
            ddp = reference()
            if ddp is not None:
                figures = ddp.logger._get_ddp_logging_data().ints_map
                if figures.get("avg_backward_compute_time"):
                    compute += figures["backward_compute_time"]
                    comm += figures["backward_comm_time"]
                    exposed += max(0, figures["backward_comm_time"] - figures["backward_compute_comm_overlap_time"])
        return compute, comm, exposed


# -- Waits on the device ----------------------------------------------------------------------------------------------
# Where a device's stream waits for a collective without passing through ``Work.wait`` on the training thread.
#
# On NCCL the host hardly ever waits: it makes the stream wait.  In a timed step (``recorder/device.py``) an event
# before and one after such a wait measure how long the stream waited for the others; in all other steps these hooks
# read one attribute.  There are three such places:
#
# - DDP's reducer waits in C++, at the end of backward.  Autograd runs the callbacks queued with its engine in order,
#   and DDP queues its callback when its last gradient is ready: a callback queued when backward reaches the model's
#   output runs before it.
# - FSDP orders streams with events, from Python: ``Stream.wait_event``.  Scripts do that, too, for their own copies; so
#   it counts only if torch.distributed itself calls it.
# - Autograd's threads wait on ``Work`` and functional collectives in backward (``recorder/hooks/collectives.py``).

DISTRIBUTED = "torch.distributed"
STREAMS = "torch.cuda.streams"
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
MAX_DEPTH, MAX_ITEMS = 3, 16
"""Limits for lists and dictionaries in a model's output; one may be a list of a million numbers."""


def install_stream_waits(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    ledger, calls = recorder.ledger, CollectiveCalls(recorder, torch)
    original = torch.cuda.Stream.wait_event

    @functools.wraps(original)
    def wait_event(stream: Any, event: Any) -> Any:
        device = ledger.device  # read once: the training thread may reset it meanwhile
        if device is None or ledger.phase == COMM or not _by_torch_distributed():
            return original(stream, event)
        ours = get_ident() == ledger.thread or calls.is_autograd()
        begun = ours and _is_current(torch, stream) and device.stall_begins(ledger.phase)
        try:
            return original(stream, event)
        finally:
            if begun:
                device.stall_ends()

    leave_alone(torch, wait_event, with_calls=True)
    patches.set(torch.cuda.Stream, "wait_event", wait_event)
    ddp = torch.nn.parallel.DistributedDataParallel
    if hasattr(ddp, "_post_forward"):
        around = _BeforeReducer(recorder, torch).around(ddp._post_forward, torch.compiler.is_dynamo_compiling)
        leave_alone(torch, around, with_calls=False)
        patches.set(ddp, "_post_forward", around)


class _BeforeReducer:
    """Notices, in some steps, when the last gradient is ready and DDP's reducer begins to wait.

    In a timed step the stream waits from there on; and gradients are still this rank's own (``layers/gradient_trail``).
    """

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._tensor = torch.Tensor
        self._straight = torch._C.DisableTorchFunction
        self._queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

    def around(self, original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
        recorder, ledger, note_output = self._recorder, self._ledger, self._note_output

        @functools.wraps(original)
        def _post_forward(self: Any, output: Any) -> Any:
            output = original(self, output)
            # The reducer in Python, which compiled autograd needs, has no hidden waits.
            due = ledger.device is not None or (recorder.trail is not None and recorder.step >= recorder.trail.due)
            if due and not is_compiling() and not getattr(self, "_use_python_reducer", False):
                note_output(self, output)
            return output

        return _post_forward

    @failsafe
    def _note_output(self, ddp: Any, output: Any) -> None:
        """Make queuing the mark the first thing that backward does with the output.

        Not with compiled autograd, where that would change the graph.
        """
        with self._straight():  # bypass __torch_function__, which belongs to the script
            node = getattr(self._first_tensor(output, MAX_DEPTH), "grad_fn", None)
        if node is not None and not getattr(sys.modules.get(COMPILED_AUTOGRAD), "compiled_autograd_enabled", False):
            exchanges = getattr(ddp, "require_backward_grad_sync", True)
            node.register_prehook(self._begins(weakref.ref(ddp) if exchanges else None))

    def _begins(self, ddp: weakref.ref[Any] | None) -> Callable[[Any], None]:
        @failsafe
        def backward_begins(gradients: Any) -> None:
            self._queue(lambda: self._gradients_done(ddp))

        return backward_begins

    @failsafe
    def _gradients_done(self, ddp: weakref.ref[Any] | None) -> None:
        """``ddp``: the one that is going to exchange its gradients."""
        trail, own = self._recorder.trail, None if ddp is None else ddp()
        # On a GPU this runs on a thread of autograd, while the training thread waits inside backward.
        ours = get_ident() == self._ledger.thread or self._ledger.phase == BACKWARD
        due = trail is not None and self._recorder.step >= trail.due and ours
        if trail is not None and own is not None and due:
            trail.before_exchange(own)
        if self._ledger.device is not None and self._ledger.phase == BACKWARD:
            self._ledger.device.stall_begins(BACKWARD)  # ends with backward

    def _first_tensor(self, output: Any, depth: int) -> Any:
        if isinstance(output, self._tensor):
            return output if output.requires_grad else None
        inside = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
        found = (self._first_tensor(element, depth - 1) for element in itertools.islice(inside, MAX_ITEMS) if depth)
        return next((tensor for tensor in found if tensor is not None), None)


@failsafe
def _is_current(torch: Any, stream: Any) -> bool:
    return bool(torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream)


def _by_torch_distributed() -> bool:
    """Whether torch.distributed calls ``wait_event``; C may call it without a Python caller."""
    frame = sys._getframe(1).f_back
    if frame is not None and frame.f_globals.get("__name__") == STREAMS:  # Stream.wait_stream
        frame = frame.f_back
    name = frame.f_globals.get("__name__") if frame is not None else None
    return isinstance(name, str) and name.startswith(DISTRIBUTED)
