"""Groups and flows: what the ranks exchange, summed up by process group and operation over every step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.communication_arrivals import MUTUAL
from stepscope.records.collectives import FLAG_DEVICE, FLAG_MISSED, OPS, ProcessGroup
from stepscope.records.series import RankSeries

__all__ = ["Flow", "FlowSums", "Group", "GroupNumbers", "Measured", "bus_factor"]

Floats = NDArray[np.float64]

BLOCKING = ("gloo", "mpi")
"""Backends whose waits block the host; others only order streams, and what the host saw of them says nothing."""
OP_CODES = 32


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    kind: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    """As the group itself says, else those that were seen in it."""
    size: int
    rows: tuple[int, ...]
    """Of the window, those that know the group."""
    blocking: bool
    """Whether a wait for it blocks the host."""
    device: bool
    """Whether times of the device are known of it."""

    @property
    def timed(self) -> bool:
        """Whether its times are known, one way or the other."""
        return self.blocking or self.device

    @property
    def whole(self) -> bool:
        """Whether all its ranks are there to be compared."""
        return len(self.rows) == self.size > 1


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One operation in one group; S steps of the window."""

    group: Group
    op: str
    flags: int
    rows: NDArray[np.intp]
    """Of the window: the ranks that took part."""
    device: bool
    """Whether its times are the device's; of the steps below only those count in which they are known."""
    count: float
    """Per rank and steady step, on the average; so are the bytes and the times below."""
    bytes: float
    exposed_by_row: Floats
    """As ``rows``; nanoseconds a step; zero where the times are the device's."""
    span_by_row: Floats
    transfer_ns: float
    """On the device: a step, on the rank where it took least, which came last; else 0."""
    least_ns: NDArray[np.float32]
    """[S]; blocked, on the rank that was blocked least; nan where nobody was seen in it.

    On the device how long it took, on the rank where it took least; nan also where not all ranks were seen."""
    bytes_by_step: NDArray[np.float32]
    """[S]; per rank."""

    @property
    def exposed_ns(self) -> float:
        return float(self.exposed_by_row.mean())

    @property
    def overlapped_ns(self) -> float:
        """Under way while the rank did something else; of what was not waited for nothing is known."""
        return float(np.maximum(self.span_by_row - self.exposed_by_row, 0.0).mean())

    @property
    def waited_by_row(self) -> Floats:
        """As ``rows``; on the device, for later ranks."""
        return np.maximum(self.span_by_row - self.transfer_ns, 0.0) if self.device else np.zeros(len(self.rows))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """In which steps collectives were timed on the device."""

    places: NDArray[np.bool_]
    """[S]; on all ranks that have any."""
    missed: int
    """Steps in which they were overwritten, on some rank, before they could be read."""

    @property
    def last_unread(self) -> int:
        """Steps after the last of them: the recorder is gone with its process."""
        at = np.flatnonzero(self.places)
        return len(self.places) - 1 - int(at[-1]) if len(at) else 0


def bus_factor(op: str, size: int) -> float:
    """What of the bytes of an operation each rank's link carries, as NVIDIA's nccl-tests count it; 0: not known."""
    if size < 2:
        return 0.0
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "gather": 1.0}
    if op in ("broadcast", "reduce", "send", "recv"):
        return 1.0
    return shares.get(op, 1.0 if op == "scatter" else 0.0) * (size - 1) / size


