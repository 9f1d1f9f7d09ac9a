"""Read a ring: its header, the records completed so far, and where its process is right now.

Used by the agent, and by any process that opens a run whose agent died.
"""

from __future__ import annotations

import json
import mmap
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from stepscope.errors import RingForeign, RingVersion
from stepscope.records.collectives import ProcessGroup, groups_from_json
from stepscope.records.files import open_file
from stepscope.records.identity import RankIdentity, checked_facts
from stepscope.records.steps import BUILTIN_PHASES, COMM, PHASE_SLOTS, SLOT_HEAD, shown_name
from stepscope.ring import layout as w
from stepscope.ring.decoder import StreamDecoder
from stepscope.ring.layout import (
    BLOCK_HEAD,
    FACTS_BYTES,
    FACTS_OFFSET,
    FIXED,
    GROUPS_BYTES,
    GROUPS_OFFSET,
    HEAD_WORD,
    HEADER_BYTES,
    HOOK_FAILURES_WORD,
    IDENTITY_BYTES,
    IDENTITY_OFFSET,
    MAGIC,
    MIN_CAPACITY,
    NAME_BYTES,
    NAMES_OFFSET,
    RESERVE_WORDS,
    RUNNING_WORD,
    SERVER_WORD,
    STACKS_FD_SHIFT,
    STACKS_WORD,
    STATE_WORD,
    THREADS_WORD,
    TRAINS_WORD,
    TURN_WORDS,
    VERSION,
    WORD_BYTES,
    WORKERS_WORD,
    RingState,
)

__all__ = [
    "LastCollective",
    "LivePhase",
    "RingBatch",
    "RingHeader",
    "RingReader",
    "last_collective",
    "live_phase",
    "split",
]


# -- Latest words -----------------------------------------------------------------------------------------------------
# The last words of a ring, announced or not, show where its process is right now and in which collective.
#
# The writer announces a word only after it has written one or two hundred more, and a process that hangs writes none,
# so these functions look beyond the head. Time only grows: the first time word there that is not newer than its
# predecessor is left over from the previous round, and so is everything after it.

SEARCHED_WORDS = 4096
"""How many words to search for the current step's number, or for a collective."""
RECENT_WORDS = 512
"""How many words to measure phase shares over: some tens of steps."""
LATEST_STEPS = 6
"""Steps whose median is the time that a phase takes now: a single long step does not change it."""

Words = memoryview


class LivePhase(NamedTuple):
    """Where the process is now."""

    phase: int
    since_ns: int
    """When the last word was written. It identifies the stretch, so two readings of one stretch can be recognized."""
    step: int


class LastCollective(NamedTuple):
    """The collective that the process is waiting for or, if it is not waiting, the one it called last."""

    op: int
    """Index into ``records.collectives.OPS``."""
    group: int
    """The slot of its process group."""
    size_bytes: int
    called_ns: int
    waiting: bool
    """Whether the process is waiting for it now."""
    peer: int | None
    """For a send or recv, the other global rank; None if there is no specific one."""


def live_phase(body: Words, head: int) -> LivePhase:
    phase = since = step = 0
    backwards = _backwards(body, head)
    for word in backwards:
        if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
            step = ((word & w.VALUE_MASK) >> 20) + 1
            if not since:  # nothing was entered since the previous step ended, one word earlier
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
    """Return whether the stretch that began then lies after the last step and before any phase other than ``comm``."""
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
    """Return when the stretch that began then ended; None if it continues or is no longer in the last words."""
    times = (word >> w.TIME_SHIFT for word in _last_words(body, head) if not word & w.DATA)
    return next(times, None) if since_ns in times else None


