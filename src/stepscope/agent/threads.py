"""The stacks of all threads of processes that stand still, by a signal that they offered.

faulthandler's handler is C code that needs no GIL, so a process answers that is stuck in a library, and one whose GIL
is held.  A process that is stopped, or waits for a disk, does not: one that is stopped is not asked.  The same checks
hold as for single stacks (``agent/stacks.py``), and they are made anew for each question.

Whichever thread gets the signal shows them all.  While the main thread sleeps in the kernel, one that only waits for a
lock gets it: nothing that the main thread is in is interrupted.  While it runs it gets the signal itself, because
nobody else can read its frames then.

A forked child (a DataLoader worker) has its parent's handler and writes to its parent's file: who shares a file must be
asked one after the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stepscope.agent.procfs import PROC, read_process
from stepscope.agent.signals import listens, send_to_thread, sleeps_in_native_code, waiting_thread

__all__ = ["ThreadsQuestion", "ask_threads"]

Key = TypeVar("Key", bound=Hashable)

LOOK_S = 0.01
CALM_LOOKS = 4
"""An answer that has not grown for so many looks, and ends with a line, is whole."""
MAX_BYTES = 1 << 20
STOPPED = ("T", "t", "Z", "X", "")


@dataclass(frozen=True, kw_only=True)
class ThreadsQuestion:
    """Whom to ask, and how."""

    pid: int
    pidfd: int
    signal: int
    fd: int
    """Its descriptor of ``path``."""
    path: Path


class _Asked:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._calm = 0

    def whole(self) -> bool:
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        self._calm = self._calm + 1 if size and size == self._size else 0
        self._size = size
        return self._calm >= CALM_LOOKS

    def text(self) -> str:
        """Whole lines of what was written."""
        try:
            with self._path.open("rb") as file:
                written = file.read(MAX_BYTES)
        except OSError:
            return ""
        return written[: written.rfind(b"\n") + 1].decode(errors="replace")


def ask_threads(questions: Mapping[Key, ThreadsQuestion], *, patience_s: float, proc: Path = PROC) -> dict[Key, str]:
    """Ask all at once, then wait for all: what faulthandler wrote, of those that answered in time.

    No two questions may share a file.
    """
    asked = {key: _Asked(question.path) for key, question in questions.items() if _ask(question, proc)}
    waiting = dict(asked)
    deadline = time.monotonic() + patience_s
    while waiting and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        waiting = {key: one for key, one in waiting.items() if not one.whole()}
    return {key: text for key, one in asked.items() if (text := one.text())}


def _ask(question: ThreadsQuestion, proc: Path) -> bool:
    """Whether it was asked: it runs, and it listens."""
    reading, process = read_process(question.pid, proc), proc / str(question.pid)
    if reading is None or reading.state in STOPPED:
        return False
    try:
        if not listens(process, question.signal, question.fd, question.path):
            return False
        thread = waiting_thread(process, question.signal) if reading.state == "S" else None
        if thread is None and sleeps_in_native_code(process):
            return False
        os.truncate(question.path, 0)
        if thread is not None and send_to_thread(question.pid, thread, question.signal):
            return True
        signal.pidfd_send_signal(question.pidfd, question.signal)
    except (OSError, ValueError):
        return False  # it just ended, or what it offers is no signal
    return True
