"""What the ranks exchange: by process group and operation, how much, how long it blocked the host, which rank was last.

Two tables.  *Flows* sum up every step by group and operation.  *Arrivals* compare the ranks in the collectives that
were recorded individually.  DDP's reducer calls no function that could be hooked; its exchange is known from its own
logging and its bucket setting, and is listed next to the flows as a *reducer*.

Of the time a rank is blocked, only what every rank of the group has is the exchange itself; the rest is waiting for a
rank.  The minimum over the ranks is therefore taken step by step.

On NCCL the host sees nothing of this.  There the times are the device's own, of the kernels on NCCL's stream
(``FLAG_DEVICE``): they show how long a collective took, and how much of it was waiting for a rank; the part that
delayed the computation is in the device's phase ``comm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.samples import LARGEST, number
from stepscope.judge import thresholds
from stepscope.judge.statistics import shortest
from stepscope.records.collectives import (
    FLAG_ASYNC,
    FLAG_DEVICE,
    FLAG_MISSED,
    FLAG_WAITED,
    MAX_GROUPS,
    OPS,
    PHASE_SHIFT,
    ProcessGroup,
    kept_by_itself,
)
from stepscope.records.series import RankSeries

__all__ = [
    "DDP_OP",
    "MIB",
    "Arrivals",
    "Communication",
    "Flow",
    "Group",
    "Reducer",
    "build_communication",
    "bus_factor",
    "gradients_of",
]


# -- arrivals ---------------------------------------------------------------------------------------------------------
# Which rank waited for which: the n-th collective of a group in a step, compared over the ranks of the group.
#
# Clocks of two machines cannot be compared; but all ranks leave a collective at about the same time, so the rank that
# spent least time in it came last.  Its time is the exchange itself, and what the others took beyond it was waiting.
# On NCCL the time of its kernel on the device says the same, with collectives matched by their number in the group.
# This holds for operations in which every rank waits for every other.  The root of a broadcast may be gone before the
# last rank comes, so broadcasts and the like are not compared, nor are sends and receives.

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

MUTUAL = np.isin(OPS, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"))
"""By operation: whether every rank waits for every other."""
LOOKED_AT = 500_000
"""Maximum rows over all ranks; with more, only every second, third … step is used."""
CALL_DTYPE = np.dtype(
    [
        *((name, np.intp) for name in ("row", "group", "place", "nth", "op", "phase")),
        ("bytes", np.float64),
        ("took_ns", np.float64),
    ]
)
"""One rank in one collective."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """N collectives that all ranks of their group took part in; M memberships of a rank in a group."""

    group: Ints
    """[N]; index into ``Communication.groups``."""
    op: Ints
    """[N]; index into ``OPS``."""
    place: Ints
    """[N]; its step, as an index into the window."""
    bytes: Floats
    """[N]; per rank."""
    transfer_ns: Floats
    """[N]; what the rank that came last took: the exchange itself."""
    skew_ns: Floats
    """[N]; by how much it came after the first."""
    member_group: Ints
    """[M]."""
    member_row: Ints
    """[M]; row of the window."""
    waited_ns: Floats
    """[M]; total wait for later ranks."""
    last: Ints
    """[M]; how often it was the last and made another rank wait."""
    late_ns: Floats
    """[M]; total time that each of the others waited for it then."""
    call_row: Ints
    """[K]; row of the window: one rank in one collective on the device, even if not all ranks were recorded."""
    call_place: Ints
    """[K]; its step."""
    call_phase: Ints
    """[K]; the slot of the phase in which it was called."""
    call_wait_ns: Floats
    """[K]; how long it waited for later ranks; nan if not all were recorded."""


def align_collectives(
    trained: Sequence[RankSeries],
    steps: NDArray[np.int64],
    steady: NDArray[np.bool_],
    by_slot: Sequence[Mapping[int, int]],
    aligned: NDArray[np.bool_],
    on_device: NDArray[np.bool_],
) -> Arrivals:
    """``by_slot``: for each rank, slot → group; ``aligned`` [groups]: those that may be compared.

    ``on_device`` [groups]: those with device times; what the host recorded of them does not count.
    """
    looked_at = _looked_at(trained, steps, steady)
    seen = np.concatenate(
        [
            _calls_of_rank(row, series, steps, looked_at, by_slot[row], aligned, on_device)
            for row, series in enumerate(trained)
        ]
    )
    numbers, nth = np.unique(seen["nth"], return_inverse=True)  # a group's own numbers may be large
    key = (seen["group"] * len(steps) + seen["place"]) * (len(numbers) + 1) + nth
    seen = seen[np.argsort(key, kind="stable")]
    starts, counts = _runs(seen["group"], seen["place"], seen["nth"])
    members = np.bincount([group for own in by_slot for group in set(own.values())], minlength=len(aligned))
    calls = seen
    whole = np.zeros(len(starts), np.bool_)
    if len(starts):
        whole = counts == members[seen["group"][starts]]
        whole &= np.minimum.reduceat(seen["op"], starts) == np.maximum.reduceat(seen["op"], starts)
        waits = np.where(np.repeat(whole, counts), calls["took_ns"], np.nan)
        waits -= np.repeat(np.minimum.reduceat(calls["took_ns"], starts), counts)
        own = on_device[calls["group"]]
        calls, waits = calls[own], waits[own]
        seen, counts = seen[np.repeat(whole, counts)], counts[whole]
    else:
        waits = np.zeros(0)
    return _compare_arrivals(seen, counts, calls, waits)


def _compare_arrivals(seen: NDArray[Any], counts: Ints, calls: NDArray[Any], call_wait_ns: Floats) -> Arrivals:
    """``counts`` [N]: the number of rows of ``seen``, one per rank, that belong to the n-th collective."""
    starts = np.cumsum(counts) - counts
    took = seen["took_ns"]
    # reduceat with an index at the end would read an empty stretch.
    least, most = (ufunc.reduceat(took, starts) if len(starts) else np.zeros(0) for ufunc in (np.minimum, np.maximum))
    waits = took - np.repeat(least, counts)
    number = np.repeat(np.arange(len(counts)), counts)
    late = np.bincount(number, waits, minlength=len(counts)) / np.maximum(counts - 1, 1)
    # The first of its rows that did not wait; two that did not wait came together.
    at_end = np.flatnonzero(waits == 0)
    last = at_end[np.unique(number[at_end], return_index=True)[1]]
    stride = int(seen["row"].max(initial=0)) + 1
    pairs, member = np.unique(seen["group"] * stride + seen["row"], return_inverse=True)
    mattered = most - least >= thresholds.EXCESS_FLOOR_NS
    last_member = member[last][mattered]
    return Arrivals(
        group=seen["group"][starts],
        op=seen["op"][starts],
        place=seen["place"][starts],
        bytes=np.bincount(number, seen["bytes"], minlength=len(counts)) / np.maximum(counts, 1),
        transfer_ns=least,
        skew_ns=most - least,
        member_group=pairs // stride,
        member_row=pairs % stride,
        waited_ns=_sums(member, waits, len(pairs)),
        last=np.bincount(last_member, minlength=len(pairs)),
        late_ns=_sums(last_member, late[mattered], len(pairs)),
        call_row=calls["row"],
        call_place=calls["place"],
        call_phase=calls["phase"],
        call_wait_ns=call_wait_ns,
    )


def _sums(at: Ints, values: Floats, count: int) -> Floats:
    return np.asarray(np.bincount(at, values, minlength=count), np.float64)


def _runs(*keys: Ints) -> tuple[Ints, Ints]:
    """Where a new key begins in sorted rows, and how many rows have it."""
    new = np.ones(len(keys[0]), np.bool_)
    new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    starts = np.flatnonzero(new)
    return starts, np.diff(np.append(starts, len(new)))


def _looked_at(trained: Sequence[RankSeries], steps: NDArray[np.int64], steady: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[S]; steady steps with recorded collectives; not all of them for a large job."""
    kept = np.array([kept_by_itself(int(step)) for step in steps], np.bool_) & steady
    rows = sum(len(series.collectives) for series in trained if series.collectives is not None)
    places = np.flatnonzero(kept)[:: -(-rows // LOOKED_AT) or 1]
    chosen = np.zeros(len(steps), np.bool_)
    chosen[places] = True
    return chosen


def _calls_of_rank(
    row: int,
    series: RankSeries,
    steps: NDArray[np.int64],
    looked_at: NDArray[np.bool_],
    by_slot: Mapping[int, int],
    aligned: NDArray[np.bool_],
    on_device: NDArray[np.bool_],
) -> NDArray[Any]:
    rows = series.collectives
    if rows is None:
        return np.zeros(0, CALL_DTYPE)
    number = np.full(MAX_GROUPS, -1, np.intp)
    for slot, group in by_slot.items():
        number[slot] = group if aligned[group] else -1
    groups = number[rows["group"]]
    place = np.minimum(np.searchsorted(steps, rows["step"]), len(steps) - 1)
    chosen = (groups >= 0) & looked_at[place] & (steps[place] == rows["step"]) & MUTUAL[rows["op"]]
    timed = np.append(on_device, False)[groups]
    chosen &= (rows["flags"] & np.where(timed, FLAG_DEVICE, FLAG_WAITED)) > 0
    rows, timed = rows[chosen], timed[chosen]
    seen = np.zeros(len(rows), CALL_DTYPE)
    seen["row"], seen["group"], seen["place"] = row, groups[chosen], place[chosen]
    seen["op"], seen["bytes"] = rows["op"], rows["bytes"]
    seen["phase"] = rows["flags"] >> PHASE_SHIFT
    called_ns = (rows["end_ns"] - rows["start_ns"]).astype(np.int64)
    # For one that overlaps with the computation, the part that could not be hidden.
    hidden = (rows["flags"] & FLAG_ASYNC) > 0
    seen["took_ns"] = np.where(hidden & ~timed, rows["exposed_ns"].astype(np.int64), called_ns).clip(0)
    # Some ranks have sends and receives in between, so the host's own numbers cannot be used.
    order = np.argsort(seen["place"] * len(aligned) + seen["group"], kind="stable")
    seen = seen[order]
    starts, counts = _runs(seen["group"], seen["place"])
    counted = np.arange(len(seen)) - np.repeat(starts, counts)
    seen["nth"] = np.where(timed[order], rows["nth"][order], counted)
    return seen


# -- groups and flows -------------------------------------------------------------------------------------------------
# What the ranks exchange, summed up by process group and operation over every step.

BLOCKING = ("gloo", "mpi")
"""Backends whose waits block the host; others only order streams, and the host's times for them are meaningless."""
OP_CODES = 32


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    kind: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    """As the group itself defines them, else those recorded in it."""
    size: int
    rows: tuple[int, ...]
    """Rows of the window that know the group."""
    blocking: bool
    """Whether a wait for it blocks the host."""
    device: bool
    """Whether it has device times."""

    @property
    def timed(self) -> bool:
        """Whether its times are known, one way or the other."""
        return self.blocking or self.device

    @property
    def whole(self) -> bool:
        """Whether all its ranks are present for comparison."""
        return len(self.rows) == self.size > 1


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One operation in one group; S steps of the window."""

    group: Group
    op: str
    flags: int
    rows: NDArray[np.intp]
    """Rows of the window: the ranks that took part."""
    device: bool
    """Whether its times are the device's; then only the steps with known times count below."""
    count: float
    """Average per rank and steady step; so are the bytes and the times below."""
    bytes: float
    exposed_by_row: Floats
    """In the order of ``rows``; nanoseconds per step; zero where the times are the device's."""
    span_by_row: Floats
    transfer_ns: float
    """On the device: per step, on the rank where it took least, which came last; else 0."""
    least_ns: NDArray[np.float32]
    """[S]; blocked time on the rank that was blocked least; nan where no rank was recorded in it.

    On the device: its duration on the rank where it took least; nan also where not all ranks were recorded."""
    bytes_by_step: NDArray[np.float32]
    """[S]; per rank."""

    @property
    def exposed_ns(self) -> float:
        return float(self.exposed_by_row.mean())

    @property
    def overlapped_ns(self) -> float:
        """Time under way while the rank did something else; unknown for operations that were not waited for."""
        return float(np.maximum(self.span_by_row - self.exposed_by_row, 0.0).mean())

    @property
    def waited_by_row(self) -> Floats:
        """In the order of ``rows``; on the device, wait for later ranks."""
        return np.maximum(self.span_by_row - self.transfer_ns, 0.0) if self.device else np.zeros(len(self.rows))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps in which collectives were timed on the device."""

    places: NDArray[np.bool_]
    """[S]; on all ranks that have any."""
    missed: int
    """Steps in which they were overwritten, on some rank, before they could be read."""

    @property
    def last_unread(self) -> int:
        """Steps after the last of them: the Flight Recorder ends with its process."""
        at = np.flatnonzero(self.places)
        return len(self.places) - 1 - int(at[-1]) if len(at) else 0


def bus_factor(op: str, size: int) -> float:
    """Share of an operation's bytes that each rank's link carries, as NVIDIA's nccl-tests count it; 0: unknown."""
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
        self._groups_seen: list[ProcessGroup] = []
        self._rows: list[list[int]] = []
        self._trained = trained
        self.by_slot: list[dict[int, int]] = []
        """By row: slot → number.  Slots without a group (they came too late to be recorded) are missing."""
        for row, series in enumerate(trained):
            own: dict[int, int] = {}
            for group in series.groups:
                number = self._known.setdefault((group.name, group.ranks), len(self._groups_seen))
                if number == len(self._groups_seen):
                    self._groups_seen.append(group)
                    self._rows.append([])
                own[group.slot] = number
                if row not in self._rows[number][-1:]:
                    self._rows[number].append(row)
            self.by_slot.append(own)

    def groups(self, on_device: Collection[int]) -> tuple[Group, ...]:
        """``on_device``: numbers of the groups whose times are the device's."""
        return tuple(
            self._group(group, tuple(rows), device=number in on_device)
            for number, (group, rows) in enumerate(zip(self._groups_seen, self._rows, strict=True))
        )

    def _group(self, group: ProcessGroup, rows: tuple[int, ...], *, device: bool) -> Group:
        blocking = all(self._trained[row].identity.device in ("", "cpu") for row in rows) or group.backend in BLOCKING
        ranks = group.ranks or tuple(self._trained[row].rank for row in rows)
        return Group(
            name=group.name,
            kind=group.kind,
            description=group.description,
            backend=group.backend,
            ranks=ranks,
            size=group.size or len(ranks),
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
        """By row: [S]; steps with device times."""
        self._missed = np.zeros(len(steps), np.bool_)

    @property
    def seen(self) -> bool:
        return bool(self._number)

    def add(self, row: int, series: RankSeries) -> Floats:
        """Add the rows of a rank; return [S], nanoseconds for which it was blocked in all that was recorded."""
        if series.comm is None:
            return np.zeros(len(self._steps))
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
        """For an operation and group with device times, keep only those; drop the rows that mark missed ones."""
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
                continue  # of a rank whose Flight Recorder was never read
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
        """In the order of ``rows``; the number of steps over which each was summed."""
        if not device:
            return np.full(len(rows), float(self._steady.sum()))
        covered = [(self._covered[row] & self._steady).sum() for row in rows.tolist()]
        return np.maximum(np.array(covered, np.float64), 1.0)

    def _transfer_ns(self, least_ns: NDArray[np.float32], there: NDArray[np.float32], steps: Floats) -> float:
        """Average per step, from the steps in which all ranks were recorded."""
        own = least_ns[self._steady]
        known = own[~np.isnan(own)]
        often = float((there[self._steady] > 0).sum()) / float(steps.max())
        return float(known.mean(dtype=np.float64)) * min(often, 1.0) if len(known) else 0.0


_SUMMED = ("count", "bytes", "exposed_ns", "span_ns")


def _within(rows: NDArray[Any] | None, steps: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """The rows of steps in the window, and the step that each belongs to."""
    if rows is None or not len(rows):
        return np.zeros(0, [(name, np.int64) for name in ("group", "op", "flags", *_SUMMED)]), np.zeros(0, np.intp)
    place = np.searchsorted(steps, rows["step"])
    inside = np.flatnonzero(steps[np.minimum(place, len(steps) - 1)] == rows["step"])
    return (rows, place) if len(inside) == len(rows) else (rows[inside], place[inside])


# -- DDP's reducer ----------------------------------------------------------------------------------------------------
# What DDP's reducer exchanges inside backward, according to its own logging and bucket setting.

DDP_OP = "all_reduce (DDP)"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Reducer:
    """DDP's all-reduce inside backward, in one group of data-parallel peers."""

    rows: NDArray[np.intp]
    group: str
    """Its usual name, from the facts; empty: unknown."""
    backwards: float
    """Backward passes per step."""
    buckets: int
    """As DDP laid them out; 0: unknown."""
    buckets_bytes: tuple[int, ...]
    """Sizes of the first ones."""
    bytes: int
    """Size of all gradients; 0: unknown."""
    exposed_ns: Floats
    """[S]; the least over the ranks; nan if unknown, here and below."""
    span_ns: Floats
    """[S]; from the first bucket's start to the last one's end, the least over the ranks."""
    compute_ns: Floats
    """[S]; time to compute the gradients, the mean over the ranks: what may hide an exchange."""
    exposed_by_row: Floats
    """In the order of ``rows``: mean over the steady steps in which it is known; nan if it never is."""
    span_by_row: Floats


def has_reducer(trained: Sequence[RankSeries]) -> bool:
    """Whether DDP reported its figures step by step, not just now and then (as on a GPU)."""
    shares = (np.count_nonzero(series.steps["ddp_comm_ns"]) / max(len(series.steps), 1) for series in trained)
    return any(share >= thresholds.COMM_STEPS_SHARE for share in shares)


def find_reducers(
    trained: Sequence[RankSeries],
    steady: NDArray[np.bool_],
    ddp_ns: tuple[Floats, Floats],
    blocked_ns: Floats,
    peers: NDArray[np.intp],
) -> tuple[Reducer, ...]:
    found = []
    for group in np.unique(peers).tolist():
        rows = np.flatnonzero((peers == group) & (ddp_ns[0] > 0).any(axis=1))
        if len(rows) < 2:
            continue
        spans, computes = ddp_ns[0][rows], ddp_ns[1][rows]
        spans[spans == 0] = np.nan
        exposed = np.where(np.isnan(spans), np.nan, blocked_ns[rows])
        found.append(
            Reducer(
                rows=rows,
                backwards=float(np.median(trained[rows[0]].steps["micro_batches"])),
                **gradients_of(trained[rows[0]].facts.get("ddp")),
                group=_group_word(trained[rows[0]].facts.get("ddp")),
                exposed_ns=shortest(exposed),
                span_ns=shortest(spans),
                compute_ns=computes.mean(axis=0),
                exposed_by_row=_means(exposed[:, steady]),
                span_by_row=_means(spans[:, steady]),
            )
        )
    return tuple(found)


def _means(values: Floats) -> Floats:
    """[R]; over the steps that have a value."""
    counts = (~np.isnan(values)).sum(axis=1)
    return np.where(counts > 0, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)


def _group_word(ddp: object) -> str:
    word = ddp.get("group") if isinstance(ddp, Mapping) else None
    return word if isinstance(word, str) else ""


def gradients_of(ddp: object) -> dict[str, Any]:
    """``buckets``, ``buckets_bytes`` and ``bytes``, as far as DDP's facts contain them."""
    facts: Mapping[str, Any] = ddp if isinstance(ddp, Mapping) else {}
    reported = facts.get("bucket_sizes_mb")
    sizes = (
        reported
        if isinstance(reported, list) and all(type(size) in (int, float) and 0 < size < LARGEST for size in reported)
        else []
    )
    bucket_bytes = tuple(round(size * MIB) for size in sizes)
    buckets = max(int(number(facts, "buckets") or 0), len(bucket_bytes)) if bucket_bytes else 0
    gradient_mb = number(facts, "gradient_mb") or 0.0
    return {
        "buckets": buckets,
        "buckets_bytes": bucket_bytes,
        "bytes": max(round(gradient_mb * MIB), sum(bucket_bytes)),
    }


# -- communication ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Communication:
    groups: tuple[Group, ...]
    flows: tuple[Flow, ...]
    reducers: tuple[Reducer, ...]
    arrivals: Arrivals
    measured: Measured | None
    """None without times on the device."""

    @cached_property
    def siblings(self) -> list[list[int]]:
        """Groups for the same purpose that share no rank, as indices into ``groups``: the columns of a mesh, say."""
        alike: dict[tuple[str, str, int, bool], list[int]] = {}
        for place, group in enumerate(self.groups):
            if group.whole and group.timed:
                alike.setdefault((group.kind, group.description, group.size, group.device), []).append(place)
        return [places for places in alike.values() if len(places) > 1 and self._disjoint(places)]

    def _disjoint(self, places: Sequence[int]) -> bool:
        rows = [row for place in places for row in self.groups[place].rows]
        return len(set(rows)) == len(rows)


def build_communication(
    trained: Sequence[RankSeries],
    steps: NDArray[np.int64],
    steady: NDArray[np.bool_],
    comm_ns: Floats,
    ddp_ns: tuple[Floats, Floats],
    peers: NDArray[np.intp],
) -> Communication | None:
    """None: one rank, or no records.

    ``comm_ns`` [R, S]: phase comm; ``ddp_ns`` [R, S]: how long the exchange and the gradients took according to DDP, 0
    where it reported nothing; ``peers``: ``Window.groups``.
    """
    if len(trained) < 2 or not steady.any():
        return None
    numbering = GroupNumbers(trained)
    flows = FlowSums(numbering, steps, steady)
    blocked_ns = np.zeros(comm_ns.shape) if has_reducer(trained) else None
    for row, series in enumerate(trained):
        seen = flows.add(row, series)
        if blocked_ns is not None:
            blocked_ns[row] = np.maximum(comm_ns[row] - seen, 0.0)
    reducers = () if blocked_ns is None else find_reducers(trained, steady, ddp_ns, blocked_ns, peers)
    if not flows.seen and not reducers:
        return None
    groups = numbering.groups(flows.on_device)
    aligned = np.array([group.whole and group.timed for group in groups], np.bool_)
    on_device = np.array([group.device for group in groups], np.bool_)
    arrivals = align_collectives(trained, steps, steady, numbering.by_slot, aligned, on_device)
    return Communication(
        groups=groups,
        flows=flows.done(groups),
        reducers=reducers,
        arrivals=arrivals,
        measured=flows.measured(groups),
    )
