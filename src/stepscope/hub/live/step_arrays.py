"""The steps of every rank as arrays: new rows, the window of the last steps, the map rank × time, collectives.

The last steps of every rank of the last attempt, as arrays ``[step, column]``: what digests and rules are made from.

A ring buffer over steps: step n stands in row ``n // stride % width``.  One array per quantity, float32, made when the
first value other than zero comes: a job without device times, or without a phase, pays nothing for them.  How many
steps are kept follows from the memory they may take and the number of ranks: 1,024 for some hundred, 256 for some
thousand, never fewer than 32.

Agents of a large job send every twenty seconds or so, each at another time, and a step is complete only when the last
of them has sent it.  Where that many steps do not fit, only every second (fourth …) step is kept: the ``stride``.
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
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
)
from stepscope.store.rank_series import DEVICE_DTYPE, STEP_DTYPE

__all__ = ["NONE", "Batch", "Exchanges", "Heat", "Names", "Planes", "Taken", "gather"]


# -- batch ------------------------------------------------------------------------------------------------------------
# From slots as they came to columns of new steps: in order, each once, with waiting booked as ``comm``.
#
# Rows wait until a few thousand have come together (``LiveRun.settle``); then everything here is a handful of array
# operations, however many frames they came in.  A step that a ring already has is passed over: an agent that resumed
# may read twice, and the first counts, as it does when a run is loaded.

Floats = NDArray[np.float32]
LARGEST_STEP = 1 << 40
"""More steps than anybody makes: a number from here on is of another hand."""
_DDP = ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns")


class Taken(Protocol):
    """Rows that the inbox took, or that a segment had."""

    @property
    def slots(self) -> NDArray[np.uint8]:
        """[n, 256]; ring by ring in the table's order."""

    @property
    def table(self) -> NDArray[Any]:
        """``wire.blocks.TABLE_FIELDS``; ``rows`` says how many of the slots are each ring's."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Steps of an earlier batch whose waiting is known only now (DDP tells it in the step after)."""

    ring: NDArray[np.intp]
    step: NDArray[np.int64]
    ddp: dict[str, Floats]
    """By field of the slot."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New steps, ordered by ring and step; one entry of each array a step."""

    ring: NDArray[np.intp]
    """Number in the registry."""
    step: NDArray[np.int64]
    rows: NDArray[Any]
    """dtype ``STEP_FIELDS``; ``phase_ns`` as recorded."""
    waited: Floats
    """Of the phase backward, what belongs to comm."""
    ddp: dict[str, Floats]
    """DDP's figures of each step itself, not of the one before; {} where there are none."""
    again: Again | None
    device_ring: NDArray[np.intp]
    device: NDArray[Any]
    """dtype ``DEVICE_FIELDS``."""
    exchange_ring: NDArray[np.intp]
    exchanges: NDArray[np.uint8]
    """[n, 256]; the slots that tell of collectives."""
    repeated: int
    """Rows that were there already, or that nobody can have made."""

    def part(self, chosen: NDArray[np.intp]) -> Batch:
        """Of the steps, those; everything else is left as it is."""
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
    """``taken``: rows with the registry's number of each ring of their table; ``last_step``: by that number.

    Quickest when the rings come in ascending order.
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
        repeated=len(chosen) - len(rows),
    )


def _is_new(ring: NDArray[np.intp], step: NDArray[np.uint64], last_step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which steps come after all that their ring had before them; ordered by ring."""
    if not len(ring):
        return np.zeros(0, np.bool_)
    known = step < LARGEST_STEP
    number = np.where(known, step, 0).astype(np.int64)
    # One ascending key over all rings, so that a single running maximum says what each ring has had so far.
    place = np.cumsum(np.concatenate(([0], np.diff(ring) != 0))).astype(np.int64) * (LARGEST_STEP + 1)
    key = np.where(known, place + number, place - 1)
    before = np.concatenate(([-1], np.maximum.accumulate(key)[:-1]))
    return known & (key > before) & (number > last_step[ring])


