"""Reads the Flight Recorders of a node's ranks: a client for torch's worker server, and NCCL's read at intervals.

The server is a native thread in a rank that answers without the GIL; ``recorder/`` starts it in jobs with several
ranks. ``fr_trace_json`` is gloo's Flight Recorder, ``dump_nccl_trace_json`` is NCCL's. torch 2.15 has one recorder per
backend, selected by name (``?backend=nccl2``). ``dump_traceback`` needs the GIL, so its silence shows that the GIL is
held. Answers are untrusted: they are bounded in size and time, and only complete answers count.

NCCL's Flight Recorder of every rank on this node is read at intervals (``FlightReader``). It is a ring buffer of a few
thousand collectives, which the worker server returns as JSON. Two thousand entries take that thread 50 ms, and one read
a second had no measurable effect on training. But every read leaves memory allocated in the rank: building the answer
takes twelve times its size, and malloc keeps that for the thread that did it, 11 MB for two thousand entries. The
server has one thread per core and uses them in turn, so each read grows a rank by one such piece, up to two gigabytes
on a machine with 192 cores. Therefore:

- a rank is queried every second for its first eight answers, so that short runs have figures too; then every five
  seconds, during the first minutes and while the run is being viewed; then every half minute. A buffer of more than two
  thousand entries is read proportionally less often;
- it is not queried while it makes no steps and there is nothing left to learn. When it pauses for longer than ever
  before, it is queried soon, because it may be about to end;
- all ranks of a node together may keep one hundredth of the memory that the job may use. A rank that has its share is
  not queried again, unless its server has come back to the threads that answered first;
- only one query is pending at a time.

The result is a sample: overwritten steps are counted, not estimated. The memory that the ranks keep is reported with
their memory use, so that it is not mistaken for a leak in the job. The agent's loop continues while an answer arrives;
``agent/flight_records.py`` turns it into records.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from stepscope.agent.drain import RingDrain
from stepscope.agent.sampling.host import memory_limit_of
from stepscope.flight.dump import combined
from stepscope.records.paths import SERVER_SUFFIX, server_threads

if TYPE_CHECKING:
    from stepscope.agent.flight_records import FlightRecords

__all__ = [
    "FLIGHT",
    "NCCL_FLIGHT",
    "NEEDS_GIL",
    "FlightReader",
    "Questions",
    "ask_active",
    "ask_flights",
    "ask_servers",
]

Key = TypeVar("Key", bound=Hashable)

# -- Worker server ----------------------------------------------------------------------------------------------------

FLIGHT = "fr_trace_json"
NCCL_FLIGHT = "dump_nccl_trace_json"
NCCL2_FLIGHT = "fr_trace_json?backend=nccl2"
"""For ProcessGroupNCCL2 (torch 2.15). Older versions ignore the backend and answer for gloo."""
ACTIVE = "?includecollectives=true&onlyactive=true"
"""For NCCL's own recorder: skips finished collectives, which takes 2 ms instead of 50."""
HAS_CALLS = b'"entries"'
"""Appears in the dump of a Flight Recorder that has recorded anything."""
OF_NCCL = b'"profiling_name":"nccl'
NEEDS_GIL = "dump_traceback"

MAX_BODY = 32 << 20
"""Limit for one answer. Two thousand entries take one MiB."""
MAX_HEAD = 1 << 14
CHUNK = 1 << 18


