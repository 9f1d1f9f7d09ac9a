"""Collectives: which were called when, in which group, how large, and how long the host waited for each.

Seen are

- the methods of torch's own ``ProcessGroup`` class (``allreduce``, ``send`` …), not the functions of
  ``torch.distributed`` that call them.  Whatever is called from Python ends up there, FSDP2's and the pipelines'
  collectives and those of a coalescing block included, while dynamo, which knows the functions by their identity and
  replaces them, never looks into the methods;
- functional collectives (``recorder/functional.py``);
- ``Work.wait``, where every blocking collective and every wait of FSDP2 ends up.  On gloo it blocks until the peers
  came.  On NCCL it only orders streams: such a wait is booked as ever but says nothing of the collective, of which
  only the call is known.

Not seen is what never passes through Python, above all the all-reduces of DDP's reducer (``recorder/waiting.py`` has
what DDP says of them itself), nor Python classes that override a method of ``ProcessGroup`` altogether.

What is written is a word and an instant per call (``ring/words.py``: COLLECTIVE), with the peer of a send or recv, and
one more before a wait, which says for which call it is.  Whether the script waits at once shows by that; where a wait
says nothing, torch's options of the call tell.

Autograd runs backward on threads of its own where there is a GPU, and FSDP2 communicates from there.  While the thread
that trains is inside of backward it executes nothing, so for that long autograd's threads may write calls as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.calls import Calls
from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.functional import FunctionalCalls
from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.collectives import OPS
from stepscope.records.phases import COMM
from stepscope.ring.words import (
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

__all__ = ["install"]

FUNCTIONAL = "torch.distributed._functional_collectives"

METHODS = {
    # name: operation, which argument tells the size, and whether that is one rank's part of the whole
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
    calls = Calls(recorder, torch)
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
    watch.when_imported(FUNCTIONAL, lambda module: functional.install(module, patches))


class MethodCalls:
    """Makes the wrappers of methods.  This is the hot path: written out, as in ``recorder/ledger.py``."""

    def __init__(self, calls: Calls, torch: Any) -> None:
        self._calls = calls
        self._tensor = torch.Tensor

    def collective(self, original: Callable[..., Any], *, op: str, at: int, part: bool) -> Callable[..., Any]:
        """A method whose ``at``-th argument is what is communicated, or one rank's ``part`` of it."""
        calls, ledger, known, handles = self._calls, self._calls.ledger, self._calls.known, self._calls.handles
        tensor, has_mode, now = self._tensor, self._calls.has_mode, self._calls.ledger.now
        base = COLLECTIVE_DATA | OPS.index(op) << OP_SHIFT | ASYNC_BIT

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
            body, position = ledger.body, ledger.at
            body[position] = (base | bits) ^ size  # whose bits are clear there, and the one of ASYNC set
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
        """A send or recv: it has a peer instead of options."""
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
        """One that returns only when it is done."""
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
        """``Work.wait``, booked for ``comm`` and linked to the call that gave the handle."""
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
            if ledger.device is not None:
                ledger.device.mark(outer, COMM)
            try:
                return original(work, *args, **kwargs)
            finally:
                at = ledger.at
                ledger.body[at] = (now() << TIME_SHIFT) + outer
                ledger.at = at + 1
                if ledger.device is not None:
                    ledger.device.mark(ledger.phase, outer)
                ledger.phase = outer
                if at > ledger.limit:
                    ledger.turn()

        return wait


def _in(ranks: tuple[int, ...], peer: Any) -> bool:
    return type(peer) is int and 0 <= peer < len(ranks)


def _named(function: Any, name: str) -> Callable[..., Any]:
    """Give the code itself that name, too.

    A method that C++ may call back (in a Python subclass of a torch class) is known there by the name in its frame:
    under another one the call of the original would come back to us for ever.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    wrapper: Callable[..., Any] = function
    return wrapper
