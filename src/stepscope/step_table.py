"""The steps of a run as columns: one row per rank and step, rank by rank, as in ``steps.parquet``.

Between the records of the ring and what is shown, steps have this one form:

- sealed files are read into it column by column, and the records of an open run once (``store/rank_series.py``);
- the live hub copies its last steps into it for the rules (``hub/live/rules.py``), and fills its own arrays, from which
  the page is served, with the table of a finished run (``hub/past_run.py``);
- ``RankSteps``, the steps of a ``RankSeries``, are some of its rows;
- the rules' window is a rectangle ranks × steps of it (``Grid``): if all ranks made the same steps, which is common, a
  view that copies nothing.

A table is never changed: its columns are shared by whoever has a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.steps import BUILTIN_PHASES, DEVICE_FIELDS, PHASE_SLOTS, STEP_FIELDS

__all__ = [
    "DEVICE_DTYPE",
    "LARGEST",
    "NO_STEPS",
    "PLAIN",
    "STEP_DTYPE",
    "Grid",
    "RankSteps",
    "StepTable",
    "TableBuilder",
    "join_steps",
    "phase_labels",
    "phases_in_order",
    "slots_in_use",
]

STEP_DTYPE = np.dtype(STEP_FIELDS)
DEVICE_DTYPE = np.dtype(DEVICE_FIELDS)
PLAIN: Mapping[str, str] = {
    "start_ns": "i8",
    "wall_ns": "f8",
    "between_ns": "f8",
    "flags": "u2",
    "allocated": "f8",
    "reserved": "f8",
    "peak_allocated": "f8",
    "ddp_compute_ns": "f8",
    "ddp_comm_ns": "f8",
    "micro_batches": "u4",
    "forwards": "u4",
    "batches": "u4",
    "device_wall_ns": "f8",
    "device_flags": "u2",
}
"""Quantities of a step besides its phases, as in its record; ``device_``: of its DEVICE record."""
LARGEST_STEP = 1 << 62
LARGEST = (1 << 63) - 1024
"""Larger numbers are corrupt; this one is a float as well as a signed integer."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTable:
    """R ranks, P phases, N rows: those of rank r are ``first[r]`` to ``first[r + 1]``, by step and without repeats."""

    first: NDArray[np.intp]
    """[R + 1]."""
    step: NDArray[np.int64]
    """[N]."""
    plain: Mapping[str, NDArray[Any]]
    """[N] each, by name (``PLAIN``); a quantity that is zero in every row may be missing."""
    phases: tuple[str, ...]
    """Those with any time in them: the built-in ones in their order, then the users'."""
    phase_ns: Floats
    """[P, N]; host time."""
    device_ns: Floats | None = None
    """[P, N]; nan in steps that were not timed on the device; None: none was."""
    timed: NDArray[np.bool_] | None = None
    """[N]; whether the step was timed on the device."""
    _zeros: dict[str, NDArray[Any]] = field(default_factory=dict, init=False, repr=False)
    """Columns that are missing in ``plain``, once they were requested: every rank's view is a slice of one."""

    def __post_init__(self) -> None:
        for column in (self.step, *self.plain.values(), self.phase_ns, self.device_ns, self.timed):
            if column is not None:
                column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.step)

    @property
    def ranks(self) -> int:
        return len(self.first) - 1

    def column(self, name: str) -> NDArray[Any]:
        """[N]; one of ``PLAIN``, or ``step``."""
        if name == "step":
            return self.step
        found = self.plain.get(name)
        if found is None:
            found = self._zeros.get(name)
        if found is None:
            found = self._zeros[name] = np.zeros(len(self.step), PLAIN[name])  # takes no memory until it is read
            found.flags.writeable = False
        return found

    def medians(self, name: str) -> Floats:
        """[R]; the median of a column over the steps of each rank, which must have some."""
        if name not in self.plain:
            return np.zeros(self.ranks)
        column, counts = self.plain[name], np.diff(self.first)
        if len(counts) and (counts == counts[0]).all():
            return np.asarray(np.median(column.reshape(self.ranks, -1), axis=1), np.float64)
        return np.array([np.median(own) for own in np.split(column, self.first[1:-1])], np.float64)

    def phase(self, name: str) -> Floats:
        """[N]; host time in a phase."""
        if name in self.phases:
            return np.asarray(self.phase_ns[self.phases.index(name)])
        return np.broadcast_to(np.float64(0), self.step.shape)

    def by_name(self, rows: Any = slice(None)) -> dict[str, NDArray[Any]]:
        """Return the columns of these rows; a phase is ``phase:NAME``."""
        found = {name: column[rows] for name, column in self.plain.items()}
        return found | {f"phase:{name}": self.phase_ns[at][rows] for at, name in enumerate(self.phases)}

    def rank(self, number: int) -> RankSteps:
        return RankSteps(self, slice(int(self.first[number]), int(self.first[number + 1])))

    def part(self, rows: slice | NDArray[Any], first: NDArray[np.intp]) -> StepTable:
        """Return some rows as a table; a slice copies nothing."""
        timed = None if self.timed is None else self.timed[rows]
        on_device = timed is not None and bool(timed.any())
        return StepTable(
            first=first,
            step=self.step[rows],
            plain={name: column[rows] for name, column in self.plain.items()},
            phases=self.phases,
            phase_ns=self.phase_ns[:, rows],
            device_ns=self.device_ns[:, rows] if on_device and self.device_ns is not None else None,
            timed=timed if on_device else None,
        )

    def shared_steps(self) -> NDArray[np.int64] | None:
        """Return the steps that all ranks made; None if some differ."""
        counts = np.diff(self.first)
        if not len(counts) or (counts != counts[0]).any():
            return None
        steps = self.step.reshape(len(counts), -1)
        return steps[0] if (steps == steps[0]).all() else None