class _Call:
    """One pending request."""

    def __init__(self, path: Path, handler: str, max_body: int) -> None:
        """Raise OSError if no server listens there."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        head = f"POST /handler/{handler} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self._to_send = head.encode()
        self._received = bytearray()
        self._max_body = max_body
        self.answer: bytes | None = None

    def send(self) -> bool:
        """Send more of the request; return whether all of it is sent. Raise OSError if the other end is gone."""
        self._to_send = self._to_send[self.socket.send(self._to_send) :]
        return self.sent

    @property
    def sent(self) -> bool:
        return not self._to_send

    def receive(self) -> bool:
        """Receive more; return whether it is over: answered, refused, truncated or too long."""
        data = self.socket.recv(CHUNK)
        self._received += data
        head, gap, _ = bytes(self._received[:MAX_HEAD]).partition(b"\r\n\r\n")
        if not gap:
            return not data or len(self._received) >= MAX_HEAD
        length = _length(head)
        if length is None or length > self._max_body:
            return True
        start = len(head) + len(gap)
        if len(self._received) - start < length:
            return not data
        self.answer = bytes(self._received[start : start + length])
        return True


class Questions(Generic[Key]):
    """The same question to many servers. Leaving the context cancels pending requests."""

    def __init__(self, servers: Mapping[Key, Path], handler: str, *, max_body: int = MAX_BODY) -> None:
        self.answers: dict[Key, bytes] = {}
        """The bodies of the complete answers (status 200) so far."""
        self._calls: dict[Key, _Call] = {}
        """Pending requests."""
        self._selector = selectors.DefaultSelector()
        for key, path in servers.items():
            try:
                call = _Call(path, handler, max_body)
            except (OSError, ValueError):
                continue  # no server listens, its queue is full, or the path is too long for a socket
            self._calls[key] = call
            self._selector.register(call.socket, selectors.EVENT_WRITE, (key, call))

    def __enter__(self) -> Questions[Key]:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for call in self._calls.values():
            call.socket.close()

    def wait(self, patience_s: float) -> None:
        """Wait until all requests are over, but not longer than ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while self._calls:
            for ready, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                key, call = ready.data
                if _over(self._selector, ready, call):
                    self._end(key, call)
            if time.monotonic() >= deadline:
                return

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``wait`` would have something to do."""
        return self._selector.fileno()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._calls

    def unanswered(self, key: Key) -> bool:
        """Return whether its server took the question and has not answered yet."""
        self.wait(0.0)
        return key in self._calls and self._calls[key].sent

    def _end(self, key: Key, call: _Call) -> None:
        self._selector.unregister(call.socket)
        self._calls.pop(key).socket.close()
        if call.answer is not None:
            self.answers[key] = call.answer


def ask_servers(
    servers: Mapping[Key, Path], handler: str, *, patience_s: float, max_body: int = MAX_BODY
) -> dict[Key, bytes]:
    """Return the bodies of the complete answers (status 200) that arrived in time."""
    with Questions(servers, handler, max_body=max_body) as questions:
        questions.wait(patience_s)
        return questions.answers


def ask_flights(servers: Mapping[Key, Path], *, patience_s: float) -> dict[Key, bytes]:
    """Return the ranks' Flight Recorders: gloo's, NCCL's, or both in one document (``flight/dump.py``)."""
    deadline = time.monotonic() + patience_s
    gloo = ask_servers(servers, FLIGHT, patience_s=patience_s)
    heard = {key: servers[key] for key in gloo}
    nccl = ask_servers(heard, NCCL_FLIGHT, patience_s=max(0.0, deadline - time.monotonic()))
    nccl |= _ask_nccl2(heard, nccl, patience_s=max(0.0, deadline - time.monotonic()))
    return {key: combined(nccl.get(key, b""), answer) for key, answer in gloo.items()}


def ask_active(servers: Mapping[Key, Path], *, patience_s: float) -> dict[Key, bytes]:
    """Return the unfinished collectives of NCCL's recorders. This is cheap enough to be done twice."""
    deadline = time.monotonic() + patience_s
    answers = ask_servers(servers, NCCL_FLIGHT + ACTIVE, patience_s=patience_s)
    return answers | _ask_nccl2(servers, answers, patience_s=max(0.0, deadline - time.monotonic()))


def _ask_nccl2(servers: Mapping[Key, Path], nccl: Mapping[Key, bytes], *, patience_s: float) -> dict[Key, bytes]:
    """Ask those servers that support NCCL but whose NCCL recorder knows no group."""
    unused = {key: servers[key] for key, answer in nccl.items() if HAS_CALLS not in answer and b'"ranks"' not in answer}
    answers = ask_servers(unused, NCCL2_FLIGHT, patience_s=patience_s) if unused else {}
    return {key: answer for key, answer in answers.items() if OF_NCCL in answer}


def _over(selector: selectors.BaseSelector, ready: selectors.SelectorKey, call: _Call) -> bool:
    try:
        if ready.events == selectors.EVENT_READ:
            return call.receive()
        if call.send():
            selector.modify(call.socket, selectors.EVENT_READ, ready.data)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def _length(head: bytes) -> int | None:
    """Return the body length of a successful answer; None for anything else."""
    status, *lines = head.split(b"\r\n")
    words = status.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        return None
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            value = value.strip()
            return int(value) if value.isdigit() and len(value) < 12 else None
    return None


# -- NCCL's Flight Recorder -------------------------------------------------------------------------------------------

