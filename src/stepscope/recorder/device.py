"""Device time of the phases, and numbers from the device, with CUDA events that are never waited for.

In a timed step, one pooled event is recorded on the current stream at each change of phase, also around host-only
phases such as input: the device may have been idle during them.  At later step ends the oldest pending step is queried
(``query``) whether its last event has passed; if so its times are read and written.  The host never blocks, and a step
killed before its events passed simply has no device times.

Timing a step costs the host about 150 µs, so short steps are timed only now and then: one of each ``every`` steps, a
power of two, so that the cost stays around 0.1%.  Which one of them varies (``timed_step``): loops log, and DDP waits
for its device, every 10 or 100 steps, and timing every 4th step would always hit those.  All ranks time the same steps.
A run's first steps are timed more often, so that a short run has device times, too.  Steps shorter than 1.5 ms are not
timed at all.

Events, and the timer that holds them, are never destroyed (``recorder/guard.py``): a forked child that destroys a CUDA
event aborts.  They are reused instead; a timer ends up with as many as a few steps need.

The time between two events counts for the phase that ended with the second one.  It is time on the stream's clock: when
the host is the bottleneck it contains the gaps in which the device waited for work.

Layers of sampled steps are timed in the same way (``StreamMarks``).  Losses, norms and checksums are copied to the host
in the background and read once their event has passed (``Scalars``).

Where the stream waits for a collective (``recorder/hooks/ddp.py``), an event before and one after it take that time out
of the phase: it is ``comm``, like waiting on the host.  Only this shows which rank the others wait for.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe, immortal
from stepscope.recorder.ledger import Ledger
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import COMM, FORWARD, OTHER, PHASE_SLOTS
from stepscope.ring.layout import ALLOCATED, DEVICE_PHASE, DEVICE_STEP, PEAK_ALLOCATED, RESERVED, data_word

__all__ = ["DeviceTimer", "Scalars", "StreamMarks", "device_timer", "timed_step"]

MEMORY_INTERVAL_NS = 100_000_000
"""Reading the allocator's statistics costs 47 µs: read them at most this often."""
MAX_PENDING = 64
"""Steps whose events have not passed; beyond this the device is not timed until it has caught up."""
TIMED_STEP_COST_NS = 150_000
"""Cost of timing a step with a usual number of marks …"""
USUAL_MARKS, MARK_COST_NS = 16, 6_000
"""… and of each additional mark: where each layer waits for its parameters there are hundreds."""
COST_SHARE = 0.001
"""The share of the steps' time that timing may cost overall."""
MAX_EVERY = 64
SHORTEST_STEP_NS = 10 * TIMED_STEP_COST_NS
"""Timing would make a shorter step a tenth longer, so its device times would not be representative."""
DENSE_STEPS, DENSE_EVERY = 128, 4
"""Among the first ``DENSE_STEPS`` steps, at least one in ``DENSE_EVERY`` is timed."""
MOST_MARKS = 1024
"""A step with more marks is not timed."""
MOST_STREAM_MARKS = 4_096
"""Of layers; a step with more has the host's times of them."""
PACE_STEPS = 16
"""How often, in steps, the timing rate is recomputed."""
SLOWER, DENSE_AGAIN_AFTER = 1.1, 2 * DENSE_STEPS
"""Steps that became this much longer are timed more often for a while, as at the start; half of the time at most."""


def device_timer(identity: RankIdentity, now: Callable[[], int]) -> DeviceTimer | None:
    """A timer for the device this process uses; None if only host times are available."""
    if not identity.device_timed:
        return None
    return immortal(DeviceTimer(sys.modules["torch"], identity.device_index, now))


