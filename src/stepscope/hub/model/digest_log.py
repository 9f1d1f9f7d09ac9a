"""The digests of a whole attempt in bounded memory: the newest step by step, the past in bins.

When the log is full, pairs of its older half become one, so that the past grows coarser the further it lies back (bins
of 2, 4, 8 … steps).  Of a bin, the least and the most are those of its steps, the mean is that of all of them, the
quantiles between are averages, and the worst are the worst of all.  Device times are known of some steps only: their
mean is that of those.

What is kept of a bin stands in a row of its own and stays there; the order of the bins is a list of row numbers.  So
neither folding nor a step that comes late moves anything but numbers: a run of tens of thousands of steps folds a
hundred times while somebody waits for its page.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.digest import MEMORY, QUANTILES, WORST, Digest
from stepscope.hub.model.planes import NONE

__all__ = ["ROOM", "Bins", "DigestLog"]

ROOM = 4096
"""Bins of the log."""
_WORK = 1
_MIN, _MAX = QUANTILES.index(0.0), QUANTILES.index(1.0)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Digests, each of one step or of several; one entry of each array a bin."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """First and last step."""
    steps: NDArray[np.int64]
    """How many digests are in it."""
    ranks: NDArray[np.int32]
    """The most that made one of its steps."""
    quantiles: NDArray[np.float32]
    """[bin, metric, quantile]."""
    mean: NDArray[np.float32]
    """[bin, metric]."""
    worst: NDArray[np.int32]
    """[bin, place]: columns, by work; NONE where there are fewer."""
    worst_step: NDArray[np.int64]
    values: NDArray[np.float32]
    """[bin, place, metric]."""
    memory: NDArray[np.float32]
    """The most of its steps."""
    device: NDArray[np.float32]
    """[bin, 1 + phase]: in how many of its steps a device was timed, and the mean of each phase over those; [bin, 0]
    where none ever was."""
    start_wall_ns: NDArray[np.int64]
    """When its first step began, on the hub's clock: good to lay samples beside it, not to compare ranks."""

    @classmethod
    def zeros(cls, room: int, *, metrics: int, worst: int, device: int = 0) -> Bins:
        return cls(
            first=np.zeros(room, np.int64),
            last=np.zeros(room, np.int64),
            steps=np.zeros(room, np.int64),
            ranks=np.zeros(room, np.int32),
            quantiles=np.zeros((room, metrics, len(QUANTILES)), np.float32),
            mean=np.zeros((room, metrics), np.float32),
            worst=np.full((room, worst), NONE, np.int32),
            worst_step=np.zeros((room, worst), np.int64),
            values=np.zeros((room, worst, metrics), np.float32),
            memory=np.zeros((room, len(MEMORY)), np.float32),
            device=np.zeros((room, device), np.float32),
            start_wall_ns=np.zeros(room, np.int64),
        )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def metrics(self) -> int:
        return int(self.mean.shape[1])

    def part(self, rows: Any) -> Bins:
        return Bins(**{name: getattr(self, name)[rows] for name in _NAMES})

    def put(self, rows: NDArray[np.intp], others: Bins) -> None:
        """Others in place of these rows; they may have fewer metrics, of host and device, and fewer of the worst."""
        for name in _NAMES:
            held, fresh = getattr(self, name), getattr(others, name)
            if fresh.shape[1:] != held.shape[1:]:
                held[rows] = NONE if name == "worst" else 0
                inside = (slice(None), *map(slice, fresh.shape[1:]))
                held = held[inside]
            held[rows] = fresh


_NAMES = tuple(one.name for one in fields(Bins))


