"""Lets the agent ask where the process is, without a thread and, if possible, without running our Python code.

When a ring is created, the process takes four unused real-time signals and publishes them in the ring's header.  Each
makes the process write to a file next to the ring:

- STACKS: the main thread's stack to ``PID.stacks``, by faulthandler, whose handler is C code.  For a main thread that
  waits in the kernel, in a process that makes no progress.
- RUNNING: the same, by a handler in Python, for a thread that trains or runs.  CPython 3.11 and 3.12 enter a frame in
  two steps, and a signal between them makes faulthandler read uninitialized data.  (Code that C calls back all the
  time: one request in several hundred ended the process.  Waiting threads that resumed during the request: one in a
  thousand.)  A handler in Python runs only where the interpreter permits it.  Where another thread trains (Ray Train),
  the handler still runs on the main one.  It holds the GIL, so the other thread is between two instructions, and it
  writes that thread's stack with the time at which it was read: another phase may have begun by then.
- THREADS: the stacks of all threads to ``PID.threads``, by faulthandler.  Only for a process that makes no progress and
  whose threads cannot run Python meanwhile, because its GIL is held or because they all wait in the kernel.
- WORKERS: like RUNNING, to ``PID.workers``, but meant for DataLoader workers forked from this process: the agent never
  sends it to the process itself.

This is safe for the script if the agent follows these rules (``agent/stacks.py``):

- faulthandler's handler walks the frames and writes to a file in memory.  It allocates nothing, takes no lock and
  preserves ``errno``.  The handler in Python takes about twenty microseconds and cannot raise.  System calls continue
  (SA_RESTART); Python retries those that the kernel never restarts (sleep, select, poll; PEP 475).
- If the script wants one of these signals later, it gets it in its original state.
- When the interpreter exits, the signals are *ignored*: a late one does nothing, where the default would end the
  process.  faulthandler restores the previous handler, so SIG_IGN is set before it registers.
- ``exec`` resets everything.  A forked child returns the signals for the main thread at once.  It keeps THREADS, since
  a stuck DataLoader worker stops the job too: the inherited handler appends to the parent's ``PID.threads``, and the
  kernel tells the agent which children have the handler and the file.  Only a fork by which torch starts a DataLoader
  worker keeps WORKERS, so that a slow worker has a line; every other child returns it.  The child never touches the
  parent's ring, and if it trains it takes its own signals.

Not thread safe: only the main thread may set signals.  A process that trains on another thread, and whose main thread
never came here (it set up no process group), offers no stacks.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from stepscope.recorder.guard import Patches, above_standard_streams, failsafe
from stepscope.records.paths import ENV_STACKS, STACKS_SUFFIX, THREADS_SUFFIX, WORKERS_SUFFIX
from stepscope.ring import RingWriter
from stepscope.ring.layout import (
    RUNNING_WORD,
    STACKS_FD_SHIFT,
    STACKS_WORD,
    THREADS_WORD,
    TRAINS_WORD,
    WORKERS_WORD,
)

__all__ = ["STATEFUL_LOADER", "StackOffer"]

CANDIDATES = (12, 11, 10, 9, 8, 7)
"""Offsets from SIGRTMIN, the first free one is taken; libraries use the first or the last real-time signals."""
MAX_FRAMES = 100
"""The same limit as faulthandler's."""
STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader"
WORKER_STARTERS = ("torch.utils.data.dataloader", STATEFUL_LOADER)
"""The modules whose iterators start DataLoader workers, in their ``__init__``."""
START_FRAMES = 24
"""At most this many frames are between the fork and that ``__init__``: ours and those of multiprocessing."""


