"""Functional collectives: what DTensor, and with it tensor parallelism, is made of.

They call their group in C++, so it is their own functions that are wrapped, and ``wait_tensor``, which the tensors they
return call when somebody first uses them.  For dynamo such a wrapper is nothing but the call of the original
(``is_dynamo_compiling`` is a constant there).  Not seen are those inside of a compiled graph, and the one that autograd
runs by itself as the backward of another (DTensor's own backward is made of the functions again).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.calls import Calls
from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.groups import UNKNOWN, KnownGroup
from stepscope.recorder.guard import failsafe
from stepscope.recorder.patches import Patches
from stepscope.records.collectives import OPS
from stepscope.records.phases import COMM
from stepscope.ring.words import ASYNC_BIT, COLLECTIVE_DATA, OP_SHIFT, SIZE_MASK, TIME_SHIFT

__all__ = ["FunctionalCalls"]

FUNCTIONS = (
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

    def __init__(self, calls: Calls, torch: Any) -> None:
        self._calls = calls
        self._torch = torch
        self._within = 0
        """The number of the collective under way: what it waits for by itself is its own."""
        self._is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        mode_of, fake = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
        self._is_tracing: Callable[[], bool] = lambda: mode_of(fake) is not None

    def install(self, module: Any, patches: Patches) -> None:
        handle = module.AsyncCollectiveTensor
        calls = self._calls
        for ours in (calls.enter_wait, calls.turn, calls.is_autograd, calls.stalled):
            leave_alone(self._torch, ours, with_calls=True)
        self._put(patches, module, "wait_tensor", self._waiting(module.wait_tensor))
        for name, earlier, op, part in FUNCTIONS:
            chosen = name if hasattr(module, name) else earlier
            if hasattr(module, chosen):
                self._put(patches, module, chosen, self._function(getattr(module, chosen), op, part, handle))

    def _put(self, patches: Patches, module: Any, name: str, wrapper: Callable[..., Any]) -> None:
        leave_alone(self._torch, wrapper, with_calls=False)  # the original is for dynamo to see
        patches.set(module, name, wrapper)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``wait_tensor``, booked for ``comm`` and linked to the call that gave the tensor."""
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
            except RuntimeError:  # a tensor without memory, as inside of vmap
                place = 0
            outer = calls.enter_wait(handles.pop(-(place or 0), 0) or this._within)
            try:
                return original(tensor)
            finally:
                ledger.leave(outer)

        return wait_tensor

    def _function(self, original: Callable[..., Any], op: str, part: bool, handle: Any) -> Callable[..., Any]:
        """A functional collective, which returns a ``handle`` that is also a tensor (or a list of them)."""
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
            bits, ranks, blind, _ = known.get(id(group)) or this._group(group) or UNKNOWN
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
                except RuntimeError:  # likewise; suppress() would be a call more
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
        """What was returned may be waited for; what is no handle was waited for already."""
        for one in result if type(result) is list else (result,):
            if type(one) is handle:
                self._calls.handles[-(self._calls.place_of(one.elem) or 0)] = number


def _key_of(group: Any) -> tuple[Any, Any]:
    """By what a group is known, and whose identity that is; DTensor names one by its mesh and a dimension of it."""
    if isinstance(group, tuple):
        return (id(group[0]), group[1]), group[0]
    return (group, group) if isinstance(group, str) else (id(group), group)
