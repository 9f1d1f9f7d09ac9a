"""The steps of every rank as arrays: new rows, the window of the last steps, the map rank × time, collectives.

The window (``Planes``) has the last steps of every rank in the last attempt as arrays ``[step, column]``; digests and
rules are computed from it.  It is a ring buffer over steps: step n is in row ``n // stride % width``.  There is one
float32 array per quantity, allocated at its first nonzero value: a job without device times, or without a phase, pays
nothing for them.  The number of steps kept follows from the memory budget and the number of ranks: 1,024 for hundreds
of ranks, 256 for thousands, never fewer than 32.

Agents of a large job send about every twenty seconds, each at a different time, and a step is complete only when the
last agent has sent it.  If that many steps do not fit, only every second (fourth …) step is kept: the ``stride``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    COLLECTIVE,
    COMM,
    COMM_RECORD,
    DEVICE,
    NOTE,
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
)
from stepscope.step_table import DEVICE_DTYPE, STEP_DTYPE

__all__ = ["NONE", "NO_ROWS", "Batch", "Exchanges", "Heat", "Names", "Planes", "Rows", "Slots", "Taken", "gather"]


# -- batches ----------------------------------------------------------------------------------------------------------
# Turns received slots into columns of new steps: in order, without duplicates, with waiting booked as ``comm``.
#
# Rows are queued until there are a few thousand (``LiveRun.settle``); a batch then takes a few array operations, no
# matter how many frames it came in.  Steps that a ring already has are skipped: an agent that resumed may read twice,
# and the first row counts, as when a run is loaded.

Floats = NDArray[np.float32]
LARGEST_STEP = 1 << 40
"""No job makes this many steps: a larger number is corrupt or forged."""
_DDP = ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns")


class Taken(Protocol):
    """Rows from the inbox, or from a segment."""

    @property
    def slots(self) -> NDArray[np.uint8]:
        """[n, 256]; ring by ring in the table's order."""

    @property
    def table(self) -> NDArray[Any]:
        """``wire.frames.TABLE_FIELDS``; ``rows`` is each ring's number of slots."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Steps of some rings; each array has one entry per step."""

    ring: NDArray[np.intp]
    """Number in the registry."""
    step: NDArray[np.int64]
    values: Mapping[str, NDArray[Any]]
    """By name of a plane."""

    def part(self, chosen: NDArray[np.intp]) -> Rows:
        if len(chosen) == len(self.step):
            return self
        values = {name: column[chosen] for name, column in self.values.items()}
        return Rows(ring=self.ring[chosen], step=self.step[chosen], values=values)


NO_ROWS = Rows(ring=np.zeros(0, np.intp), step=np.zeros(0, np.int64), values={})


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Records as received."""

    ring: NDArray[np.intp]
    slots: NDArray[np.uint8]
    """[n, 256]."""


NO_SLOTS = Slots(ring=np.zeros(0, np.intp), slots=np.zeros((0, SLOT_BYTES), np.uint8))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New steps, ordered by ring and step, and what came with them."""

    steps: Rows
    """Times by phase; waiting is booked as ``comm``."""
    device: Rows = NO_ROWS
    """Device times of some steps."""
    waits: Rows = NO_ROWS
    """Steps of an earlier batch whose waiting time is known only now (DDP reports it one step later)."""
    exchanges: Slots = NO_SLOTS
    """What describes collectives."""
    notes: Slots = NO_SLOTS
    """Values that the script noted."""
    repeated: int = 0
    """Rows that are duplicates or have an impossible step number."""


