"""The last words of a ring, announced or not: where its process is right now, and in which collective.

Nobody announces a word before the next one or two hundred are written, and a process that hangs writes none: so these
look beyond the head.  Time only grows, so the first time word there that is not younger than the last one is a
left-over of the round before, and with it all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from stepscope.records.phases import COMM, PHASE_SLOTS
from stepscope.ring import words as w
from stepscope.ring.layout import RESERVE_WORDS, TURN_WORDS

__all__ = [
    "LastCollective",
    "LivePhase",
    "is_between_steps",
    "last_collective",
    "live_phase",
    "recent_shares",
    "stretch_at",
    "stretch_end_ns",
]

LOOK_BACK = 4096
"""How far back we look for the number of the step under way, or for a collective."""
RECENT_WORDS = 512
"""How far back the shares of phases are measured: some tens of steps."""

Words = memoryview


class LivePhase(NamedTuple):
    """Where the process is now."""

    phase: int
    since_ns: int
    """When the last word was written; with it two looks at the same stretch are told from looks at two."""
    step: int


class LastCollective(NamedTuple):
    """The collective that the process waits in or, while it waits in none, the one it called last."""

    op: int
    """As in ``records.collectives.OPS``."""
    group: int
    """The slot of its process group."""
    size_bytes: int
    called_ns: int
    waiting: bool
    """Whether the process is in a wait for it now."""
    peer: int | None
    """Of a send or recv: the other rank in the world; None where there is none, or any will do."""


def live_phase(body: Words, head: int) -> LivePhase:
    phase = since = step = 0
    backwards = _backwards(body, head)
    for word in backwards:
        if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
            step = ((word & w.VALUE_MASK) >> 20) + 1
            if not since:  # nothing was entered since the step before ended, one word earlier
                phase = word >> 16 & (PHASE_SLOTS - 1)
                since = next(backwards, 0) >> w.TIME_SHIFT
            break
        if not word & w.DATA and not since:
            since, phase = word >> w.TIME_SHIFT, word % PHASE_SLOTS
    for word in _beyond(body, head, since):
        if not word & w.DATA:
            since, phase = word >> w.TIME_SHIFT, word % PHASE_SLOTS
    return LivePhase(phase, since, step)


def is_between_steps(body: Words, head: int, since_ns: int) -> bool:
    """Whether the stretch that began then comes after the last step and before any phase of the next but ``comm``."""
    words = _backwards(body, head)
    behind: list[int] = []
    for word in words:
        if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
            break
        behind.append(word)
    else:
        return False
    last_ns = next(words, 0) >> w.TIME_SHIFT
    if last_ns == since_ns:
        return True
    behind.reverse()
    newest_ns = next((word >> w.TIME_SHIFT for word in reversed(behind) if not word & w.DATA), last_ns)
    for word in (*behind, *_beyond(body, head, newest_ns)):
        if not word & w.DATA:
            if word & w.CODE_MASK > w.ENTER and word & w.CODE_MASK != w.ENTER + COMM:
                return False
            if word >> w.TIME_SHIFT == since_ns:
                return True
    return False


def stretch_end_ns(body: Words, head: int, since_ns: int) -> int | None:
    """When the stretch that began then was over; None: it lasts, or that is no longer among the last words."""
    times = (word >> w.TIME_SHIFT for word in _last_words(body, head) if not word & w.DATA)
    return next(times, None) if since_ns in times else None


def stretch_at(body: Words, head: int, begin_ns: int, end_ns: int) -> tuple[LivePhase, bool] | None:
    """The stretch from before ``begin_ns`` until after ``end_ns``, and whether it lies ``between_steps``.

    None: the phase changed meanwhile, or that is no longer among the last words.
    """
    phase: int | None = None
    since = step = 0
    between = False
    for word in _last_words(body, head):
        if word & w.DATA:
            if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
                step = ((word & w.VALUE_MASK) >> 20) + 1
                phase, between = word >> 16 & (PHASE_SLOTS - 1), True
            continue
        at = word >> w.TIME_SHIFT
        if at > begin_ns:
            if at <= end_ns:
                return None
            break
        since, phase = at, word % PHASE_SLOTS
        if word & w.CODE_MASK > w.ENTER and word & w.CODE_MASK != w.ENTER + COMM:
            between = False
    return (LivePhase(phase, since, step), between) if phase is not None and since else None


def recent_shares(body: Words, head: int) -> tuple[float, ...]:
    """Of the time between the last words, the share in each phase; 0 where there are too few to tell."""
    total, inside = 0, [0] * PHASE_SLOTS
    now: int | None = None
    since = 0
    for word in _last_words(body, head, RECENT_WORDS):
        if word & w.DATA:
            if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
                now = word >> 16 & (PHASE_SLOTS - 1)
            continue
        at = word >> w.TIME_SHIFT
        if now is not None:
            total += at - since
            inside[now] += at - since
        since, now = at, word % PHASE_SLOTS
    return tuple(took / total if total > 0 else 0.0 for took in inside)


def last_collective(body: Words, head: int) -> LastCollective | None:
    """None when there is none among the last words."""
    calls: list[tuple[int, int | None, int]] = []
    called: int | None = None
    peer: int | None = None
    distance: int | None = None
    waited: int | None = None
    for word in _last_words(body, head):
        if word & w.DATA:
            tag, value = word >> w.TAG_SHIFT & w.TAG_MASK, word & w.VALUE_MASK
            if tag == w.COLLECTIVE:
                called, peer = value, None
            elif tag == w.PEER:
                peer = value if value != w.ANY_PEER else None
            elif tag == w.WAIT:
                distance = value
            continue
        entered = word & w.CODE_MASK > w.ENTER
        if called is not None:
            calls.append((called, peer, word >> w.TIME_SHIFT))
            called = None
            if not entered:
                continue
        waited = distance if entered else None
        distance = None
    if not calls:
        return None
    waiting = waited is not None and waited < len(calls)
    value, peer, at = calls[-1 - (waited or 0)] if waiting else calls[-1]
    op, group, size = w.collective_fields(value)
    return LastCollective(op, group, size, at, waiting, peer)


def _last_words(body: Words, head: int, most: int = LOOK_BACK) -> Iterator[int]:
    """In order, those beyond the head among them; ``most`` of those that were announced."""
    words = list(islice(_backwards(body, head), most))[::-1]
    since = next((word >> w.TIME_SHIFT for word in reversed(words) if not word & w.DATA), 0)
    yield from words
    yield from _beyond(body, head, since)


def _backwards(body: Words, head: int) -> Iterator[int]:
    """The words that were announced, the last one first; what a round left unused at its end is passed."""
    capacity = len(body)
    position = head
    oldest = max(head - min(LOOK_BACK, capacity - RESERVE_WORDS), 0)
    while position > oldest:
        if not position % capacity:
            position -= _unused(body)
        position -= 1
        yield body[position % capacity]


def _unused(body: Words) -> int:
    """How many words at the end of the last round mean nothing, the WRAP before them included."""
    for left, word in zip(range(RESERVE_WORDS, 0, -1), body[-RESERVE_WORDS:], strict=False):
        if word >> w.TAG_SHIFT == w.data_word(w.WRAP, 0) >> w.TAG_SHIFT:
            return left  # the first: behind it stand those of earlier rounds
    return 0


def _beyond(body: Words, head: int, since: int) -> Iterator[int]:
    """The words that were written since, in order; a data word only together with the time word behind it."""
    capacity = len(body)
    held: list[int] = []
    for position in range(head, head + 2 * TURN_WORDS):
        word = body[position % capacity]
        held.append(word)
        if not word & w.DATA:
            if word >> w.TIME_SHIFT <= since:
                return
            since = word >> w.TIME_SHIFT
            yield from held
            held.clear()
