"""Digests: each step as a few numbers over its ranks, and a log of them for the whole attempt.

A digest has the mean and quantiles over the ranks, and the worst ranks in full.  A step is digested once, when all
live ranks have made it, and again when one of its rows comes late, while its rows are still in the window.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.live.step_arrays import MOST_PHASES, NONE, Planes
from stepscope.records.steps import BUILTIN_PHASES, COMM, FLAG_CAPTURED, FLAG_SAMPLED

__all__ = [
    "DEVICE_PHASES",
    "LOG_ROOM",
    "MEMORY",
    "QUANTILES",
    "WORST",
    "Bins",
    "DigestLog",
    "device_width",
    "digest_block",
    "digest_step",
    "metrics_of",
    "sampled_rows",
]


# -- figures ----------------------------------------------------------------------------------------------------------

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
WORST = 16
DEVICE_PHASES = 2
"""Where the phases begin in the device figures of a step."""
METRICS = 2 + MOST_PHASES
"""The largest number of metrics: wall, work, and each phase in the order of ``Planes.phases``."""
MEMORY = ("allocated_median", "allocated", "reserved", "peak_allocated")
"""Over the sampled ranks: the median for the first, the maximum for the others."""
_COMM = f"phase:{BUILTIN_PHASES[COMM]}"


def metrics_of(planes: Planes) -> int:
    """Return the current number of metrics: it grows as ranks name new phases."""
    return 2 + len(planes.phases)


def device_width(planes: Planes) -> int:
    """Return the number of device figures per step: 0 if no device was ever timed."""
    return DEVICE_PHASES + len(planes.phases) if "device" in planes.arrays else 0


# -- digest log -------------------------------------------------------------------------------------------------------
# The digests of a whole attempt in bounded memory: the newest step by step (of a long run that is over, in bins of
# ``steps_per_bin``), the past in bins.
#
# When the log is full, pairs in its older half are merged, so that older steps are kept more coarsely (bins of 2, 4, 8
# … steps).  A bin has the minimum, maximum and mean over its steps, averages for the other quantiles, and the worst
# ranks of all its steps.  Sampled steps, in which ranks look at their layers, do not count in them unless a bin has no
# others.  Only some steps have device times: their mean is over those steps.
#
# Each bin's data stays in one row; the order of the bins is a list of row numbers.  Folding or inserting a late step
# therefore moves only numbers: a run with tens of thousands of steps folds a hundred times while a user waits for its
# page.

LOG_ROOM = 4096
"""Number of bins in the log."""
JOINED_AT_ONCE = 4096
"""Steps that are merged into bins at once: a few megabytes."""
_WORK = 1
_MIN, _MAX = QUANTILES.index(0.0), QUANTILES.index(1.0)


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Digests of one or more steps each; every array has one entry per bin."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """First and last step."""
    steps: NDArray[np.int64]
    """How many steps it includes."""
    sampled: NDArray[np.int64]
    """How many of these steps were sampled."""
    ranks: NDArray[np.int32]
    """The largest number of ranks that completed one of its steps."""
    quantiles: NDArray[np.float32]
    """[bin, metric, quantile], nanoseconds; interpolated between ranks: the median of two is their mean."""
    mean: NDArray[np.float32]
    """[bin, metric]: over ranks; the phases add up to the wall time."""
    worst: NDArray[np.int32]
    """[bin, place]: columns, by work; NONE where there are fewer."""
    worst_step: NDArray[np.int64]
    values: NDArray[np.float32]
    """[bin, place, metric]."""
    memory: NDArray[np.float32]
    """By ``MEMORY``, in bytes: the maximum over its steps; nan if no rank was sampled."""
    device: NDArray[np.float32]
    """[bin, 2 + phase]: number of steps with a timed device, the longest of them, each phase's mean over them;
    [bin, 0] if never timed."""
    start_wall_ns: NDArray[np.int64]
    """When its first step began, on the hub's clock: accurate enough to align samples, not to compare ranks."""

    @classmethod
    def zeros(cls, room: int, *, metrics: int, worst: int, device: int = 0) -> Bins:
        return cls(
            first=np.zeros(room, np.int64),
            last=np.zeros(room, np.int64),
            steps=np.zeros(room, np.int64),
            sampled=np.zeros(room, np.int64),
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
        """Replace these rows; ``others`` may have fewer metrics, device figures and worst ranks."""
        for name in _NAMES:
            column, fresh = getattr(self, name), getattr(others, name)
            if fresh.shape[1:] != column.shape[1:]:
                column[rows] = NONE if name == "worst" else 0
                inside = (slice(None), *map(slice, fresh.shape[1:]))
                column = column[inside]
            column[rows] = fresh


_NAMES = tuple(column.name for column in fields(Bins))


class DigestLog:
    """Bins in order of steps, the newest last.  See the comment above for the layout."""

    def __init__(self, room: int = LOG_ROOM, *, steps_per_bin: int = 1, forgets: bool = False) -> None:
        """``steps_per_bin``: of steps that come many at a time, for a run whose length is known.

        Otherwise a long run is folded a hundred times until it fits, which takes several times as long.
        ``forgets``: drop the older half when it is full, instead of merging it, if nobody reads more.
        """
        self._steps_per_bin = steps_per_bin
        self._forgets = forgets
        self.count = 0
        """Bins in use."""
        self._bins = Bins.zeros(room, metrics=0, worst=WORST)
        self._order: NDArray[np.intp] = np.arange(room)
        """Row numbers of the bins, in order; free rows follow from ``count`` on."""

    @property
    def last_step(self) -> int:
        """The last step; NONE if the log is empty."""
        return int(self._bins.last[self._order[self.count - 1]]) if self.count else NONE

    def clear(self) -> None:
        self.count = 0

    def put(self, digest: Bins) -> None:
        """Add or replace one step; one in a folded bin, or before everything that is kept, is ignored."""
        step = int(digest.first[0])
        at, bins = self._place(step), self._bins
        if at < self.count and bins.first[self._order[at]] == step:
            if bins.last[self._order[at]] == step:
                self._write(self._order[at : at + 1], digest)
            return
        if at and bins.last[self._order[at - 1]] >= step:
            return
        if self.count == len(bins):
            self._fold()
            at = self._place(step)
            if at and bins.last[self._order[at - 1]] >= step:
                return  # in the gap between two bins that were just merged
        own = self._order[self.count]
        self._order[at + 1 : self.count + 1] = self._order[at : self.count]
        self._order[at] = own
        self.count += 1
        self._write(self._order[at : at + 1], digest)

    def extend(self, block: Bins) -> None:
        """Add steps that come after all those in the log."""
        if self._steps_per_bin == 1:
            self._append(block)
            return
        whole = len(block) // self._steps_per_bin * self._steps_per_bin
        groups = np.arange(whole).reshape(-1, self._steps_per_bin)
        at_once = max(1, JOINED_AT_ONCE // self._steps_per_bin)
        for first in range(0, len(groups), at_once):
            self._append(_joined(block, groups[first : first + at_once]))
        self._append(block.part(slice(whole, None)))

    def _append(self, block: Bins) -> None:
        done = 0
        while done < len(block):
            if self.count == len(self._bins):
                self._fold()
            fit = min(len(block) - done, len(self._bins) - self.count)
            self._write(self._order[self.count : self.count + fit], block.part(slice(done, done + fit)))
            self.count += fit
            done += fit

    def coarsest(self, first: int, last: int) -> int:
        """Return the number of steps in the longest bin that overlaps this range; 0 if the range is empty."""
        rows = self._order[: self.count]
        rows = rows[(self._bins.last[rows] >= first) & (self._bins.first[rows] <= last)]
        return int(self._bins.steps[rows].max(initial=0))

    def bins(self, first: int, last: int, most: int, *, metrics: int = 0, device: int = 0) -> Bins:
        """Return these steps in order, in at most ``most`` bins with at least this many metrics and device figures."""
        rows = self._order[: self.count]
        rows = rows[(self._bins.last[rows] >= first) & (self._bins.first[rows] <= last)]
        if most <= 1 < len(rows):
            return self._joined_at_once(rows, metrics, device)
        found = DigestLog(len(rows))
        found._widen(metrics, device)
        found.extend(self._bins.part(rows))
        longest = 2
        while found.count > max(1, most):
            if not found._pair(found.count, longest):
                longest *= 2
        found._hide_sampled()
        return found._bins.part(found._order[: found.count])

    # -- details --------------------------------------------------------------------------------------------------

    def _joined_at_once(self, rows: NDArray[np.intp], metrics: int, device: int) -> Bins:
        """Merge rows into one bin: half the time of merging pairs of them until one is left."""
        joined = _joined(self._bins, rows[None, :])
        found = Bins.zeros(
            1, metrics=max(metrics, joined.metrics), worst=WORST, device=max(device, joined.device.shape[1])
        )
        found.put(np.arange(1), joined)
        return found

    def _place(self, step: int) -> int:
        """Return the index of the first bin that does not begin before the step."""
        if step > self.last_step:
            return self.count
        return int(np.searchsorted(self._bins.first[self._order[: self.count]], step))

    def _write(self, rows: NDArray[np.intp], bins: Bins) -> None:
        self._widen(bins.metrics, bins.device.shape[1])
        self._bins.put(rows, bins)

    def _widen(self, metrics: int, device: int) -> None:
        """Make room for new phases, and for the first device times."""
        old, rows = self._bins, self._order[: self.count]
        if metrics > old.metrics or device > old.device.shape[1]:
            metrics, device = max(metrics, old.metrics), max(device, old.device.shape[1])
            self._bins = Bins.zeros(len(old), metrics=metrics, worst=WORST, device=device)
            self._bins.put(rows, old.part(rows))

    def _hide_sampled(self) -> None:
        """Merge each bin that has only sampled steps into the one before it, or the first ones into the next."""
        bins, order = self._bins, self._order[: self.count]
        plain = np.flatnonzero(bins.steps[order] > bins.sampled[order])
        if not len(plain) or len(plain) == self.count:
            return
        into = plain[np.maximum(np.searchsorted(plain, np.arange(self.count), side="right") - 1, 0)]
        sampled = np.setdiff1d(np.arange(self.count), plain).tolist()
        for at in sorted(sampled, key=lambda at: at if at > into[at] else -at):  # the nearest first, on either side
            left, right = sorted((at, int(into[at])))
            joined = _joined(bins, order[[[left, right]]])
            bins.put(order[into[at] : into[at] + 1], joined)
        self._order = np.concatenate([order[plain], np.setdiff1d(self._order, order[plain])])
        self.count = len(plain)

    def _fold(self) -> None:
        """Merge the shortest bins of the older half first, so that the past becomes coarser evenly."""
        if self._forgets:
            half = self.count // 2
            self._order = np.roll(self._order, -half)
            self.count -= half
            return
        freed, longest, room = 0, 2, len(self._bins)
        while freed < max(1, room // 8):
            paired = self._pair(room // 2 - freed, longest)
            freed += paired
            longest *= 1 if paired else 2

    def _pair(self, upto: int, longest: int) -> int:
        """Merge pairs among the first ``upto`` bins if they have at most ``longest`` steps; return how many."""
        order, steps = self._order, self._bins.steps[self._order[:upto]]
        even = np.arange(0, upto - 1, 2)
        even = even[steps[even] + steps[even + 1] <= longest]
        if not len(even):
            return 0
        left, right = order[even], order[even + 1]
        self._bins.put(left, _joined(self._bins, np.stack([left, right], axis=1)))
        kept = np.ones(len(order), np.bool_)
        kept[even + 1] = False
        self._order = np.concatenate([order[kept], right])
        self.count -= len(even)
        return len(even)


def _joined(bins: Bins, rows: NDArray[np.intp]) -> Bins:
    """Merge each of these groups of rows, [group, row], into one bin."""
    all_steps, all_sampled = bins.steps[rows], bins.sampled[rows]
    plain = all_steps - all_sampled
    counted = np.where(plain.sum(axis=1, keepdims=True) > 0, plain, all_steps)
    weight = counted / counted.sum(axis=1, keepdims=True)
    weight[:, -1] = 1 - weight[:, :-1].sum(axis=1)
    each = bins.quantiles[rows]
    quantiles = (each * weight[:, :, None, None]).sum(axis=1)
    left_out = (counted == 0)[:, :, None]
    quantiles[:, :, _MIN] = np.where(left_out, np.inf, each[:, :, :, _MIN]).min(axis=1)
    quantiles[:, :, _MAX] = np.where(left_out, -np.inf, each[:, :, :, _MAX]).max(axis=1)
    worst = np.where(left_out, NONE, bins.worst[rows]).reshape(len(rows), -1)
    work = bins.values[rows, :, _WORK].reshape(len(rows), -1)
    order = np.argsort(np.where(worst == NONE, np.inf, -work), axis=1, kind="stable")[:, :WORST]
    row, place = np.take_along_axis(rows, order // bins.worst.shape[1], 1), order % bins.worst.shape[1]
    return Bins(
        first=bins.first[rows[:, 0]],
        last=bins.last[rows[:, -1]],
        steps=all_steps.sum(axis=1),
        sampled=all_sampled.sum(axis=1),
        ranks=bins.ranks[rows].max(axis=1),
        quantiles=quantiles.astype(np.float32),
        mean=(bins.mean[rows] * weight[:, :, None]).sum(axis=1).astype(np.float32),
        worst=np.take_along_axis(worst, order, 1),
        worst_step=bins.worst_step[row, place],
        values=bins.values[row, place],
        memory=np.fmax.reduce(bins.memory[rows], axis=1),
        device=_joined_device(bins.device[rows], counted),
        start_wall_ns=bins.start_wall_ns[rows[:, 0]],
    )


def _joined_device(each: NDArray[np.float32], counted: NDArray[np.int64]) -> NDArray[np.float32]:
    """Merge the devices' figures, [group, row, figure].  ``counted``: by row, the number of steps that count; sampled
    ones do not.
    """
    if not each.size:
        return each[:, 0]
    each = each * (counted[:, :, None] > 0)
    timed = each[:, :, 0]
    number = timed.sum(axis=1, keepdims=True)
    longest = each[:, :, 1:DEVICE_PHASES].max(axis=1)
    weight = timed / np.maximum(number, 1)
    weight[:, -1] = 1 - weight[:, :-1].sum(axis=1)
    means = (each[:, :, DEVICE_PHASES:] * weight[:, :, None]).sum(axis=1)
    return np.concatenate([number, longest, means], axis=1, dtype=np.float32)


# -- digesting --------------------------------------------------------------------------------------------------------
# Steps become bins of one step each: many steps of few ranks at once, since a small job makes a hundred steps a second
# and a finished run has tens of thousands while a user waits; or one step of many ranks, or of those that made it.

BLOCK_RANKS = 512
"""With more ranks, a single step is large enough for numpy to be efficient."""
BLOCK_CELLS = 1 << 17
"""The number of cells in one array."""


def digest_block(planes: Planes, steps: NDArray[np.int64]) -> Bins | None:
    """Digest as many leading steps as fit in one block; ``start_wall_ns`` is still on the clock of the first column.

    None: a rank is missing one of the steps, or there are too many ranks.
    """
    n = planes.columns
    if not 0 < n <= BLOCK_RANKS:
        return None
    steps = steps[: max(1, BLOCK_CELLS // n)]
    rows = planes.row_of(steps)
    if (rows == NONE).any() or not planes.have[rows, :n].all():
        return None
    return _digest(planes, steps, rows, np.arange(n))


def digest_step(planes: Planes, step: int) -> tuple[Bins, int] | None:
    """Digest one step over the ranks that made it; ``start_wall_ns`` is still on the clock of the column returned.

    None: it is not in the window, or no rank made it.
    """
    steps = np.array([step], np.int64)
    rows = planes.row_of(steps)
    columns = np.flatnonzero(planes.have[rows[0], : planes.columns]) if rows[0] != NONE else np.zeros(0, np.intp)
    return (_digest(planes, steps, rows, columns), int(columns[0])) if len(columns) else None


def _digest(planes: Planes, steps: NDArray[np.int64], rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Bins:
    """Digest steps that all these columns have."""
    every: Any = slice(None, planes.columns) if len(columns) == planes.columns else columns

    def of(name: str) -> NDArray[np.float32] | None:
        plane = planes.arrays.get(name)
        return None if plane is None else plane[rows][:, every]

    wall: NDArray[np.float32] = planes.arrays["wall_ns"][rows][:, every]
    comm = of(_COMM)
    work = wall if comm is None else wall - comm
    k = min(len(columns), WORST)
    found = Bins.zeros(len(steps), metrics=metrics_of(planes), worst=k, device=device_width(planes))
    found.first[:] = found.last[:] = steps
    found.steps[:], found.ranks[:] = 1, len(columns)
    found.sampled[:] = sampled_rows(planes, rows)
    worst = _longest(work, k)
    found.worst[:], found.worst_step[:] = columns[worst], steps[:, None]
    below, above, between = quantile_places(len(columns))
    both = np.unique(np.concatenate([below, above]))
    for metric in range(found.metrics):
        values = wall if metric == 0 else work if metric == 1 else of(f"phase:{planes.phases[metric - 2]}")
        if values is not None:
            found.values[:, :, metric] = np.take_along_axis(values, worst, 1)
            few = len(columns) <= BLOCK_RANKS
            ordered = np.sort(values, axis=1) if few else np.partition(values, both, axis=1)
            found.quantiles[:, metric] = ordered[:, below] + (ordered[:, above] - ordered[:, below]) * between
            found.mean[:, metric] = values.mean(axis=1)
    found.memory[:] = np.nan
    for place, name in enumerate(MEMORY[1:], 1):
        levels = of(name)
        if levels is not None:
            _put_memory(found.memory, place, levels)
    found.device[:] = device_means(planes, rows)
    found.start_wall_ns[:] = planes.arrays["start_ns"][rows, columns[0]].astype(np.int64)
    return found


def _longest(work: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """[row, k]; the columns with the most work, the longest first, then by column."""
    n = work.shape[1]
    if n <= BLOCK_RANKS:
        return np.argsort(-work, axis=1, kind="stable")[:, :k]
    most = np.sort(np.argpartition(work, n - k, axis=1)[:, n - k :], axis=1)
    order = np.argsort(-np.take_along_axis(work, most, 1), axis=1, kind="stable")
    return np.take_along_axis(most, order, 1)


def quantile_places(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """For this many sorted values: the indices below and above each quantile, and its position between them."""
    exact = np.array(QUANTILES) * (count - 1)
    below = np.floor(exact).astype(np.intp)
    return below, np.ceil(exact).astype(np.intp), (exact - below).astype(np.float32)


def sampled_rows(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """[row]: whether any rank looked at its layers in that step or was profiled, which takes time."""
    if "flags" not in planes.arrays:
        return np.zeros(len(rows), np.bool_)
    flags = planes.arrays["flags"][rows, : planes.columns] & (FLAG_SAMPLED | FLAG_CAPTURED)
    return np.asarray(((flags > 0) & planes.have[rows, : planes.columns]).any(axis=1), np.bool_)


def device_means(planes: Planes, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """[row, ``device_width``]: 1 if a device was timed, the longest step of a timed rank, each phase's mean over them.

    Only some short steps are timed.
    """
    found = np.zeros((len(rows), device_width(planes)), np.float32)
    if found.size:
        n = planes.columns
        timed = planes.arrays["device"][rows, :n].sum(axis=1)
        found[:, 0] = timed > 0
        lengths = np.zeros((len(rows), n), np.float32)
        for place, name in enumerate(planes.phases, DEVICE_PHASES):
            plane = planes.arrays.get(f"device:{name}")
            if plane is not None:
                times = plane[rows, :n]
                lengths += times
                found[:, place] = times.sum(axis=1) / np.maximum(timed, 1)
        found[:, 1] = lengths.max(axis=1, initial=0)
    return found


def _put_memory(out: NDArray[np.float32], place: int, levels: NDArray[np.float32]) -> None:
    """Put the maximum over the sampled ranks in ``place``; for the memory in use also the median."""
    levels = np.sort(levels, axis=1)
    n = levels.shape[1]
    unsampled = (levels <= 0).sum(axis=1)  # 0: not sampled in this step
    rows = np.flatnonzero(unsampled < n)
    out[rows, place] = levels[rows, -1]
    if MEMORY[place] == "allocated":
        twice = unsampled[rows] + n - 1
        out[rows, 0] = (levels[rows, twice // 2] + levels[rows, (twice + 1) // 2]) / 2
