"""Reads NCCL's Flight Recorder of every rank on this node, often enough that little of it is overwritten unread.

The recorder in a rank is a ring buffer of some thousand collectives; torch's worker server hands it out as JSON, from a
native thread and without the GIL (``worker_server.py``).  Two thousand entries take that thread 50 ms, and one read a
second could not be measured in the training, so:

- a rank is asked when half of its buffer may have filled since the last time, at least every five seconds (two while
  somebody looks on, one in the first minute, so that short runs have figures too), and at most twice a second; a
  buffer of more than two thousand entries takes longer to hand out, and is asked for as much more rarely;
- it is not asked while it makes no steps and nothing is left to learn; when it stops making them it is asked soon,
  since that may be the end;
- one rank is asked at a time.

A job that fills the buffer faster than that is sampled: the steps that were overwritten are counted, not guessed.
The agent's loop goes on while an answer comes; ``flight_records.py`` makes records of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stepscope.agent.drain import RingDrain
from stepscope.agent.worker_server import FLIGHT, NCCL_FLIGHT, Questions
from stepscope.records.places import SERVER_SUFFIX

if TYPE_CHECKING:
    from stepscope.agent.flight_records import FlightRecords

__all__ = ["FlightReader"]

HANDLERS = (NCCL_FLIGHT, *(f"{FLIGHT}?backend={name}" for name in ("nccl2", "nccl", "nccl-lazy")))
"""From torch 2.15 on NCCL may be ProcessGroupNCCL2, whose recorder is one of several and has a name."""
MAX_BODY = 64 << 20
BUFFER = 2000
"""Entries that torch keeps unless it is told otherwise; how many it is shows once the first is overwritten."""
LEAST_S = 0.5
NEW_S, NEW_FOR_S = 1.0, 60.0
WATCHED_S = 2.0
USUAL_S = 5.0
QUIET_S = 0.3
"""Without a new word in its ring for so long, a rank may be at its end."""
PATIENCE_S = 10.0
MOST_APART_S = 60.0
"""Between two tries to ask a server that does not answer, or one with a very large buffer."""
IDENTITY_S = 1.0
"""How often to look whether a rank uses NCCL by now."""


class _Rank:
    def __init__(self, drain: RingDrain, records: FlightRecords, now_s: float) -> None:
        self.drain, self.records = drain, records
        self.since_s = self.asked_s = self.answered_s = self.moved_s = now_s
        self.handler = 0
        self.answered = False
        """Whether the handler is the right one."""
        self.failures = 0
        self.buffer = BUFFER
        self.per_s = 0.0
        """Entries, of late."""
        self.head = self.asked_head = -1

    def due_s(self, now_s: float, *, watched: bool) -> float:
        """When to ask it next; infinity: not now."""
        head = self.drain.reader.head()
        if head != self.head:
            self.head, self.moved_s = head, now_s
        if head == self.asked_head and not self.records.waiting:
            return float("inf")
        if self.failures:
            return self.asked_s + min(LEAST_S * float(1 << min(self.failures, 10)), MOST_APART_S)
        usual_s = NEW_S if now_s - self.since_s < NEW_FOR_S else WATCHED_S if watched else USUAL_S
        usual_s = min(usual_s * max(1.0, self.buffer / BUFFER), MOST_APART_S)
        if head != self.asked_head and now_s - self.moved_s >= QUIET_S:
            usual_s = LEAST_S
        filled_s = self.buffer / 2 / self.per_s if self.per_s else usual_s
        return self.asked_s + max(LEAST_S, min(usual_s, filled_s))


class FlightReader:
    """All ranks of this node.  ``wall_offset_ns``: by how much the wall clock is ahead of the rings' clock.

    (The largest of three: who is interrupted between the two clocks finds too little.)
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        ring_clock: Callable[[], int] = time.perf_counter_ns,
        wall_offset_ns: Callable[[], int] = lambda: max(time.time_ns() - time.perf_counter_ns() for _ in range(3)),
    ) -> None:
        self._clock, self._ring_clock, self._wall_offset_ns = clock, ring_clock, wall_offset_ns
        self._ranks: dict[RingDrain, _Rank] = {}
        self._looked_s: dict[RingDrain, float] = {}
        self._asked: tuple[_Rank, Questions[int], float, int] | None = None
        """Whom, what, since when, and that on the clock of the rings."""

    def fileno(self) -> int | None:
        """Readable when there is something to ``receive``; None while nobody is asked."""
        return self._asked[1].fileno() if self._asked is not None else None

    def look(self, drains: Iterable[RingDrain], *, watched: bool) -> None:
        """Ask the rank that is due longest, unless one is being asked."""
        now_s = self._clock()
        for drain in drains:
            if drain not in self._ranks:
                self._adopt(drain, now_s)
        if self._asked is not None:
            self.receive()
        if self._asked is not None:
            return
        due = [(rank.due_s(now_s, watched=watched), number) for number, rank in enumerate(self._ranks.values())]
        when_s, number = min(due, default=(float("inf"), 0))
        if when_s <= now_s:
            self._ask(list(self._ranks.values())[number], now_s)

    def receive(self) -> None:
        """What came of the answer so far, without waiting."""
        if self._asked is None:
            return
        rank, question, since_s, asked_ns = self._asked
        question.wait(0.0)
        if question.over:
            self._close()
            self._take(rank, question.answers.get(0), since_s, asked_ns)
        elif self._clock() - since_s > PATIENCE_S:
            self._close()
            rank.failures += 1

    def forget(self, drain: RingDrain) -> None:
        """Its process is gone."""
        if self._asked is not None and self._asked[0].drain is drain:
            self._close()
        self._ranks.pop(drain, None)
        self._looked_s.pop(drain, None)

    def close(self) -> None:
        self._close()
        self._ranks.clear()

    def _close(self) -> None:
        if self._asked is not None:
            with self._asked[1]:
                self._asked = None

    def _adopt(self, drain: RingDrain, now_s: float) -> None:
        if not drain.reader.server_offer() or now_s - self._looked_s.get(drain, float("-inf")) < IDENTITY_S:
            return
        self._looked_s[drain] = now_s
        if "nccl" in drain.reader.header().identity.backend:
            self._ranks[drain] = _Rank(drain, drain.record_flights(), now_s)

    def _ask(self, rank: _Rank, now_s: float) -> None:
        rank.asked_s = now_s
        if not rank.drain.reader.server_offer():
            rank.failures += 1  # it is about to end, or it was withdrawn
            return
        rank.asked_head = rank.drain.reader.head()
        asked_ns = self._ring_clock()
        path = rank.drain.reader.path.with_suffix(SERVER_SUFFIX)
        question = Questions({0: path}, HANDLERS[rank.handler], max_body=MAX_BODY)
        self._asked = rank, question, now_s, asked_ns
        self.receive()

    def _take(self, rank: _Rank, body: bytes | None, since_s: float, asked_ns: int) -> None:
        from stepscope.agent.flight_records import read_dump

        dump = read_dump(body) if body is not None else None
        if dump is None or not (dump.entries or rank.answered):
            rank.handler = rank.handler if rank.answered else (rank.handler + 1) % len(HANDLERS)
            if not rank.answered and rank.handler:
                rank.asked_s = float("-inf")  # an empty answer is quick, and the next one may be the right one
        if dump is None:
            # A handler that is not there answers at once; only a round of them that failed is a reason to wait.
            rank.failures += rank.answered or rank.handler == 0
            return
        rank.failures = 0
        if dump.entries:
            rank.answered = True
            if dump.entries[0].record_id or len(dump.entries) > rank.buffer:
                rank.buffer = len(dump.entries)
        before = rank.records.last_id
        new = rank.records.take(
            dump, asked_ns=asked_ns, wall_offset_ns=self._wall_offset_ns(), heard_ns=self._ring_clock()
        )
        passed = max(rank.records.last_id - before, new) if before >= 0 else new
        rank.per_s = passed / max(since_s - rank.answered_s, LEAST_S)
        rank.answered_s = since_s