HANDLERS = (NCCL_FLIGHT, *(f"{FLIGHT}?backend={name}" for name in ("nccl2", "nccl", "nccl-lazy")))
"""Since torch 2.15 NCCL may be ProcessGroupNCCL2, whose recorder is one of several and has a name."""
LARGEST_DUMP = 64 << 20
BUFFER = 2000
"""Entries that torch keeps by default. The actual number shows once the first entry is overwritten."""
LEAST_S = 0.5
FIRST_ANSWERS, FIRST_S = 8, 1.0
"""The minimum number of server threads."""
EARLY_S, EARLY_FOR_S = 5.0, 300.0
USUAL_S = 30.0
QUIET_S, QUIET_AT_MOST_S, QUIETER = 0.3, 10.0, 1.5
"""A rank whose ring has been quiet for longer than ever before may be about to end."""
KEPT_PER_BYTE = 12.5
"""Bytes that malloc keeps for the thread that built an answer, per byte of it (11.5 MB for 0.94 MB, glibc 2.36)."""
KEPT_SHARE = 0.01
"""The share of the job's memory that all ranks of a node together may keep."""
PATIENCE_S = 10.0
MOST_APART_S = 60.0
"""The longest interval for a server that does not answer or has a very large buffer."""
IDENTITY_S = 1.0
"""How often to check whether a rank uses NCCL by now."""


class _Rank:
    def __init__(self, drain: RingDrain, records: FlightRecords, now_s: float, threads: int) -> None:
        self.drain, self.records = drain, records
        self.since_s = self.requested_s = self.answered_s = self.moved_s = now_s
        self.handler = 0
        self.answered = False
        """Whether the handler is the right one."""
        self.failures = 0
        self.buffer = BUFFER
        self.per_s = 0.0
        """Recent entries per second."""
        self.head = self.requested_head = -1
        self.answers = 0
        self.longest_quiet_s = 0.0
        self.answer_bytes: deque[int] = deque(maxlen=threads)
        """Bytes that each thread of its server keeps, for the answers so far."""

    def due_s(self, now_s: float, *, watched: bool, most_kept: float) -> float:
        """Return when to ask it next; infinity means not now. ``most_kept`` limits the bytes its server may keep."""
        head = self.drain.reader.head()
        if head != self.head:
            if self.head >= 0:
                self.longest_quiet_s = max(self.longest_quiet_s, now_s - self.moved_s)
            self.head, self.moved_s = head, now_s
        if head == self.requested_head and not self.records.waiting:
            return float("inf")
        if self.failures:
            return self.requested_s + min(LEAST_S * float(1 << min(self.failures, 10)), MOST_APART_S)
        if self.has_its_share(most_kept):
            return float("inf")
        early = watched or now_s - self.since_s < EARLY_FOR_S
        usual_s = FIRST_S if self.answers < FIRST_ANSWERS else EARLY_S if early else USUAL_S
        usual_s = min(usual_s * max(1.0, self.buffer / BUFFER), MOST_APART_S)
        quiet_s = min(max(QUIETER * self.longest_quiet_s, QUIET_S), QUIET_AT_MOST_S)
        if head != self.requested_head and now_s - self.moved_s >= quiet_s:
            usual_s = LEAST_S
        return self.requested_s + usual_s

    def has_its_share(self, most_kept: float) -> bool:
        """Return whether another answer might exceed that. Two answers are always allowed."""
        if len(self.answer_bytes) < 2 or len(self.answer_bytes) == self.answer_bytes.maxlen:
            return False
        return sum(self.answer_bytes) + max(self.answer_bytes) > most_kept


