"""How much of the process's memory is free: freed by the program, and kept by the C library.

glibc returns small and middle-sized blocks to the system only from the end of its heap.  So a process may grow by
hundreds of megabytes while it uses no more than before, which is no leak; and while it lives on what was free, a leak
does not show in the size of the process at all.

Only the process itself can tell.  ``mallinfo2`` visits the blocks that are free (0.1 ms for a thousand), so the time
between two calls is a thousand times as long as the call; once it took long, there is no other.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MallocFree", "free_in_glibc"]

LONGEST_NS = 5_000_000
"""Of processor time: once a call took this long, there is no other."""
MOST_COST = 0.001
"""Of the time until the next call."""
MOST_READINGS = 24
"""If there are more, every other one is dropped, and fewer are added from then on."""
UNIT = 1 << 16
"""In which they are published, in bytes."""
LEAST_CHANGE = 16 << 20
"""Of what is free or used: then it is published for the first time …"""
PUBLISH_FACTOR, PUBLISH_RISE = 1.3, 64 << 20
"""… and again when the step is this many times as far, so that growth that has ended is seen to have ended; or when
more is free by so much than was ever published …"""
MANY_RANKS, MANY_PUBLISH_FACTOR, MANY_PUBLISH_RISE = 64, 8.0, 256 << 20
"""… in large jobs less often, since the hub keeps all facts that there ever were …"""
TOO_MANY_RANKS = 512
"""… and in larger ones never."""
MOST_RISES = 1 << 30
"""Bytes: beyond that, growth of what is free is reported like any other."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


class MallocFree:
    def __init__(self, read: Callable[[], int] | None, *, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        """``read``: the bytes that are free now; None if that cannot be known.

        ``clock_ns``: processor time, since on a busy machine any call may take long.
        """
        self.world_size = 1
        self._read = read
        self._clock_ns = clock_ns
        self._due_s = 0.0
        self._free = 0
        self._readings: list[tuple[int, int, int]] = []
        """(step, bytes that are free, memory of the process)."""
        self._apart = 0
        """Steps between two of them, at least."""
        self._published_at: int | None = None
        """The step."""
        self._most_published = 0
        """Bytes that were free."""
        self._rises = 0

    def read(self, step: int, now_s: float, resident: int) -> tuple[int, dict[str, Any]]:
        """Return the bytes that are free, as far as known, and facts if they or the others have changed.

        ``resident``: the memory of the process.
        """
        if self._read is None or now_s < self._due_s:
            return self._free, {}
        began_ns = self._clock_ns()
        self._free = self._read()
        took_ns = self._clock_ns() - began_ns
        self._due_s = now_s + took_ns / 1e9 / MOST_COST
        if took_ns > LONGEST_NS:
            self._read = None
        return self._free, self._add((step, self._free, resident))

    def _add(self, reading: tuple[int, int, int]) -> dict[str, Any]:
        step, free, resident = reading
        if not self._readings or step - self._readings[-1][0] >= self._apart:
            self._readings.append(reading)
        if len(self._readings) > MOST_READINGS:
            self._readings = self._readings[::2]
            self._apart = 2 * (step - self._readings[0][0]) // MOST_READINGS
        if self.world_size > TOO_MANY_RANKS or not self._is_due(step, free, resident):
            return {}
        self._published_at = step
        self._most_published = max(self._most_published, free)
        rows = [*self._readings, *([reading] if self._readings[-1] != reading else [])]
        names = ("step", "free", "resident")
        columns = ([step for step, _, _ in rows], *([row[at] // UNIT for row in rows] for at in (1, 2)))
        return {"malloc": dict(zip(names, columns, strict=True))}

    def _is_due(self, step: int, free: int, resident: int) -> bool:
        if self._published_at is None:
            _, free_before, resident_before = self._readings[0]
            used_more = (resident - free) - (resident_before - free_before)
            return abs(free - free_before) >= LEAST_CHANGE or abs(used_more) >= LEAST_CHANGE
        many = self.world_size > MANY_RANKS
        factor, rise = (MANY_PUBLISH_FACTOR, MANY_PUBLISH_RISE) if many else (PUBLISH_FACTOR, PUBLISH_RISE)
        if free - self._most_published >= rise and self._rises < MOST_RISES // rise:
            self._rises += 1
            return True
        return step >= factor * self._published_at


def free_in_glibc() -> Callable[[], int] | None:
    """How to read it; None with another C library, or with glibc older than 2.33."""
    try:
        mallinfo2 = ctypes.PyDLL(None).mallinfo2  # keeps the GIL: another thread would keep it for milliseconds
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2
    mallinfo2.argtypes = []
    return lambda: int(mallinfo2().fordblks)