class GroupNumbers:
    """One number for each process group of the job, whatever slots the ranks gave it."""

    def __init__(self, trained: Sequence[RankSeries]) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        self._said: list[ProcessGroup] = []
        self._rows: list[list[int]] = []
        self._trained = trained
        self.by_slot: list[dict[int, int]] = []
        """By row: slot → number.  A slot without a group (they came too late to be told) is none."""
        for row, series in enumerate(trained):
            own: dict[int, int] = {}
            for group in series.groups:
                number = self._known.setdefault((group.name, group.ranks), len(self._said))
                if number == len(self._said):
                    self._said.append(group)
                    self._rows.append([])
                own[group.slot] = number
                if row not in self._rows[number][-1:]:
                    self._rows[number].append(row)
            self.by_slot.append(own)

    def groups(self, on_device: Collection[int]) -> tuple[Group, ...]:
        """``on_device``: numbers of those whose times are the device's."""
        return tuple(
            self._group(said, tuple(rows), device=number in on_device)
            for number, (said, rows) in enumerate(zip(self._said, self._rows, strict=True))
        )

    def _group(self, said: ProcessGroup, rows: tuple[int, ...], *, device: bool) -> Group:
        blocking = all(self._trained[row].identity.device in ("", "cpu") for row in rows) or said.backend in BLOCKING
        ranks = said.ranks or tuple(self._trained[row].rank for row in rows)
        return Group(
            name=said.name,
            kind=said.kind,
            description=said.description,
            backend=said.backend,
            ranks=ranks,
            size=said.size or len(ranks),
            rows=rows,
            blocking=blocking,
            device=device,
        )