def stretch_at(body: Words, head: int, begin_ns: int, end_ns: int) -> tuple[LivePhase, bool] | None:
    """Return the stretch that covers ``begin_ns`` to ``end_ns``, and whether it lies between two steps.

    None if the phase changed in between, or the stretch is no longer in the last words.
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
    """Return each phase's share of the time between the last words; 0 if there are too few."""
    total, inside = 0, [0] * PHASE_SLOTS
    now: int | None = None
    since: int | None = None
    for word in _last_words(body, head, RECENT_WORDS):
        if word & w.DATA:
            if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
                now = word >> 16 & (PHASE_SLOTS - 1)
            continue
        at = word >> w.TIME_SHIFT
        # Unknown until the first time word: the words may begin within a step, with the phase but not its start.
        if now is not None and since is not None:
            total += at - since
            inside[now] += at - since
        since, now = at, word % PHASE_SLOTS
    return tuple(took / total if total > 0 else 0.0 for took in inside)


def latest_phase_ns(body: Words, head: int) -> tuple[float, ...]:
    """Return how long each phase takes in a step now, the median of the last steps; empty if there were too few."""
    steps: list[list[int]] = []
    inside: list[int] | None = None
    now: int | None = None
    since: int | None = None
    for word in _last_words(body, head, RECENT_WORDS):
        if word & w.DATA:
            if word >> w.TAG_SHIFT == w.STEP_DATA >> w.TAG_SHIFT:
                now = word >> 16 & (PHASE_SLOTS - 1)
                if inside is not None:
                    steps.append(inside)
                inside = [0] * PHASE_SLOTS  # what came before the first one is part of a step
            continue
        at = word >> w.TIME_SHIFT
        if now is not None and since is not None and inside is not None:
            inside[now] += at - since
        since, now = at, word % PHASE_SLOTS
    if len(steps) < LATEST_STEPS:
        return ()
    return tuple(median(took) for took in zip(*steps[-LATEST_STEPS:], strict=True))


def last_collective(body: Words, head: int) -> LastCollective | None:
    """Return the last collective; None if the last words contain none."""
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


def _last_words(body: Words, head: int, most: int = SEARCHED_WORDS) -> Iterator[int]:
    """Yield the last words in order: up to ``most`` announced ones, then those beyond the head."""
    words = list(islice(_backwards(body, head), most))[::-1]
    since = next((word >> w.TIME_SHIFT for word in reversed(words) if not word & w.DATA), 0)
    yield from words
    yield from _beyond(body, head, since)


def _backwards(body: Words, head: int) -> Iterator[int]:
    """Yield announced words, newest first, skipping the unused end of a round."""
    capacity = len(body)
    position = head
    oldest = max(head - min(SEARCHED_WORDS, capacity - RESERVE_WORDS), 0)
    while position > oldest:
        if not position % capacity:
            position -= _unused(body)
        position -= 1
        yield body[position % capacity]


def _unused(body: Words) -> int:
    """Return how many words at the end of the last round are unused, including the WRAP before them."""
    for left, word in zip(range(RESERVE_WORDS, 0, -1), body[-RESERVE_WORDS:], strict=False):
        if word >> w.TAG_SHIFT == w.data_word(w.WRAP, 0) >> w.TAG_SHIFT:
            return left  # the first one: those after it are from earlier rounds
    return 0


def _beyond(body: Words, head: int, since: int) -> Iterator[int]:
    """Yield the words written since, in order; a data word only together with the time word that follows it."""
    capacity = len(body)
    locked: list[int] = []
    for position in range(head, head + 2 * TURN_WORDS):
        word = body[position % capacity]
        locked.append(word)
        if not word & w.DATA:
            if word >> w.TIME_SHIFT <= since:
                return
            since = word >> w.TIME_SHIFT
            yield from locked
            locked.clear()


# -- Reader -----------------------------------------------------------------------------------------------------------