class DigestLog:
    """In order of steps; the newest at the end."""

    def __init__(self, room: int = ROOM) -> None:
        self.count = 0
        """Bins that are there."""
        self._held = Bins.zeros(room, metrics=0, worst=WORST)
        self._order: NDArray[np.intp] = np.arange(room)
        """Their rows, in order; behind ``count`` those that are free."""

    @property
    def last_step(self) -> int:
        """NONE when nothing is there."""
        return int(self._held.last[self._order[self.count - 1]]) if self.count else NONE

    def clear(self) -> None:
        self.count = 0

    def put(self, digest: Digest, start_wall_ns: int = 0) -> None:
        """Add a step, or replace it; one that lies in a folded bin, or before all that is kept, stays as it was."""
        at, held = self._place(digest.step), self._held
        if at < self.count and held.first[self._order[at]] == digest.step:
            if held.last[self._order[at]] == digest.step:
                self._write(self._order[at : at + 1], _alone(digest, start_wall_ns))
            return
        if at and held.last[self._order[at - 1]] >= digest.step:
            return
        if self.count == len(held):
            self._fold()
            at = self._place(digest.step)
            if at and held.last[self._order[at - 1]] >= digest.step:
                return  # in the gap between two bins that have just become one
        own = self._order[self.count]
        self._order[at + 1 : self.count + 1] = self._order[at : self.count]
        self._order[at] = own
        self.count += 1
        self._write(self._order[at : at + 1], _alone(digest, start_wall_ns))

    def extend(self, block: Bins) -> None:
        """Add steps that come after all that are there."""
        done = 0
        while done < len(block):
            if self.count == len(self._held):
                self._fold()
            fit = min(len(block) - done, len(self._held) - self.count)
            self._write(self._order[self.count : self.count + fit], block.part(slice(done, done + fit)))
            self.count += fit
            done += fit

    def coarsest(self, first: int, last: int) -> int:
        """How many steps the longest bin has that holds any of these; 0: nothing is known of them."""
        rows = self._order[: self.count]
        rows = rows[(self._held.last[rows] >= first) & (self._held.first[rows] <= last)]
        return int(self._held.steps[rows].max(initial=0))

    def bins(self, first: int, last: int, most: int, *, metrics: int = 0, device: int = 0) -> Bins:
        """What is known of these steps, in order, in at most ``most`` bins; as wide as that at least."""
        rows = self._order[: self.count]
        rows = rows[(self._held.last[rows] >= first) & (self._held.first[rows] <= last)]
        found = DigestLog(len(rows))
        found._widen(metrics, device)
        found.extend(self._held.part(rows))
        longest = 2
        while found.count > max(1, most):
            if not found._pair(found.count, longest):
                longest *= 2
        return found._held.part(found._order[: found.count])

    # -- parts ----------------------------------------------------------------------------------------------------

    def _place(self, step: int) -> int:
        """Of the first bin that does not begin before it."""
        if step > self.last_step:
            return self.count
        return int(np.searchsorted(self._held.first[self._order[: self.count]], step))

    def _write(self, rows: NDArray[np.intp], bins: Bins) -> None:
        self._widen(bins.metrics, bins.device.shape[1])
        self._held.put(rows, bins)

    def _widen(self, metrics: int, device: int) -> None:
        """Make room for phases that are new, and for device times when the first come."""
        old, rows = self._held, self._order[: self.count]
        if metrics > old.metrics or device > old.device.shape[1]:
            metrics, device = max(metrics, old.metrics), max(device, old.device.shape[1])
            self._held = Bins.zeros(len(old), metrics=metrics, worst=WORST, device=device)
            self._held.put(rows, old.part(rows))

    def _fold(self) -> None:
        """Make room in the older half, by its shortest bins: the past grows coarse as evenly as it can."""
        freed, longest, room = 0, 2, len(self._held)
        while freed < max(1, room // 8):
            paired = self._pair(room // 2 - freed, longest)
            freed += paired
            longest *= 1 if paired else 2

    def _pair(self, upto: int, longest: int) -> int:
        """Make one bin of two among the first ``upto`` where it has no more steps than ``longest``; how many."""
        order, steps = self._order, self._held.steps[self._order[:upto]]
        even = np.arange(0, upto - 1, 2)
        even = even[steps[even] + steps[even + 1] <= longest]
        if not len(even):
            return 0
        left, right = order[even], order[even + 1]
        self._held.put(left, _joined(self._held, left, right))
        kept = np.ones(len(order), np.bool_)
        kept[even + 1] = False
        self._order = np.concatenate([order[kept], right])
        self.count -= len(even)
        return len(even)


def _alone(digest: Digest, start_wall_ns: int) -> Bins:
    """One step as a bin."""
    step = np.array([digest.step])
    return Bins(
        first=step,
        last=step,
        steps=np.array([1]),
        ranks=np.array([digest.ranks], np.int32),
        quantiles=digest.quantiles[None],
        mean=digest.mean[None],
        worst=digest.worst[None].astype(np.int32),
        worst_step=np.full((1, len(digest.worst)), digest.step),
        values=digest.values[None],
        memory=digest.memory[None],
        device=digest.device[None],
        start_wall_ns=np.array([start_wall_ns]),
    )


def _joined(held: Bins, left: NDArray[np.intp], right: NDArray[np.intp]) -> Bins:
    """Of each pair of rows one bin."""
    steps = held.steps[left] + held.steps[right]
    weight = (held.steps[left] / steps)[:, None]
    before, after = held.quantiles[left], held.quantiles[right]
    quantiles = before * weight[:, :, None] + after * (1 - weight[:, :, None])
    quantiles[:, :, _MIN] = np.minimum(before[:, :, _MIN], after[:, :, _MIN])
    quantiles[:, :, _MAX] = np.maximum(before[:, :, _MAX], after[:, :, _MAX])
    both = np.stack([left, right], axis=1)
    worst = held.worst[both].reshape(len(both), -1)
    work = held.values[both, :, _WORK].reshape(len(both), -1)
    order = np.argsort(np.where(worst == NONE, np.inf, -work), axis=1, kind="stable")[:, :WORST]
    row, place = np.take_along_axis(both, order // WORST, 1), order % WORST
    return Bins(
        first=held.first[left],
        last=held.last[right],
        steps=steps,
        ranks=np.maximum(held.ranks[left], held.ranks[right]),
        quantiles=quantiles.astype(np.float32),
        mean=(held.mean[left] * weight + held.mean[right] * (1 - weight)).astype(np.float32),
        worst=held.worst[row, place],
        worst_step=held.worst_step[row, place],
        values=held.values[row, place],
        memory=np.fmax(held.memory[left], held.memory[right]),
        device=_joined_device(held.device[left], held.device[right]),
        start_wall_ns=held.start_wall_ns[left],
    )


def _joined_device(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    if not left.size:
        return left
    timed = left[:, :1] + right[:, :1]
    weight = left[:, :1] / np.maximum(timed, 1)
    means = left[:, 1:] * weight + right[:, 1:] * (1 - weight)
    return np.concatenate([timed, means], axis=1, dtype=np.float32)
