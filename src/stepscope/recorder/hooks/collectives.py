"""Hooks on torch.distributed: joining a process group, collectives, functional collectives, and waits.

They record which collectives were called, when, in which group and with what size, and how long the host waited for
each.  The hooks see

- the methods of torch's own ``ProcessGroup`` class (``allreduce``, ``send`` …), not the functions of
  ``torch.distributed`` that call them.  Every call from Python ends up there, including the collectives of FSDP2, of
  pipelines and of a coalescing block.  Dynamo knows the functions by identity and replaces them, but never looks into
  the methods;
- functional collectives;
- ``Work.wait``, where every blocking collective and every wait of FSDP2 ends up.  On gloo it blocks until the peers
  arrive.  On NCCL it only orders streams: such a wait is recorded like any other but says nothing about the collective,
  of which only the call is known.

They do not see what never passes through Python, above all the all-reduces of DDP's reducer (``recorder/hooks/ddp.py``
has DDP's own figures on them), nor Python classes that override a method of ``ProcessGroup`` altogether.

Each call is written as one word and one timestamp (``ring/layout.py``: COLLECTIVE), with the peer of a send or recv.
Another word before a wait says which call it is for.  This shows whether the script waits at once; where a wait says
nothing, torch's options for the call are used.

On a GPU, autograd runs backward on its own threads, and FSDP2 communicates from there.  The training thread executes
nothing while it is inside backward, so autograd's threads may write calls during that time.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.identity import of_this_process, start_times
from stepscope.recorder.process_groups import UNKNOWN_GROUP, KnownGroup
from stepscope.recorder.recorder import Recorder
from stepscope.records.collectives import OPS
from stepscope.records.steps import BACKWARD, COMM
from stepscope.ring.layout import (
    ANY_PEER,
    ASYNC_BIT,
    COLLECTIVE_DATA,
    ENTER,
    OP_SHIFT,
    PEER,
    SIZE_MASK,
    TIME_SHIFT,
    WAIT_DATA,
    data_word,
)

__all__ = ["CollectiveCalls", "install", "install_init_process_group"]


# -- Shared state -----------------------------------------------------------------------------------------------------
# What all collective hooks share: the call count, the handles that may be waited for, and some queries.
#
# A wait finds its collective by the identity of the handle, or by the memory address of the tensor that a functional
# collective returned; neither is kept alive for that.  Only the size, address and device of tensors are read, bypassing
# ``__torch_function__``, which belongs to the script.

MAX_HANDLES = 512
"""Handles that were never waited for; beyond this number all are dropped at once."""
AUTOGRAD_THREAD = "pt_autograd"


class CollectiveCalls:
    """State of one recorder.  Used by the training thread, or by autograd's threads while that one waits for them."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self.recorder = recorder
        self.ledger = recorder.ledger
        self.known = recorder.groups.known
        """Groups seen so far."""
        self.count = 0
        """Calls so far."""
        self.handles: dict[int, int] = {}
        """What may be waited for, by identity: the number of its call."""
        self._torch = torch
        self._straight = torch._C.DisableTorchFunction
        self.has_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
        """Whether the script intercepts everything that is done with tensors."""
        self._engines: dict[int, bool] = {}
        """Other threads seen so far: whether they are autograd's."""

    def meet(self, group: Any) -> KnownGroup:
        return self.meet_as(group, id(group), group)

    def meet_as(self, group: Any, key: Any, owner: Any) -> KnownGroup:
        """Register a group, given in any form; ``key`` identifies it while ``owner`` lives."""
        return self.recorder.groups.meet(group, key, owner, self._torch.distributed, self.recorder.ring)

    def turn(self) -> None:
        """Publish the words, and drop handles that were not waited for; hardly any of them ever will be."""
        self.ledger.turn()
        if len(self.handles) > MAX_HANDLES:
            self.handles.clear()

    def reduce(self, value: Any) -> None:
        """A collective in backward is about to reduce this."""
        trail = self.recorder.trail
        if trail is not None and self.recorder.step >= trail.due:
            trail.given_to_collective(value)

    def enter_wait(self, number: int) -> int:
        """Begin to wait, for the ``number``-th call unless it is 0; returns the outer phase."""
        ledger = self.ledger
        if number:
            at = ledger.at
            ledger.body[at] = WAIT_DATA | self.count - number
            ledger.at = at + 1
        return ledger.enter(COMM)

    def stalled(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a wait that the ledger does not record, since it is on another thread; the device may still be timed."""
        device = self.ledger.device
        if device is None or not self.is_autograd() or not device.stall_begins(BACKWARD):
            return wait(*args, **kwargs)
        try:
            return wait(*args, **kwargs)
        finally:
            device.stall_ends()

    def is_autograd(self) -> bool:
        """Whether this is one of autograd's threads, inside a backward of the training thread."""
        if self.ledger.phase != BACKWARD or not self.ledger.thread:
            return False
        thread = get_ident()
        if thread not in self._engines:
            self._engines[thread] = _thread_name().startswith(AUTOGRAD_THREAD)
        return self._engines[thread]

    @failsafe
    def bytes_of(self, value: Any) -> int:
        if isinstance(value, self._torch.Tensor):
            with self._straight():
                return int(value.numel() * value.itemsize)
        return sum(self.bytes_of(element) or 0 for element in value) if isinstance(value, (list, tuple)) else 0

    @failsafe
    def is_on_device(self, value: Any) -> bool:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        with self._straight():
            return isinstance(value, self._torch.Tensor) and bool(value.is_cuda)

    @failsafe
    def is_async(self, args: tuple[Any, ...]) -> bool:
        """What torch's options, the last argument, say; without options, assume that it may be."""
        option = args[-1] if args else None
        return not type(option).__name__.endswith("Options") or bool(getattr(option, "asyncOp", True))

    @failsafe
    def place_of(self, tensor: Any) -> int:
        """The address of its memory, shared by its views; 0: none.  Negated, it cannot equal a handle's identity."""
        try:
            with self._straight():
                return int(tensor.data_ptr())
        except RuntimeError:
            return 0


def _thread_name() -> str:
    """The system's name of the calling thread; empty if not available."""
    try:
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
    except OSError:
        return ""


# -- Functional collectives -------------------------------------------------------------------------------------------
# DTensor, and with it tensor parallelism, is made of these.
#
# They call their group in C++, so their own functions are wrapped, and ``wait_tensor``, which the returned tensors call
# on first use.  For dynamo such a wrapper is only the call of the original (``is_dynamo_compiling`` is a constant
# there).  Not covered: collectives inside a compiled graph, and those that autograd runs as the backward of another
# (DTensor's own backward consists of the functions again).

FUNCTIONAL_COLLECTIVES = (
    # name, its name in earlier versions (now a wrapper of the former), operation, whether its input is one rank's part
    ("broadcast", "", "broadcast", False),
    ("all_reduce", "", "all_reduce", False),
    ("all_reduce_coalesced", "", "all_reduce", False),
    ("all_gather_single", "all_gather_tensor", "all_gather", True),
    ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced", "all_gather", True),
    ("reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter", False),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter", False),
    ("all_to_all_single", "", "all_to_all", False),
)


class FunctionalCalls:
    """Makes the wrappers for the module once the script has imported it."""

    def __init__(self, calls: CollectiveCalls, torch: Any) -> None:
        self._calls = calls
        self._torch = torch
        self._within = 0
        """The number of the collective in progress: waits inside it belong to it."""
        self._is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        mode_of, fake = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
        self._is_tracing: Callable[[], bool] = lambda: mode_of(fake) is not None

    def install(self, module: Any, patches: Patches) -> None:
        handle = module.AsyncCollectiveTensor
        calls = self._calls
        for ours in (calls.enter_wait, calls.turn, calls.is_autograd, calls.stalled):
            leave_alone(self._torch, ours, with_calls=True)
        self._put(patches, module, "wait_tensor", self._waiting(module.wait_tensor))
        for name, earlier, op, part in FUNCTIONAL_COLLECTIVES:
            chosen = name if hasattr(module, name) else earlier
            if hasattr(module, chosen):
                self._put(patches, module, chosen, self._function(getattr(module, chosen), op, part, handle))

    def _put(self, patches: Patches, module: Any, name: str, wrapper: Callable[..., Any]) -> None:
        leave_alone(self._torch, wrapper, with_calls=False)  # dynamo must see the original
        patches.set(module, name, wrapper)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``wait_tensor``: counted as ``comm`` and linked to the call that returned the tensor."""
        this, calls, ledger, is_compiling = self, self._calls, self._calls.ledger, self._is_compiling
        plain, has_mode, handles = self._torch.Tensor, calls.has_mode, calls.handles

        @functools.wraps(original)
        def wait_tensor(tensor: Any) -> Any:
            if is_compiling():
                return original(tensor)
            if get_ident() != ledger.thread or ledger.phase == COMM:
                return calls.stalled(original, tensor)
            straight = type(tensor) is plain and not has_mode()
            if not straight and this._is_tracing():
                return original(tensor)
            try:
                place = tensor.data_ptr() if straight else calls.place_of(tensor)
            except RuntimeError:  # a tensor without memory, as inside vmap
                place = 0
            outer = calls.enter_wait(handles.pop(-(place or 0), 0) or this._within)
            try:
                return original(tensor)
            finally:
                ledger.leave(outer)

        return wait_tensor

    def _function(self, original: Callable[..., Any], op: str, part: bool, handle: Any) -> Callable[..., Any]:
        """Wrap a functional collective, which returns a ``handle`` that is also a tensor (or a list of them)."""
        this, calls, ledger, is_compiling = self, self._calls, self._calls.ledger, self._is_compiling
        plain, has_mode, known, handles = self._torch.Tensor, calls.has_mode, calls.known, calls.handles
        place = list(inspect.signature(original).parameters).index("group")
        base = COLLECTIVE_DATA | OPS.index(op) << OP_SHIFT | ASYNC_BIT

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or (get_ident() != ledger.thread and not calls.is_autograd()):
                return original(*args, **kwargs)
            value: Any = args[0] if args else None
            straight = type(value) is plain and not has_mode()
            if not straight and this._is_tracing():
                return original(*args, **kwargs)
            group = args[place] if len(args) > place else kwargs.get("group")
            bits, ranks, blind, _ = known.get(id(group)) or this._group(group) or UNKNOWN_GROUP
            try:
                size = value.nbytes if straight else calls.bytes_of(value) or 0
            except RuntimeError:  # a sparse tensor has none
                size = 0
            body, position = ledger.body, ledger.at
            body[position] = base | bits | min(size * ranks if part else size, SIZE_MASK)
            body[position + 1] = (ledger.now() << TIME_SHIFT) + ledger.phase
            ledger.at = position + 2
            this._within = calls.count = number = calls.count + 1
            if position > ledger.limit:
                calls.turn()
            try:
                result = original(*args, **kwargs)
            finally:
                this._within = 0
            if straight and not blind and type(result) is handle:
                try:
                    handles[-result.elem.data_ptr()] = number
                except RuntimeError:  # likewise; suppress() would cost another call
                    return result
            elif not blind or not calls.is_on_device(value):
                this._expect(result, number, handle)
            return result

        return call

    @failsafe
    def _group(self, group: Any) -> KnownGroup:
        key, owner = _key_of(group)
        return self._calls.known.get(key) or self._calls.meet_as(group, key, owner)

    @failsafe
    def _expect(self, result: Any, number: int, handle: Any) -> None:
        """Remember that the result may be waited for; anything but a handle was waited for already."""
        for work in result if type(result) is list else (result,):
            if type(work) is handle:
                self._calls.handles[-(self._calls.place_of(work.elem) or 0)] = number


def _key_of(group: Any) -> tuple[Any, Any]:
    """The key of a group, and the object whose lifetime it depends on; DTensor names a group by mesh and dimension."""
    if isinstance(group, tuple):
        return (id(group[0]), group[1]), group[0]
    return (group, group) if isinstance(group, str) else (id(group), group)


# -- Method wrappers --------------------------------------------------------------------------------------------------

FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"

METHODS = {
    # name: operation, which argument has the size, and whether that is one rank's part of the whole
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "allgather": ("all_gather", 1, True),
    "allgather_coalesced": ("all_gather", 1, True),
    "_allgather_base": ("all_gather", 0, False),
    "all_gather_single": ("all_gather", 0, False),
    "all_gather_single_coalesced": ("all_gather", 0, False),
    "allgather_into_tensor_coalesced": ("all_gather", 0, False),
    "reduce_scatter": ("reduce_scatter", 0, True),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "broadcast": ("broadcast", 0, False),
    "reduce": ("reduce", 0, False),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
    "barrier": ("barrier", 0, False),
}
SINGLE_METHODS = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
BLOCKING_METHODS = {"monitored_barrier": "barrier"}


def install(recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch) -> None:
    if not torch.distributed.is_available():
        return
    calls = CollectiveCalls(recorder, torch)
    hooks = MethodCalls(calls, torch)
    c10d = torch._C._distributed_c10d

    def put(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            wrapper = _named(wrapped(getattr(owner, name)), name)
            leave_alone(torch, wrapper, with_calls=True)
            wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]  # a method in C++ ends a graph, too
            patches.set(owner, name, wrapper)

    put(c10d.Work, "wait", hooks.waiting)
    for name, (op, at, part) in METHODS.items():
        put(c10d.ProcessGroup, name, functools.partial(hooks.collective, op=op, at=at, part=part))
    for name, op in SINGLE_METHODS.items():
        put(c10d.ProcessGroup, name, functools.partial(hooks.single, op=op, with_peer=name != "recv_anysource"))
    for name, op in BLOCKING_METHODS.items():
        put(c10d.ProcessGroup, name, functools.partial(hooks.blocking, op=op))
    functional = FunctionalCalls(calls, torch)
    watch.when_imported(FUNCTIONAL_MODULE, lambda module: functional.install(module, patches))


class MethodCalls:
    """Makes the wrappers of methods.  This is the hot path, inlined as in ``recorder/ledger.py``."""

    def __init__(self, calls: CollectiveCalls, torch: Any) -> None:
        self._calls = calls
        self._tensor = torch.Tensor

    def collective(self, original: Callable[..., Any], *, op: str, at: int, part: bool) -> Callable[..., Any]:
        """Wrap a method whose ``at``-th argument is what is communicated, or one rank's ``part`` of it."""
        calls, ledger, known, handles = self._calls, self._calls.ledger, self._calls.known, self._calls.handles
        tensor, has_mode, now = self._tensor, self._calls.has_mode, self._calls.ledger.now
        base = COLLECTIVE_DATA | OPS.index(op) << OP_SHIFT | ASYNC_BIT
        reduces = op in ("all_reduce", "reduce_scatter")

        @functools.wraps(original)
        def call(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != ledger.thread and not calls.is_autograd():
                return original(group, *args, **kwargs)
            bits, ranks, blind, _ = known.get(id(group)) or calls.meet(group)
            value: Any = args[at] if len(args) > at else None
            if type(value) is list and len(value) == 1:
                value = value[0]
            try:
                size = value.nbytes if type(value) is tensor and not has_mode() else calls.bytes_of(value) or 0
            except RuntimeError:  # a sparse tensor has none
                size = calls.bytes_of(value) or 0
            if part:
                size = min(size * ranks, SIZE_MASK)
            if blind and not calls.is_async(args):
                size ^= ASYNC_BIT
            if reduces and ledger.phase == BACKWARD:
                calls.reduce(value)
            body, position = ledger.body, ledger.at
            body[position] = (base | bits) ^ size  # the bits of size are clear there, except ASYNC, which is set
            body[position + 1] = (now() << TIME_SHIFT) + ledger.phase
            ledger.at = position + 2
            calls.count = number = calls.count + 1
            if position > ledger.limit:
                calls.turn()
            work = original(group, *args, **kwargs)
            if not blind or not calls.is_on_device(value):
                handles[id(work)] = number
            return work

        return call

    def single(self, original: Callable[..., Any], *, op: str, with_peer: bool) -> Callable[..., Any]:
        """Wrap a send or recv, which has a peer instead of options."""
        calls, ledger, known, handles = self._calls, self._calls.ledger, self._calls.known, self._calls.handles
        base = COLLECTIVE_DATA | OPS.index(op) << OP_SHIFT | ASYNC_BIT

        @functools.wraps(original)
        def call(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != ledger.thread and not calls.is_autograd():
                return original(group, *args, **kwargs)
            bits, _, blind, ranks = known.get(id(group)) or calls.meet(group)
            value: Any = args[0] if args else None
            peer: Any = args[1] if with_peer and len(args) > 1 else None
            size = calls.bytes_of(value) or 0
            position = ledger.at
            ledger.body[position] = base | bits | size & SIZE_MASK
            ledger.body[position + 1] = data_word(PEER, ranks[peer] if _in(ranks, peer) else ANY_PEER)
            ledger.body[position + 2] = (ledger.now() << TIME_SHIFT) + ledger.phase
            ledger.at = position + 3
            calls.count = number = calls.count + 1
            if position > ledger.limit:
                calls.turn()
            work = original(group, *args, **kwargs)
            if not blind or not calls.is_on_device(value):
                handles[id(work)] = number
            return work

        return call

    def blocking(self, original: Callable[..., Any], *, op: str) -> Callable[..., Any]:
        """Wrap a method that returns only when it is done."""
        calls, ledger, known = self._calls, self._calls.ledger, self._calls.known
        base = COLLECTIVE_DATA | OPS.index(op) << OP_SHIFT

        @functools.wraps(original)
        def call(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != ledger.thread or ledger.phase == COMM:
                return original(group, *args, **kwargs)
            about = known.get(id(group)) or calls.meet(group)
            ledger.body[ledger.at] = base | about.bits
            ledger.at += 1
            calls.count += 1
            outer = calls.enter_wait(calls.count)
            try:
                return original(group, *args, **kwargs)
            finally:
                ledger.leave(outer)

        return call

    def waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Work.wait``: counted as ``comm`` and linked to the call that returned the handle."""
        calls, ledger, handles, now = self._calls, self._calls.ledger, self._calls.handles, self._calls.ledger.now

        @functools.wraps(original)
        def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
            outer = ledger.phase
            if get_ident() != ledger.thread or outer == COMM:
                return calls.stalled(original, work, *args, **kwargs)
            body, at = ledger.body, ledger.at
            number = handles.pop(id(work), 0)
            if number:
                body[at] = WAIT_DATA | calls.count - number
                at += 1
            body[at] = (now() << TIME_SHIFT) + COMM + ENTER
            ledger.at = at + 1
            ledger.phase = COMM
            try:
                if ledger.device is not None:
                    ledger.device.mark(outer, COMM)
                return original(work, *args, **kwargs)
            finally:
                at, ended = ledger.at, ledger.phase
                ledger.phase = outer  # first, as in ``Ledger.leave``
                ledger.body[at] = (now() << TIME_SHIFT) + outer
                ledger.at = at + 1
                if ledger.device is not None:
                    ledger.device.mark(ended, outer)
                if at > ledger.limit:
                    ledger.turn()

        return wait


def _in(ranks: tuple[int, ...], peer: Any) -> bool:
    return type(peer) is int and 0 <= peer < len(ranks)


def _named(function: Any, name: str) -> Callable[..., Any]:
    """Rename the code object as well.

    C++ recognizes a method that it may call back (in a Python subclass of a torch class) by the name in its frame:
    under another name the call of the original would come back to us forever.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    wrapper: Callable[..., Any] = function
    return wrapper


# -- Joining a process group ------------------------------------------------------------------------------------------
# A job with several ranks can hang before its first step, in the rendezvous, when one of them never arrives.  So in
# such a job the ring is created while ``init_process_group`` runs, not only at the first sign of training; nothing
# changes for a single process.  The arguments of the call or the launcher's variables say who we are until the group
# itself does.

INIT_FUNCTION = "init_process_group"
INIT_MODULES = ("torch.distributed.distributed_c10d", "torch.distributed", "torch.distributed.device_mesh")
"""Modules of torch that have the function by name."""
WORLD_SIZE_AT, RANK_AT = 3, 4
"""Their positions among the arguments."""


def install_init_process_group(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    original = getattr(torch.distributed, INIT_FUNCTION, None)
    if original is None:
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _joins(
            recorder,
            _given_number(args, kwargs, RANK_AT, "rank"),
            _given_number(args, kwargs, WORLD_SIZE_AT, "world_size"),
        )
        result = original(*args, **kwargs)
        _has_joined(recorder)
        return result

    for name in INIT_MODULES:
        module = sys.modules.get(name)
        if getattr(module, INIT_FUNCTION, None) is original:
            patches.set(module, INIT_FUNCTION, init_process_group)
    if torch.distributed.is_initialized():
        _has_joined(recorder)  # it came before ``stepscope.init()``


@failsafe
def _joins(recorder: Recorder, rank: int | None, world_size: int | None) -> None:
    """The group is being set up: ranks waiting there for one that never arrives are visible from now on."""
    found = of_this_process()
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if world_size > 1 and recorder.ring is None:
        recorder.appear(replace(found, rank=rank, world_size=max(world_size, rank + 1)), serve=False)


@failsafe
def _has_joined(recorder: Recorder) -> None:
    """The group is set up: it is now certain who we are, and that there are others."""
    start_times.joined_ns = start_times.joined_ns or time.perf_counter_ns()
    found = of_this_process()
    if found.world_size > 1:
        recorder.appear(found, serve=True)


def _given_number(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> int | None:
    """An argument of the call; None if it is left to the environment."""
    value = args[at] if len(args) > at else kwargs.get(name)
    return value if type(value) is int and value >= 0 else None