class _Answer(ABC):
    """One signal, and what is written when it arrives."""

    def __init__(self, suffix: str, word: int) -> None:
        self._suffix = suffix
        self._word = word
        self.number = 0
        """0 while nothing is registered."""
        self._fd = -1
        self._pid = 0
        self._ring: RingWriter | None = None

    @abstractmethod
    def _install(self, number: int, fd: int) -> None: ...

    @abstractmethod
    def _remove(self, number: int) -> bool:
        """Remove it; return whether it was still installed: the script may have bypassed our patches."""
        ...

    @property
    def announced(self) -> bool:
        return self._ring is not None

    def offer(self, ring: RingWriter, number: int) -> None:
        # Appending, so that the agent may empty the file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = above_standard_streams(os.open(ring.path.with_suffix(self._suffix), flags, 0o600))
        signal.signal(number, signal.SIG_IGN)
        self._install(number, self._fd)
        self.number, self._ring, self._pid = number, ring, os.getpid()
        ring.header[self._word] = number | self._fd << STACKS_FD_SHIFT

    def disown(self) -> None:
        """In a forked child: the ring and its header belong to the parent."""
        self._ring = None

    def unannounce(self) -> None:
        """Stop requests from the agent."""
        if self._ring is not None and self._pid == os.getpid():  # a fork in native code goes unnoticed
            self._ring.header[self._word] = 0
        self._ring = None

    def give_back(self, *, to: signal.Handlers = signal.SIG_DFL) -> None:
        """Restore the signal; only the main thread may do that."""
        self.unannounce()
        number, self.number = self.number, 0
        if number and self._remove(number):
            signal.signal(number, to)
            os.close(self._fd)


class _ByFaulthandler(_Answer):
    def __init__(self, suffix: str, word: int, *, all_threads: bool) -> None:
        super().__init__(suffix, word)
        self._all_threads = all_threads

    def _install(self, number: int, fd: int) -> None:
        import faulthandler

        faulthandler.register(number, file=fd, all_threads=self._all_threads, chain=False)

    def _remove(self, number: int) -> bool:
        import faulthandler

        if signal.getsignal(number) is not signal.SIG_IGN:
            return False
        faulthandler.unregister(number)
        return True


class _ByPython(_Answer):
    """Writes the stack of the training thread in faulthandler's format, with the classes of methods.

    If that is not the main thread, a last line says when reading the stack began and ended.
    """

    def __init__(self, suffix: str, word: int) -> None:
        super().__init__(suffix, word)
        self._thread: threading.Thread | None = None

    def show(self, thread: threading.Thread | None) -> None:
        """Set the training thread; None: the main one."""
        self._thread = thread
        if self._ring is not None:
            self._ring.header[TRAINS_WORD] = thread.ident or 0 if thread is not None else 0

    def _install(self, number: int, fd: int) -> None:
        @failsafe
        def answer(_: int, frame: FrameType | None) -> None:
            thread, began_ns = self._thread, time.perf_counter_ns()
            if thread is not None:
                frame = _frame_of(thread)
                if frame is None:
                    return  # it has ended
            lines, depth = ["Stack (most recent call first):"], 0
            while frame is not None and depth < MAX_FRAMES:
                code = frame.f_code
                name = getattr(code, "co_qualname", code.co_name)  # with its class, from Python 3.11 on
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {name}')
                frame, depth = frame.f_back, depth + 1
            if frame is not None:
                lines.append("  ...")
            if thread is not None:
                lines.append(f"  read {began_ns} {time.perf_counter_ns()}")
            os.write(fd, ("\n".join(lines) + "\n").encode("ascii", "backslashreplace"))

        self._handler = answer
        signal.signal(number, answer)
        signal.siginterrupt(number, False)

    def _remove(self, number: int) -> bool:
        return signal.getsignal(number) is self._handler


