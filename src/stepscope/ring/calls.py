"""From the words about collectives to the COMM and COLLECTIVE records of a step (``records/collectives.py``).

A collective belongs to the step in which it was called; what was spent in a wait belongs to the step of the wait, so
that no step is blocked for longer than it took.  For most these are the same step.  Where one is waited for only in a
later step, that one has a row of the same group and operation for it with a count of 0, and the call by itself, long
written, stays without an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from stepscope.records.collectives import FLAG_ASYNC, FLAG_WAITED, OPS, kept_by_itself
from stepscope.records.slot import (
    COLLECTIVE,
    COLLECTIVE_ENTRIES,
    COLLECTIVE_ENTRY,
    COMM_ENTRIES,
    COMM_ENTRY,
    COMM_RECORD,
    ENTRIES_HEAD,
    SLOT_BYTES,
)
from stepscope.ring import words as w

__all__ = ["CallBook", "pack_entries"]

MAX_KEPT = 512
"""Calls of one step that are kept one by one."""
MAX_RECENT = 1024
"""So many calls later a wait for one is no longer known to be for it."""
MAX_U32 = (1 << 32) - 1
SINGLE = (OPS.index("send"), OPS.index("recv"))
"""The other ranks of the group have no part in these, so they are numbered by themselves."""


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
    """All of one group and operation in a step."""

    __slots__ = ("count", "exposed", "flags", "left_alone", "size", "span")

    def __init__(self) -> None:
        self.count = self.size = self.exposed = self.span = self.flags = 0
        self.left_alone = 0
        """How many of them were not waited for at once."""


class CallBook:
    """What the words so far say of collectives; the decoder hands it those words and every change of phase."""

    def __init__(self) -> None:
        self._recent: deque[_Call] = deque(maxlen=MAX_RECENT)
        self.forget()

    def forget(self) -> None:
        """The words before are not to be trusted, or are of another stream."""
        self.busy = False
        """Whether the next change of phase is of interest; until then the book need not be asked."""
        self._called: int | None = None
        self._distance: int | None = None
        self._waited: tuple[_Call, int] | None = None
        self._at_once = False
        """Whether the last call was the last thing that happened."""
        self._recent.clear()
        self.clear()

    def clear(self) -> None:
        """A step is over: forget what was called in it, but not that it may still be waited for."""
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._kept: list[_Call] = []
        self._numbers: dict[tuple[int, bool], int] = {}

    def data(self, tag: int, value: int) -> None:
        """A data word: COLLECTIVE, PEER or WAIT."""
        self.busy = True
        if tag == w.COLLECTIVE:
            self._called = value
        elif tag == w.WAIT:
            self._distance = value

    def time(self, at: int, code: int) -> bool:
        """A time word; whether it is nothing but the instant of a call, and no change of phase."""
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
        """Of the step that ended; all with the ``seq`` of its STEP record."""
        sums = [
            COMM_ENTRY.pack(
                op,
                group,
                one.flags | (FLAG_ASYNC if one.left_alone > 0 else 0),
                min(one.count, MAX_U32),
                one.size,
                one.exposed,
                one.span,
            )
            for (group, op), one in self._sums.items()
        ]
        calls = [
            COLLECTIVE_ENTRY.pack(c.op, c.group, c.flags, c.nth, c.size, c.start, c.exposed, c.end)
            for c in (self._kept if kept_by_itself(step) else ())
        ]
        return [
            *pack_entries(COMM_RECORD, step, seq, sums, COMM_ENTRIES),
            *pack_entries(COLLECTIVE, step, seq, calls, COLLECTIVE_ENTRIES),
        ]

    def _call(self, value: int, at: int) -> None:
        call = _Call(value, at)
        self._recent.append(call)
        self._at_once = True
        if len(self._kept) < MAX_KEPT:
            key = call.group, call.op in SINGLE
            call.nth = self._numbers.get(key, 0)
            self._numbers[key] = call.nth + 1
            self._kept.append(call)
        one = self._sum(call)
        one.count += 1
        one.size += call.size
        one.left_alone += call.flags & FLAG_ASYNC

    def _begin_wait(self, call: _Call, at: int) -> None:
        if self._at_once and call is self._recent[-1] and call.flags & FLAG_ASYNC:
            call.flags &= ~FLAG_ASYNC
            self._sum(call).left_alone -= 1
        self._waited = call, at

    def _end_wait(self, call: _Call, began: int, at: int) -> None:
        self._waited = None
        one = self._sum(call)
        one.flags |= FLAG_WAITED
        one.exposed += at - began
        one.span += at - max(call.start, call.end)  # a second wait for it goes on where the first one ended
        call.flags |= FLAG_WAITED
        call.exposed += at - began
        call.end = at

    def _sum(self, call: _Call) -> _Sum:
        key = call.group, call.op
        one = self._sums.get(key)
        if one is None:
            one = self._sums[key] = _Sum()
        return one


def pack_entries(kind: int, step: int, seq: int, entries: Sequence[bytes], size: int) -> Iterable[bytes]:
    """Records of ``size`` entries each, and one of the rest."""
    for first in range(0, len(entries), size):
        some = entries[first : first + size]
        yield (ENTRIES_HEAD.pack(kind, 0, seq, step, len(some)) + b"".join(some)).ljust(SLOT_BYTES, b"\0")
