"""The ledger: every nanosecond between two step ends belongs to exactly one phase.

Nothing is summed during a step: each change of phase is one word in the ring, *at this instant the phase became that
one*, and readers do the sums (``ring/decoder.py``).  So the phases of a step add up to its length without a remainder,
because only instants are ever measured.

This is the hottest code in Stepscope.  It runs between kernels that have just emptied the processor's caches, where
every line costs three to five times what it costs in a tight loop: hence one word, no stack (the caller that enters a
phase remembers the outer one), no object per phase, no sums; and hence ``timed``, which inlines ``enter`` and
``leave``: two calls less at every hook.

The hooks of an ordinary step also exist in C (``hooks/native_hooks.c``): ``timed`` here, the timers of models and the
optimizer's hooks in ``hooks/``, and the end of a step in ``recorder.py``.  Whoever changes these changes that file too;
``tests/recorder/test_native_hooks.py`` compares what both record.

One thread owns the ledger, the training thread.  ``enter`` from another thread returns ``NOT_NOW``: autograd's device
threads and a user's background threads run alongside the step, not inside it.  A ledger without a ring has no owner, so
that the same check rejects all threads until recording has begun.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Protocol

from stepscope.records.steps import OTHER
from stepscope.ring import RingWriter
from stepscope.ring.layout import (
    ENTER,
    HEAD_WORD,
    RESERVE_WORDS,
    START,
    STEP_DATA,
    STEP_END,
    TIME_SHIFT,
    TURN_WORDS,
    WORD_BYTES,
    WRAP,
    data_word,
)

__all__ = ["NOBODY", "NOT_NOW", "CallObserver", "DeviceMarks", "Ledger", "LedgerMethods"]

NOT_NOW = -1
"""Result of ``enter`` when there is nothing to leave."""
NOBODY = 0
"""No thread has this ident."""


NO_FIELDS = tuple[str, ...]()


class DeviceMarks(Protocol):
    """Receives every change of phase while a device is timed."""

    def mark(self, ended: int, begun: int) -> None: ...

    def stall_begins(self, phase: int) -> bool | None: ...

    def stall_ends(self) -> None: ...


class CallObserver(Protocol):
    """Is shown the arguments of a call, in some steps."""

    recorder: Any
    """Its ``step`` is the current one."""
    due: int

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class LedgerMethods:
    """Writes the stream of one ring.  The fields belong to a subclass: ``Ledger``, or that of ``hooks/native.py``.

    ``at`` is the index of the next word in ``body``.  There is always room for more words than are ever written between
    two checks of ``limit``; a caller that finds ``at`` beyond it calls ``turn``.
    """

    __slots__ = NO_FIELDS

    def __init__(self, now: Callable[[], int], on_refusal: Callable[[int], bool | None]) -> None:
        """``on_refusal(phase)`` is called while the ledger has no owner; it returns whether recording has begun now."""
        self.now = now
        self._on_refusal = on_refusal
        self.phase = OTHER
        self.thread = NOBODY
        self.device: DeviceMarks | None = None
        self.before_backward: Callable[[tuple[Any, ...], dict[str, Any]], object] | None = None
        """In a sampled step: called with the arguments of backward."""
        self.at = self.limit = self.rounds = self._capacity = 0
        self.body = self.header = memoryview(b"")

    def open(self, ring: RingWriter) -> None:
        """Begin to record, on behalf of the calling thread."""
        self.body, self.header, self._capacity = ring.body, ring.header, ring.capacity
        self.at = self.rounds = 0
        self.limit = TURN_WORDS
        self.thread = get_ident()
        self.put(data_word(START, 0), self.now() << TIME_SHIFT)

    def close(self) -> None:
        """Reject all threads from now on."""
        self.thread = NOBODY

    def let_go(self) -> None:
        """Release the ring, in a forked child: it belongs to the parent.

        Phases in progress at the fork still end in the child, and ``leave`` does not check the owner: their words go
        into memory that is never read.
        """
        self.close()
        self.phase = OTHER
        self.device = None
        if self._capacity:
            self._capacity = 2 * RESERVE_WORDS
            self.body = memoryview(bytearray(self._capacity * WORD_BYTES)).cast("Q")
            self.header = memoryview(bytearray((HEAD_WORD + 1) * WORD_BYTES)).cast("Q")
            self.at = self.rounds = 0
            self.limit = TURN_WORDS

    def enter(self, phase: int) -> int:
        """Begin a phase inside the current one, which is returned: pass it to ``leave``.

        ``NOT_NOW`` on a thread that does not train, and inside the same phase.  ``other`` is never entered.
        """
        outer = self.phase
        if outer == phase or (get_ident() != self.thread and not self._refused(phase)):
            return NOT_NOW
        at = self.at
        self.body[at] = (self.now() << TIME_SHIFT) + phase + ENTER
        self.at = at + 1
        self.phase = phase
        if self.device is not None:
            try:
                self.device.mark(outer, phase)
            except BaseException:  # of a signal handler: the caller will not leave what it did not enter
                self.phase = outer
                raise
        return outer

    def leave(self, outer: int) -> None:
        """Return to the phase before ``enter``, whatever was begun inside and never ended."""
        at, ended = self.at, self.phase
        self.phase = outer  # first: the interpreter may run a signal handler, which may raise, at each call below
        self.body[at] = (self.now() << TIME_SHIFT) + outer
        self.at = at + 1
        if self.device is not None:
            self.device.mark(ended, outer)
        if at > self.limit:
            self.turn()

    def timed(
        self, original: Callable[..., Any], phase: int, observer: CallObserver | None = None
    ) -> Callable[..., Any]:
        """Wrap ``original`` to count its time as ``phase``; straight through where ``enter`` would return NOT_NOW.

        ``observer`` is shown the arguments, before the phase begins, from its step on.
        """
        ledger, now, code = self, self.now, phase + ENTER
        recorder = None if observer is None else observer.recorder

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = ledger.phase
            if outer == phase or (get_ident() != ledger.thread and not ledger._refused(phase)):
                return original(*args, **kwargs)
            if observer is not None:
                if ledger.before_backward is not None:
                    ledger.before_backward(args, kwargs)
                if recorder.step >= observer.due:  # type: ignore[union-attr]
                    observer.see(args, kwargs)
            at = ledger.at
            ledger.body[at] = (now() << TIME_SHIFT) + code
            ledger.at = at + 1
            ledger.phase = phase
            try:
                if ledger.device is not None:
                    ledger.device.mark(outer, phase)
                return original(*args, **kwargs)
            finally:
                at, ended = ledger.at, ledger.phase
                ledger.phase = outer  # first, as in ``leave``
                ledger.body[at] = (now() << TIME_SHIFT) + outer
                ledger.at = at + 1
                if ledger.device is not None:
                    ledger.device.mark(ended, outer)
                if at > ledger.limit:
                    ledger.turn()

        return timed

    def end_step(self, outer: int, step: int, flags: int, more: Sequence[int] = ()) -> None:
        """End a step now and with it the current phase; ``outer`` continues into the next step.

        ``more`` are data words with other figures of the step.
        """
        self.phase = outer
        at, body = self.at, self.body
        body[at] = (self.now() << TIME_SHIFT) + STEP_END
        body[at + 1] = STEP_DATA | step << 20 | outer << 16 | flags
        at += 2
        if more:
            for word in more:
                body[at] = word
                at += 1
        self.at = at
        self.header[HEAD_WORD] = self.rounds + at
        if at > self.limit:
            self.turn()

    @property
    def rests(self) -> bool:
        """Whether nothing was written since the last publication: as right after a step or a note."""
        return bool(self.header[HEAD_WORD] == self.written)

    @property
    def written(self) -> int:
        """Words since the beginning."""
        return self.rounds + self.at

    def put(self, *words: int) -> None:
        """Write words that belong together (at most ``TURN_WORDS``), and publish them."""
        for word in words:
            self.body[self.at] = word
            self.at += 1
        self.turn()

    def turn(self) -> None:
        """Publish what was written; near the end of the body, continue at its beginning."""
        if self.at > self._capacity - RESERVE_WORDS:
            self.body[self.at] = data_word(WRAP, 0)
            self.rounds += self._capacity
            self.at = 0
        self.limit = self.at + TURN_WORDS
        self.header[HEAD_WORD] = self.rounds + self.at

    def _refused(self, phase: int) -> bool:
        """Handle a call from a thread that is not the owner: if there is no owner yet, recording may begin."""
        return self.thread == NOBODY and bool(self._on_refusal(phase))


class Ledger(LedgerMethods):
    __slots__ = (
        "_capacity",
        "_on_refusal",
        "at",
        "before_backward",
        "body",
        "device",
        "header",
        "limit",
        "now",
        "phase",
        "rounds",
        "thread",
    )
