"""What the ranks of a small job exchanged in the last steps: the slots that tell of collectives, as they came.

For jobs in which all ranks are judged, and within bounds: a sum over ranks of whom some are missing would be wrong, so
beyond them nothing is kept at all, and the rules that need it find nothing.  The summary at the end has all of it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from stepscope.store.assemble import STEP_DTYPE

__all__ = ["Exchanges"]

MOST_RANKS = 256
KEPT_BYTES = 64 << 20


class Exchanges:
    def __init__(self, *, most_ranks: int = MOST_RANKS, kept_bytes: int = KEPT_BYTES) -> None:
        self._most_ranks, self._kept_bytes = most_ranks, kept_bytes
        self._kept: deque[tuple[int, NDArray[np.intp], NDArray[np.uint8]]] = deque()
        self._held_bytes = 0
        self._cut = -1
        """The last step of which something was dropped for want of room."""

    def clear(self) -> None:
        self._kept.clear()
        self._held_bytes, self._cut = 0, -1

    def put(self, ring: NDArray[np.intp], slots: NDArray[np.uint8], *, ranks: int, oldest: int) -> None:
        """``oldest``: the first step of the window; what lies before it goes."""
        if ranks > self._most_ranks:
            self.clear()
            self._cut = 1 << 62
            return
        last = int(min(slots.view(STEP_DTYPE)["step"].max(), np.uint64(1 << 62)))
        self._kept.append((last, ring, slots))
        self._held_bytes += slots.nbytes
        while self._kept and (self._kept[0][0] < oldest or self._held_bytes > self._kept_bytes):
            step, _, gone = self._kept.popleft()
            self._held_bytes -= gone.nbytes
            if step >= oldest:
                self._cut = max(self._cut, step)

    def kept(self, oldest: int) -> tuple[tuple[NDArray[np.intp], NDArray[np.uint8]], ...]:
        """Ring numbers and slots from that step on (and some before it); nothing where some of them had to go."""
        if self._cut >= oldest:
            return ()
        return tuple((ring, slots) for _, ring, slots in self._kept)