class Phases:
    """The phases of all ranks, in the order in which ranks named them; the built-in ones first."""

    def __init__(self) -> None:
        self.names: list[str] = list(BUILTIN_PHASES)
        self._places: dict[tuple[str, ...], NDArray[np.intp]] = {}

    def known(self, name: str) -> str:
        """Return the name under which the time of a phase counts: its own, while there is room for it."""
        if name and name not in self.names and len(self.names) < MOST_PHASES:
            self.names.append(name)
        return name if name in self.names else BUILTIN_PHASES[OTHER]

    def by_name(self, kind: str, by_slot: Floats, names: Names) -> dict[str, Floats]:
        """Convert from each rank's phase slots to one array per phase name."""
        places = [self._places_of(given) for given in names.given]
        found = np.zeros((len(self.names), len(by_slot)), np.float32)
        for number in np.flatnonzero(np.bincount(names.number, minlength=1)):
            own = names.number == number
            whole = bool(own.all())
            for slot in range(PHASE_SLOTS):
                column = by_slot[:, slot] if whole else np.where(own, by_slot[:, slot], 0)
                if column.any():
                    found[places[number][slot]] += column
        return {f"{kind}:{name}": found[place] for place, name in enumerate(self.names)}

    def of_table(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Rename the columns of a step table (``StepTable.by_name``) to those of planes."""
        found: dict[str, NDArray[Any]] = {}
        for name, column in columns.items():
            kind, colon, phase = name.partition(":")
            if not colon:
                if name in PLAIN:
                    found[name] = np.minimum(column, 0xFFFF) if name in _COUNTS else column
                continue
            plane = f"{kind}:{self.known(phase)}"
            found[plane] = found[plane] + column if plane in found else column
        return found

    def _places_of(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Return the index into ``names`` for each of the sixteen slots."""
        if names not in self._places:
            builtin = len(BUILTIN_PHASES)
            own = [self.names.index(self.known(name)) for name in names[builtin:]]
            self._places[names] = np.array([*range(builtin), *own], np.intp)
        return self._places[names]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The phase names of rows."""

    given: Sequence[tuple[str, ...]]
    """Sixteen names by slot; each distinct set once."""
    number: NDArray[np.int32]
    """The index into ``given``; by ring, or by row."""

    def of(self, ring: NDArray[np.intp]) -> Names:
        return Names(given=self.given, number=self.number[ring])


def gather(
    taken: Sequence[tuple[NDArray[np.intp], Taken]], last_step: NDArray[np.int64], phases: Phases, names: Names
) -> Batch:
    """Join rows into a batch; fastest when the rings come in ascending order.

    ``taken``: rows with the registry number of each ring in their table; ``last_step``, ``names``: by that number.
    """
    counts = [own.table["rows"].astype(np.intp) for _, own in taken]
    ring = np.concatenate([np.repeat(rings, own) for (rings, _), own in zip(taken, counts, strict=True)])
    slots = taken[0][1].slots if len(taken) == 1 else np.concatenate([own.slots for _, own in taken])
    everything: NDArray[Any] = np.ascontiguousarray(slots).view(STEP_DTYPE).reshape(-1)
    kinds = everything["kind"].copy()
    chosen = np.flatnonzero(kinds == STEP)
    if (np.diff(ring) < 0).any():
        chosen = chosen[np.argsort(ring[chosen], kind="stable")]
    order: Any = slice(None) if len(chosen) == len(ring) and (np.diff(chosen) == 1).all() else chosen
    fresh = _is_new(ring[order], everything["step"][order], last_step)
    kept: Any = order if fresh.all() else chosen[fresh]
    rows, own = everything[kept], ring[kept]
    step = rows["step"].astype(np.int64)
    ddp, waited, waits = _booked(own, step, rows, last_step)
    by_slot = rows["phase_ns"].astype(np.float32)
    booked_phases(by_slot, waited)
    values: dict[str, NDArray[Any]] = {name: rows[name] for name in _AS_RECORDED}
    values |= {name: np.minimum(rows[name], 0xFFFF) for name in _COUNTS}
    values |= {name: column for name, column in ddp.items() if name in PLAIN} | {"waited": waited}
    is_exchange = (kinds == COMM_RECORD) | (kinds == COLLECTIVE)
    return Batch(
        steps=Rows(ring=own, step=step, values=values | phases.by_name("phase", by_slot, names.of(own))),
        device=_device_rows(slots[kinds == DEVICE], ring[kinds == DEVICE], phases, names),
        waits=waits,
        exchanges=Slots(ring=ring[is_exchange], slots=slots[is_exchange]),
        notes=Slots(ring=ring[kinds == NOTE], slots=slots[kinds == NOTE]),
        repeated=len(chosen) - len(rows),
    )


def _device_rows(slots: NDArray[np.uint8], ring: NDArray[np.intp], phases: Phases, names: Names) -> Rows:
    if not len(slots):
        return NO_ROWS
    rows: NDArray[Any] = slots.view(DEVICE_DTYPE).reshape(-1)
    step = np.minimum(rows["step"], np.uint64(1 << 62)).astype(np.int64)
    times = phases.by_name("device", rows["phase_ns"].astype(np.float32), names.of(ring))
    return Rows(ring=ring, step=step, values={**times, "device": np.ones(len(rows), np.bool_)})


def _is_new(ring: NDArray[np.intp], step: NDArray[np.uint64], last_step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the steps that come after all earlier steps of their ring; ordered by ring."""
    if not len(ring):
        return np.zeros(0, np.bool_)
    known = step < LARGEST_STEP
    number = np.where(known, step, 0).astype(np.int64)
    # One ascending key over all rings, so that a single running maximum gives each ring's last step so far.
    place = np.cumsum(np.concatenate(([0], np.diff(ring) != 0))).astype(np.int64) * (LARGEST_STEP + 1)
    key = np.where(known, place + number, place - 1)
    before = np.concatenate(([-1], np.maximum.accumulate(key)[:-1]))
    return known & (key > before) & (number > last_step[ring])


def _booked(
    ring: NDArray[np.intp], step: NDArray[np.int64], rows: NDArray[Any], last_step: NDArray[np.int64]
) -> tuple[dict[str, Floats], Floats, Rows]:
    """Book waiting as ``store.rank_series.book_waiting`` does, as far as possible before the next step arrives."""
    waited = np.zeros(len(rows), np.float32)
    reported = rows["ddp_compute_ns"] > 0
    if not reported.any():
        return {}, waited, NO_ROWS
    ddp = {name: rows[name].astype(np.float32) for name in _DDP}
    first = np.concatenate(([True], np.diff(ring) != 0))
    waits = NO_ROWS
    if rows["ddp_exposed_ns"].any():  # on a GPU DDP samples itself, and the figures may be from any earlier step
        earlier = np.flatnonzero(first & reported & (step > 0) & (last_step[ring] == step - 1))
        values = {name: column[earlier] for name, column in ddp.items()}
        waits = Rows(ring=ring[earlier], step=step[earlier] - 1, values=values)
        known = np.flatnonzero(~first[1:] & (np.diff(step) == 1) & reported[1:])
        for column in ddp.values():
            column[known] = column[known + 1]
        waited = np.minimum(ddp["ddp_exposed_ns"], rows["phase_ns"][:, BACKWARD].astype(np.float32))
    return ddp, waited, waits


def booked_phases(phase_ns: Floats, waited: Floats) -> None:
    """Move the waiting time from backward to comm, in place; ``phase_ns`` is [n, slots]."""
    phase_ns[:, BACKWARD] -= waited
    phase_ns[:, COMM] += waited


# -- planes -----------------------------------------------------------------------------------------------------------

PLANES_BYTES = 224 << 20
MOST_STEPS = 1024
"""The rules use the last 256 during a job, and more if devices are timed in only one step of 64."""
LEAST_STEPS = 32
MOST_PHASES = 24
"""The number of distinct phases over all ranks; the time of further phases counts as other."""
FIRST_ROOM = 64
NONE = -1

PLAIN: dict[str, str] = {
    "start_ns": "u8",
    "wall_ns": "f4",
    "between_ns": "f4",
    "flags": "u2",
    "allocated": "f4",
    "reserved": "f4",
    "peak_allocated": "f4",
    "ddp_compute_ns": "f4",
    "ddp_comm_ns": "f4",
    "waited": "f4",
    "micro_batches": "u2",
    "forwards": "u2",
    "batches": "u2",
}
"""By field of a step's slot; ``waited`` is the time moved from backward to comm."""
_ALWAYS = ("start_ns", "wall_ns")
_AS_RECORDED = ("start_ns", "wall_ns", "between_ns", "flags", "allocated", "reserved", "peak_allocated")
_COUNTS = ("micro_batches", "forwards", "batches")


SUMMED_ROWS = 32
"""Rows of the window whose sums are kept together."""


@dataclass(frozen=True, kw_only=True)
class _BlockSums:
    key: tuple[object, ...]
    """The last change of its rows, and what was added up."""
    count: NDArray[np.int64]
    totals: Mapping[str, NDArray[np.float32]]


class Planes:
    def __init__(
        self,
        *,
        budget_bytes: int = PLANES_BYTES,
        most_steps: int = MOST_STEPS,
        least_steps: int = LEAST_STEPS,
        room: int = FIRST_ROOM,
    ) -> None:
        """``room``: the number of ranks to allocate for; it grows as more come."""
        self._budget_bytes = budget_bytes
        self._most, self._least = most_steps, least_steps
        self.columns = 0
        self.stride = 1
        self.newest = NONE
        """The last step that any rank has made, kept or not."""
        self.named = Phases()
        self.steps: NDArray[np.int64] = np.full(most_steps, NONE, np.int64)
        """[width]; the step in each row."""
        self.have: NDArray[np.bool_] = np.zeros((most_steps, room), np.bool_)
        """[width, room]; whether a rank has made the step; where it is unset, everything else is zero."""
        self.arrays: dict[str, NDArray[Any]] = {}
        """[width, room] by quantity: fields of ``PLAIN``, ``phase:NAME``, ``device:NAME``, ``device`` (where timed)."""
        self._changes = 0
        self._changed: NDArray[np.int64] = np.zeros(most_steps, np.int64)
        """[width]; the number of the last change of each row."""
        self._block_sums: dict[int, _BlockSums] = {}

    @property
    def phases(self) -> list[str]:
        return self.named.names

    @property
    def width(self) -> int:
        return len(self.steps)

    @property
    def oldest(self) -> int:
        """The first step that could be kept."""
        return max(0, (self.newest // self.stride - self.width + 1) * self.stride)

    @property
    def nbytes(self) -> int:
        return self.have.nbytes + sum(plane.nbytes for plane in self.arrays.values())

    def clear(self) -> None:
        """Reset for another attempt."""
        self.columns, self.stride, self.newest = 0, 1, NONE
        self.steps[:] = NONE
        self._note_change(slice(None))
        for plane in (self.have, *self.arrays.values()):
            plane[:] = 0

    def add_columns(self, count: int) -> NDArray[np.intp]:
        first, self.columns = self.columns, self.columns + count
        if self.columns > self.have.shape[1]:
            self.expect(max(self.columns, self.have.shape[1] * 5 // 4))
        return np.arange(first, self.columns)

    def expect(self, columns: int) -> None:
        """Make room for this many ranks: announcing them early avoids copies later."""
        if columns > self.have.shape[1]:
            room = -(-columns // FIRST_ROOM) * FIRST_ROOM
            self._shape(self._width_for(room), room)

    def row_of(self, steps: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the row of each step; ``NONE`` for steps that are not kept."""
        rows = (steps // self.stride % self.width).astype(np.intp)
        return np.where((steps >= 0) & (self.steps[rows] == steps), rows, NONE)

    def leaving(self, newest: int) -> NDArray[np.int64]:
        """Return the steps that leave the window when ``newest`` comes, ascending."""
        limit = (newest // self.stride - self.width + 1) * self.stride
        return np.sort(self.steps[(self.steps != NONE) & (self.steps < limit)])

    def advance(self, newest: int) -> None:
        """Make room up to that step."""
        if newest <= self.newest:
            return
        first = max(self.newest // self.stride + 1 if self.newest >= 0 else 0, newest // self.stride - self.width + 1)
        fresh = np.arange(first, newest // self.stride + 1, dtype=np.int64)
        self.steps[fresh % self.width] = fresh * self.stride
        for plane in (self.have, *self.arrays.values()):
            plane[fresh % self.width] = 0
        self._note_change(fresh % self.width)
        self.newest = newest

    def set_stride(self, stride: int) -> None:
        """From now on keep every ``stride``-th step, including those already in the window."""
        self.stride = stride
        self._shape(self.width, self.have.shape[1])

    def complete(self) -> NDArray[np.int64]:
        """Return the steps that are kept, ascending."""
        return np.sort(self.steps[self.steps != NONE])

    # -- taking rows ----------------------------------------------------------------------------------------------

    def take(self, rows: Rows, column: NDArray[np.intp]) -> NDArray[np.intp]:
        """Put in new steps; return the rows of the window that changed.  ``column``: by step.

        Steps outside the window are skipped.
        """
        self._make(rows.values)
        at = self.row_of(rows.step)
        kept = np.flatnonzero((at != NONE) & (column != NONE))
        at, column = at[kept], column[kept]
        self.have[at, column] = True
        self._put(rows, kept, at, column)
        changed = np.flatnonzero(np.bincount(at, minlength=1))
        self._note_change(changed)
        return changed

    def take_device(self, rows: Rows, column: NDArray[np.intp]) -> NDArray[np.int64]:
        """Put in device times, which arrive after their step; return the steps that changed."""
        self._make(rows.values)
        at, kept = self._there(rows.step, column)
        self._put(rows, kept, at, column[kept])
        changed = np.flatnonzero(np.bincount(at, minlength=1))
        self._note_change(changed)
        return self.steps[changed]

    def take_waits(self, rows: Rows, column: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Book waiting for steps in the window; return which ones were there, and the additional waiting time."""
        backward, comm = f"phase:{BUILTIN_PHASES[BACKWARD]}", f"phase:{BUILTIN_PHASES[COMM]}"
        waited = rows.values["ddp_exposed_ns"]
        plain = {name: column for name, column in rows.values.items() if name in PLAIN}
        self._make({**plain, "waited": waited, backward: waited, comm: waited})
        at, kept = self._there(rows.step, column)
        column, waited = column[kept], waited[kept]
        if not {"waited", backward, comm} <= self.arrays.keys():
            return kept[:0], waited[:0]
        self._put(rows, kept, at, column)
        before = self.arrays["waited"][at, column]
        waited = np.minimum(waited, self.arrays[backward][at, column] + before)
        self.arrays["waited"][at, column] = waited
        self.arrays[backward][at, column] -= waited - before
        self.arrays[comm][at, column] += waited - before
        self._note_change(at)
        return kept, waited - before

    def _put(self, rows: Rows, kept: NDArray[np.intp], at: NDArray[np.intp], column: NDArray[np.intp]) -> None:
        cells = at * self.have.shape[1] + column  # planes are contiguous: half the time of an index by dimension
        every = len(at) == len(rows.step)
        for name in rows.values.keys() & self.arrays.keys():
            values = rows.values[name]
            self.arrays[name].reshape(-1)[cells] = values if every else values[kept]

    def _there(self, steps: NDArray[np.int64], column: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the row of each step that its rank has made, and the indices of those steps."""
        at = self.row_of(steps)
        kept = np.flatnonzero((at != NONE) & (column != NONE))
        kept = kept[self.have[at[kept], column[kept]]]
        return at[kept], kept

    def _note_change(self, rows: slice | NDArray[np.integer[Any]]) -> None:
        self._changes += 1
        self._changed[rows] = self._changes

    # -- sums -----------------------------------------------------------------------------------------------------

    def sums(
        self, rows: NDArray[np.intp], names: Sequence[str]
    ) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
        """For these rows of the window, [column]: how many of the steps each rank has made, and by name the sum.

        The sums of blocks of rows that did not change are kept: adding up 256 steps of 4,096 ranks takes 5 ms.
        """
        n, rows = self.columns, np.sort(rows)
        count, totals = np.zeros(n, np.int64), {name: np.zeros(n, np.float64) for name in names}
        blocks = {}
        for own in np.split(rows, np.flatnonzero(np.diff(rows // SUMMED_ROWS)) + 1) if len(rows) else ():
            block, changed = int(own[0]) // SUMMED_ROWS, int(self._changed[own].max())
            found = self._block_sums.get(block)
            if found is None or found.key != (changed, n, len(own), *names):
                found = _BlockSums(key=(changed, n, len(own), *names), **self._sums_of(own, names))
            if len(own) == SUMMED_ROWS:
                blocks[block] = found
            count += found.count
            for name, total in found.totals.items():
                totals[name] += total
        self._block_sums = blocks
        return count, totals

    def _sums_of(self, rows: NDArray[np.intp], names: Sequence[str]) -> dict[str, Any]:
        n = self.columns
        stretches = [
            slice(int(own[0]), int(own[-1]) + 1) for own in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        ]
        count = sum(np.count_nonzero(self.have[stretch, :n], axis=0) for stretch in stretches)
        planes = {name: self.arrays[name] for name in names if name in self.arrays}
        totals = {
            name: sum(np.add.reduce(plane[stretch, :n], axis=0) for stretch in stretches)
            for name, plane in planes.items()
        }
        return {"count": count, "totals": totals}

    # -- memory ---------------------------------------------------------------------------------------------------

    def _width_for(self, room: int) -> int:
        cell = self.have.itemsize + sum(plane.itemsize for plane in self.arrays.values())
        return max(self._least, min(self._most, self._budget_bytes // (cell * room)))

    def _make(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Allocate planes for quantities that are not all zero.  Call this before putting in: the window may shrink."""
        for name, found in values.items():
            if name not in self.arrays and (name in _ALWAYS or found.any()):
                kind = PLAIN.get(name, "?" if name == "device" else "f4")
                self.arrays[name] = np.zeros(self.have.shape, kind)
        width = self._width_for(self.have.shape[1])
        if width < self.width:
            self._shape(width, self.have.shape[1])

    def _shape(self, width: int, room: int) -> None:
        """Change the size or the stride; the newest steps are kept."""
        old = np.sort(self.steps[(self.steps != NONE) & (self.steps % self.stride == 0)])
        old = old[old > (self.newest // self.stride - width) * self.stride]
        order = np.argsort(self.steps)
        there = order[np.searchsorted(self.steps, old, sorter=order)]
        rows = (old // self.stride % width).astype(np.intp)
        both = min(room, self.have.shape[1])

        def moved(plane: NDArray[Any]) -> NDArray[Any]:
            fresh = np.zeros((width, room), plane.dtype)
            fresh[rows, :both] = plane[there, :both]
            return fresh

        self.have = moved(self.have)
        for name in list(self.arrays):
            self.arrays[name] = moved(self.arrays[name])
        self._changed = np.zeros(width, np.int64)
        self._note_change(slice(None))
        self.steps = np.full(width, NONE, np.int64)
        self.steps[rows] = old
        if self.newest >= 0:
            kept = np.arange(max(0, self.newest // self.stride - width + 1), self.newest // self.stride + 1)
            self.steps[kept % width] = kept * self.stride


# -- heat map ---------------------------------------------------------------------------------------------------------
# The map rank × time of a whole attempt: work and step length in bins of steps, in bounded memory.
#
# Rows are columns of the planes; a column of the map is a bin of ``span`` steps.  When a step lies beyond the last
# bin, or more ranks come than fit with this many bins, pairs of bins are merged and ``span`` doubles.

HEAT_BYTES = 40 << 20
MOST_BINS = 512
LEAST_BINS = 32
_CELL = 4 + 4 + 4


class Heat:
    def __init__(self, *, budget_bytes: int = HEAT_BYTES, bins: int = MOST_BINS, least_bins: int = LEAST_BINS) -> None:
        self._budget_bytes, self._most, self._least = budget_bytes, bins, least_bins
        self.span = 1
        """Steps per bin."""
        self.newest = -1
        self.work_ns: NDArray[np.float32] = np.zeros((FIRST_ROOM, bins), np.float32)
        """[column, bin]; sums, like ``wall_ns``."""
        self.wall_ns: NDArray[np.float32] = np.zeros_like(self.work_ns)
        self.count: NDArray[np.uint32] = np.zeros((FIRST_ROOM, bins), np.uint32)
        """Number of steps in the sums."""

    @property
    def bins(self) -> int:
        return int(self.work_ns.shape[1])

    @property
    def nbytes(self) -> int:
        return self.work_ns.nbytes + self.wall_ns.nbytes + self.count.nbytes

    def clear(self) -> None:
        self.span, self.newest = 1, -1
        for cells in (self.work_ns, self.wall_ns, self.count):
            cells[:] = 0

    def make_room(self, columns: int) -> None:
        """Make room for this many ranks; may be called before they come."""
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
        """Add steps, ordered by column and step.  ``wall_ns`` None: correct the work of steps already added."""
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
        for cells in (self.work_ns, self.wall_ns, self.count):
            cells[:, :half] = cells[:, 0 : 2 * half : 2] + cells[:, 1 : 2 * half : 2]
            cells[:, half:] = 0
        self.span *= 2

    def _shape(self, room: int, bins: int) -> None:
        rows = min(room, len(self.count))

        def moved(cells: NDArray[np.float32]) -> NDArray[np.float32]:
            fresh = np.zeros((room, bins), cells.dtype)
            fresh[:rows] = cells[:rows, :bins]
            return fresh

        self.work_ns, self.wall_ns = moved(self.work_ns), moved(self.wall_ns)
        self.count = moved(self.count)  # type: ignore[arg-type, assignment]  # the same for counts


# -- collectives ------------------------------------------------------------------------------------------------------
# What the ranks of a small job exchanged in the last steps: the slots that describe collectives, unchanged.
#
# Kept only within limits and for jobs in which all ranks are judged: a sum over ranks would be wrong if some were
# missing.  Beyond the limits nothing is kept and the rules that need it find nothing; the final summary has all of it.

EXCHANGES_MOST_RANKS = 256
EXCHANGES_BYTES = 64 << 20


class Exchanges:
    def __init__(self, *, most_ranks: int = EXCHANGES_MOST_RANKS, most_bytes: int = EXCHANGES_BYTES) -> None:
        self._most_ranks, self._most_bytes = most_ranks, most_bytes
        self._batches: deque[tuple[int, Slots]] = deque()
        """The last step of each, and the batch."""
        self._bytes = 0
        self._cut = -1
        """The last step from which something was dropped for lack of room."""

    def clear(self) -> None:
        self._batches.clear()
        self._bytes, self._cut = 0, -1

    def put(self, batch: Slots, *, ranks: int, oldest: int) -> None:
        """Add slots and drop those before ``oldest``, the first step of the window."""
        if ranks > self._most_ranks:
            self.clear()
            self._cut = 1 << 62
            return
        last = int(min(batch.slots.view(STEP_DTYPE)["step"].max(), np.uint64(1 << 62)))
        self._batches.append((last, batch))
        self._bytes += batch.slots.nbytes
        while self._batches and (self._batches[0][0] < oldest or self._bytes > self._most_bytes):
            step, gone = self._batches.popleft()
            self._bytes -= gone.slots.nbytes
            if step >= oldest:
                self._cut = max(self._cut, step)

    def since(self, oldest: int) -> tuple[Slots, ...]:
        """Return slots from that step on (and some before it); nothing if any of them were dropped."""
        return () if self._cut >= oldest else tuple(batch for _, batch in self._batches)
