"""Where a rank is while no phase claims its time: its stack, asked for by a signal that it offered.

What passes outside all phases has no name; the stack gives it one.  A rank is asked while it is in ``other``: when it
has been there for a while, or when a good part of its last steps passed there.  A callback of 20 ms at every step is
seldom met by five looks a second, so such a rank is looked at more often for a moment, when a question is due.  It is
asked rarely and not often in all, and never otherwise.  It answers through a handler in Python, into a file beside its
ring: always that one, which the interpreter runs where it lets it, never faulthandler's, because a thread that waits
now may run by the time the signal is there, and be between two frames (``recorder/stacks.py``).  Who waits in native
code answers when it comes back from there, at the line of that very call and before it can enter a phase: so an answer
counts, however late it is read, if the stretch was not over when the signal had been sent.

Before each question is checked, in the kernel's own words, that the process catches the signal in its main thread, that
its descriptor still is that file, and that the thread is in no sleep of native code, which a signal would end; the
signal goes through the pidfd, so it can reach no other process.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.agent.signals import awaits_delivery, listens, sleeps_in_native_code
from stepscope.flight.stacks import parse_frame
from stepscope.records.phases import BUILTIN_PHASES, OTHER
from stepscope.records.places import STACKS_SUFFIX
from stepscope.ring import RingReader, RingState
from stepscope.ring.latest import LivePhase

__all__ = ["StackAsker", "parse_stack"]

STRETCH_NS = 15_000_000
"""So long in ``other`` before a rank is asked, whatever its last steps were like …"""
WORTH_SHARE = 0.03
"""… and of its last steps' time, what must have passed in ``other`` for a shorter stretch to be worth a question."""
SEEK_S = 0.005
"""From one look at such a rank to the next, until it is met in ``other`` …"""
SEEK_LOOKS = 60
"""… so often; then it is left alone until the next question is due."""
PAUSE_S = 2.0
"""Between two questions to the same rank …"""
FIRST_PAUSE_S = 0.5
FIRST_QUESTIONS = 5
"""… after the first few, which may be all that a short run has."""
MAX_QUESTIONS = 40
"""To one rank in one run: enough to tell one habit from three, and over soon in a script that is all ``other``."""
BRIEF_S = 0.001
BRIEF_LOOKS = 6
"""An answer mostly comes at once, so we wait for it this often, this long; if it does not, until the next look."""
PATIENCE_S = 2.0
"""A rank that did not answer so long after the stretch was over, although it took the signal, is not asked again."""
MAX_BYTES = 1 << 17
MAX_FRAMES = 50

_HEAD = "Stack (most recent call first):"
_CUT = "  ..."
_OUTERMOST = ("<module>", "_run_module_as_main")


@dataclass(frozen=True, kw_only=True)
class _Question:
    live: LivePhase
    between: bool
    """Whether it was asked between two steps."""
    wall_ns: int
    sent_ns: int
    """By the ring's clock, when the signal was certainly there."""
    signal: int


