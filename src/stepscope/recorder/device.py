"""Device time of the phases, by CUDA events that nobody ever waits for.

At each change of phase that concerns the device one pooled event is recorded on the stream in use.  At later step ends
the oldest pending step is asked (``query``) whether its last event has passed; if so its times are read and written as
a DEVICE record.  The host never blocks, and a step killed before its events passed simply has no device times.

The time between two events counts for the phase that ended with the second one.  It is time on the stream's clock:
when the host is the bottleneck it holds the gaps in which the device waited for work.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import Ledger
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BACKWARD, COMM, EVAL, FORWARD, H2D, OPTIMIZER, PHASE_SLOTS
from stepscope.ring.words import ALLOCATED, DEVICE_PHASE, DEVICE_STEP, PEAK_ALLOCATED, RESERVED, data_word

__all__ = ["DeviceTimer", "device_timer"]

MEMORY_INTERVAL_NS = 5_000_000
"""The allocator's statistics cost 14 µs: read them at most this often."""
MAX_PENDING = 256
"""Steps whose events have not passed; beyond this the device is not timed until it caught up."""
RESOLVE_PER_STEP = 2

_ON_DEVICE = [slot in (H2D, FORWARD, BACKWARD, COMM, OPTIMIZER, EVAL) for slot in range(PHASE_SLOTS)]


def device_timer(identity: RankIdentity, now: Callable[[], int]) -> DeviceTimer | None:
    """A timer for the device this process uses; None where only host times can be had."""
    if not identity.device_timed:
        return None
    return DeviceTimer(sys.modules["torch"], identity.device_index, now)


class DeviceTimer:
    """Owned by the recorder; called on the training thread only.

    A pending step is ``(step, marks)``; a mark is ``(phase that ended, event)``.  The first mark of a step is the
    boundary event of the step before, shared between the two.
    """

    def __init__(self, torch: Any, index: int, now: Callable[[], int]) -> None:
        self._index = index
        self._event = torch.cuda.Event
        self._record = torch._C._CudaEventBase.record
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._capturing = torch._C._cuda_isCurrentStreamCapturing
        self._statistics = torch._C._cuda_memoryStats
        self._current_stream = torch.cuda.current_stream
        self._streams: dict[int, Any] = {}
        self._pool: list[Any] = []
        self._marks: list[tuple[int, Any]] = []
        self._pending: deque[tuple[int, list[tuple[int, Any]]]] = deque()
        self._memory: tuple[int, ...] = ()
        self._memory_at = now() - MEMORY_INTERVAL_NS

    @failsafe
    def mark(self, ended: int, begun: int) -> None:
        if self._marks and (_ON_DEVICE[ended] or _ON_DEVICE[begun]) and not self._capturing():
            self._marks.append((ended, self._now_event()))

    @failsafe
    def end_step(self, step: int, ledger: Ledger) -> None:
        """Close the step that just ended on the device's side too, and write what has become known."""
        if self._capturing():  # not even a query may be made while a graph is captured
            self._marks = []
            return
        border = (0, self._now_event())
        if self._marks:
            self._marks.append(border)
            self._pending.append((step, self._marks))
        self._marks = [border] if len(self._pending) < MAX_PENDING else []
        for _ in range(RESOLVE_PER_STEP):
            if not self._pending or not self._pending[0][1][-1][1].query():
                break
            self._resolve(*self._pending.popleft(), ledger)

    def memory(self, now: int) -> tuple[int, ...]:
        """Bytes allocated, reserved and allocated at the most so far, as data words; read now or a moment ago."""
        if now - self._memory_at >= MEMORY_INTERVAL_NS:
            self._memory_at = now
            statistics = self._statistics(self._index)
            allocated = statistics["allocated_bytes"]["all"]
            reserved = statistics["reserved_bytes"]["all"]["current"]
            self._memory = (
                data_word(ALLOCATED, allocated["current"]),
                data_word(RESERVED, reserved),
                data_word(PEAK_ALLOCATED, allocated["peak"]),
            )
        return self._memory

    def _now_event(self) -> Any:
        raw = self._raw_stream(self._index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = self._current_stream(self._index)
        event = self._pool.pop() if self._pool else self._event(enable_timing=True)
        self._record(event, stream)
        return event

    def _resolve(self, step: int, marks: list[tuple[int, Any]], ledger: Ledger) -> None:
        phases = [0] * PHASE_SLOTS
        before = marks[0][1]
        for phase, event in marks[1:]:
            phases[phase] += max(int(before.elapsed_time(event) * 1e6), 0)
            self._pool.append(before)
            before = event
        # The last event is the next step's first one and goes back to the pool with it.
        spent = (data_word(DEVICE_PHASE + slot, ns) for slot, ns in enumerate(phases) if ns)
        ledger.put(data_word(DEVICE_STEP, step), *spent)
