"""Every step in a few numbers: quantiles over the ranks, and the worst of them in full.

A step is digested once, when all live ranks have made it; again when a row of it comes late, as long as its rows are
there.  The log of digests spans the whole run in bounded memory: when it is full, pairs of its older half become one,
so that the past grows coarser the further it lies back (bins of 2, 4, 8 … steps).  Of a bin, the least and the most
are those of its steps, the quantiles between them are averages, and the worst are the worst of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.planes import MOST_PHASES, NONE, Planes
from stepscope.records.phases import BUILTIN_PHASES, COMM

__all__ = ["MEMORY", "QUANTILES", "WORST", "Digest", "DigestLog", "digest_steps"]

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
WORST = 16
ROOM = 4096
"""Bins of the log."""
METRICS = 2 + MOST_PHASES
"""Wall, work, and each phase in the order of ``Planes.phases``."""
MEMORY = ("allocated_median", "allocated", "reserved", "peak_allocated")
"""Over the ranks that were sampled: of the first the median, of the others the most."""
_COMM = f"phase:{BUILTIN_PHASES[COMM]}"
_MIN, _MAX = QUANTILES.index(0.0), QUANTILES.index(1.0)


@dataclass(frozen=True, kw_only=True)
class Digest:
    """One step over its ranks."""

    step: int
    ranks: int
    """How many have made it."""
    quantiles: NDArray[np.float32]
    """[metric, quantile], nanoseconds; a quantile is the value of a rank."""
    worst: NDArray[np.intp]
    """Columns, by work, the longest first; at most ``WORST``."""
    values: NDArray[np.float32]
    """[worst, metric]."""
    memory: NDArray[np.float32] = field(default_factory=lambda: np.full(len(MEMORY), np.nan, np.float32))
    """By ``MEMORY``: of the device, bytes; nan where no rank was sampled."""
    column: int = 0
    """One that made it …"""
    start_ns: int = 0
    """… and when it began there, by its own monotonic clock."""


def digest_steps(planes: Planes, steps: Sequence[int]) -> list[Digest]:
    """Of steps that are in the window; one without any rank gives none."""
    rows = planes.row_of(np.array(steps, np.int64))
    found = []
    for step, row in zip(steps, rows, strict=True):
        if row != NONE:
            digest = _digest(planes, step, int(row))
            if digest is not None:
                found.append(digest)
    return found


def _digest(planes: Planes, step: int, row: int) -> Digest | None:
    n = planes.columns
    have = planes.have[row, :n]
    columns: Any = slice(None, n) if have.all() else np.flatnonzero(have)
    wall = planes.held["wall_ns"][row][columns]
    count = len(wall)
    if not count:
        return None
    comm = planes.held.get(_COMM)
    work = wall if comm is None else wall - comm[row][columns]
    worst = np.arange(count)
    if count > WORST:
        worst = np.argpartition(work, count - WORST)[count - WORST :]
    worst = worst[np.lexsort((worst, -work[worst]))]
    places = np.array([round(share * (count - 1)) for share in QUANTILES], np.intp)
    quantiles = np.zeros((METRICS, len(QUANTILES)), np.float32)
    values = np.zeros((len(worst), METRICS), np.float32)
    for metric, column in enumerate(_metrics(planes, row, columns, wall, work)):
        if column is not None:
            values[:, metric] = column[worst]
            quantiles[metric] = np.partition(column, places)[places]
    numbers = worst if have.all() else columns[worst]
    some = 0 if have.all() else int(columns[0])
    return Digest(
        step=step,
        ranks=count,
        quantiles=quantiles,
        worst=numbers,
        values=values,
        memory=_memory(planes, row, columns),
        column=some,
        start_ns=int(planes.held["start_ns"][row, some]),
    )


def _memory(planes: Planes, row: int, columns: Any) -> NDArray[np.float32]:
    found = np.full(len(MEMORY), np.nan, np.float32)
    for at, name in enumerate(MEMORY[1:], 1):
        plane = planes.held.get(name)
        levels = plane[row][columns] if plane is not None else np.zeros(0)
        levels = levels[levels > 0]  # 0: not sampled in this step
        if len(levels):
            found[at] = levels.max()
            if name == "allocated":
                found[0] = np.median(levels)
    return found


def _metrics(
    planes: Planes, row: int, columns: Any, wall: NDArray[np.float32], work: NDArray[np.float32]
) -> list[NDArray[np.float32] | None]:
    found: list[NDArray[np.float32] | None] = [wall, work]
    for name in planes.phases:
        plane = planes.held.get(f"phase:{name}")
        found.append(None if plane is None else plane[row][columns])
    return found


class DigestLog:
    """Digests of a whole attempt, in order of steps; the newest at the end."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self.count = 0
        self.first: NDArray[np.int64] = np.zeros(room, np.int64)
        self.last: NDArray[np.int64] = np.zeros(room, np.int64)
        """First and last step of each bin."""
        self.steps: NDArray[np.int64] = np.zeros(room, np.int64)
        """How many digests are in it."""
        self.ranks: NDArray[np.int32] = np.zeros(room, np.int32)
        """The most that made one of its steps."""
        self.quantiles: NDArray[np.float32] = np.zeros((room, METRICS, len(QUANTILES)), np.float32)
        self.worst: NDArray[np.int32] = np.zeros((room, WORST), np.int32)
        """Columns; NONE where there are fewer."""
        self.worst_step: NDArray[np.int64] = np.zeros((room, WORST), np.int64)
        self.values: NDArray[np.float32] = np.zeros((room, WORST, METRICS), np.float32)
        self.memory: NDArray[np.float32] = np.zeros((room, len(MEMORY)), np.float32)
        """The most of its steps."""
        self.start_wall_ns: NDArray[np.int64] = np.zeros(room, np.int64)
        """When its first step began, on the hub's clock: good to lay samples beside it, not to compare ranks."""

    def clear(self) -> None:
        self.count = 0

    def put(self, digest: Digest, start_wall_ns: int = 0) -> None:
        """Add a step, or replace it; one that lies in a folded bin, or before all that is kept, stays as it was."""
        at = int(np.searchsorted(self.first[: self.count], digest.step))
        if at < self.count and self.first[at] == digest.step == self.last[at]:
            self._set(at, digest, start_wall_ns)
            return
        if at and self.last[at - 1] >= digest.step:
            return
        if self.count == self._room:
            self._fold()
            at = int(np.searchsorted(self.first[: self.count], digest.step))
        for held in self._arrays():
            held[at + 1 : self.count + 1] = held[at : self.count]
        self.count += 1
        self._set(at, digest, start_wall_ns)

    def extend(self, block: DigestLog) -> None:
        """Add steps that come after all that are there."""
        done = 0
        while done < block.count:
            if self.count == self._room:
                self._fold()
            fit = min(block.count - done, self._room - self.count)
            for held, fresh in zip(self._arrays(), block._arrays(), strict=True):
                held[self.count : self.count + fit] = fresh[done : done + fit]
            self.count += fit
            done += fit

    def bins(self, first: int, last: int, most: int) -> DigestLog:
        """What is known of these steps, in at most ``most`` bins."""
        chosen = np.flatnonzero((self.last[: self.count] >= first) & (self.first[: self.count] <= last))
        found = DigestLog(max(2, len(chosen)))
        found.count = len(chosen)
        for own, held in zip(found._arrays(), self._arrays(), strict=True):
            own[: len(chosen)] = held[chosen]
        while found.count > max(1, most):
            found._pair(found.count)
        return found

    def _set(self, at: int, digest: Digest, start_wall_ns: int) -> None:
        self.memory[at], self.start_wall_ns[at] = digest.memory, start_wall_ns
        self.first[at] = self.last[at] = digest.step
        self.steps[at], self.ranks[at] = 1, digest.ranks
        self.quantiles[at] = digest.quantiles
        k = len(digest.worst)
        self.worst[at], self.worst[at, :k] = NONE, digest.worst
        self.worst_step[at] = digest.step
        self.values[at], self.values[at, :k] = 0, digest.values

    def _fold(self) -> None:
        self._pair(self._room // 2 // 2 * 2)

    def _pair(self, upto: int) -> None:
        """Make one bin of each two among the first ``upto``."""
        pairs = upto // 2
        even, odd = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        weight = self.steps[even] / (self.steps[even] + self.steps[odd])
        merged = self.quantiles[even] * weight[:, None, None] + self.quantiles[odd] * (1 - weight[:, None, None])
        merged[:, :, _MIN] = np.minimum(self.quantiles[even, :, _MIN], self.quantiles[odd, :, _MIN])
        merged[:, :, _MAX] = np.maximum(self.quantiles[even, :, _MAX], self.quantiles[odd, :, _MAX])
        worst = np.concatenate([self.worst[even], self.worst[odd]], axis=1)
        at_step = np.concatenate([self.worst_step[even], self.worst_step[odd]], axis=1)
        values = np.concatenate([self.values[even], self.values[odd]], axis=1)
        key = np.where(worst == NONE, -np.inf, values[:, :, 1])
        order = np.argsort(-key, axis=1, kind="stable")[:, :WORST]
        rest = slice(2 * pairs, self.count)
        left = self.count - 2 * pairs
        made = (
            self.first[even],
            self.last[odd],
            self.steps[even] + self.steps[odd],
            np.maximum(self.ranks[even], self.ranks[odd]),
            merged,
            np.take_along_axis(worst, order, 1),
            np.take_along_axis(at_step, order, 1),
            np.take_along_axis(values, order[:, :, None], 1),
            np.fmax(self.memory[even], self.memory[odd]),
            self.start_wall_ns[even],
        )
        for held, fresh in zip(self._arrays(), made, strict=True):
            tail = held[rest].copy()
            held[:pairs] = fresh
            held[pairs : pairs + left] = tail
        self.count = pairs + left

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.first,
            self.last,
            self.steps,
            self.ranks,
            self.quantiles,
            self.worst,
            self.worst_step,
            self.values,
            self.memory,
            self.start_wall_ns,
        )
