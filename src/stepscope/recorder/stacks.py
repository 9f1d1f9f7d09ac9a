"""Lets the agent ask where the main thread is, without a thread, a hook or a line of Python of ours running for it.

When a ring is made, faulthandler is told to write the main thread's stack to ``PID.stacks`` beside the ring whenever a
certain real-time signal comes, and the ring's header says which.  The agent asks only while no phase is under way
(``agent/stacks.py``).  Why that is safe for the script:

- The handler is CPython's own, in C: it walks the frames and writes to a file in memory.  No Python code runs, nothing
  is allocated, no lock is taken, ``errno`` is kept.  System calls go on (SA_RESTART); those that the kernel never
  restarts (sleep, select, poll) are taken up again by Python itself (PEP 475).
- Only a signal that nobody uses is taken.  Should the script want that very one later, it gets it as it was.
- The signal is ignored before faulthandler takes it, so that faulthandler, which gives it back when the interpreter
  goes, gives back *ignored*: one that comes too late does nothing, where the default would end the process.
- A child of a fork gives it back at once; ``exec`` does so by itself.

Not thread safe: only the main thread may set signals, and only of a main thread that trains is the stack of use.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.patches import Patches
from stepscope.records.places import ENV_STACKS, STACKS_SUFFIX
from stepscope.ring import RingWriter
from stepscope.ring.layout import STACKS_FD_SHIFT, STACKS_WORD

__all__ = ["StackOffer"]

CANDIDATES = (12, 11, 10, 9)
"""Beyond SIGRTMIN, the first that nobody uses; libraries that take real-time signals take the first or the last."""


class StackOffer:
    """At most one ring at a time is offered stacks for; ``withdraw`` leaves signals and module attributes as before."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._signal = 0
        self._fd = -1
        self._ring: RingWriter | None = None

    @failsafe
    def open(self, ring: RingWriter) -> None:
        """Offer stacks of the calling thread, if it is the main one."""
        if not _on_main_thread():
            self._give_back()
            return
        chosen = _free_signal() if not self._signal and os.environ.get(ENV_STACKS) != "0" else None
        if chosen is None:
            return
        import faulthandler

        # Appending, so that the agent may empty the file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(ring.path.with_suffix(STACKS_SUFFIX), flags, 0o600)
        self._signal, self._ring = chosen, ring
        signal.signal(chosen, signal.SIG_IGN)
        faulthandler.register(chosen, file=self._fd, all_threads=False, chain=False)
        self._patches.set(signal, "signal", self._yielding(signal.signal))
        self._patches.set(faulthandler, "register", self._yielding(faulthandler.register))
        ring.header[STACKS_WORD] = chosen | self._fd << STACKS_FD_SHIFT

    @failsafe
    def withdraw(self) -> None:
        self._give_back()

    @failsafe
    def forget(self) -> None:
        """In a forked child: the ring, and what its header says, are the parent's."""
        self._ring = None
        self._give_back()

    def _give_back(self) -> None:
        if self._ring is not None:
            self._ring.header[STACKS_WORD] = 0
        self._ring = None
        if not self._signal or not _on_main_thread():
            return  # from here on nobody asks; the handler itself only the main thread may take away
        import faulthandler

        number, self._signal = self._signal, 0
        self._patches.undo()
        if signal.getsignal(number) is signal.SIG_IGN:  # otherwise somebody got past our patch and has it
            faulthandler.unregister(number)
            signal.signal(number, signal.SIG_DFL)
            os.close(self._fd)

    def _yielding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``signal.signal`` and the like: whoever sets our signal gets it as if we had never had it."""
        pid = os.getpid()

        @functools.wraps(original)
        def yielding(*args: Any, **kwargs: Any) -> Any:
            number = args[0] if args else kwargs.get("signum")
            if number == self._signal and os.getpid() == pid:
                self.withdraw()
            return original(*args, **kwargs)

        return yielding


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _free_signal() -> int | None:
    """A signal that neither Python nor the kernel knows a handler of; None where there are no such signals."""
    first = getattr(signal, "SIGRTMIN", None)
    if first is None:
        return None
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    taken = 0
    for line in status.splitlines():
        name, _, mask = line.partition(":\t")
        if name in ("SigCgt", "SigIgn", "SigBlk"):
            taken |= int(mask, 16)
    numbers = (int(first) + more for more in CANDIDATES)
    free = (n for n in numbers if not taken >> (n - 1) & 1 and signal.getsignal(n) is signal.SIG_DFL)
    return next(free, None)
