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
from dataclasses import dataclass, replace
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
from stepscope.store.rank_series import DEVICE_DTYPE, STEP_DTYPE

__all__ = ["NONE", "Batch", "Exchanges", "Heat", "Names", "Planes", "Taken", "gather"]


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
class Again:
    """Steps of an earlier batch whose waiting time is known only now (DDP reports it one step later)."""

    ring: NDArray[np.intp]
    step: NDArray[np.int64]
    ddp: dict[str, Floats]
    """By field of the slot."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New steps, ordered by ring and step; each array has one entry per step."""

    ring: NDArray[np.intp]
    """Number in the registry."""
    step: NDArray[np.int64]
    rows: NDArray[Any]
    """dtype ``STEP_FIELDS``; ``phase_ns`` as recorded."""
    waited: Floats
    """The part of the backward phase that belongs to comm."""
    ddp: dict[str, Floats]
    """DDP's figures for the step itself, not the previous one; {} if there are no figures."""
    again: Again | None
    device_ring: NDArray[np.intp]
    device: NDArray[Any]
    """dtype ``DEVICE_FIELDS``."""
    exchange_ring: NDArray[np.intp]
    exchanges: NDArray[np.uint8]
    """[n, 256]; the slots that describe collectives."""
    note_ring: NDArray[np.intp]
    notes: NDArray[np.uint8]
    """[n, 256]; the slots with values that the script noted."""
    repeated: int
    """Rows that are duplicates or have an impossible step number."""

    def part(self, chosen: NDArray[np.intp]) -> Batch:
        """Select steps; everything else is unchanged."""
        if len(chosen) == len(self.step):
            return self
        return replace(
            self,
            ring=self.ring[chosen],
            step=self.step[chosen],
            rows=self.rows[chosen],
            waited=self.waited[chosen],
            ddp={name: column[chosen] for name, column in self.ddp.items()},
        )


def gather(taken: Sequence[tuple[NDArray[np.intp], Taken]], last_step: NDArray[np.int64]) -> Batch:
    """Join rows into a batch; fastest when the rings come in ascending order.

    ``taken``: rows with the registry number of each ring in their table; ``last_step``: by that number.
    """
    counts = [one.table["rows"].astype(np.intp) for _, one in taken]
    ring = np.concatenate([np.repeat(rings, own) for (rings, _), own in zip(taken, counts, strict=True)])
    slots = taken[0][1].slots if len(taken) == 1 else np.concatenate([one.slots for _, one in taken])
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
    ddp, waited, again = _booked(own, step, rows, last_step)
    is_device = kinds == DEVICE
    is_note = kinds == NOTE
    is_exchange = (kinds == COMM_RECORD) | (kinds == COLLECTIVE)
    return Batch(
        ring=own,
        step=step,
        rows=rows,
        waited=waited,
        ddp=ddp,
        again=again,
        device_ring=ring[is_device],
        device=slots[is_device].view(DEVICE_DTYPE).reshape(-1),
        exchange_ring=ring[is_exchange],
        exchanges=slots[is_exchange].reshape(-1, SLOT_BYTES),
        note_ring=ring[is_note],
        notes=slots[is_note].reshape(-1, SLOT_BYTES),
        repeated=len(chosen) - len(rows),
    )


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
) -> tuple[dict[str, Floats], Floats, Again | None]:
    """Book waiting as ``store.rank_series.book_waiting`` does, as far as possible before the next step arrives."""
    waited = np.zeros(len(rows), np.float32)
    told = rows["ddp_compute_ns"] > 0
    if not told.any():
        return {}, waited, None
    ddp = {name: rows[name].astype(np.float32) for name in _DDP}
    first = np.concatenate(([True], np.diff(ring) != 0))
    again = None
    if rows["ddp_exposed_ns"].any():  # on a GPU DDP samples itself, and the figures may be from any earlier step
        earlier = np.flatnonzero(first & told & (step > 0) & (last_step[ring] == step - 1))
        values = {name: column[earlier] for name, column in ddp.items()}
        again = Again(ring=ring[earlier], step=step[earlier] - 1, ddp=values)
        known = np.flatnonzero(~first[1:] & (np.diff(step) == 1) & told[1:])
        for column in ddp.values():
            column[known] = column[known + 1]
        waited = np.minimum(ddp["ddp_exposed_ns"], rows["phase_ns"][:, BACKWARD].astype(np.float32))
    return ddp, waited, again


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