@dataclass(frozen=True, eq=False)
class RankSteps:
    """The steps of one rank: rows of a table."""

    table: StepTable
    rows: slice

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column: ``step``, or one of ``PLAIN``."""
        return self.table.column(name)[self.rows]

    def phase(self, name: str) -> Floats:
        """Host time in a phase, by step."""
        return self.table.phase(name)[self.rows]

    @property
    def timed(self) -> NDArray[np.bool_]:
        """By step, whether it was timed on the device."""
        timed = self.table.timed
        return np.zeros(len(self), np.bool_) if timed is None else timed[self.rows]

    def device(self, name: str) -> Floats:
        """Device time in a phase, by step; nan where it was not timed."""
        table = self.table
        if table.device_ns is None:
            return np.full(len(self), np.nan)
        if name not in table.phases:
            return np.where(self.timed, 0.0, np.nan)
        return np.asarray(table.device_ns[table.phases.index(name)][self.rows])

    def part(self, chosen: slice | NDArray[Any]) -> RankSteps:
        """Return some of these steps: a slice of them, or those of a mask."""
        if isinstance(chosen, slice):
            begin, end, every = chosen.indices(len(self))
            if every == 1:
                return RankSteps(self.table, slice(self.rows.start + begin, self.rows.start + max(begin, end)))
        rows = np.arange(self.rows.start, self.rows.stop)[chosen]
        return self.table.part(rows, np.array([0, len(rows)], np.intp)).rank(0)

    def same(self, other: RankSteps) -> bool:
        """Whether both have the same values in the same steps."""
        if len(self) != len(other) or not all((self[name] == other[name]).all() for name in ("step", *PLAIN)):
            return False
        names = {*self.table.phases, *other.table.phases}
        return bool((self.timed == other.timed).all()) and all(
            np.array_equal(self.phase(name), other.phase(name))
            and np.array_equal(self.device(name), other.device(name), equal_nan=True)
            for name in names
        )


def join_steps(parts: Sequence[RankSteps]) -> StepTable:
    """Return the steps of these ranks as one table; without copying if they follow each other in a table."""
    first = np.cumsum([0, *map(len, parts)]).astype(np.intp)
    if not parts:
        return empty_table()
    table = parts[0].table
    if all(part.table is table for part in parts):
        if all(before.rows.stop == after.rows.start for before, after in pairwise(parts)):
            return table.part(slice(parts[0].rows.start, parts[-1].rows.stop), first)
        return table.part(np.concatenate([np.arange(part.rows.start, part.rows.stop) for part in parts]), first)
    phases = phases_in_order(name for part in parts for name in part.table.phases)
    timed = np.concatenate([part.timed for part in parts])
    on_device = [np.concatenate([part.device(name) for part in parts]) for name in phases] if timed.any() else None
    return StepTable(
        first=first,
        step=np.concatenate([part["step"] for part in parts]),
        plain={
            name: np.concatenate([part[name] for part in parts])
            for name in PLAIN
            if any(name in part.table.plain for part in parts)
        },
        phases=phases,
        phase_ns=_stacked([np.concatenate([part.phase(name) for part in parts]) for name in phases], int(first[-1])),
        device_ns=None if on_device is None else _stacked(on_device, int(first[-1])),
        timed=timed if on_device is not None else None,
    )


def empty_table() -> StepTable:
    nothing = np.zeros((0, 0))
    return StepTable(first=np.zeros(1, np.intp), step=np.zeros(0, np.int64), plain={}, phases=(), phase_ns=nothing)


NO_STEPS = RankSteps(empty_table(), slice(0, 0))


def _stacked(columns: Sequence[Floats], rows: int) -> Floats:
    return np.stack(columns) if columns else np.zeros((0, rows))


# -- phases -----------------------------------------------------------------------------------------------------------


def phase_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the phase of each of the sixteen slots; ranks may have given one slot different names."""
    own = [name or f"slot_{slot}" for slot, name in enumerate(names)][len(BUILTIN_PHASES) :]
    return (*BUILTIN_PHASES, *own)


