"""Loss, gradient norm and learning rate of each step, as the training computes them anyway.

The loss is the scalar on which the script calls ``backward``: the last one of the step, if there are several (gradient
accumulation, a GAN).  With a GradScaler it is what was given to ``scale``.  The norm is what ``clip_grad_norm_``
returned, before it clipped; of several calls in a step (one for each model, or for each parameter) the root of the sum
of squares.  Nothing is computed for it, and nothing waits: on a CPU both are read at once, from a GPU they are copied
to pinned memory in the background and read when they are there.  Of steps shorter than 40 ms only some are read.

The learning rate is that of the first parameter group of the optimizer that ends the step, if it is a Python number or
on the CPU, read when backward begins: the one that the optimizer is going to use.

They are stored as notes whose names begin with ``SEEN`` (``records/steps.py``), so that they never mix with what the
script notes itself: of all steps at first, then of every 2nd, 4th, 8th … so that their number grows with the logarithm
of the run; of ranks from ``EVERY_STEP_RANKS`` on, of every 64th of these.  A value that is not finite is stored in any
case, with the last one before it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

from stepscope.recorder.device import Scalars
from stepscope.recorder.guard import ImportWatch, Patches, failsafe, immortal
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.layers.tree import local_part
from stepscope.recorder.ledger import NOBODY
from stepscope.recorder.recorder import Recorder
from stepscope.records.paths import ENV_LAYERS
from stepscope.records.steps import SEEN

__all__ = ["StepValues"]

EVERY_STEP_UP_TO = 1024
"""Steps of which each value is stored; from there on every 2nd, after twice as many every 4th …"""
EVERY_STEP_RANKS = 8
FEWER = 64
"""On the other ranks, one in so many of these."""
FIRST_BAD = 4
MOST_CHANGES = 256
"""Values that are stored between the regular ones: the first few that are not finite, and the first after them."""
SHORTEST_NS = 40_000_000
"""Between two steps that are read: a reading takes 60 µs between kernels, too much for a loop of a millisecond."""
DEVICE_NS = 100_000_000
"""… and of shorter steps on a GPU, where a reading takes 140 µs."""
LONGEST_STRIDE = 1024
MOST_UNDER_WAY = 8
MOST_NORMS = 8
"""Norms of one step that are copied from a GPU."""
FULLY_SHARDED = "torch.distributed.fsdp.fully_sharded_data_parallel"
SHARDED_SCALER = "torch.distributed.fsdp.sharded_grad_scaler"

BATCH_NS = 250_000_000
MOST_UNCOPIED = 16
"""Values of a GPU are copied together, when the last copy was this long ago, or when there are so many steps."""

Call = Callable[..., Any]
Place = tuple[int, int]
"""Of a number: which list of ``Scalars``, and where in it."""
Values = tuple[int, float | None, float | None, float | None]
"""Step, loss, norm and learning rate."""


class StepValues:
    def __init__(
        self, recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch, environ: Mapping[str, str]
    ) -> None:
        self.recorder = recorder
        mode = environ.get(ENV_LAYERS, "")
        self._ledger = recorder.ledger
        self._torch = torch
        self._plain = torch.Tensor
        private = torch._C
        self._modes: tuple[Callable[[], Any], ...] = (
            private._len_torch_dispatch_stack,
            private._len_torch_function_stack,
            private._functorch.peek_interpreter_stack,
        )
        """Whether the script watches, or changes, what operations do."""
        self._is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        self.forget()
        recorder.when_forked(self._forget_in_child)
        recorder.when_ending(self._end)
        self.off = mode == "off"
        if not self.off:
            self._install(torch, patches, watch)

    def _forget_in_child(self) -> None:
        """Start over without destroying what is on the parent's device."""
        immortal([self._device_loss, self._device_norms, self._scaled, self._uncopied])
        self.forget()

    def forget(self) -> None:
        self._step = 0
        """The step that the values below belong to: the last one that was read."""
        self.due = 0
        """From this step on ``see`` is called; that of the last reading, until the step after it."""
        self._next = 0
        """The next step to read …"""
        self._stride = 1
        """… every so many steps, a power of two, so that ranks read the same ones."""
        self._checked_ns = 0
        self._loss: float | None = None
        self._squares: float | None = None
        """Of the norms so far."""
        self._device_loss: Any = None
        """On a GPU: the loss without its graph."""
        self._on_device = False
        self._device_norms: list[Any] = []
        self._rate: float | None = None
        self._reads_rate = True
        """Until that fails."""
        self._scaled: tuple[weakref.ref[Any], Any] | None = None
        """What a GradScaler made of the loss, and the loss."""
        self._scaled_step = -1
        self._scaler: weakref.ref[Any] | None = None
        self._clipping = False
        self._unwritten: Values | None = None
        """The last values, if they were not stored."""
        self._bad_steps = 0
        """So many values in a row were not finite."""
        self._changes = 0
        self._copied_ns = 0
        self._free: list[Scalars] = []
        self._made = 0
        self._uncopied: list[tuple[int, Any, list[Any], float | None]] = []
        """Of steps since the last copy: loss and norms on the device, and the learning rate."""
        self._under_way: deque[tuple[Scalars, list[tuple[int, Place | None, list[Place], float | None]]]] = deque()
        """The same, with the places of the numbers that are on their way."""

    # -- Hooks ----------------------------------------------------------------------------------------------------

    def _install(self, torch: Any, patches: Patches, watch: ImportWatch) -> None:
        utils = torch.nn.utils
        clip = self._clipped(torch, utils.clip_grad_norm_)
        patches.set(utils, "clip_grad_norm_", clip)
        patches.set(utils.clip_grad, "clip_grad_norm_", clip)
        if hasattr(utils, "clip_grads_with_norm_"):
            patches.set(utils, "clip_grads_with_norm_", self._clipped_with(torch, utils.clip_grads_with_norm_))
        scaler = torch.amp.GradScaler
        patches.set(scaler, "scale", self._scaling(torch, scaler.scale))

        def sharded(module: Any) -> None:
            fsdp = module.FullyShardedDataParallel
            patches.set(fsdp, "clip_grad_norm_", self._clipped(torch, fsdp.clip_grad_norm_))

        def sharded_scaler(module: Any) -> None:
            patches.set(module.ShardedGradScaler, "scale", self._scaling(torch, module.ShardedGradScaler.scale))

        watch.when_imported(FULLY_SHARDED, sharded)
        watch.when_imported(SHARDED_SCALER, sharded_scaler)

    def _scaling(self, torch: Any, original: Call) -> Call:
        is_compiling, remember = self._is_compiling, self._remember_scaled

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if not self._passes_over() and not is_compiling() and result is not outputs:
                remember(scaler, outputs, result)
            return result

        leave_alone(torch, scale, with_calls=False)
        return scale

    def _clipped(self, torch: Any, original: Call) -> Call:
        """Wrap a function that returns the norm: of parameters, the largest norm, and the kind of norm."""
        is_compiling, see, recorder, ledger = self._is_compiling, self._see_norm, self.recorder, self._ledger

        @functools.wraps(original)
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._clipping or recorder.capturing or get_ident() != ledger.thread:
                return original(*args, **kwargs)
            self._clipping = True
            try:
                trail = recorder.trail
                norm = original(*args, **kwargs) if trail is None else trail.clip(original, args, kwargs)
            finally:
                self._clipping = False
            if self._passes_over():
                return norm
            see(norm, kwargs.get("norm_type", args[2] if len(args) > 2 else 2.0))
            return norm

        leave_alone(torch, clip_grad_norm_, with_calls=False)
        return clip_grad_norm_

    def _clipped_with(self, torch: Any, original: Call) -> Call:
        """Wrap a function that is given the norm: after parameters and the largest norm."""
        is_compiling, see = self._is_compiling, self._see_norm

        @functools.wraps(original)
        def clip_grads_with_norm_(*args: Any, **kwargs: Any) -> Any:
            if not (self._passes_over() or is_compiling() or self._clipping):
                see(kwargs.get("total_norm", args[2] if len(args) > 2 else None), 2.0)
            return original(*args, **kwargs)

        leave_alone(torch, clip_grads_with_norm_, with_calls=False)
        return clip_grads_with_norm_

    def _passes_over(self) -> bool:
        """Whether nothing is read in the current step, or now: what is captured in a CUDA graph has no values yet,
        and a question to the device would end the capture."""
        step = self.recorder.step
        if step == self._step or step >= self._next:
            return self.recorder.capturing
        self.due = self._next
        return True

    # -- What they see --------------------------------------------------------------------------------------------

    @failsafe
    def _remember_scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        if get_ident() == self._ledger.thread or self._ledger.thread == NOBODY:
            self._scaled_step = self.recorder.step
            self._scaler = weakref.ref(scaler)
            if self._is_number(outputs):
                self._scaled = weakref.ref(result), outputs.item() if outputs.is_cpu else outputs.detach()

    @failsafe
    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what ``torch.autograd.backward`` is called with, on the training thread."""
        if self._passes_over() or self._is_compiling():
            return
        tensors: Any = args[0] if args else kwargs.get("tensors")
        weights: Any = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        if isinstance(tensors, tuple | list) and len(tensors) == 1:
            tensors = tensors[0]
            weights = weights[0] if isinstance(weights, tuple | list) and len(weights) == 1 else weights
        if self.recorder.step != self._step:
            self._flush()
        if self._rate is None and self._reads_rate:
            self._see_rate()
        if weights is not None or not self._is_number(tensors):
            return
        loss: Any = tensors
        if self._scaled is not None:
            (scaled, plain), self._scaled = self._scaled, None
            loss = plain if scaled() is tensors else tensors
        if type(loss) is not float and loss.is_cpu:
            loss = loss.item()
        if type(loss) is not float:
            self._device_loss = loss.detach()
            self._on_device = True
            return
        self._loss = loss
        if loss - loss != 0:
            self.recorder.suspect("nonfinite")
            if self.recorder.trail is not None:
                self.recorder.trail.see_forward(tensors)

    @failsafe
    def _see_norm(self, norm: Any, kind: Any) -> None:
        if get_ident() != self._ledger.thread or kind != 2:
            return
        if type(norm) is not self._plain:
            if any(not placement.is_replicate() for placement in getattr(norm, "placements", ())):
                return  # a rank's part of it: the whole would have to be exchanged
            norm = local_part(norm)
        if self.recorder.step != self._step:
            self._flush()
        if not self._is_number(norm) or self._is_scaled():
            return
        if not norm.is_cpu:
            self._device_norms.append(norm.detach())
            return
        value = norm.item()
        if value - value != 0:
            self.recorder.suspect("nonfinite" if self._scaled_step != self._step else "skipped")
        self._squares = (self._squares or 0.0) + value * value

    @failsafe
    def _see_rate(self) -> None:
        self._reads_rate = False  # if this fails, it would fail each time
        groups: Any = getattr(self.recorder.closing_optimizer(), "param_groups", None)
        rate: Any = groups[0].get("lr") if groups else None
        if type(rate) in (int, float):
            self._rate = float(rate)
        elif self._is_number(rate) and rate.is_cpu:
            self._rate = rate.item()
        self._reads_rate = True

    def _is_number(self, tensor: Any) -> bool:
        """Whether it is an ordinary tensor with one floating-point number, which no mode of the script watches."""
        if type(tensor) is not self._plain or tensor.numel() != 1 or not tensor.is_floating_point():
            return False
        dispatch, function, functorch = self._modes
        return not (dispatch() or function() or functorch()) and (tensor.is_cpu or tensor.is_cuda)

    def _is_scaled(self) -> bool:
        """Whether gradients still have the factor of a GradScaler in them."""
        scaler = self._scaler() if self._scaler is not None and self._scaled_step == self.recorder.step else None
        if scaler is None:
            return False
        return all(state["stage"].name == "READY" for state in scaler._per_optimizer_states.values())

    # -- Storing --------------------------------------------------------------------------------------------------

    @failsafe
    def _end(self) -> None:
        """The process ends; a failure of its device is reported elsewhere."""
        if get_ident() == self._ledger.thread:
            with contextlib.suppress(RuntimeError):
                self._flush()
                self._receive()

    def _flush(self) -> None:
        """The step that the values belong to is over."""
        step, self._step = self._step, self.recorder.step
        self._schedule(self._step - step)
        rate, self._rate = self._rate, None
        if self._hold(step, rate):
            rate = None
        if (self._under_way or self._uncopied) and not self._torch.cuda.is_current_stream_capturing():
            self._receive()
            self._send()
        loss, squares = self._loss, self._squares
        if loss is not None or squares is not None or rate is not None:
            self._loss = self._squares = None
            self._store(step, loss, None if squares is None else math.sqrt(squares), rate)

    def _schedule(self, steps: int) -> None:
        """Choose the next step to read; so many passed since the last reading."""
        now_ns = self._ledger.now()
        since_ns, self._checked_ns = now_ns - self._checked_ns, now_ns
        apart_ns = DEVICE_NS if self._on_device and since_ns < SHORTEST_NS * steps else SHORTEST_NS
        while self._stride < LONGEST_STRIDE and self._stride * since_ns < apart_ns * steps:
            self._stride *= 2
        while self._stride > 1 and self._stride // 2 * since_ns >= apart_ns * steps:
            self._stride //= 2
        self._next = (self._step // self._stride + 1) * self._stride

    def _store(self, step: int, loss: float | None, norm: float | None, rate: float | None = None) -> None:
        if loss is None and norm is None:
            if self._is_due(step):
                self._write(step, None, None, rate)
            return
        if norm is not None and norm - norm != 0 and self._scaler is not None:
            norm = None  # the scaler skips such a step
        bad = (loss is not None and loss - loss != 0) or (norm is not None and norm - norm != 0)
        before, self._bad_steps = self._bad_steps, self._bad_steps + 1 if bad else 0
        if (before < FIRST_BAD if bad else before) and self._changes < MOST_CHANGES:
            self._changes += 1
            if self._unwritten is not None:
                self._write(*self._unwritten)
        elif not self._is_due(step):
            self._unwritten = step, loss, norm, rate
            return
        self._write(step, loss, norm, rate)
        self._unwritten = None

    def _write(self, step: int, loss: float | None, norm: float | None, rate: float | None) -> None:
        values = [
            f'"{SEEN}{name}":{value:.6g}' if value - value == 0 else f'"{SEEN}{name}":"{value}"'
            for name, value in (("loss", loss), ("grad_norm", norm), ("lr", rate))
            if value is not None
        ]
        if values:
            self.recorder.note_at(step, f"{{{','.join(values)}}}".encode())

    def _is_due(self, step: int) -> bool:
        stride = 1 << (step // EVERY_STEP_UP_TO).bit_length()
        if self.recorder.identity.rank >= EVERY_STEP_RANKS:
            stride *= FEWER
        return not step & (stride - 1)

    # -- From a GPU -----------------------------------------------------------------------------------------------

    def _hold(self, step: int, rate: float | None) -> bool:
        """Keep the values of the step that is over, if they are on a device, until several are copied at once."""
        loss, norms = self._device_loss, self._device_norms
        self._device_loss, self._device_norms = None, []
        if loss is None and not norms:
            return False
        self._uncopied.append((step, loss, norms if len(norms) <= MOST_NORMS else [], rate))
        return True

    def _send(self) -> None:
        """Copy what is held, if that is due: what follows a copy costs more than the values do."""
        now_ns = self._ledger.now()
        if not self._uncopied or (now_ns - self._copied_ns < BATCH_NS and len(self._uncopied) < MOST_UNCOPIED):
            return
        losses, self._uncopied = self._uncopied, []
        if not self._free and self._made < MOST_UNDER_WAY:
            self._made += 1
            self._free.append(immortal(Scalars(self._torch)))
        if not self._free:
            return
        self._copied_ns = now_ns
        scalars = self._free.pop()
        scalars.start()
        lists: dict[Any, list[Any]] = {}
        which: dict[Any, int] = {}

        def put(tensor: Any) -> Place:
            key = tensor.dtype, tensor.device
            if key not in lists:
                lists[key] = []
                which[key] = scalars.add(lists[key])
            lists[key].append(tensor if tensor.ndim == 0 else tensor.reshape(()))
            return which[key], len(lists[key]) - 1

        rows = [
            (step, None if loss is None else put(loss), [put(norm) for norm in norms], rate)
            for step, loss, norms, rate in losses
        ]
        scalars.send()
        self._under_way.append((scalars, rows))

    def _receive(self) -> None:
        """Store what has arrived; never waits."""
        while self._under_way and self._under_way[0][0].arrived():
            scalars, rows = self._under_way.popleft()

            def number(place: Place, scalars: Scalars = scalars) -> float:
                return float(scalars.numbers(place[0])[place[1]])

            for step, of_loss, of_norms, rate in rows:
                loss = None if of_loss is None else number(of_loss)
                norms = [number(term) for term in of_norms]
                norm = math.sqrt(sum(part * part for part in norms)) if norms else None
                if any(value is not None and value - value != 0 for value in (loss, norm)):
                    self.recorder.suspect("nonfinite" if self._scaler is None else "skipped")
                self._store(step, loss, norm, rate)
            self._free.append(scalars)