@dataclass(frozen=True, kw_only=True)
class Names:
    """The phase names of the ranks."""

    given: Sequence[tuple[str, ...]]
    """Sixteen names by slot; each distinct set once."""
    number: NDArray[np.int32]
    """The index into ``given``, by row."""


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
        self.phases: list[str] = list(BUILTIN_PHASES)
        self.steps: NDArray[np.int64] = np.full(most_steps, NONE, np.int64)
        """[width]; the step in each row."""
        self.have: NDArray[np.bool_] = np.zeros((most_steps, room), np.bool_)
        """[width, room]; whether a rank has made the step; where it is unset, everything else is zero."""
        self.held: dict[str, NDArray[Any]] = {}
        """[width, room] by quantity: fields of ``PLAIN``, ``phase:NAME``, ``device:NAME``, ``device`` (where timed)."""
        self._maps: dict[tuple[str, ...], NDArray[np.intp]] = {}

    @property
    def width(self) -> int:
        return len(self.steps)

    @property
    def oldest(self) -> int:
        """The first step that could be kept."""
        return max(0, (self.newest // self.stride - self.width + 1) * self.stride)

    @property
    def nbytes(self) -> int:
        return self.have.nbytes + sum(plane.nbytes for plane in self.held.values())

    def clear(self) -> None:
        """Reset for another attempt."""
        self.columns, self.stride, self.newest = 0, 1, NONE
        self.steps[:] = NONE
        for plane in (self.have, *self.held.values()):
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
        for plane in (self.have, *self.held.values()):
            plane[fresh % self.width] = 0
        self.newest = newest

    def set_stride(self, stride: int) -> None:
        """From now on keep every ``stride``-th step, including those already in the window."""
        self.stride = stride
        self._shape(self.width, self.have.shape[1])

    def complete(self) -> NDArray[np.int64]:
        """Return the steps that are kept, ascending."""
        return np.sort(self.steps[self.steps != NONE])

    # -- taking rows ----------------------------------------------------------------------------------------------

    def take(self, batch: Batch, column: NDArray[np.intp], names: Names) -> NDArray[np.intp]:
        """Put in new steps; return the rows of the window that changed.  ``column``: by step of the batch.

        Steps outside the window are skipped.
        """
        rows = batch.rows
        values: dict[str, NDArray[Any]] = {name: rows[name] for name in _AS_RECORDED}
        values |= {name: np.minimum(rows[name], 0xFFFF) for name in _COUNTS}
        values |= {name: column for name, column in batch.ddp.items() if name in PLAIN}
        values["waited"] = batch.waited
        by_slot = rows["phase_ns"].astype(np.float32)
        booked_phases(by_slot, batch.waited)
        values |= self._by_phase("phase", by_slot, names)
        self._make(values)
        at = self.row_of(batch.step)
        kept = np.flatnonzero((at != NONE) & (column != NONE))
        at, column = at[kept], column[kept]
        self.have[at, column] = True
        for name in values.keys() & self.held.keys():
            self.held[name][at, column] = values[name][kept]
        return np.flatnonzero(np.bincount(at, minlength=1))

    def take_device(self, device: NDArray[Any], column: NDArray[np.intp], names: Names) -> NDArray[np.int64]:
        """Put in device times, which arrive after their step; return the steps that changed."""
        values = self._by_phase("device", device["phase_ns"].astype(np.float32), names)
        values["device"] = np.ones(len(device), np.bool_)
        self._make(values)
        at, kept = self._there(np.minimum(device["step"], np.uint64(1 << 62)).astype(np.int64), column)
        for name in values.keys() & self.held.keys():
            self.held[name][at, column[kept]] = values[name][kept]
        return self.steps[np.flatnonzero(np.bincount(at, minlength=1))]

    def take_again(self, again: Again, column: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Book waiting for steps in the window; return which ones were there, and the additional waiting time."""
        backward, comm = f"phase:{BUILTIN_PHASES[BACKWARD]}", f"phase:{BUILTIN_PHASES[COMM]}"
        waited = again.ddp["ddp_exposed_ns"]
        self._make({**again.ddp, "waited": waited, backward: waited, comm: waited})
        at, kept = self._there(again.step, column)
        column, waited = column[kept], waited[kept]
        if not {"waited", backward, comm} <= self.held.keys():
            return kept[:0], waited[:0]
        for name in again.ddp.keys() & self.held.keys():
            self.held[name][at, column] = again.ddp[name][kept]
        before = self.held["waited"][at, column]
        waited = np.minimum(waited, self.held[backward][at, column] + before)
        self.held["waited"][at, column] = waited
        self.held[backward][at, column] -= waited - before
        self.held[comm][at, column] += waited - before
        return kept, waited - before

    def _there(self, steps: NDArray[np.int64], column: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the row of each step that its rank has made, and the indices of those steps."""
        at = self.row_of(steps)
        kept = np.flatnonzero((at != NONE) & (column != NONE))
        kept = kept[self.have[at[kept], column[kept]]]
        return at[kept], kept

    def _by_phase(self, kind: str, by_slot: NDArray[np.float32], names: Names) -> dict[str, NDArray[np.float32]]:
        """Convert from each rank's phase slots to one array per phase name."""
        maps = [self._map(given) for given in names.given]
        found = np.zeros((len(self.phases), len(by_slot)), np.float32)
        for number in np.flatnonzero(np.bincount(names.number, minlength=1)):
            own = names.number == number
            whole = bool(own.all())
            for slot in range(PHASE_SLOTS):
                column = by_slot[:, slot] if whole else np.where(own, by_slot[:, slot], 0)
                if column.any():
                    found[maps[number][slot]] += column
        return {f"{kind}:{name}": found[place] for place, name in enumerate(self.phases)}

    def _map(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Return the index into ``phases`` for each of the sixteen slots."""
        if names not in self._maps:
            places = list(range(len(BUILTIN_PHASES)))
            for name in names[len(BUILTIN_PHASES) :]:
                if name and name not in self.phases and len(self.phases) < MOST_PHASES:
                    self.phases.append(name)
                places.append(self.phases.index(name) if name in self.phases else OTHER)
            self._maps[names] = np.array(places, np.intp)
        return self._maps[names]

    # -- memory ---------------------------------------------------------------------------------------------------

    def _width_for(self, room: int) -> int:
        cell = self.have.itemsize + sum(plane.itemsize for plane in self.held.values())
        return max(self._least, min(self._most, self._budget_bytes // (cell * room)))

    def _make(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Allocate planes for quantities that are not all zero.  Call this before putting in: the window may shrink."""
        for name, found in values.items():
            if name not in self.held and (name in _ALWAYS or found.any()):
                kind = PLAIN.get(name, "?" if name == "device" else "f4")
                self.held[name] = np.zeros(self.have.shape, kind)
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
        for name in list(self.held):
            self.held[name] = moved(self.held[name])
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
        for held in (self.work_ns, self.wall_ns, self.count):
            held[:] = 0

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


# -- collectives ------------------------------------------------------------------------------------------------------
# What the ranks of a small job exchanged in the last steps: the slots that describe collectives, unchanged.
#
# Kept only within limits and for jobs in which all ranks are judged: a sum over ranks would be wrong if some were
# missing.  Beyond the limits nothing is kept and the rules that need it find nothing; the final summary has all of it.

EXCHANGES_MOST_RANKS = 256
EXCHANGES_BYTES = 64 << 20


class Exchanges:
    def __init__(self, *, most_ranks: int = EXCHANGES_MOST_RANKS, kept_bytes: int = EXCHANGES_BYTES) -> None:
        self._most_ranks, self._kept_bytes = most_ranks, kept_bytes
        self._kept: deque[tuple[int, NDArray[np.intp], NDArray[np.uint8]]] = deque()
        self._held_bytes = 0
        self._cut = -1
        """The last step from which something was dropped for lack of room."""

    def clear(self) -> None:
        self._kept.clear()
        self._held_bytes, self._cut = 0, -1

    def put(self, ring: NDArray[np.intp], slots: NDArray[np.uint8], *, ranks: int, oldest: int) -> None:
        """Add slots and drop those before ``oldest``, the first step of the window."""
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
        """Return ring numbers and slots from that step on (and some before it); nothing if any of them were dropped."""
        if self._cut >= oldest:
            return ()
        return tuple((ring, slots) for _, ring, slots in self._kept)