class FlowSums:
    """Adds up the rows of one rank after the other: [flow, step]."""

    def __init__(self, numbering: GroupNumbers, steps: NDArray[np.int64], steady: NDArray[np.bool_]) -> None:
        self._numbering, self._steps, self._steady = numbering, steps, steady
        self._number: dict[tuple[int, int, bool], int] = {}
        """(group, op, whether its times are the device's) → flow."""
        self._least: list[NDArray[np.float32]] = []
        self._bytes: list[NDArray[np.float32]] = []
        self._there: list[NDArray[np.float32]] = []
        self._flags: list[int] = []
        self._ranks: list[list[tuple[float, ...]]] = []
        """By flow: row, and its sums over the steady steps: count, bytes, exposed and span."""
        self.on_device: set[int] = set()
        """Groups whose times are the device's."""
        self._covered: dict[int, NDArray[np.bool_]] = {}
        """By row: [S]; steps with times of the device."""
        self._missed = np.zeros(len(steps), np.bool_)

    @property
    def seen(self) -> bool:
        return bool(self._number)

    def add(self, row: int, series: RankSeries) -> Floats:
        """[S]; nanoseconds for which this rank was blocked in all that was seen."""
        rows, place = self._device_first(row, *_within(series.comm, self._steps))
        codes = rows["group"].astype(np.uint16) * OP_CODES + rows["op"]
        order = np.argsort(codes, kind="stable")
        rows, place, codes = rows[order], place[order], codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        columns = [rows[name].astype(np.float64) for name in _SUMMED]
        device = (rows["flags"] & FLAG_DEVICE) > 0
        took = np.where(device, columns[3], columns[2])
        counted = self._steady[place]
        sums = [np.add.reduceat(column * counted, starts) if len(starts) else column for column in columns]
        for index, (start, end) in enumerate(itertools.pairwise([*starts.tolist(), len(rows)])):
            group = self._numbering.by_slot[row].get(int(codes[start]) // OP_CODES)
            if group is not None:
                at = place[start:end] if end - start < len(self._steps) else slice(None)
                flow = self._flow(group, int(codes[start]) % OP_CODES, bool(device[start]))
                self._least[flow][at] = np.fmin(self._least[flow][at], took[start:end])
                if device[start]:
                    self.on_device.add(group)
                self._bytes[flow][at] += columns[1][start:end]
                self._there[flow][at] += 1
                self._flags[flow] |= int(np.bitwise_or.reduce(rows["flags"][start:end]))
                self._ranks[flow].append((row, *(float(column[index]) for column in sums)))
        return np.asarray(np.bincount(place, columns[2], minlength=len(self._steps)), np.float64)

    def _device_first(
        self, row: int, rows: NDArray[Any], place: NDArray[np.intp]
    ) -> tuple[NDArray[Any], NDArray[np.intp]]:
        """Of an operation in a group that has times of the device, only those; what says that some were missed goes."""
        flags = rows["flags"].astype(np.int64)
        missed, device = (flags & FLAG_MISSED) > 0, (flags & FLAG_DEVICE) > 0
        if not missed.any() and not device.any():
            return rows, place
        self._missed[place[missed]] = True
        covered = self._covered.setdefault(row, np.zeros(len(self._steps), np.bool_))
        covered[place[device]] = True
        codes = rows["group"].astype(np.intp) * OP_CODES + rows["op"]
        kept = (device | ~np.isin(codes, np.unique(codes[device]))) & ~missed
        return rows[kept], place[kept]

    def measured(self, groups: Sequence[Group]) -> Measured | None:
        rows = {row for group in groups if group.device for row in group.rows}
        if not rows and not self._missed.any():
            return None
        nowhere = np.zeros(len(self._steps), np.bool_)
        places = np.logical_and.reduce([self._covered.get(row, nowhere) for row in rows or (-1,)])
        return Measured(places=np.asarray(places), missed=int((self._missed & ~places).sum()))

    def _flow(self, group: int, op: int, device: bool) -> int:
        flow = self._number.setdefault((group, op, device), len(self._number))
        if flow == len(self._least):
            count = len(self._steps)
            self._least.append(np.full(count, np.nan, np.float32))
            self._bytes.append(np.zeros(count, np.float32))
            self._there.append(np.zeros(count, np.float32))
            self._flags.append(0)
            self._ranks.append([])
        return flow

    def done(self, groups: Sequence[Group]) -> tuple[Flow, ...]:
        found = []
        for (group, op, device), flow in self._number.items():
            if not device and (group, op, True) in self._number:
                continue  # of a rank whose recorder was never read
            sums = np.array(self._ranks[flow], np.float64)
            rows = sums[:, 0].astype(np.intp)
            steps = self._steps_of(rows, device=device)
            least_ns = self._least[flow]
            if device:
                least_ns[self._there[flow] < (len(groups[group].rows) if MUTUAL[op] else len(rows))] = np.nan
            found.append(
                Flow(
                    group=groups[group],
                    op=OPS[op],
                    flags=self._flags[flow],
                    device=device,
                    rows=rows,
                    count=float((sums[:, 1] / steps).mean()),
                    bytes=float((sums[:, 2] / steps).mean()),
                    exposed_by_row=sums[:, 3] / steps,
                    span_by_row=sums[:, 4] / steps,
                    transfer_ns=self._transfer_ns(least_ns, self._there[flow], steps) if device else 0.0,
                    least_ns=least_ns,
                    bytes_by_step=np.asarray(self._bytes[flow] / np.maximum(self._there[flow], 1), np.float32),
                )
            )
        return tuple(found)

    def _steps_of(self, rows: NDArray[np.intp], *, device: bool) -> Floats:
        """As ``rows``; over how many steps each was summed."""
        if not device:
            return np.full(len(rows), float(self._steady.sum()))
        covered = [(self._covered[row] & self._steady).sum() for row in rows.tolist()]
        return np.maximum(np.array(covered, np.float64), 1.0)

    def _transfer_ns(self, least_ns: NDArray[np.float32], there: NDArray[np.float32], steps: Floats) -> float:
        """A step, on the average, from those in which all ranks were seen."""
        own = least_ns[self._steady]
        known = own[~np.isnan(own)]
        often = float((there[self._steady] > 0).sum()) / float(steps.max())
        return float(known.mean(dtype=np.float64)) * min(often, 1.0) if len(known) else 0.0


_SUMMED = ("count", "bytes", "exposed_ns", "span_ns")


def _within(rows: NDArray[Any] | None, steps: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """The rows of steps in the window, and which of them each belongs to."""
    if rows is None or not len(rows):
        return np.zeros(0, [(name, np.int64) for name in ("group", "op", "flags", *_SUMMED)]), np.zeros(0, np.intp)
    place = np.searchsorted(steps, rows["step"])
    inside = np.flatnonzero(steps[np.minimum(place, len(steps) - 1)] == rows["step"])
    return (rows, place) if len(inside) == len(rows) else (rows[inside], place[inside])