def timed_step(first: int, every: int) -> int:
    """The first timed step from ``first`` on, if one in ``every`` (a power of two) is timed.

    Of two neighboring blocks of half the length, a hash picks the one that provides the step.  So each block of
    ``every`` contains one timed step, and ranks that time fewer steps time some of those that the others time.
    """
    block = first // every
    while True:
        step, length = block, every
        while length > 1:
            length //= 2
            coin = ((step + 1) * 0x9E3779B97F4A7C15 ^ length * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
            coin = (coin ^ coin >> 29) * 0xBF58476D1CE4E5B9
            step = 2 * step + (coin >> 40 & 1)
        if step >= first:
            return step
        block += 1


class DeviceTimer:
    """Owned by the recorder; called on the training thread only.

    A mark is ``(phase that ended, event)``.  If consecutive steps are timed, the last mark of one is the first of the
    next: its event is free when the later one has been read.
    """

    def __init__(self, torch: Any, index: int, now: Callable[[], int]) -> None:
        self._index = index
        self._now = now
        self._event = torch.cuda.Event
        self._record = torch._C._CudaEventBase.record
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._capturing = torch._C._cuda_isCurrentStreamCapturing
        self._statistics = torch._C._cuda_memoryStats
        self._current_stream = torch.cuda.current_stream
        self._streams: dict[int, Any] = {}
        self._pool: list[Any] = []
        self._marks: list[tuple[int, Any]] = []
        self._in_loss = False
        self._stalled = False
        self._home = 0
        """The stream on which the current step is timed."""
        self._most_marks = 0
        self._too_many = False
        self._pending: deque[_Pending] = deque()
        self._memory_at = now() - MEMORY_INTERVAL_NS
        self._every = DENSE_EVERY
        self._pace_at = now()
        self._pace_step = 0
        self._usual_ns = 0.0
        self._dense_until, self._dense_again_at = DENSE_STEPS, 0

    @failsafe
    def mark(self, ended: int, begun: int) -> None:
        if not self._marks or self._capturing():
            return
        if ended == FORWARD and begun == OTHER:
            self._in_loss = True  # what follows until the next phase is the loss, as on the host
            return
        if self._in_loss and ended == OTHER:
            ended = FORWARD
        self._in_loss = False
        if self._stalled:
            ended, self._stalled = COMM, False
        self._marks.append((ended, self._now_event()))

    @failsafe
    def stall_begins(self, phase: int) -> bool:
        """The stream, in ``phase``, is about to wait for a collective: until ``stall_ends`` or the next mark.

        Also called on autograd's threads while the training thread waits for them.  Returns False if this is not timed.
        """
        if not self._marks or self._raw_stream(self._index) != self._home or self._capturing():
            return False
        if len(self._marks) >= MOST_MARKS:
            self._too_many = True  # hundreds of micro-batches: half of its waits would be worse than none
            return False
        self._marks.append((COMM if self._stalled else phase, self._now_event()))
        self._stalled = True
        return True

    @failsafe
    def stall_ends(self) -> None:
        if self._stalled and self._marks:
            self._stalled = False
            self._marks.append((COMM, self._now_event()))

    def end_step(self, step: int, ended: int, ledger: Ledger) -> int:
        """End a step on the host, in the phase ``ended``: write the times now known, and begin the next step.

        Returns the next step at whose end to call this: the one before a timed step, and the timed step itself.
        """
        timed = self._every > 0 and timed_step(step + 1, self._every) == step + 1 and len(self._pending) < MAX_PENDING
        if self._capturing():
            self.drop_step(ledger)  # even a query is not allowed during a graph capture
            return step + 1
        if timed or self._marks:
            border = (COMM if self._stalled else ended, self._now_event())
            self._home = self._raw_stream(self._index)
            if self._too_many:
                self._pool += [event for _, event in self._marks[1:]]
                self._release(self._marks[0][1])
                self._marks, self._most_marks, self._too_many = [], 10 * MOST_MARKS, False
            if self._marks:
                self._marks.append(border)
                self._most_marks = max(self._most_marks, len(self._marks))
                self._pending.append(_Pending(step, self._marks, shares_last=timed))
            self._marks = [border] if timed else []
            self._in_loss = self._stalled = False
        ledger.device = self if timed else None
        if self._pending and self._pending[0].marks[-1][1].query():
            self._resolve(self._pending.popleft(), ledger)
        if step - self._pace_step >= PACE_STEPS:
            self._reckon(step)
        if timed:
            return step + 1
        return timed_step(step + 2, self._every) - 1 if self._every else step + PACE_STEPS

    def drop_step(self, ledger: Ledger) -> None:
        """Stop timing the current step, because a graph is being captured."""
        ledger.device = None
        marks, self._marks = self._marks, []
        self._stalled = self._too_many = False
        if marks:
            self._pool += [event for _, event in marks[1:]]
            self._release(marks[0][1])

    def _release(self, first: Any) -> None:
        """Release the first event of an abandoned step, which may be the last one of the step before."""
        if self._pending and self._pending[-1].marks[-1][1] is first:
            self._pending[-1].shares_last = False
        else:
            self._pool.append(first)

    def memory(self) -> tuple[int, ...]:
        """Bytes allocated, reserved and allocated at peak, as data words; none if called again too soon."""
        now = self._now()
        if now - self._memory_at < MEMORY_INTERVAL_NS:
            return ()
        self._memory_at = now
        statistics = self._statistics(self._index)
        allocated = statistics["allocated_bytes"]["all"]
        reserved = statistics["reserved_bytes"]["all"]["current"]
        return (
            data_word(ALLOCATED, allocated["current"]),
            data_word(RESERVED, reserved),
            data_word(PEAK_ALLOCATED, allocated["peak"]),
        )

    def _reckon(self, step: int) -> None:
        """Compute how many steps to time: the shorter they are, the fewer."""
        now = self._now()
        step_ns = max((now - self._pace_at) // (step - self._pace_step), 1)
        self._pace_at, self._pace_step = now, step
        if step_ns < SHORTEST_STEP_NS:
            self._every = 0
            return
        if self._usual_ns and step_ns > SLOWER * self._usual_ns and step >= self._dense_again_at:
            self._dense_until, self._dense_again_at = step + DENSE_STEPS, step + DENSE_AGAIN_AFTER
        # Up at once, so that one change is reported once; down slowly.
        self._usual_ns = max(step_ns, self._usual_ns + (step_ns - self._usual_ns) / 8) if self._usual_ns else step_ns
        cost_ns = TIMED_STEP_COST_NS + max(self._most_marks - USUAL_MARKS, 0) * MARK_COST_NS
        wanted = cost_ns / (COST_SHARE * step_ns)
        most = (
            DENSE_EVERY if step < self._dense_until else max(MAX_EVERY, MAX_EVERY * cost_ns // (8 * TIMED_STEP_COST_NS))
        )
        self._every = 1
        while self._every < min(wanted, most):
            self._every *= 2

    def _now_event(self) -> Any:
        raw = self._raw_stream(self._index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = self._current_stream(self._index)
        event = self._pool.pop() if self._pool else self._event(enable_timing=True)
        self._record(event, stream)
        return event

    def _resolve(self, pending: _Pending, ledger: Ledger) -> None:
        marks = pending.marks
        phases = [0] * PHASE_SLOTS
        before = marks[0][1]
        for phase, event in marks[1:]:
            phases[phase] += max(int(before.elapsed_time(event) * 1e6), 0)
            before = event
        self._pool += [event for _, event in (marks[:-1] if pending.shares_last else marks)]
        spent = (data_word(DEVICE_PHASE + slot, ns) for slot, ns in enumerate(phases) if ns)
        ledger.put(data_word(DEVICE_STEP, pending.step), *spent)


class _Pending:
    """A timed step whose events have not been read yet."""

    __slots__ = ("marks", "shares_last", "step")

    def __init__(self, step: int, marks: list[tuple[int, Any]], *, shares_last: bool) -> None:
        self.step = step
        self.marks = marks
        self.shares_last = shares_last
        """Whether the next timed step begins with the last event of this one."""


class StreamMarks:
    """Points of time on the stream, as CUDA events; immortal (``recorder/guard.py``), and the events are used again."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._device: int | None = None
        self._events: list[Any] = []
        self._used = 0

    def start(self, device: int | None) -> None:
        """Forget the marks; the next ones are on this device, which need not be the current one."""
        self._used = 0
        if device != self._device:
            self._device, self._events = device, []  # an event belongs to the device that it was first used on

    @property
    def complete(self) -> bool:
        return 0 < self._used <= MOST_STREAM_MARKS

    def mark(self) -> int:
        """Mark this point of the device's current stream; the number of the mark."""
        at = self._used
        self._used += 1
        if at < MOST_STREAM_MARKS:
            if at == len(self._events):
                self._events.append(immortal(self._torch.cuda.Event(enable_timing=True)))
            self._events[at].record(self._torch.cuda.current_stream(self._device))
        return at

    def passed(self) -> bool:
        """Whether the device has passed all of them; never waits."""
        return all(event.query() for event in reversed(self._events[: self._used]))

    def read(self) -> list[float]:
        """The time of each, in microseconds after the first; all of them have passed."""
        first = self._events[0]
        return [first.elapsed_time(event) * 1e3 for event in self._events[: self._used]]


class Scalars:
    """Small tensors that are read together: at once on the CPU; from a GPU in the background.

    Holds events and pinned memory, so it is immortal (``recorder/guard.py``), and both are used again.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._lists: list[list[Any]] = []
        self._copies: list[tuple[int, Any, int]] = []
        """Which list, the pinned memory in which it arrives, and how many numbers."""
        self._events: list[Any] = []
        self._free_events: list[Any] = []
        self._pinned: dict[tuple[int, Any], Any] = {}

    def start(self) -> None:
        self._lists = []
        self._copies = []

    def add(self, tensors: list[Any]) -> int:
        """Read these too, numbers or one list of them; returns what to ask ``numbers`` for."""
        self._lists.append(tensors)
        return len(self._lists) - 1

    def send(self) -> None:
        for which, tensors in enumerate(self._lists):
            if not tensors:
                continue
            joined = tensors[0] if tensors[0].ndim else self._torch.stack(tensors)
            if joined.is_cpu:
                self._lists[which] = joined.tolist()
            else:
                self._copies.append((which, self._copy(which, joined), len(joined)))

    def arrived(self) -> bool:
        """Whether all numbers are here; never waits."""
        if self._events and not all(event.query() for event in self._events):
            return False
        self._free_events += self._events
        self._events = []
        for which, pinned, count in self._copies:
            self._lists[which] = pinned[:count].tolist()
        self._copies = []
        return True

    def numbers(self, which: int) -> list[Any]:
        return self._lists[which]

    def _copy(self, which: int, joined: Any) -> Any:
        torch = self._torch
        room = self._pinned.get((which, joined.dtype))
        if room is None or len(room) < len(joined):
            room = immortal(torch.empty(2 * len(joined), dtype=joined.dtype, pin_memory=True))
            self._pinned[which, joined.dtype] = room
        room[: len(joined)].copy_(joined, non_blocking=True)
        event = self._free_events.pop() if self._free_events else immortal(torch.cuda.Event())
        event.record(torch.cuda.current_stream(joined.device))
        self._events.append(event)
        return room
