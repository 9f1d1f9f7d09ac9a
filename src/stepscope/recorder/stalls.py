"""Where a device's stream waits for a collective without passing through ``Work.wait`` on the thread that trains.

On NCCL the host hardly ever waits: it tells the stream to.  In a step that is timed (``recorder/device.py``) an event
before and one after such a wait tell how long the stream stood still for the others; in all other steps these hooks
look at one attribute.  There are three such places:

- DDP's reducer waits in C++, at the end of backward.  Autograd calls what was queued with its engine in order, and DDP
  queues when its last gradient is there: what is queued when backward comes to the model's output is called before.
- FSDP orders streams with events, from Python: ``Stream.wait_event``.  Scripts do that, too, for copies of their own;
  so it counts only where torch.distributed itself calls it.
- Autograd's threads wait on ``Work`` and functional collectives in backward (``recorder/collectives.py``).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.calls import Calls
from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD, COMM

__all__ = ["install"]

DISTRIBUTED = "torch.distributed"
STREAMS = "torch.cuda.streams"
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
MAX_DEPTH, MAX_ITEMS = 3, 16
"""Of lists and dictionaries in a model's output; one may be a list of a million numbers."""


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    ledger, calls = recorder.ledger, Calls(recorder, torch)
    original = torch.cuda.Stream.wait_event

    @functools.wraps(original)
    def wait_event(stream: Any, event: Any) -> Any:
        device = ledger.device  # once: the thread that trains may take it away meanwhile
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
        around = _BeforeReducer(ledger, torch).around(ddp._post_forward, torch.compiler.is_dynamo_compiling)
        leave_alone(torch, around, with_calls=False)
        patches.set(ddp, "_post_forward", around)


class _BeforeReducer:
    """Tells, in a step that is timed, when the last gradient is there and DDP's reducer begins to wait."""

    def __init__(self, ledger: Ledger, torch: Any) -> None:
        self._ledger = ledger
        self._tensor = torch.Tensor
        self._straight = torch._C.DisableTorchFunction
        self._queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

    def around(self, original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
        ledger, look_at = self._ledger, self._look_at

        @functools.wraps(original)
        def _post_forward(self: Any, output: Any) -> Any:
            output = original(self, output)
            # The reducer in Python, which compiled autograd needs, does not wait behind anybody's back.
            if not is_compiling() and ledger.device is not None and not getattr(self, "_use_python_reducer", False):
                look_at(output)
            return output

        return _post_forward

    @failsafe
    def _look_at(self, output: Any) -> None:
        """Let the first thing that backward does with the output be to queue the mark.

        With compiled autograd that would be another graph.
        """
        with self._straight():  # past __torch_function__, which belongs to the script
            node = getattr(self._first_tensor(output, MAX_DEPTH), "grad_fn", None)
        if node is not None and not getattr(sys.modules.get(COMPILED_AUTOGRAD), "compiled_autograd_enabled", False):
            node.register_prehook(self._backward_begins)

    @failsafe
    def _backward_begins(self, gradients: Any) -> None:
        self._queue(self._gradients_done)

    @failsafe
    def _gradients_done(self) -> None:
        if self._ledger.device is not None and self._ledger.phase == BACKWARD:
            self._ledger.device.stall_begins(BACKWARD)  # which ends with backward

    def _first_tensor(self, output: Any, depth: int) -> Any:
        if isinstance(output, self._tensor):
            return output if output.requires_grad else None
        inside = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
        found = (self._first_tensor(one, depth - 1) for one in itertools.islice(inside, MAX_ITEMS) if depth)
        return next((one for one in found if one is not None), None)


@failsafe
def _is_current(torch: Any, stream: Any) -> bool:
    return bool(torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream)


def _by_torch_distributed() -> bool:
    """Whether the caller of ``wait_event`` is; C may call it with nobody above."""
    frame = sys._getframe(1).f_back
    if frame is not None and frame.f_globals.get("__name__") == STREAMS:  # Stream.wait_stream
        frame = frame.f_back
    name = frame.f_globals.get("__name__") if frame is not None else None
    return isinstance(name, str) and name.startswith(DISTRIBUTED)