class StackAsker:
    """Asks one rank.  Call ``look`` at every look at its ring."""

    def __init__(self, reader: RingReader, pid: int, *, asked: int = 0, proc: Path = Path("/proc")) -> None:
        self._reader = reader
        self._pid = pid
        self._proc = proc / str(pid)
        self._path = reader.path.with_suffix(STACKS_SUFFIX)
        self._left = MAX_QUESTIONS - asked
        self._next_s = 0.0
        self._looks_left: int | None = None
        """While a question is due, looks left at a rank that is worth it; None: not known to be worth it."""
        self._question: _Question | None = None
        self._over_s: float | None = None
        """When the stretch of the question was first seen to be over."""
        self._seen = b""

    @property
    def seeks(self) -> bool:
        """Whether it wants to look again in ``SEEK_S``: the rank is often in ``other``, and just was not."""
        return self._question is None and bool(self._looks_left)

    def look(self, pidfd: int | None) -> dict[str, Any] | None:
        """A stack, when there is a new one; without the rank's number, which the caller knows."""
        if pidfd is None:
            return None
        if self._question is None:
            if not self._ask(pidfd):
                return None
            for _ in range(BRIEF_LOOKS):
                time.sleep(BRIEF_S)
                if (answer := self._answer(at_once=True)) is not None or self._question is None:
                    return answer
            return None
        return self._answer(at_once=False)

    def _ask(self, pidfd: int) -> bool:
        """Whether the rank was asked: it is due, and it listens."""
        if (
            self._reader.running_offer() is None
            or self._left <= 0
            or time.monotonic() < self._next_s
            or self._reader.state() is not RingState.RUNNING
        ):
            self._looks_left = None
            return False
        live = self._reader.live()
        if not self._is_worth_it(live):
            return False
        between = self._reader.is_between_steps(live.since_ns)
        self._pause()
        try:
            offer = self._reader.running_offer()
            if offer is None or not self._listens(*offer) or sleeps_in_native_code(self._proc):
                return False
            os.truncate(self._path, 0)
            signal.pidfd_send_signal(pidfd, offer[0])
        except (OSError, ValueError):
            return False  # it just ended, or what it offers is no signal
        self._left -= 1
        self._seen, self._over_s = b"", None
        sent_ns = time.perf_counter_ns()
        self._question = _Question(live=live, between=between, wall_ns=time.time_ns(), sent_ns=sent_ns, signal=offer[0])
        return True

    def _is_worth_it(self, live: LivePhase) -> bool:
        """Whether the rank is in a stretch of ``other`` that is long, or one of many."""
        in_other = live.phase == OTHER and live.since_ns > 0
        if in_other and live.since_ns <= time.perf_counter_ns() - STRETCH_NS:
            return True
        if self._looks_left is None:
            often = self._reader.recent_share(OTHER) >= WORTH_SHARE
            self._looks_left = SEEK_LOOKS if often else 0
        if not self._looks_left:
            self._looks_left = None  # at the next look its last steps may be others
            return False
        self._looks_left -= 1
        if not in_other and not self._looks_left:
            self._pause()
        return in_other

    def _pause(self) -> None:
        """No question until the next is due."""
        early = self._left > MAX_QUESTIONS - FIRST_QUESTIONS
        self._next_s = time.monotonic() + min(PAUSE_S, FIRST_PAUSE_S if early else PAUSE_S)
        self._looks_left = None

    def _listens(self, number: int, fd: int) -> bool:
        return listens(self._proc, number, fd, self._path)

    def _answer(self, *, at_once: bool) -> dict[str, Any] | None:
        """What was written, once it is whole: the same at two looks, and ending where a main thread's stack does."""
        question = self._question
        if question is None:
            return None
        over = self._reader.live() != question.live  # looked at first: what it wrote before, is there to be read
        written = self._read()
        whole = bool(written) and written == self._seen
        self._seen = written
        if not whole:
            if over and not written:
                self._give_up(question)
            return None
        frames = parse_stack(written.decode(errors="replace"))
        if at_once and (not frames or frames[-1]["function"] not in _OUTERMOST):
            return None
        self._question = None
        if not frames or (over and not self._lasted(question)):
            return None
        about: dict[str, Any] = {"pid": self._pid, "wall_ns": question.wall_ns, "step": question.live.step}
        about |= {"phase": BUILTIN_PHASES[OTHER], "between": question.between}
        return {**about, "frames": frames[:MAX_FRAMES]}

    def _lasted(self, question: _Question) -> bool:
        """Whether the stretch was not over yet when the signal had been sent."""
        end_ns = self._reader.stretch_end_ns(question.live.since_ns)
        return end_ns is not None and end_ns > question.sent_ns

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES)
        except OSError:
            return b""

    def _give_up(self, question: _Question) -> None:
        """Another phase and still no answer: who has not got the signal yet is waited for, others are asked no more."""
        now_s = time.monotonic()
        self._over_s = now_s if self._over_s is None else self._over_s
        if now_s - self._over_s >= PATIENCE_S and not awaits_delivery(self._proc, question.signal):
            self._question, self._left = None, 0


def parse_stack(text: str) -> list[dict[str, Any]]:
    """Frames, innermost first, of what faulthandler wrote; none when a single line is not as it writes them."""
    lines = text.split("\n")
    if len(lines) < 3 or lines[0] != _HEAD or lines[-1]:
        return []
    frames = lines[1:-1]
    if frames[-1] == _CUT:
        frames.pop()
    found = [parse_frame(line) for line in frames]
    return [] if None in found else [asdict(frame) for frame in found if frame]