class StackOffer:
    """Offers stacks for at most one ring at a time; ``withdraw`` restores signals and module attributes."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._main = _ByFaulthandler(STACKS_SUFFIX, STACKS_WORD, all_threads=False)
        self._running = _ByPython(STACKS_SUFFIX, RUNNING_WORD)
        self._threads = _ByFaulthandler(THREADS_SUFFIX, THREADS_WORD, all_threads=True)
        self._workers = _ByPython(WORKERS_SUFFIX, WORKERS_WORD)
        self._answers: tuple[_Answer, ...] = (self._main, self._running, self._threads, self._workers)

    @failsafe
    def open(self, ring: RingWriter) -> None:
        """Offer the stack of the calling thread; if it is not the main one, what the main one can say about it."""
        if not _on_main_thread():
            self._main.unannounce()  # it says nothing about this thread
            thread = _known_thread(threading.get_ident())
            if thread is None:
                self._running.unannounce()
            else:
                self._running.show(thread)
            return
        if os.environ.get(ENV_STACKS) == "0":
            return
        for answer in self._answers:
            if answer.announced:
                continue
            self._give_back(answer)  # from another thread's time, or a parent's
            number = _free_signal()
            if number is not None:
                self._watch()
                answer.offer(ring, number)
        self._running.show(None)

    @failsafe
    def withdraw(self) -> None:
        for answer in self._answers:
            self._give_back(answer)

    @failsafe
    def forget(self) -> None:
        """Forget the parent's ring, in a forked child."""
        for answer in self._answers:
            answer.disown()
        self._give_back(self._main)
        self._give_back(self._running)
        if not _starts_worker(sys._getframe()):
            self._give_back(self._workers)

    @failsafe
    def _leave(self) -> None:
        """Ignore the signals before the interpreter exits, which would restore the default for a handler in Python."""
        if _on_main_thread():
            self._running.give_back(to=signal.SIG_IGN)
            self._workers.give_back(to=signal.SIG_IGN)

    def _give_back(self, answer: _Answer) -> None:
        answer.unannounce()
        if not _on_main_thread():
            return  # only the main thread may remove the handler
        answer.give_back()
        if not any(other.number for other in self._answers):
            self._patches.undo()
            atexit.unregister(self._leave)

    def _watch(self) -> None:
        """Watch, from our first signal on, whether the script sets a signal."""
        if not any(answer.number for answer in self._answers):
            import faulthandler

            self._patches.set(signal, "signal", self._yielding(signal.signal))
            self._patches.set(faulthandler, "register", self._yielding(faulthandler.register))
            atexit.register(self._leave)

    def _yielding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``signal.signal`` and the like: a script that sets one of our signals gets it in its original state."""

        @functools.wraps(original)
        def yielding(*args: Any, **kwargs: Any) -> Any:
            self._yield(args[0] if args else kwargs.get("signum"))
            return original(*args, **kwargs)

        return yielding

    @failsafe
    def _yield(self, number: object) -> None:
        for answer in self._answers:
            if answer.number and number == answer.number:
                self._give_back(answer)


def _known_thread(ident: int) -> threading.Thread | None:
    """Look up a thread by ident, without a lock and, unlike ``current_thread()``, without creating a dummy."""
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})
    return known.get(ident)


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """The current frame of another thread; None when it has ended."""
    ident = thread.ident
    if ident is None or _known_thread(ident) is not thread:
        return None  # its ident may have been reused
    # Before Python 3.12 the garbage collector may run during the call and wait for a lock that the call holds.
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()


def _starts_worker(frame: FrameType | None) -> bool:
    """Return whether torch's DataLoader is starting a worker: only multiprocessing is between it and the fork.

    A dataset that forks is not that, although the DataLoader called it.
    """
    forked = False
    for _ in range(START_FRAMES):
        if frame is None:
            return False
        module = dict.get(frame.f_globals, "__name__")
        name = module if type(module) is str else ""
        if name.startswith("multiprocessing."):
            forked = True
        elif forked or not name.startswith("stepscope.recorder."):
            return forked and name in WORKER_STARTERS and frame.f_code.co_name == "__init__"
        frame = frame.f_back
    return False


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _free_signal() -> int | None:
    """A signal for which neither Python nor the kernel has a handler; None where there are no such signals."""
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