def _booked(
    ring: NDArray[np.intp], step: NDArray[np.int64], rows: NDArray[Any], last_step: NDArray[np.int64]
) -> tuple[dict[str, Floats], Floats, Again | None]:
    """What ``store.assemble.book_waiting`` does, as far as it can be done before the next step has come."""
    waited = np.zeros(len(rows), np.float32)
    told = rows["ddp_compute_ns"] > 0
    if not told.any():
        return {}, waited, None
    ddp = {name: rows[name].astype(np.float32) for name in _DDP}
    first = np.concatenate(([True], np.diff(ring) != 0))
    again = None
    if rows["ddp_exposed_ns"].any():  # on a GPU DDP samples itself, and what is read may be of any earlier step
        earlier = np.flatnonzero(first & told & (step > 0) & (last_step[ring] == step - 1))
        values = {name: column[earlier] for name, column in ddp.items()}
        again = Again(ring=ring[earlier], step=step[earlier] - 1, ddp=values)
        known = np.flatnonzero(~first[1:] & (np.diff(step) == 1) & told[1:])
        for column in ddp.values():
            column[known] = column[known + 1]
        waited = np.minimum(ddp["ddp_exposed_ns"], rows["phase_ns"][:, BACKWARD].astype(np.float32))
    return ddp, waited, again


def booked_phases(phase_ns: Floats, waited: Floats) -> None:
    """Move it, in place: ``phase_ns`` is [n, slots]."""
    phase_ns[:, BACKWARD] -= waited
    phase_ns[:, COMM] += waited


# -- planes -----------------------------------------------------------------------------------------------------------

PLANES_BYTES = 224 << 20
MOST_STEPS = 1024
"""The rules look at the last 256 while a job runs, and further back where devices are timed in one step of 64 only."""
LEAST_STEPS = 32
MOST_PHASES = 24
"""Told apart over all ranks; the time of further ones counts as other."""
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
"""By field of a step's slot; ``waited`` is what was moved from backward to comm."""
_ALWAYS = ("start_ns", "wall_ns")
_AS_RECORDED = ("start_ns", "wall_ns", "between_ns", "flags", "allocated", "reserved", "peak_allocated")
_COUNTS = ("micro_batches", "forwards", "batches")


@dataclass(frozen=True, kw_only=True)
class Names:
    """What ranks call their phases."""

    given: Sequence[tuple[str, ...]]
    """Sixteen names by slot, each different set once."""
    number: NDArray[np.int32]
    """Which of them, by row."""