def phases_in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The built-in phases among them in their order, then the others as they come."""
    found = dict.fromkeys(names)
    return (*(name for name in BUILTIN_PHASES if name in found), *(n for n in found if n not in BUILTIN_PHASES))


# -- records ----------------------------------------------------------------------------------------------------------


class TableBuilder:
    """Fills a table with the records of one rank after the other.

    ``rows``: at most how many; ``phases``: all that have any time, in order (``phases_in_order``).
    """

    def __init__(self, rows: int, phases: Sequence[str]) -> None:
        self._first = [0]
        self._phases = tuple(phases)
        self._step = np.zeros(rows, np.int64)
        self._plain: dict[str, NDArray[Any]] = {}
        self._phase_ns: Floats = np.zeros((len(self._phases), rows))
        self._device_ns: Floats | None = None
        self._timed = np.zeros(rows, np.bool_)

    def add(self, steps: NDArray[Any], device: NDArray[Any], names: Sequence[str]) -> None:
        """Add a rank: its STEP records by step, the DEVICE records of some of these steps, and its phase names."""
        begin = self._first[-1]
        rows = slice(begin, begin + len(steps))
        self._first.append(rows.stop)
        self._step[rows] = np.minimum(steps["step"], LARGEST_STEP)
        for name in PLAIN:
            if name in (STEP_DTYPE.names or ()):
                self._put(name, rows, steps[name])
        self._put_phases(self._phase_ns, rows, steps["phase_ns"], names)
        if len(device):
            at = begin + np.searchsorted(steps["step"], device["step"])
            if self._device_ns is None:
                self._device_ns = np.full(self._phase_ns.shape, np.nan)
            self._timed[at] = True
            self._device_ns[:, at] = 0.0
            self._put_phases(self._device_ns, at, device["phase_ns"], names)
            for name in ("wall_ns", "flags"):
                self._put(f"device_{name}", at, device[name])

    def table(self) -> StepTable:
        rows = slice(0, self._first[-1])
        whole = StepTable(
            first=np.array(self._first, np.intp),
            step=self._step,
            plain=self._plain,
            phases=self._phases,
            phase_ns=self._phase_ns,
            device_ns=self._device_ns,
            timed=None if self._device_ns is None else self._timed,
        )
        return whole.part(rows, whole.first)

    def _put(self, name: str, rows: Any, values: NDArray[Any]) -> None:
        if name not in self._plain:
            if not values.any():
                return
            self._plain[name] = np.zeros(len(self._step), PLAIN[name])
        self._plain[name][rows] = np.minimum(values, LARGEST) if values.dtype.itemsize == 8 else values

    def _put_phases(self, out: Floats, rows: Any, by_slot: NDArray[Any], names: Sequence[str]) -> None:
        """Add times [row, slot] by the names that the rank gave its slots."""
        for slot, label in enumerate(phase_labels(names)):
            if label in self._phases:
                out[self._phases.index(label), rows] += np.minimum(by_slot[:, slot], LARGEST)


def slots_in_use(by_slot: NDArray[Any], names: Sequence[str]) -> list[str]:
    """The phases with any time among the times [row, slot] of a rank."""
    used = np.asarray(by_slot.any(axis=0)) if len(by_slot) else np.zeros(PHASE_SLOTS, np.bool_)
    return [label for label, has_time in zip(phase_labels(names), used, strict=True) if has_time]


# -- ranks × steps ----------------------------------------------------------------------------------------------------


class Grid:
    """Some steps of all ranks of a table as rectangles ``[rank, step]``.

    ``steps``: ascending; ``there`` [R, S]: where a rank is to be shown; None: everywhere.
    """

    def __init__(self, table: StepTable, steps: NDArray[np.int64], there: NDArray[np.bool_] | None = None) -> None:
        self.shape = table.ranks, len(steps)
        shared = table.shared_steps() if there is None or there.all() else None
        begin = 0 if shared is None or not len(steps) else int(np.searchsorted(shared, steps[0]))
        self._columns = slice(begin, begin + len(steps))
        self._rows: NDArray[np.intp] | None = None
        if shared is None or not np.array_equal(shared[self._columns], steps):
            self._rows = _rows_of(table, steps, there)

    def __call__(self, values: NDArray[Any], missing: float = np.nan) -> NDArray[Any]:
        """Return values [..., row] of the table as [..., rank, step]; a view if all ranks made the same steps."""
        if self._rows is None:
            ranks, made = self.shape[0], values.shape[-1] // max(self.shape[0], 1)  # -1 would fail without phases
            return values.reshape(*values.shape[:-1], ranks, made)[..., self._columns]
        found = values[..., np.maximum(self._rows, 0)]
        absent = self._rows < 0
        if absent.any():
            found[..., absent] = missing
        return found


def _rows_of(table: StepTable, steps: NDArray[np.int64], there: NDArray[np.bool_] | None) -> NDArray[np.intp]:
    """[R, S]; row of each rank and step; -1 without a row."""
    rows = np.full((table.ranks, len(steps)), -1, np.intp)
    for rank, (begin, end) in enumerate(zip(table.first[:-1].tolist(), table.first[1:].tolist(), strict=True)):
        own = table.step[begin:end]
        if len(own):
            at = np.minimum(np.searchsorted(own, steps), len(own) - 1)
            rows[rank] = np.where(own[at] == steps, begin + at, -1)
    return rows if there is None else np.where(there, rows, -1)