MAX_CAPACITY = 1 << 30
"""A capacity above this is garbage, not a ring."""
MAX_PID = 1 << 32
SETTLE_S = 0.0002
"""Pause between reading a new head and the words below it. No processor delays a store for this long."""
CHUNK_WORDS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RingHeader:
    """A snapshot of the header."""

    pid: int
    start_ticks: int
    anchor_mono_ns: int
    anchor_wall_ns: int
    head: int
    state: RingState
    live_phase: int
    live_since_ns: int
    live_step: int
    hook_failures: int
    phase_names: tuple[str, ...]
    identity: RankIdentity
    facts: dict[str, Any] = field(default_factory=dict)
    groups: tuple[ProcessGroup, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RingBatch:
    """Whole records in order of seq, and counts of what is missing."""

    slots: list[bytes]
    last_seq: int
    """Pass this to the next ``read``."""
    lost: int
    """Steps overwritten before they were read."""
    torn: int
    """Words that made no sense."""


def split(batch: RingBatch, size: int) -> Iterator[RingBatch]:
    """Split a batch into parts of at most ``size`` records, each a valid point to resume from; yields at least one.

    The records of one step share a seq and stay together, so a part may exceed ``size`` for a single step.
    """
    seqs = [SLOT_HEAD.unpack_from(slot)[3] for slot in batch.slots]
    start = 0
    while True:
        end = min(start + size, len(seqs))
        while start < end < len(seqs) and seqs[end] == seqs[end - 1]:
            end -= 1
        if end == start:
            end = next((at for at in range(start, len(seqs)) if seqs[at] != seqs[start]), len(seqs))
        last = end == len(seqs)
        yield RingBatch(
            slots=batch.slots[start:end],
            last_seq=batch.last_seq if last else seqs[end - 1],
            lost=0 if start else batch.lost,
            torn=0 if start else batch.torn,
        )
        if last:
            return
        start = end


class RingReader:
    """Reads a ring while its writer is running, or after it died.

    ``read(after)`` continues after the record whose seq was ``after``. The same reader resumes at its position; a new
    one first has to synchronize: it looks back for the end of the previous step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:
            head = file.read(FIXED.size)
            if len(head) < FIXED.size or not head.startswith(MAGIC):
                raise RingForeign(f"{path} is not a ring, or not complete yet")
            _, version, header_bytes, capacity, *about = FIXED.unpack(head)
            self._pid, self._ticks, self._mono, self._wall = about
            if version != VERSION:
                raise RingVersion(f"{path} has ring layout {version}; this Stepscope reads layout {VERSION}")
            if header_bytes != HEADER_BYTES or not MIN_CAPACITY <= capacity <= MAX_CAPACITY or self._pid >= MAX_PID:
                raise RingForeign(f"{path} has a damaged header")
            size = HEADER_BYTES + capacity * WORD_BYTES
            if file.seek(0, 2) < size:
                raise RingForeign(f"{path} is cut off")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self.capacity: int = capacity
        """How many words the ring holds. A writer further ahead than this overwrites unread words."""
        self._header = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._body = memoryview(self._map)[HEADER_BYTES:size].cast("Q")
        self._identity = RankIdentity(host="", pid=self._pid)
        self._facts: dict[str, Any] = {}
        self._groups: tuple[ProcessGroup, ...] = ()
        self._decoder = StreamDecoder()
        self._follows = False
        self._position = 0
        self._seen_head = 0

    def close(self) -> None:
        self._header.release()
        self._body.release()
        self._map.close()

    def head(self) -> int:
        """Return how many words were announced, without the cost of a whole ``header()``."""
        head: int = self._header[HEAD_WORD]
        return head

    def mark(self) -> tuple[int, int, bytes]:
        """Return a value that changes when the process writes a word or changes its state; compare it with ``==``."""
        head, first = self._header[HEAD_WORD], self._header[HEAD_WORD] % self.capacity
        return head, self._header[STATE_WORD], bytes(self._body[first : first + 2 * TURN_WORDS])

    def state(self) -> RingState:
        state = self._header[STATE_WORD]
        return RingState(state) if state in RingState._value2member_map_ else RingState.RUNNING

    def stack_offer(self) -> tuple[int, int] | None:
        """Return the signal that makes the process write its stack, and the descriptor used; None if not offered.

        Use it only while the main thread waits in the kernel: a running one might not survive it.
        """
        return self._offer(STACKS_WORD)

    def running_offer(self) -> tuple[int, int] | None:
        """Return the same for a main thread that runs. If it is not running, it answers when it runs again.

        The process writes the stack of the thread that trains, whether that is the main thread or another.
        """
        return self._offer(RUNNING_WORD)

    def worker_offer(self) -> tuple[int, int] | None:
        """Return the same for the process's forked DataLoader workers, which inherit the handler and the descriptor.

        Ask the kernel before each signal whether the worker still has both.
        """
        return self._offer(WORKERS_WORD)

    def training_thread(self) -> int:
        """Return faulthandler's number for the thread that trains; 0 for the main thread."""
        thread: int = self._header[TRAINS_WORD]
        return thread

    def thread_offer(self) -> tuple[int, int] | None:
        """Return the same for the stacks of all threads. Use it only while none of them can run Python."""
        return self._offer(THREADS_WORD)

    def _offer(self, at: int) -> tuple[int, int] | None:
        word = self._header[at]
        return (word & ((1 << STACKS_FD_SHIFT) - 1), word >> STACKS_FD_SHIFT) if word else None

    def server_offer(self) -> bool:
        """Return whether torch's worker server listens next to the ring."""
        return bool(self._header[SERVER_WORD])

    def header(self) -> RingHeader:
        words = self._header
        live_phase, live_since_ns, live_step = self.live()
        return RingHeader(
            pid=self._pid,
            start_ticks=self._ticks,
            anchor_mono_ns=self._mono,
            anchor_wall_ns=self._wall,
            head=words[HEAD_WORD],
            state=self.state(),
            live_phase=live_phase,
            live_since_ns=live_since_ns,
            live_step=live_step,
            hook_failures=words[HOOK_FAILURES_WORD],
            phase_names=self._phase_names(),
            identity=self._read_identity(),
            facts=self._read_facts(),
            groups=self._read_groups(),
        )

    def read(self, after: int) -> RingBatch:
        """Return all announced records after ``after``."""
        head = self.head()
        if head != self._seen_head:
            self._seen_head = head
            time.sleep(SETTLE_S)
        if after != self._position:
            self._find_way(after, head)
        decoder = self._decoder
        self._read_until(head)
        # Synchronizing starts before ``after``; another reader has already read the records up to there.
        slots = [slot for slot in decoder.records if SLOT_HEAD.unpack_from(slot)[3] > after]
        batch = RingBatch(slots=slots, last_seq=max(self._position, after), lost=decoder.lost, torn=decoder.torn)
        decoder.records, decoder.lost, decoder.torn = [], 0, 0
        return batch

    def follow_phases(self) -> None:
        """Make ``phase_changes`` report from now on."""
        self._follows = self._decoder.follows = True

    def phase_changes(self) -> list[tuple[int, int]]:
        """Return the new phase changes read so far, each with its time, for steps that are ``kept_by_itself``."""
        changes, self._decoder.changes = self._decoder.changes, []
        return changes

    def _read_until(self, end: int) -> None:
        """Read in pieces that never span two rounds, because the last words of a round may be unused."""
        while self._position < end:
            round_end = self._position - self._position % self.capacity + self.capacity
            until = min(end, round_end, self._position + CHUNK_WORDS)
            words = self._copy(self._position, until)
            # The writer may have wrapped around while we copied: do not trust what it can have touched by now.
            safe = min(self._oldest_safe(), end)
            if self._position < safe:
                self._decoder.resync()
                self._decoder.next_round()
                self._position = safe
                continue
            self._decoder.feed(words, self._position)
            self._position = until
            if until == round_end:
                self._decoder.next_round()

    def _oldest_safe(self) -> int:
        """Return the oldest word that cannot be overwritten before the next announcement and can be decoded from.

        The end of a round is unused from some word on. Only a reader that comes from before it knows where, so skip it.
        """
        oldest = max(self.head() - self.capacity + RESERVE_WORDS, 0)
        if oldest % self.capacity > self.capacity - RESERVE_WORDS:
            oldest += self.capacity - oldest % self.capacity
        return oldest

    def _copy(self, begin: int, end: int) -> list[int]:
        first = begin % self.capacity
        return self._body[first : first + end - begin].tolist()

    def _find_way(self, after: int, head: int) -> None:
        """Move to an end of a step before ``after``, so that the step in progress there is read from its beginning."""
        self._decoder = StreamDecoder()
        self._decoder.follows = self._follows
        after = min(after, head)
        begin = max(self._oldest_safe(), after - CHUNK_WORDS)
        if begin:
            self._decoder.resync(knowing_step=False)
        self._position = min(begin, after)
        self._read_until(after)
        self._decoder.lost = 0

    def live(self) -> LivePhase:
        """Return the current phase, its start and its step, from the last words, announced or not."""
        return live_phase(self._body, self.head())

    def is_between_steps(self, since_ns: int) -> bool:
        """Return whether the stretch with this ``live`` start lies between two steps, from the last words."""
        return is_between_steps(self._body, self.head(), since_ns)

    def recent_shares(self) -> tuple[float, ...]:
        """Return each phase's share of the last steps' time, from the last words."""
        return recent_shares(self._body, self.head())

    def latest_phase_ns(self) -> tuple[float, ...]:
        """Return how long each phase takes in a step now, from the last words; empty if there were too few steps."""
        return latest_phase_ns(self._body, self.head())

    def stretch_end_ns(self, since_ns: int) -> int | None:
        """Return when the stretch with this ``live`` start ended; None if it continues or is long past."""
        return stretch_end_ns(self._body, self.head(), since_ns)

    def stretch_at(self, begin_ns: int, end_ns: int) -> tuple[LivePhase, bool] | None:
        """Return the stretch that contains that time, and whether it is between two steps; None if no stretch does."""
        return stretch_at(self._body, self.head(), begin_ns, end_ns)

    def last_collective(self) -> LastCollective | None:
        """Return the collective that the process waits for or called last; None if there was none recently."""
        return last_collective(self._body, self.head())

    def _phase_names(self) -> tuple[str, ...]:
        user = (
            shown_name(self._map[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace"))
            for at in range(NAMES_OFFSET, NAMES_OFFSET + (PHASE_SLOTS - len(BUILTIN_PHASES)) * NAME_BYTES, NAME_BYTES)
        )
        return (*BUILTIN_PHASES, *user)

    def _read_identity(self) -> RankIdentity:
        """Return the identity; while it is being rewritten, the last complete one."""
        text = self._read_block(IDENTITY_OFFSET, IDENTITY_BYTES)
        if text:
            try:
                self._identity = RankIdentity.from_json(text)
            except (ValueError, RecursionError):
                pass  # a foreign identity with a valid checksum: keep the previous one
        return self._identity

    def _read_facts(self) -> dict[str, Any]:
        """Return the facts, likewise; a new dict each time."""
        text = self._read_block(FACTS_OFFSET, FACTS_BYTES)
        if text:
            try:
                self._facts = checked_facts(json.loads(text))
            except (ValueError, RecursionError):
                pass
        return dict(self._facts)

    def _read_groups(self) -> tuple[ProcessGroup, ...]:
        text = self._read_block(GROUPS_OFFSET, GROUPS_BYTES)
        if text:
            try:
                self._groups = groups_from_json(json.loads(text))
            except (ValueError, RecursionError):
                pass
        return self._groups

    def _read_block(self, offset: int, limit: int) -> bytes:
        """Return a text of the header if its checksum matches, otherwise nothing."""
        length, crc = BLOCK_HEAD.unpack_from(self._map, offset)
        at = offset + BLOCK_HEAD.size
        text = self._map[at : min(at + min(length, limit), HEADER_BYTES)]
        return text if zlib.crc32(text) == crc else b""