class Planes:
    def __init__(
        self,
        *,
        budget_bytes: int = PLANES_BYTES,
        most_steps: int = MOST_STEPS,
        least_steps: int = LEAST_STEPS,
        room: int = FIRST_ROOM,
    ) -> None:
        """``room``: for so many ranks; for more it is made when they come."""
        self._budget_bytes = budget_bytes
        self._most, self._least = most_steps, least_steps
        self.columns = 0
        self.stride = 1
        self.newest = NONE
        """The last step that any rank has made, kept or not."""
        self.phases: list[str] = list(BUILTIN_PHASES)
        self.steps: NDArray[np.int64] = np.full(most_steps, NONE, np.int64)
        """[width]; which step stands in each row."""
        self.have: NDArray[np.bool_] = np.zeros((most_steps, room), np.bool_)
        """[width, room]; whether a rank has made it; where this is not set all else is zero."""
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
        """Another attempt begins."""
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
        """Make room for so many ranks: what is known to come is not copied later."""
        if columns > self.have.shape[1]:
            room = -(-columns // FIRST_ROOM) * FIRST_ROOM
            self._shape(self._width_for(room), room)

    def row_of(self, steps: NDArray[np.int64]) -> NDArray[np.intp]:
        """Where each step stands; ``NONE`` for those that are not kept."""
        rows = (steps // self.stride % self.width).astype(np.intp)
        return np.where((steps >= 0) & (self.steps[rows] == steps), rows, NONE)

    def leaving(self, newest: int) -> NDArray[np.int64]:
        """The steps that must make room when ``newest`` comes, ascending."""
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
        """Keep every ``stride``-th step from now on, and those of them that are there."""
        self.stride = stride
        self._shape(self.width, self.have.shape[1])

    def complete(self) -> NDArray[np.int64]:
        """The steps that are kept, ascending."""
        return np.sort(self.steps[self.steps != NONE])

    # -- taking rows ----------------------------------------------------------------------------------------------

    def take(self, batch: Batch, column: NDArray[np.intp], names: Names) -> NDArray[np.intp]:
        """Put new steps in, ``column`` by step of the batch; the rows of the window that were touched.

        What lies outside is passed over.
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
        """Device times come after their step; the steps of which some were put in."""
        values = self._by_phase("device", device["phase_ns"].astype(np.float32), names)
        values["device"] = np.ones(len(device), np.bool_)
        self._make(values)
        at, kept = self._there(np.minimum(device["step"], np.uint64(1 << 62)).astype(np.int64), column)
        for name in values.keys() & self.held.keys():
            self.held[name][at, column[kept]] = values[name][kept]
        return self.steps[np.flatnonzero(np.bincount(at, minlength=1))]

    def take_again(self, again: Again, column: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """Book the waiting of steps that are there already; which of them were, and how much more was waited."""
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
        """The row of each step that its rank has, and which those are."""
        at = self.row_of(steps)
        kept = np.flatnonzero((at != NONE) & (column != NONE))
        kept = kept[self.have[at[kept], column[kept]]]
        return at[kept], kept

    def _by_phase(self, kind: str, by_slot: NDArray[np.float32], names: Names) -> dict[str, NDArray[np.float32]]:
        """From the slots that each rank gave its phases to one array for each name."""
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
        """The place in ``phases`` of each of sixteen slots."""
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
        """Planes for what is not zero everywhere; before anything is put in, since less of it may then fit."""
        for name, found in values.items():
            if name not in self.held and (name in _ALWAYS or found.any()):
                kind = PLAIN.get(name, "?" if name == "device" else "f4")
                self.held[name] = np.zeros(self.have.shape, kind)
        width = self._width_for(self.have.shape[1])
        if width < self.width:
            self._shape(width, self.have.shape[1])

    def _shape(self, width: int, room: int) -> None:
        """Other sizes, or another stride: the newest of what is there is kept."""
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


# -- heat -------------------------------------------------------------------------------------------------------------
# The map rank × time of a whole attempt: work and step length, in bins of steps, within bounded memory.
#
# Rows are columns of the planes; a column of the map is a bin of ``span`` steps.  When a step comes that lies beyond
# the last bin, each two become one and ``span`` doubles; when there are more ranks than fit beside so many bins,
# likewise.

HEAT_BYTES = 40 << 20
MOST_BINS = 512
LEAST_BINS = 32
_CELL = 4 + 4 + 4


class Heat:
    def __init__(self, *, budget_bytes: int = HEAT_BYTES, bins: int = MOST_BINS, least_bins: int = LEAST_BINS) -> None:
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


# -- exchanges --------------------------------------------------------------------------------------------------------
# What the ranks of a small job exchanged in the last steps: the slots that tell of collectives, as they came.
#
# For jobs in which all ranks are judged, and within bounds: a sum over ranks of whom some are missing would be wrong,
# so beyond them nothing is kept at all, and the rules that need it find nothing.  The summary at the end has all of
# it.

EXCHANGES_MOST_RANKS = 256
EXCHANGES_BYTES = 64 << 20


class Exchanges:
    def __init__(self, *, most_ranks: int = EXCHANGES_MOST_RANKS, kept_bytes: int = EXCHANGES_BYTES) -> None:
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
