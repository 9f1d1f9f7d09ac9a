"""What all hooks of collectives share: the count of calls, the handles that may be waited for, and some questions.

A wait knows its collective by the identity of the handle, or by where the tensor that a functional collective returned
lies in memory; none of them is kept alive for that.  Of tensors only size, place and device are read, and that past
``__torch_function__``, which belongs to the script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

from stepscope.recorder.groups import KnownGroup
from stepscope.recorder.guard import failsafe
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import BACKWARD, COMM
from stepscope.ring.words import WAIT_DATA

__all__ = ["Calls"]

MAX_HANDLES = 512
"""Handles that nobody waited for; beyond that they are forgotten all at once."""
AUTOGRAD_THREAD = "pt_autograd"


class Calls:
    """Of one recorder.  Only the thread that trains uses it, or autograd's while that one waits for them."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self.recorder = recorder
        self.ledger = recorder.ledger
        self.known = recorder.groups.known
        """Groups that were met."""
        self.count = 0
        """Calls so far."""
        self.handles: dict[int, int] = {}
        """What may be waited for, by identity: the number of its call."""
        self._torch = torch
        self._straight = torch._C.DisableTorchFunction
        self.has_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
        """Whether the script wants to hear of everything that is done with tensors."""
        self._engines: dict[int, bool] = {}
        """Other threads that were seen: whether they are autograd's."""

    def meet(self, group: Any) -> KnownGroup:
        return self.meet_as(group, id(group), group)

    def meet_as(self, group: Any, key: Any, owner: Any) -> KnownGroup:
        """A group by what stands for it, to be known by ``key`` for as long as ``owner`` lives."""
        return self.recorder.groups.meet(group, key, owner, self._torch.distributed, self.recorder.ring)

    def turn(self) -> None:
        """Every now and then: announce the words, and forget what nobody has waited for; hardly anybody will."""
        self.ledger.turn()
        if len(self.handles) > MAX_HANDLES:
            self.handles.clear()

    def enter_wait(self, number: int) -> int:
        """Begin to wait, for the ``number``-th call if it is not 0; returns the outer phase."""
        ledger = self.ledger
        if number:
            at = ledger.at
            ledger.body[at] = WAIT_DATA | self.count - number
            ledger.at = at + 1
        return ledger.enter(COMM)

    def stalled(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A wait that the ledger does not book, since it is not on its thread; but the device may be timed."""
        device = self.ledger.device
        if device is None or not self.is_autograd() or not device.stall_begins(BACKWARD):
            return wait(*args, **kwargs)
        try:
            return wait(*args, **kwargs)
        finally:
            device.stall_ends()

    def is_autograd(self) -> bool:
        """Whether this is a thread of autograd's, inside of a backward of the thread that trains."""
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
        return sum(self.bytes_of(one) or 0 for one in value) if isinstance(value, (list, tuple)) else 0

    @failsafe
    def is_on_device(self, value: Any) -> bool:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        with self._straight():
            return isinstance(value, self._torch.Tensor) and bool(value.is_cuda)

    @failsafe
    def is_async(self, args: tuple[Any, ...]) -> bool:
        """What torch's options, the last argument, say; where there are none, it may be."""
        option = args[-1] if args else None
        return not type(option).__name__.endswith("Options") or bool(getattr(option, "asyncOp", True))

    @failsafe
    def place_of(self, tensor: Any) -> int:
        """Where its memory begins, as that of its views does; 0: it has none.  Negative, it is no handle's identity."""
        try:
            with self._straight():
                return int(tensor.data_ptr())
        except RuntimeError:
            return 0


def _thread_name() -> str:
    """The system's name of the calling thread; empty where it does not tell."""
    try:
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
    except OSError:
        return ""
