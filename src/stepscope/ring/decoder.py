"""Decode the words of a ring into records of steps, device times, notes and collectives.

This module does all the arithmetic that the training process is spared.

The time between two words belongs to the current phase. Some of it is then reassigned, because later words show more
than the process knew at the time:

- time between the model's return and backward, with nothing in between, is the loss: ``forward``. This also holds
  around a model that is called there without gradients (a teacher), whose own time is ``eval``;
- waiting for input for an evaluation is ``eval``; the next wait for input shows that the input was not trained on;
- forward that runs again inside backward (activation checkpointing) is ``backward``.

DDP reports one step later how much of a backward was spent waiting for peers. Code that has both steps accounts for
that (``store/rank_series.py``).

The part of ``other`` between the end of a step and the first phase of the next is also counted separately
(``between_ns``), because it lies between two iterations. A collective does not start an iteration: ZeRO gathers
parameters after the optimizer's step, and loops reduce their metrics there. Nor does the rest of a GradScaler or
DeepSpeed engine step after the optimizer inside it has returned. ``between_ns`` is zero for a step that enters no other
phase, since nothing shows where its iteration began, and for the first step of a process, which begins at the first
recorded activity.

A call of a collective is an instant within a phase and changes none of this; ``CallBook`` adds up the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from stepscope.records.collectives import FLAG_ASYNC, FLAG_WAITED, OPS, kept_by_itself
from stepscope.records.steps import (
    BACKWARD,
    COLLECTIVE,
    COLLECTIVE_ENTRIES,
    COLLECTIVE_ENTRY,
    COMM,
    COMM_ENTRIES,
    COMM_ENTRY,
    COMM_RECORD,
    DEVICE,
    DEVICE_SLOT,
    ENTRIES_HEAD,
    EVAL,
    FORWARD,
    INPUT,
    NOTE,
    NOTE_BYTES,
    NOTE_SLOT,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
    STEP_SLOT,
)
from stepscope.ring import layout as w

__all__ = ["StreamDecoder", "pack_entries"]


# -- Collective calls -------------------------------------------------------------------------------------------------
# Turns the words about collectives into the COMM and COLLECTIVE records of a step (``records/collectives.py``).
#
# A collective belongs to the step that called it. Time spent waiting belongs to the step of the wait, so that no step
# is blocked for longer than it took. Usually these are the same step. If a later step waits, it gets a row for the same
# group and operation with a count of 0, and the record of the call, already written, never gets an end.

MAX_CALLS_KEPT = 512
"""How many calls of one step are kept individually."""
MAX_RECENT_CALLS = 1024
"""After this many further calls, a wait can no longer be matched to its call."""
MAX_U32 = (1 << 32) - 1
POINT_TO_POINT = (OPS.index("send"), OPS.index("recv"))
"""Not all ranks of the group take part in these, so they are numbered separately."""


class _Call:
    """One collective."""

    __slots__ = ("end", "exposed", "flags", "group", "nth", "op", "size", "start")

    def __init__(self, value: int, at: int) -> None:
        op, self.group, self.size = w.collective_fields(value)
        self.op = op if op < len(OPS) else 0
        self.flags = FLAG_ASYNC if value & w.ASYNC_BIT else 0
        self.start = at
        self.nth = self.exposed = self.end = 0


class _Sum:
    """Totals of one group and operation in a step."""

    __slots__ = ("count", "exposed", "flags", "left_alone", "size", "span")

    def __init__(self) -> None:
        self.count = self.size = self.exposed = self.span = self.flags = 0
        self.left_alone = 0
        """How many of them were not waited for immediately."""


class CallBook:
    """Accounts for the collectives in the words so far. The decoder passes it those words and every phase change."""

    def __init__(self) -> None:
        self._recent: deque[_Call] = deque(maxlen=MAX_RECENT_CALLS)
        self.forget()

    def forget(self) -> None:
        """Drop all state: the earlier words are unreliable or belong to another stream."""
        self.busy = False
        """Whether the next phase change matters. Until then the decoder need not call ``time``."""
        self._called: int | None = None
        self._distance: int | None = None
        self._waited: tuple[_Call, int] | None = None
        self._at_once = False
        """Whether nothing happened after the last call."""
        self._recent.clear()
        self.clear()

    def clear(self) -> None:
        """Forget the calls of a finished step, but still match later waits for them."""
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._single_calls: list[_Call] = []
        self._numbers: dict[tuple[int, bool], int] = {}

    def data(self, tag: int, value: int) -> None:
        """Take a data word: COLLECTIVE, PEER or WAIT."""
        self.busy = True
        if tag == w.COLLECTIVE:
            self._called = value
        elif tag == w.WAIT:
            self._distance = value

    def time(self, at: int, code: int) -> bool:
        """Take a time word; return whether it only marks the instant of a call and changes no phase."""
        if self._called is not None and code != w.STEP_END:
            self._call(self._called, at)
            self._called = None
            if code < w.ENTER:
                return True
        if self._waited is not None:
            self._end_wait(*self._waited, at)
        if self._distance is not None and code > w.ENTER and self._distance < len(self._recent):
            self._begin_wait(self._recent[-1 - self._distance], at)
        self._called = self._distance = None
        self._at_once = False
        self.busy = self._waited is not None
        return False

    def records(self, step: int, seq: int) -> list[bytes]:
        """Return the records of the step that ended, all with the ``seq`` of its STEP record."""
        sums = [
            COMM_ENTRY.pack(
                op,
                group,
                calls.flags | (FLAG_ASYNC if calls.left_alone > 0 else 0),
                min(calls.count, MAX_U32),
                calls.size,
                calls.exposed,
                calls.span,
            )
            for (group, op), calls in self._sums.items()
        ]
        calls = [
            COLLECTIVE_ENTRY.pack(c.op, c.group, c.flags, c.nth, c.size, c.start, c.exposed, c.end)
            for c in (self._single_calls if kept_by_itself(step) else ())
        ]
        return [
            *pack_entries(COMM_RECORD, step, seq, sums, COMM_ENTRIES),
            *pack_entries(COLLECTIVE, step, seq, calls, COLLECTIVE_ENTRIES),
        ]

    def _call(self, value: int, at: int) -> None:
        call = _Call(value, at)
        self._recent.append(call)
        self._at_once = True
        if len(self._single_calls) < MAX_CALLS_KEPT:
            key = call.group, call.op in POINT_TO_POINT
            call.nth = self._numbers.get(key, 0)
            self._numbers[key] = call.nth + 1
            self._single_calls.append(call)
        calls = self._sum(call)
        calls.count += 1
        calls.size += call.size
        calls.left_alone += call.flags & FLAG_ASYNC

    def _begin_wait(self, call: _Call, at: int) -> None:
        if self._at_once and call is self._recent[-1] and call.flags & FLAG_ASYNC:
            call.flags &= ~FLAG_ASYNC
            self._sum(call).left_alone -= 1
        self._waited = call, at

    def _end_wait(self, call: _Call, began: int, at: int) -> None:
        self._waited = None
        calls = self._sum(call)
        calls.flags |= FLAG_WAITED
        calls.exposed += at - began
        calls.span += at - max(call.start, call.end)  # a second wait continues where the first ended
        call.flags |= FLAG_WAITED
        call.exposed += at - began
        call.end = at

    def _sum(self, call: _Call) -> _Sum:
        key = call.group, call.op
        calls = self._sums.get(key)
        if calls is None:
            calls = self._sums[key] = _Sum()
        return calls


def pack_entries(kind: int, step: int, seq: int, entries: Sequence[bytes], size: int) -> Iterable[bytes]:
    """Yield records of ``size`` entries each; the last one holds the rest."""
    for first in range(0, len(entries), size):
        some = entries[first : first + size]
        yield (ENTRIES_HEAD.pack(kind, 0, seq, step, len(some)) + b"".join(some)).ljust(SLOT_BYTES, b"\0")


# -- Decoder ----------------------------------------------------------------------------------------------------------

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
"""Phases which show that the preceding input was used for training."""
_SLOT_MASK = PHASE_SLOTS - 1
_LOST = -1
"""Value of ``_mark`` while the position is unknown, until the next end of a step."""


class StreamDecoder:
    """Turns words, fed in order, into the records they complete.

    It starts at the beginning of a stream. After ``resync`` it skips everything up to the next end of a step, the first
    instant that is certain.
    """

    def __init__(self) -> None:
        self.records: list[bytes] = []
        """Completed records that were not taken yet."""
        self.lost = 0
        """Steps known to be missing."""
        self.torn = 0
        """Words that could not have been written at their position."""
        self.changes: list[tuple[int, int]] = []
        """When each phase began, in steps whose collectives are kept individually. Filled only if ``follows``."""
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
        """Forget the current step."""
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
        """Decode words. ``position`` is that of the first word; the last word must be the last one announced."""
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
        """Note that the next words start at the beginning of the ring again."""
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
            return  # the mark stays, because the interval that it started continues
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
        """Move time that turned out to belong to another phase, but never more than there is."""
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
        """Emit the pending records, which are complete. ``position`` is where their last word ended."""
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
            self.torn += 1  # the end of a step without its data words
            self.resync()
            return
        self.lost += max(step - expected, 0) if expected is not None else 0
        self.lost += begin == _LOST and (expected is None or step >= expected)
        self._next_step = step + 1
        self._traced = kept_by_itself(step + 1)
        if begin != _LOST:
            words, entries = self._about, self._entries
            record = STEP_SLOT.pack(
                STEP,
                flags,
                position,
                step,
                begin,
                end - begin,
                *self._ns,
                words[w.ALLOCATED],
                words[w.RESERVED],
                words[w.PEAK_ALLOCATED],
                min(entries[BACKWARD], 0xFFFFFFFF),
                min(entries[FORWARD], 0xFFFFFFFF),
                words[w.DDP_COMPUTE] or words[w.DDP_SAMPLED_COMPUTE],
                words[w.DDP_COMM],
                min(entries[INPUT], 0xFFFFFFFF),
                0,
                self._between,
                words[w.DDP_EXPOSED],
            )
            self.records += (record, *self._calls.records(step, position))
        self._clear()
        self._begin = self._mark = end
        self._phase = phase
        self._under_way = phase not in (OTHER, OPTIMIZER)
        if self.follows and self._traced:
            self.changes.append((end, phase))
