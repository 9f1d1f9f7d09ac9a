"""From the words of a stream to records: all the arithmetic that the training process is spared.

The time between two words belongs to the phase that was present.  Some of it is then booked better than the process
could have known at the moment:

- what lies between the return of the model and backward, with nothing in between, is the loss: ``forward``;
  also around a model that is called there without gradients (a teacher), whose own time is ``eval``;
- input waited for on behalf of an evaluation is ``eval``; the next wait for input shows that it was not trained with;
- forward run again inside backward (activation checkpointing) is ``backward``.

How much of a backward was waiting for peers DDP says one step later: whoever has both steps books that
(``store/assemble.py``).

Of ``other``, what passes between the end of a step and the first phase of the next is also counted by itself
(``between_ns``): it lies between two iterations.  An exchange does not begin an iteration: ZeRO gathers the parameters
behind the optimizer's step, and loops reduce their metrics there.  Nor does the rest of a step of GradScaler or of
DeepSpeed's engine, inside of which the optimizer has returned.  A step in which no other phase is entered has none,
since nothing shows where its iteration began; nor has the first of a process, which begins at the first activity seen.

The call of a collective is an instant within a phase and changes nothing of all this; what the calls come to is added
up in ``ring/calls.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepscope.records.collectives import kept_by_itself
from stepscope.records.phases import BACKWARD, COMM, EVAL, FORWARD, INPUT, OPTIMIZER, OTHER, PHASE_SLOTS
from stepscope.records.slot import DEVICE, DEVICE_SLOT, NOTE, NOTE_BYTES, NOTE_SLOT, STEP, STEP_SLOT
from stepscope.ring import words as w
from stepscope.ring.calls import CallBook

__all__ = ["StreamDecoder"]

_STEP_DATA = (
    w.DDP_COMPUTE,
    w.DDP_COMM,
    w.DDP_EXPOSED,
    w.DDP_SAMPLED_COMPUTE,
    w.ALLOCATED,
    w.RESERVED,
    w.PEAK_ALLOCATED,
)
_CALL_DATA = (w.COLLECTIVE, w.PEER, w.WAIT)
_TRAINING = (FORWARD, BACKWARD, OPTIMIZER)
"""What shows that the input before it was trained with."""
_SLOT_MASK = PHASE_SLOTS - 1
_LOST = -1
"""For ``_mark``: where we are is not known until the next end of a step."""


class StreamDecoder:
    """Feed it words in order; it gives the records they complete.

    Starts at the beginning of a stream.  After ``resync`` it passes everything up to the next end of a step, which
    is the first instant it can be sure of.
    """

    def __init__(self) -> None:
        self.records: list[bytes] = []
        """What was completed and not yet taken."""
        self.lost = 0
        """Steps known to be missing."""
        self.torn = 0
        """Words that could not have been written there."""
        self.changes: list[tuple[int, int]] = []
        """When which phase began, in steps whose collectives are kept one by one; only if somebody follows them."""
        self.follows = False
        self._traced = True
        self._next_step: int | None = 0
        self._starting = False
        self._round_over = False
        self._ended: tuple[int, int] | None = None
        self._device: tuple[int, list[int]] | None = None
        self._note: tuple[int, int, bytearray] | None = None
        self._mark = _LOST
        self._calls = CallBook()
        self._clear()

    def _clear(self) -> None:
        """Forget the step under way."""
        self._calls.clear()
        self._ns = [0] * PHASE_SLOTS
        self._entries = [0] * PHASE_SLOTS
        self._about = dict.fromkeys(_STEP_DATA, 0)
        self._flags_word = 0
        self._pending_input = 0
        self._evaluated_input = 0
        self._under_way = True
        self._between = 0
        self._loss = False
        self._loss_ns = 0

    def resync(self, *, knowing_step: bool = True) -> None:
        if not knowing_step:
            self._next_step = None
        self._mark = _LOST
        self._ended = self._device = self._note = None
        self._calls.forget()
        self._clear()

    def feed(self, words: Iterable[int], position: int) -> None:
        """``position`` is that of the first of the words; the last one must be the last that was announced."""
        for word in words:
            if self._round_over:
                return
            position += 1
            if word & w.DATA:
                self._data(word >> w.TAG_SHIFT & w.TAG_MASK, word & w.VALUE_MASK, position)
            else:
                if self._ended or self._device or self._note:
                    self._complete(position - 1)
                self._time(word >> w.TIME_SHIFT, word & w.CODE_MASK)
        self._complete(position)

    def next_round(self) -> None:
        """The words that follow stand at the beginning of the ring again."""
        self._round_over = False

    # -- time words -----------------------------------------------------------------------------------------------

    def _time(self, at: int, code: int) -> None:
        if self._starting:
            self._starting = False
            self._calls.forget()
            self._clear()
            self._begin, self._mark, self._phase = at, at, code & _SLOT_MASK
            return
        if self._mark == _LOST:
            if self._calls.busy:
                self._calls.forget()
            if code == w.STEP_END:
                self._ended = (_LOST, at)
            return
        spent = at - self._mark
        if spent < 0:
            self.torn += 1
            self.resync()
            return
        if self._calls.busy and self._calls.time(at, code):
            return  # the mark stays: what is measured from it goes on
        self._mark = at
        if code == w.STEP_END:
            self._ns[self._phase] += spent
            self._book_evaluated_input()
            self._ended = (self._begin, at)
        elif code > w.ENTER:
            self._enter(code - w.ENTER, spent)
        else:
            self._leave(code, spent)
        if self.follows and self._traced:
            self.changes.append((at, self._phase))

    def _enter(self, begun: int, spent: int) -> None:
        phase = self._phase
        if begun == FORWARD and phase == BACKWARD:
            begun = BACKWARD
        else:
            self._entries[begun] += 1
            if begun == BACKWARD and self._loss:
                phase = FORWARD
                self._move(OTHER, FORWARD, self._loss_ns)
            if begun in _TRAINING:
                self._pending_input = self._evaluated_input = 0
            elif begun == EVAL:
                self._evaluated_input += self._pending_input
                self._pending_input = 0
            elif begun == INPUT:
                self._book_evaluated_input()
        if begun == EVAL and self._loss:
            self._loss_ns += spent
        else:
            self._loss = False
            self._loss_ns = 0
        self._ns[phase] += spent
        if begun != COMM and not self._under_way:
            self._under_way = True
            self._between = self._ns[OTHER]
        self._phase = begun

    def _leave(self, begun: int, spent: int) -> None:
        phase = self._phase
        self._ns[phase] += spent
        # A model called without gradients between forward and backward does not end the loss.
        self._loss = begun == OTHER and (phase == FORWARD or (phase == EVAL and self._loss))
        if phase == INPUT:
            self._pending_input += spent
        self._phase = begun

    def _book_evaluated_input(self) -> None:
        self._move(INPUT, EVAL, self._evaluated_input)
        self._evaluated_input = 0

    def _move(self, source: int, target: int, nanoseconds: int) -> None:
        """Re-book time that turned out to belong elsewhere, never more than there is."""
        moved = min(nanoseconds, self._ns[source])
        if moved > 0:
            self._ns[source] -= moved
            self._ns[target] += moved

    # -- data words -----------------------------------------------------------------------------------------------

    def _data(self, tag: int, value: int, position: int) -> None:
        if tag == w.STEP_ABOUT:
            self._flags_word = value
        elif tag in self._about:
            self._about[tag] = value
        elif tag in _CALL_DATA:
            self._complete(position - 1)
            self._calls.data(tag, value)
        elif tag == w.TEXT:
            if self._note is not None:
                self._note[2].extend(value.to_bytes(w.TEXT_BYTES + 1, "little")[: w.TEXT_BYTES])
        elif w.DEVICE_PHASE <= tag < w.DEVICE_PHASE + PHASE_SLOTS:
            if self._device is not None:
                self._device[1][tag - w.DEVICE_PHASE] = value
        else:
            self._complete(position - 1)
            if tag == w.START:
                self._starting = True
            elif tag == w.WRAP:
                self._round_over = True
            elif tag == w.DEVICE_STEP:
                self._device = (value, [0] * PHASE_SLOTS)
            elif tag == w.NOTE_TEXT:
                self._note = (value >> 16, min(value & 0xFFFF, NOTE_BYTES), bytearray())
            else:
                self.torn += 1

    # -- records --------------------------------------------------------------------------------------------------

    def _complete(self, position: int) -> None:
        """Everything about the records under way has been said; ``position`` is where the last of it ended."""
        if self._ended is not None:
            self._complete_step(*self._ended, position)
            self._ended = None
        if self._device is not None:
            step, phases = self._device
            self._device = None
            self.records.append(DEVICE_SLOT.pack(DEVICE, 0, position, step, sum(phases), *phases))
        if self._note is not None:
            step, length, text = self._note
            self._note = None
            self.records.append(NOTE_SLOT.pack(NOTE, 0, position, step, length, bytes(text[:length])))

    def _complete_step(self, begin: int, end: int, position: int) -> None:
        about = self._flags_word
        step, phase, flags = about >> 20, about >> 16 & _SLOT_MASK, about & 0xFFFF
        expected = self._next_step
        if not about and expected:
            self.torn += 1  # an end of a step without its data words
            self.resync()
            return
        self.lost += max(step - expected, 0) if expected is not None else 0
        self.lost += begin == _LOST and (expected is None or step >= expected)
        self._next_step = step + 1
        self._traced = kept_by_itself(step + 1)
        if begin != _LOST:
            said, entries = self._about, self._entries
            record = STEP_SLOT.pack(
                STEP,
                flags,
                position,
                step,
                begin,
                end - begin,
                *self._ns,
                said[w.ALLOCATED],
                said[w.RESERVED],
                said[w.PEAK_ALLOCATED],
                min(entries[BACKWARD], 0xFFFFFFFF),
                min(entries[FORWARD], 0xFFFFFFFF),
                said[w.DDP_COMPUTE] or said[w.DDP_SAMPLED_COMPUTE],
                said[w.DDP_COMM],
                min(entries[INPUT], 0xFFFFFFFF),
                0,
                self._between,
                said[w.DDP_EXPOSED],
            )
            self.records += (record, *self._calls.records(step, position))
        self._clear()
        self._begin = self._mark = end
        self._phase = phase
        self._under_way = phase not in (OTHER, OPTIMIZER)
        if self.follows and self._traced:
            self.changes.append((end, phase))
