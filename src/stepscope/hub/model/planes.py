"""The last steps of every rank of the last attempt, as arrays ``[step, column]``: what digests and rules are made from.

A ring buffer over steps: step n stands in row ``n // stride % width``.  One array per quantity, float32, made when the
first value other than zero comes: a job without device times, or without a phase, pays nothing for them.  How many
steps are kept follows from the memory they may take and the number of ranks: 1,024 for some hundred, 256 for some
thousand, never fewer than 32.

Agents of a large job send every twenty seconds or so, each at another time, and a step is complete only when the last
of them has sent it.  Where that many steps do not fit, only every second (fourth …) step is kept: the ``stride``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.batch import Again, Batch, booked_phases
from stepscope.records.phases import BACKWARD, BUILTIN_PHASES, COMM, OTHER, PHASE_SLOTS

__all__ = ["NONE", "Names", "Planes"]

BUDGET_BYTES = 224 << 20
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
        budget_bytes: int = BUDGET_BYTES,
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
