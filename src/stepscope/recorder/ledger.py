"""The ledger: every nanosecond between two step ends belongs to exactly one phase.

On the way through a step only changes of phase are jotted down, one integer each: *at this instant the phase became
that one*.  At the end of the step the jottings are added up.  Forward inside an LBFGS step is forward, not optimizer; a
wait for peers inside backward is comm, not backward; and the phases of a step add up to its length without a
remainder, because nothing else is ever measured.

This is the hottest code we have.  It runs between kernels that have just emptied the processor's caches, where every
line costs three times what it costs in a tight loop; hence one integer, no stack (whoever enters a phase remembers the
outer one), no object per phase.

One thread owns the ledger, the one that trains.  ``enter`` from another thread answers ``NOT_NOW``: autograd's device
threads and a user's background threads run beside the step, not inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Protocol

from stepscope.records.phases import BACKWARD, EVAL, FORWARD, INPUT, OTHER, PHASE_SLOTS
from stepscope.ring.layout import LIVE_SHIFT, LIVE_WORD

__all__ = ["NOT_NOW", "DeviceMarks", "Ledger", "Totals"]

NOT_NOW = -1
"""Answer of ``enter`` when there is nothing to leave."""

_ENTER = PHASE_SLOTS
"""Set in a jotting that begins a phase, clear in one that returns to the outer phase."""
_PHASE_MASK = PHASE_SLOTS - 1
MAX_JOTTINGS = 4096
"""Beyond this they are added up before the step has ended (an evaluation of a million batches)."""


class DeviceMarks(Protocol):
    """Told of every change of phase while a device is timed."""

    def mark(self, ended: int, begun: int) -> None: ...


class Totals:
    """What a step's jottings add up to: nanoseconds and entries per phase."""

    __slots__ = ("backward_began", "entries", "last_backward", "ns", "pending_input")

    def __init__(self) -> None:
        self.ns = [0] * PHASE_SLOTS
        self.entries = [0] * PHASE_SLOTS
        self.pending_input = 0
        """Input waited for since the last forward; if an evaluation follows, it was waited for on its behalf."""
        self.backward_began = 0
        self.last_backward = 0
        """Length of the last backward, with everything inside it."""

    def move(self, source: int, target: int, nanoseconds: int) -> None:
        """Re-book time that turned out to belong elsewhere, never more than there is."""
        moved = min(nanoseconds, self.ns[source])
        if moved > 0:
            self.ns[source] -= moved
            self.ns[target] += moved


class Ledger:
    __slots__ = ("_jot", "_jottings", "_live", "_mark", "_mark_phase", "_now", "_totals", "device", "phase", "thread")

    def __init__(self, now: Callable[[], int], live: memoryview) -> None:
        """``live`` is the ring's header as words; the last jotting is kept there for the agent to see."""
        self._now = now
        self._live = live
        self._jottings: list[int] = []
        self._jot = self._jottings.append
        self._totals = Totals()
        self._mark = now()
        self._mark_phase = OTHER
        self.phase = OTHER
        self.thread = get_ident()
        self.device: DeviceMarks | None = None

    @property
    def mark(self) -> int:
        """The instant up to which time has been added up."""
        return self._mark

    def enter(self, phase: int) -> int:
        """Begin a phase inside the present one, which is returned: give it to ``leave``.

        ``NOT_NOW`` on a thread that does not train, and inside the same phase.
        """
        outer = self.phase
        if outer == phase or get_ident() != self.thread:
            return NOT_NOW
        jotting = self._now() << LIVE_SHIFT | phase | _ENTER
        self._jot(jotting)
        self._live[LIVE_WORD] = jotting
        self.phase = phase
        if self.device is not None:
            self.device.mark(outer, phase)
        return outer

    def leave(self, outer: int) -> None:
        """Return to the phase that was present before ``enter``, whatever was begun inside and never ended."""
        ended = self.phase
        jotting = self._now() << LIVE_SHIFT | outer
        self._jot(jotting)
        self._live[LIVE_WORD] = jotting
        self.phase = outer
        if self.device is not None:
            self.device.mark(ended, outer)
        if len(self._jottings) > MAX_JOTTINGS:
            self._add_up()

    def close(self) -> tuple[Totals, int]:
        """End a step now: its totals and the instant.  The present phase goes on into the next step."""
        now = self._now()
        self._add_up()
        totals = self._totals
        totals.ns[self.phase] += now - self._mark
        self._mark = now
        self._totals = Totals()
        return totals, now

    def _add_up(self) -> None:
        totals = self._totals
        ns, entries = totals.ns, totals.entries
        mark, phase, loss = self._mark, self._mark_phase, False
        for jotting in self._jottings:
            at = jotting >> LIVE_SHIFT
            begun = jotting & _PHASE_MASK
            spent = at - mark
            mark = at
            if jotting & _ENTER:
                entries[begun] += 1
                if begun == BACKWARD:
                    totals.backward_began = at
                    if loss:  # from the model's return to backward, with nothing in between: the loss
                        phase = FORWARD
                elif begun == FORWARD:
                    totals.pending_input = 0
                elif begun == EVAL:
                    totals.move(INPUT, EVAL, totals.pending_input)
                    totals.pending_input = 0
                loss = False
            else:
                loss = phase == FORWARD and begun == OTHER
                if phase == INPUT:
                    totals.pending_input += spent
                elif phase == BACKWARD:
                    totals.last_backward = at - totals.backward_began
            ns[phase] += spent
            phase = begun
        self._jottings.clear()
        self._mark, self._mark_phase = mark, phase
