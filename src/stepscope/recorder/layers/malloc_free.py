"""What the C library keeps of memory that the process has freed.

glibc returns small and middle-sized blocks to the system only from the end of its heap, so a process may grow by
hundreds of megabytes while what it uses stays the same.  That is no leak: the finding ``memory_creep`` leaves it out.

Only the process itself can tell.  ``mallinfo2`` visits the blocks that are free (0.1 ms for a thousand), so it is
called once early, and again only after memory rose or fell by a lot; never again once it took long.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MallocFree", "free_in_glibc"]

LEAST_CHANGE = 16 << 20
"""Bytes by which the memory of the process must have changed since it was read, and the result since it was sent."""
LONGEST_NS = 5_000_000
"""Once a call took this long, there is no other."""
MOST_READINGS = 32
"""If there are more, every other one is dropped."""
UNIT = 1 << 16
"""In which they are published, in bytes."""
MOST_PUBLISHED = 14
MANY_RANKS, MANY_PUBLISHED = 64, 3
"""In large jobs fewer, since the hub keeps all facts that there ever were …"""
TOO_MANY_RANKS = 1024
"""… and in larger ones none."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


class MallocFree:
    def __init__(self, read: Callable[[], int] | None, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """``read``: the bytes that are kept now; None if that cannot be known."""
        self.world_size = 1
        self._read = read
        self._clock_ns = clock_ns
        self._readings: list[tuple[int, int]] = []
        """(step, bytes)."""
        self._used = 0
        """Memory of the process at the last of them."""
        self._published: int | None = None
        self._times_published = 0

    def add(self, step: int, used: int) -> dict[str, Any]:
        """Read it if the memory of the process, ``used``, has changed much; facts if what is kept has."""
        if self._read is None or (self._readings and abs(used - self._used) < LEAST_CHANGE):
            return {}
        began_ns = self._clock_ns()
        free = self._read()
        if self._clock_ns() - began_ns > LONGEST_NS:
            self._read = None
        self._used = used
        if len(self._readings) == MOST_READINGS:
            self._readings = self._readings[::2]
        self._readings.append((step, free))
        if self._published is None:
            self._published = free
        most = MOST_PUBLISHED if self.world_size <= MANY_RANKS else MANY_PUBLISHED
        enough = self._times_published == most or self.world_size > TOO_MANY_RANKS
        if enough or abs(free - self._published) < LEAST_CHANGE:
            return {}
        self._published = free
        self._times_published += 1
        steps, values = zip(*self._readings, strict=True)
        return {"malloc_free": {"step": list(steps), "bytes": [value // UNIT for value in values]}}


def free_in_glibc() -> Callable[[], int] | None:
    """How to read it; None with another C library, or with glibc older than 2.33."""
    try:
        mallinfo2 = ctypes.PyDLL(None).mallinfo2  # keeps the GIL: another thread would keep it for milliseconds
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2
    mallinfo2.argtypes = []
    return lambda: int(mallinfo2().fordblks)
