"""Where a rank is while no phase claims its time: its stack, asked for by a signal that it offered.

What passes outside all phases has no name; the stack gives it one.  A rank is asked when it has been in ``other`` for a
while, rarely and not often in all, and never otherwise.  It answers through its faulthandler, into a file beside its
ring (``recorder/stacks.py`` says why that is safe for it).  Before each question is checked, in the kernel's own words,
that the process catches the signal in its main thread and that its descriptor still is that file, and whether that
thread waits in the kernel or runs, for which there are two signals, or is in a sleep of native code, which a signal
would end; the signal goes through the pidfd, so it can reach no other process.  An answer counts only if the rank was
in the same stretch of ``other`` before and after.
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
"""So long in ``other`` before a rank is asked: what is shorter has passed before the question gets there."""
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
"""A rank that did not answer by then, although it took the signal, is not asked again."""
WAITING_S = 0.001
"""A thread that waits at both ends of this time, and was not scheduled in between, waits."""
MAX_BYTES = 1 << 17
MAX_FRAMES = 50

_HEAD = "Stack (most recent call first):"
_CUT = "  ..."
_OUTERMOST = ("<module>", "_run_module_as_main")


@dataclass(frozen=True, kw_only=True)
class _Question:
    live: LivePhase
    wall_ns: int
    asked_s: float
    signal: int
    waited: bool
    """Whether the main thread did when it was asked."""


class StackAsker:
    """Asks one rank.  Call ``look`` at every look at its ring."""

    def __init__(self, reader: RingReader, pid: int, *, asked: int = 0, proc: Path = Path("/proc")) -> None:
        self._reader = reader
        self._pid = pid
        self._proc = proc / str(pid)
        self._path = reader.path.with_suffix(STACKS_SUFFIX)
        self._left = MAX_QUESTIONS - asked
        self._next_s = 0.0
        self._question: _Question | None = None
        self._seen = b""

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
        late = time.monotonic() - self._question.asked_s > PATIENCE_S
        answer = self._answer(at_once=False)
        if late and not self._seen and self._question is not None:
            self._give_up(self._question)
        return answer

    def _ask(self, pidfd: int) -> bool:
        """Whether the rank was asked: it is due, and it listens."""
        if (
            self._reader.stack_offer() is None
            or self._left <= 0
            or time.monotonic() < self._next_s
            or self._reader.state() is not RingState.RUNNING
        ):
            return False
        live = self._reader.live()
        if live.phase != OTHER or not 0 < live.since_ns <= time.perf_counter_ns() - STRETCH_NS:
            return False
        early = self._left > MAX_QUESTIONS - FIRST_QUESTIONS
        self._next_s = time.monotonic() + min(PAUSE_S, FIRST_PAUSE_S if early else PAUSE_S)
        try:
            waits = self._waits()
            offer = self._reader.stack_offer() if waits else self._reader.running_offer()
            if offer is None or not self._listens(*offer) or sleeps_in_native_code(self._proc):
                return False
            os.truncate(self._path, 0)
            signal.pidfd_send_signal(pidfd, offer[0])
        except (OSError, ValueError):
            return False  # it just ended, or what it offers is no signal
        self._left -= 1
        self._seen = b""
        self._question = _Question(
            live=live, wall_ns=time.time_ns(), asked_s=time.monotonic(), signal=offer[0], waited=waits
        )
        return True

    def _waits(self) -> bool:
        """Whether the main thread waits in the kernel, so that it is nowhere between two frames."""
        before = self._scheduled()
        time.sleep(WAITING_S)
        return before is not None and self._scheduled() == before

    def _scheduled(self) -> str | None:
        """How often it was made to wait so far; None while it does not wait."""
        lines = (line.partition(":\t") for line in (self._proc / "status").read_text(errors="replace").splitlines())
        found = {name: value for name, _, value in lines}
        return found.get("voluntary_ctxt_switches") if found.get("State", "")[:1] in ("S", "D") else None

    def _listens(self, number: int, fd: int) -> bool:
        return listens(self._proc, number, fd, self._path)

    def _answer(self, *, at_once: bool) -> dict[str, Any] | None:
        """What was written, once it is whole: the same at two looks, and ending where a main thread's stack does."""
        question = self._question
        written = self._read()
        whole = bool(written) and written == self._seen
        self._seen = written
        if question is None or not whole:
            return None
        frames = parse_stack(written.decode(errors="replace"))
        if at_once and (not frames or frames[-1]["function"] not in _OUTERMOST):
            return None
        self._question = None
        if not frames or self._reader.live() != question.live:
            return None
        about = {"pid": self._pid, "wall_ns": question.wall_ns, "step": question.live.step}
        return {**about, "phase": BUILTIN_PHASES[OTHER], "frames": frames[:MAX_FRAMES]}

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_BYTES)
        except OSError:
            return b""

    def _give_up(self, question: _Question) -> None:
        """Not answered in time: still waiting is a reason to wait too, anything else to ask no more.

        A thread that ran is somewhere in native code and answers when it comes back from there; that is no fault.
        """
        if awaits_delivery(self._proc, question.signal):
            return
        self._question = None
        if question.waited:
            self._left = 0


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
