"""The map rank × time of a whole attempt: work and step length, in bins of steps, within bounded memory.

Rows are columns of the planes; a column of the map is a bin of ``span`` steps.  When a step comes that lies beyond the
last bin, each two become one and ``span`` doubles; when there are more ranks than fit beside so many bins, likewise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Heat"]

BUDGET_BYTES = 40 << 20
MOST_BINS = 512
LEAST_BINS = 32
FIRST_ROOM = 64
_CELL = 4 + 4 + 4


class Heat:
    def __init__(
        self, *, budget_bytes: int = BUDGET_BYTES, bins: int = MOST_BINS, least_bins: int = LEAST_BINS
    ) -> None:
        self._budget_bytes, self._most, self._least = budget_bytes, bins, least_bins
        self.span = 1
        """Steps of a bin."""
        self.newest = -1
        self.work_ns: NDArray[np.float32] = np.zeros((FIRST_ROOM, bins), np.float32)
        """[column, bin]; sums, as ``wall_ns``."""
        self.wall_ns: NDArray[np.float32] = np.zeros_like(self.work_ns)
        self.count: NDArray[np.uint32] = np.zeros((FIRST_ROOM, bins), np.uint32)
        """Steps in the sums."""

    @property
    def bins(self) -> int:
        return int(self.work_ns.shape[1])

    @property
    def nbytes(self) -> int:
        return self.work_ns.nbytes + self.wall_ns.nbytes + self.count.nbytes

    def clear(self) -> None:
        self.span, self.newest = 1, -1
        for held in (self.work_ns, self.wall_ns, self.count):
            held[:] = 0

    def make_room(self, columns: int) -> None:
        """For so many ranks; more than are there when they are known to come."""
        if columns <= len(self.count):
            return
        room = max(columns, len(self.count) * 5 // 4)
        while self.bins > self._least and room * self.bins * _CELL > self._budget_bytes:
            self._fold()
            self._shape(len(self.count), self.bins // 2)
        self._shape(room, self.bins)

    def add(
        self,
        column: NDArray[np.intp],
        step: NDArray[np.int64],
        work_ns: NDArray[np.float32],
        wall_ns: NDArray[np.float32] | None = None,
    ) -> None:
        """Ordered by column and step; ``wall_ns`` None: the steps are there already, and their work is corrected."""
        if not len(step):
            return
        self.newest = max(self.newest, int(step.max()))
        while self.newest // self.span >= self.bins:
            self._fold()
        cell = column * self.bins + step // self.span
        first = np.flatnonzero(np.concatenate(([True], np.diff(cell) != 0)))
        place = cell[first]
        self.work_ns.reshape(-1)[place] += np.add.reduceat(work_ns, first, dtype=np.float32)
        if wall_ns is not None:
            self.wall_ns.reshape(-1)[place] += np.add.reduceat(wall_ns, first, dtype=np.float32)
            self.count.reshape(-1)[place] += np.diff(np.append(first, len(cell))).astype(np.uint32)

    def _fold(self) -> None:
        half = self.bins // 2
        for held in (self.work_ns, self.wall_ns, self.count):
            held[:, :half] = held[:, 0 : 2 * half : 2] + held[:, 1 : 2 * half : 2]
            held[:, half:] = 0
        self.span *= 2

    def _shape(self, room: int, bins: int) -> None:
        rows = min(room, len(self.count))

        def moved(held: NDArray[np.float32]) -> NDArray[np.float32]:
            fresh = np.zeros((room, bins), held.dtype)
            fresh[:rows] = held[:rows, :bins]
            return fresh

        self.work_ns, self.wall_ns = moved(self.work_ns), moved(self.wall_ns)
        self.count = moved(self.count)  # type: ignore[arg-type, assignment]  # the same for counts