class FlightReader:
    """Reads the recorders of all ranks on this node.

    ``wall_offset_ns`` returns how far the wall clock is ahead of the rings' clock. It takes the largest of three
    readings, because an interruption between the two clocks makes the result too small.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        ring_clock: Callable[[], int] = time.perf_counter_ns,
        wall_offset_ns: Callable[[], int] = lambda: max(time.time_ns() - time.perf_counter_ns() for _ in range(3)),
        threads: int | None = None,
        memory: Callable[[int], int] = memory_limit_of,
    ) -> None:
        self._threads = threads or server_threads()
        self._memory = memory
        self._most_kept = 0.0
        self._clock, self._ring_clock, self._wall_offset_ns = clock, ring_clock, wall_offset_ns
        self._ranks: dict[RingDrain, _Rank] = {}
        self._checked_s: dict[RingDrain, float] = {}
        self._pending: tuple[_Rank, Questions[int], float, int] | None = None
        """The rank, the question, and when it was asked, on our clock and on the rings' clock."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when there is something to ``receive``; None without a query."""
        return self._pending[1].fileno() if self._pending is not None else None

    def poll(self, drains: Iterable[RingDrain], *, watched: bool) -> None:
        """Ask the rank that has been due longest, unless a question is pending."""
        now_s = self._clock()
        for drain in drains:
            if drain not in self._ranks:
                self._adopt(drain, now_s)
        if self._pending is not None:
            self.receive()
        if self._pending is not None:
            return
        most = self._most_kept / max(len(self._ranks), 1)
        due = [
            (rank.due_s(now_s, watched=watched, most_kept=most), number)
            for number, rank in enumerate(self._ranks.values())
        ]
        when_s, number = min(due, default=(float("inf"), 0))
        if when_s <= now_s:
            self._ask(list(self._ranks.values())[number], now_s)

    def receive(self) -> None:
        """Take what has arrived of the answer so far, without waiting."""
        if self._pending is None:
            return
        rank, question, since_s, sent_ns = self._pending
        question.wait(0.0)
        if question.over:
            self._close()
            self._take(rank, question.answers.get(0), since_s, sent_ns)
        elif self._clock() - since_s > PATIENCE_S:
            self._close()
            rank.failures += 1

    def kept_bytes(self, drain: RingDrain) -> int | None:
        """Return the bytes that its process keeps for answers; None if it was never asked."""
        rank = self._ranks.get(drain)
        return sum(rank.answer_bytes) if rank is not None and rank.answer_bytes else None

    def forget(self, drain: RingDrain) -> None:
        """Forget a rank whose process is gone."""
        if self._pending is not None and self._pending[0].drain is drain:
            self._close()
        self._ranks.pop(drain, None)
        self._checked_s.pop(drain, None)

    def close(self) -> None:
        self._close()
        self._ranks.clear()

    def _close(self) -> None:
        if self._pending is not None:
            with self._pending[1]:
                self._pending = None

    def _adopt(self, drain: RingDrain, now_s: float) -> None:
        if not drain.reader.server_offer() or now_s - self._checked_s.get(drain, float("-inf")) < IDENTITY_S:
            return
        self._checked_s[drain] = now_s
        if "nccl" in drain.reader.header().identity.backend:
            self._ranks[drain] = _Rank(drain, drain.record_flights(), now_s, self._threads)
            self._most_kept = KEPT_SHARE * self._memory(drain.header.pid)

    def _ask(self, rank: _Rank, now_s: float) -> None:
        rank.requested_s = now_s
        if not rank.drain.reader.server_offer():
            rank.failures += 1  # it is about to end, or the offer was withdrawn
            return
        rank.requested_head = rank.drain.reader.head()
        sent_ns = self._ring_clock()
        path = rank.drain.reader.path.with_suffix(SERVER_SUFFIX)
        question = Questions({0: path}, HANDLERS[rank.handler], max_body=LARGEST_DUMP)
        self._pending = rank, question, now_s, sent_ns
        self.receive()

    def _take(self, rank: _Rank, body: bytes | None, since_s: float, sent_ns: int) -> None:
        from stepscope.agent.flight_records import read_dump

        dump = read_dump(body) if body is not None else None
        if dump is None or not (dump.entries or rank.answered):
            rank.handler = rank.handler if rank.answered else (rank.handler + 1) % len(HANDLERS)
            if not rank.answered and rank.handler:
                rank.requested_s = float("-inf")  # an empty answer is quick, and the next handler may be right
        if dump is None:
            # A missing handler answers immediately; wait only after all of them failed.
            rank.failures += rank.answered or rank.handler == 0
            return
        rank.failures = 0
        rank.answers += 1
        rank.answer_bytes.append(int(KEPT_PER_BYTE * len(body or b"")))
        if dump.entries:
            rank.answered = True
            if dump.entries[0].record_id or len(dump.entries) > rank.buffer:
                rank.buffer = len(dump.entries)
        before = rank.records.last_id
        new = rank.records.take(
            dump, sent_ns=sent_ns, wall_offset_ns=self._wall_offset_ns(), heard_ns=self._ring_clock()
        )
        passed = max(rank.records.last_id - before, new) if before >= 0 else new
        rank.per_s = passed / max(since_s - rank.answered_s, LEAST_S)
        rank.answered_s = since_s
