"""Stacks of processes that stand still, by the signals that they offered.

Who can be asked for what (``recorder/stacks.py`` says why):

    nobody in there can run Python: its GIL is held, or all wait        the stacks of all threads
    the main thread waits, another is at work                           the main thread's stack
    the main thread runs, or it is another that trains                  that one's, by a handler in Python
    it is stopped                                                       nothing

The first two are answered by faulthandler, which is C code and needs no GIL.  What allows it is looked at once more as
the very last thing before the signal: a main thread that goes on just then would be between two frames when it comes.
The checks of single stacks (``agent/stacks.py``) hold here too and are made anew for each question.

Whichever thread gets the signal for all threads shows them all.  While the main thread waits, one that only waits for a
lock gets it, so that nothing the main thread is in is interrupted; a sleep of native code, which would end, is never.

A forked child (a DataLoader worker) has its parent's handler and writes to its parent's file: who shares a file must be
asked one after the other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stepscope.agent.posture import Posture, postures, waits_on
from stepscope.agent.procfs import PROC
from stepscope.agent.signals import listens, send_to_thread, sleeps_in_native_code, waiting_thread
from stepscope.records.places import STACKS_SUFFIX, THREADS_SUFFIX

__all__ = ["STOPPED", "Offers", "StacksQuestion", "ask_stacks"]

Key = TypeVar("Key", bound=Hashable)
Offer = tuple[int, int]
"""A signal and the descriptor to which its handler writes."""

LOOK_S = 0.01
CALM_LOOKS = 4
"""An answer that has not grown for so many looks, and ends with a line, is whole."""
MAX_BYTES = 1 << 20
STOPPED = ("T", "t", "Z", "X", "")


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a process offers; None: not that."""

    ring: Path
    """The files to which it writes lie beside its ring."""
    threads: Offer | None = None
    stacks: Offer | None = None
    running: Offer | None = None
    trains: int = 0
    """The number of the thread that trains; 0: the main one."""


@dataclass(frozen=True, kw_only=True)
class StacksQuestion:
    """Whom to ask."""

    pid: int
    pidfd: int
    offers: Offers
    gil_held: Callable[[], bool] = lambda: False
    """Whether it is, at the moment of the call: then nobody in there runs Python."""


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


def ask_stacks(questions: Mapping[Key, StacksQuestion], *, patience_s: float, proc: Path = PROC) -> dict[Key, str]:
    """Ask all at once, then wait for all: what was written, by those that answered in time.

    No two questions may share a file.
    """
    found = postures((question.pid for question in questions.values()), proc)
    asked = {}
    for key, question in questions.items():
        posture = found.get(question.pid)
        if posture is not None and (path := _ask(question, posture, proc / str(question.pid))) is not None:
            asked[key] = _Asked(path)
    waiting = dict(asked)
    deadline = time.monotonic() + patience_s
    while waiting and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        waiting = {key: one for key, one in waiting.items() if not one.whole()}
    return {key: text for key, one in asked.items() if (text := one.text())}


def _ask(question: StacksQuestion, posture: Posture, process: Path) -> Path | None:
    """The file to which it will write, if it could be asked."""
    if posture.state in STOPPED:
        return None
    offers = question.offers
    quiet = posture.waits and not posture.others_run
    held = not quiet and offers.threads is not None and question.gil_held()
    any_thread = (quiet or held) and offers.threads is not None
    offer = (offers.stacks if posture.waits else None) or offers.running
    if any_thread:
        offer = offers.threads
    path = offers.ring.with_suffix(THREADS_SUFFIX if any_thread else STACKS_SUFFIX)
    if offer is None:
        return None

    def still() -> bool:
        if held:
            return question.gil_held()
        return offer is offers.running or waits_on(process, posture, all_threads=any_thread)

    try:
        return path if _send(question, offer, path, process, any_thread=any_thread, still=still) else None
    except (OSError, ValueError):
        return None  # it just ended, or what it offers is no signal


def _send(
    question: StacksQuestion, offer: Offer, path: Path, process: Path, *, any_thread: bool, still: Callable[[], bool]
) -> bool:
    number, fd = offer
    if not listens(process, number, fd, path):
        return False
    thread = waiting_thread(process, number) if any_thread else None
    if thread is None and sleeps_in_native_code(process):
        return False
    os.truncate(path, 0)
    if not still():
        return False
    if thread is None or not send_to_thread(question.pid, thread, number):
        signal.pidfd_send_signal(question.pidfd, number)
    return True
