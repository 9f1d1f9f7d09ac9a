"""The series of each rank: assembled from slots, numbered by attempt and rank, and as columns of tables.

From slots to the series of each rank: order, repeats and double claims.  Functions of their arguments, no I/O.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.collectives import COLLECTIVE_ROW, COMM_ROW, FLAG_DEVICE, MAX_GROUPS, OPS, ProcessGroup
from stepscope.records.series import RankSeries
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    COLLECTIVE,
    COLLECTIVE_ENTRY,
    COMM,
    COMM_ENTRY,
    COMM_RECORD,
    DEVICE,
    DEVICE_FIELDS,
    ENTRIES_HEAD,
    NOTE,
    NOTE_SLOT,
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
    STEP_FIELDS,
)
from stepscope.store.live.ring_records import RingRecords

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COLLECTIVE_DTYPE",
    "COMM_DTYPE",
    "DEVICE_DTYPE",
    "STEP_COLUMNS",
    "STEP_DTYPE",
    "Assembled",
    "RankClaim",
    "assemble_ranks",
    "book_waiting",
    "collective_rows",
    "comm_rows",
    "exchange_columns",
    "joined_rows",
    "phase_columns",
    "rows_of_columns",
    "settle_attempts",
    "steps_of_columns",
    "to_columns",
]


# -- attempts ---------------------------------------------------------------------------------------------------------
# Which attempt of a job each process belongs to, whatever its launcher counted.  Functions of their arguments, no I/O.
#
# An attempt is one round of the job: every rank is claimed at most once in it, and all agree on how many there are.
# A launcher's restart count does not tell the rounds apart.  torchrun counts only failures of its own workers: when a
# node joins or leaves, all are started again and nothing is counted, and the torchrun of a node that took another's
# place counts from nought.  So it is told by what cannot be otherwise: between two processes of which one came after
# the other's end, and which claim the same rank, or say different sizes of the job, or have different counts on one
# host, a round must have begun.  Each such pair is a stretch of time with a boundary in it somewhere; the fewest
# boundaries that do for all stretches are the rounds, each put as early as it can be, when the last process that was
# replaced had ended, because a launcher ends its old workers before it starts new ones.
#
# For the same reason an end may be noticed late, by an agent that was killed or a machine that is overloaded, and yet
# not count as late: a process whose successor has a higher count had ended when the first process with that count began
# on its host, unless it was seen at work after that.
#
# Two that claim the same rank at the same time need no boundary, and one of them is told as a second process of its
# rank (``store/rank_series.py``).  Nor does a process that never made a step, unless its launcher counted or it came
# after one that did not end in order: a script that prepares or evaluates is no attempt of the job.

SLACK_NS = 10**9
"""So much after a process began may another's end be noticed and still count as before it: clocks of two hosts differ
a little, and ends are seen late.  Starting a rank anew takes longer."""
_END, _BEGIN = 0, 1


@dataclass(frozen=True, kw_only=True)
class RankClaim:
    """A process that says which rank it is.  Times are of one clock, the hub's where there is one."""

    rank: int
    world_size: int
    host: str
    restarts: int
    """What its launcher counted."""
    began_ns: int
    until_ns: int | None
    """When it ended or, of one that was lost, was last known to live; None: it lives."""
    active_ns: int = 0
    """When it was last seen at work."""
    made_steps: bool = True
    in_order: bool = False
    """Whether it ended of itself and well."""


@dataclass(slots=True)
class _Ended:
    """The last process that ended, and the last that ended with another value than that one."""

    value: int | None = None
    last_ns: int | None = None
    other_ns: int | None = None

    def add(self, value: int, at_ns: int) -> None:
        """Ends come in order of time."""
        if value != self.value:
            self.value, self.other_ns = value, self.last_ns
        self.last_ns = at_ns

    def unlike(self, value: int) -> int | None:
        return self.other_ns if value == self.value else self.last_ns


def settle_attempts(claims: Sequence[RankClaim]) -> list[int]:
    """The attempt of each, in the order given: growing with time, and never less than what its launcher counted."""
    boundaries = _boundaries(_stretches(_ended_in_time(claims)))
    rounds = [bisect_right(boundaries, claim.began_ns) for claim in claims]
    counted: dict[int, int] = {}
    for claim, number in zip(claims, rounds, strict=True):
        counted[number] = max(counted.get(number, 0), claim.restarts)
    numbers: dict[int, int] = {}
    before = -1
    for number in sorted(counted):
        before = numbers[number] = max(before + 1, counted[number])
    return [numbers[number] for number in rounds]


def _ended_in_time(claims: Sequence[RankClaim]) -> list[RankClaim]:
    """With ends that were noticed only after the launcher had started the next round put where they belong."""
    of_count: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    of_rank: defaultdict[tuple[str, int], list[RankClaim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.began_ns):
        of_count[claim.host, claim.restarts].append(claim.began_ns)
        of_rank[claim.host, claim.rank].append(claim)
    followed = {id(claim): later for same in of_rank.values() for claim, later in pairwise(same)}
    settled = []
    for claim in claims:
        later, until_ns = followed.get(id(claim)), claim.until_ns
        if until_ns is not None and later is not None and later.restarts > claim.restarts:
            begun = of_count[claim.host, later.restarts]
            next_round_ns = begun[bisect_right(begun, claim.began_ns)]
            if claim.active_ns < next_round_ns:
                until_ns = min(until_ns, next_round_ns)
        settled.append(replace(claim, until_ns=until_ns))
    return settled


def _stretches(claims: Sequence[RankClaim]) -> list[tuple[int, int]]:
    """From a process's end to another's beginning: in each of them, ends included, a round began."""
    ranks: dict[tuple[int, bool], int] = {}
    worlds: defaultdict[bool, _Ended] = defaultdict(_Ended)
    counts: defaultdict[tuple[str, object], _Ended] = defaultdict(_Ended)
    begun: dict[int, RankClaim] = {}
    found: list[tuple[int, int]] = []
    for at_ns, kind, index in _events(claims):
        claim = claims[index]
        if kind == _END:
            for key in (("host", claim.host), ("rank", claim.rank)):
                counts[key].add(claim.restarts, at_ns)
            if claim.made_steps:
                ranks[claim.rank, claim.in_order] = at_ns
                worlds[claim.in_order].add(claim.world_size, at_ns)
            continue
        ended = [
            counts["host", claim.host].unlike(claim.restarts),
            counts["rank", claim.rank].unlike(claim.restarts),
        ]
        for in_order in (False, True) if claim.made_steps else (False,):
            ended += [ranks.get((claim.rank, in_order)), worlds[in_order].unlike(claim.world_size)]
        found += [(end_ns, claim.began_ns) for end_ns in ended if end_ns is not None]
        earlier = begun.get(claim.rank)
        if earlier is not None and earlier.restarts != claim.restarts and earlier.began_ns < claim.began_ns:
            found.append((earlier.began_ns + 1, claim.began_ns))  # never seen to end, but its launcher counted on
        begun[claim.rank] = claim
    return found


def _events(claims: Sequence[RankClaim]) -> list[tuple[int, int, int]]:
    """Beginnings and ends in order of time; an end as early as it counts."""
    events = [(claim.began_ns, _BEGIN, index) for index, claim in enumerate(claims)]
    for index, claim in enumerate(claims):
        if claim.until_ns is not None:
            events.append((max(claim.until_ns - SLACK_NS, claim.began_ns + 1), _END, index))
    return sorted(events)


def _boundaries(stretches: Iterable[tuple[int, int]]) -> list[int]:
    """The fewest instants such that each stretch has one, each as early as it can be."""
    found: list[int] = []
    first_end = latest_start = None
    for start, end in sorted(stretches, key=lambda stretch: stretch[1]):
        if first_end is None or latest_start is None or start > first_end:
            first_end, latest_start = end, start
            found.append(start)
        else:
            latest_start = max(latest_start, start)
        # Ends counted from a little earlier: what began in that little while is of the round that ended.
        found[-1] = min(latest_start + SLACK_NS, first_end)
    return found


# -- exchanges --------------------------------------------------------------------------------------------------------
# Collectives as they are kept: from the entries of slots to rows, and from rows to the columns of a table and back.
#
# Functions of their arguments, no I/O.  What a slot claims is not trusted: more entries than it has room for,
# operations and groups that nobody has, and steps that were not recorded are passed over.

COMM_DTYPE = np.dtype(COMM_ROW)
COLLECTIVE_DTYPE = np.dtype(COLLECTIVE_ROW)

_HEAD = np.dtype([*STEP_FIELDS[:5], ("count", "<u8")])
"""What ENTRIES_HEAD packs: as of a step, up to its number."""
_AT_FRONT = ("step", "group", "op")
"""Of a row, what is no plain number in the table: ``group`` and ``op`` are names there, and ``slot`` is the number."""


def comm_rows(slots: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup] = ()) -> NDArray[Any] | None:
    """The sums of ``steps`` (their sorted numbers) by group and operation, in this order; None when there are none.

    ``groups`` are the rank's: of one that has two slots (it gave it one after the agent had) the lower one counts.
    """
    rows = _entry_rows(slots, COMM_RECORD, COMM_ENTRY.size, COMM_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def collective_rows(
    slots: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup] = ()
) -> NDArray[Any] | None:
    """Each collective of ``steps`` that was kept by itself, in the order of the calls; None when there are none."""
    rows = _entry_rows(slots, COLLECTIVE, COLLECTIVE_ENTRY.size, COLLECTIVE_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def joined_rows(old: NDArray[Any] | None, new: NDArray[Any] | None) -> NDArray[Any] | None:
    """Those that came later with those that were there."""
    if old is None or new is None:
        return new if old is None else old
    rows = np.concatenate([old, new])
    return _settled(rows, np.unique(rows["step"]), ())


def _entry_rows(
    slots: NDArray[Any], kind: int, entry_bytes: int, dtype: np.dtype[Any], steps: NDArray[Any]
) -> NDArray[Any] | None:
    kinds = np.ascontiguousarray(slots[:, : _HEAD.itemsize]).view(_HEAD).reshape(-1)
    chosen = np.flatnonzero(kinds["kind"] == kind)
    heads = kinds[chosen]
    known = np.isin(heads["step"], steps)
    heads, chosen = heads[known], chosen[known]
    room = (SLOT_BYTES - ENTRIES_HEAD.size) // entry_bytes
    entries = np.ascontiguousarray(slots[chosen, ENTRIES_HEAD.size : ENTRIES_HEAD.size + room * entry_bytes])
    entries = entries.view(_entry_dtype(dtype)).reshape(len(chosen), room)
    used = np.arange(room) < np.minimum(heads["count"], room)[:, None]
    used &= entries["group"] < MAX_GROUPS
    rows = np.zeros(int(used.sum()), dtype)
    if not len(rows):
        return None
    for name in dtype.names or ():
        rows[name] = (
            np.broadcast_to(heads["step"][:, None], used.shape)[used] if name == "step" else entries[name][used]
        )
    rows["op"][rows["op"] >= len(OPS)] = 0
    return rows


def _settled(rows: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup]) -> NDArray[Any]:
    """Each once, by step; where the device's own times of a group's operation are known, they alone count."""
    rows["group"] = _one_slot_each(groups)[rows["group"]]
    place = np.searchsorted(steps, rows["step"])
    on_device = (rows["flags"] & FLAG_DEVICE) > 0
    if on_device.any() and not on_device.all():
        key = (place * MAX_GROUPS + rows["group"]) * len(OPS) + rows["op"]
        kept = on_device | ~np.isin(key, np.unique(key[on_device]))
        rows, place = rows[kept], place[kept]
    return _once(rows, place, "nth" if "nth" in (rows.dtype.names or ()) else "op")


def _one_slot_each(groups: Sequence[ProcessGroup]) -> NDArray[np.uint8]:
    """[MAX_GROUPS]; slot → the lowest slot of the group of that name."""
    slots = np.arange(MAX_GROUPS, dtype=np.uint8)
    first: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.slot):
        slots[group.slot] = first.setdefault(group.name, group.slot)
    return slots


def _entry_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """An entry has its row's fields but for the step, and the operation first."""
    fields = {name: dtype[name] for name in dtype.names or ()}
    order = ("op", "group", *(name for name in fields if name not in ("step", "op", "group")))
    return np.dtype([(name, fields[name]) for name in order])


def _once(rows: NDArray[Any], place: NDArray[np.intp], last_key: str) -> NDArray[Any]:
    """By step; of rows with the same step, group and ``last_key`` the first: an agent that resumed may read twice.

    Numbers of calls are the device's or the host's, and sends have numbers of their own: these are never the same.
    """
    order = np.lexsort((np.arange(len(rows)), rows["op"], rows[last_key], rows["group"], place))
    keys = rows[order]
    same = (np.diff(place[order]) == 0) & (np.diff(keys["group"].astype(np.int16)) == 0)
    same &= (keys[last_key][1:] == keys[last_key][:-1]) & (keys["op"][1:] == keys["op"][:-1])
    first = order[np.concatenate(([True], ~same))]
    if last_key == "nth":  # calls of different groups stand in the order in which they came
        first = np.sort(first)
        first = first[np.argsort(place[first], kind="stable")]
    return rows[first]


def exchange_columns(
    ranks: Sequence[RankSeries], rows: Sequence[NDArray[Any] | None], dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """The rows of all ranks as one table, rank by rank: numbers signed, groups and operations by name."""
    parts = [(series, own) for series, own in zip(ranks, rows, strict=True) if own is not None]
    counts = [len(own) for _, own in parts]
    table: dict[str, NDArray[Any]] = {
        "rank": np.repeat(np.array([series.rank for series, _ in parts], np.int64), counts),
        "attempt": np.repeat(np.array([series.identity.attempt for series, _ in parts], np.int64), counts),
        "step": _joined_values([own["step"].astype(np.int64) for _, own in parts]),
    }
    for column, what in (("group", "name"), ("kind", "kind")):
        table[column] = _joined_values([_named(series.groups, what)[own["group"]] for series, own in parts], object)
    table["op"] = _joined_values([np.array(OPS, object)[own["op"]] for _, own in parts], object)
    table["slot"] = _joined_values([own["group"].astype(np.int64) for _, own in parts])
    for name in dtype.names or ():
        if name not in _AT_FRONT:
            table[name] = _joined_values([own[name].astype(np.int64) for _, own in parts])
    return table


def rows_of_columns(columns: Mapping[str, NDArray[Any]], at: slice, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The rows of one rank again; a column that is missing is zero, an operation without a name of ours unknown."""
    rows = np.zeros(at.stop - at.start, dtype)
    for name in dtype.names or ():
        column = "slot" if name == "group" else name
        if name != "op" and column in columns:
            rows[name] = columns[column][at]
    numbers = {name: number for number, name in enumerate(OPS)}
    names = columns["op"][at] if "op" in columns else ()
    rows["op"] = [numbers.get(name, 0) for name in names] or 0
    return rows


def _named(groups: Sequence[ProcessGroup], what: str) -> NDArray[Any]:
    """[MAX_GROUPS]; the name or the kind by slot; one that the rank said nothing of has none."""
    names = np.full(MAX_GROUPS, "", object)
    for group in groups:
        text = getattr(group, what)
        names[group.slot] = text if text.isprintable() else ascii(text)[1:-1]  # what a database can hold
    return names


def _joined_values(parts: Sequence[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


# -- assemble ---------------------------------------------------------------------------------------------------------

STEP_DTYPE = np.dtype(STEP_FIELDS)
DEVICE_DTYPE = np.dtype(DEVICE_FIELDS)

_KIND_AT = np.dtype(STEP_FIELDS[:1]).itemsize
_RING_ONLY = ("head", "seq", "zero", "spare")
"""Bookkeeping of the ring; zero in a series, so that a run reads the same before and after it is sealed."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    series: list[RankSeries]
    """One per process, in order of attempt and rank."""
    notes: list[dict[str, Any]]
    """What users noted, as events."""
    notices: list[str]
    shown: list[tuple[int, int] | None]
    """Of each ring that was given, attempt and rank of its series; None: it is left out."""


def assemble_ranks(rings: Sequence[RingRecords], *, among: Sequence[RankSeries] = ()) -> Assembled:
    """``among``: what is settled already, to which these come."""
    notices: list[str] = []
    notes: list[dict[str, Any]] = []
    series: list[RankSeries] = []
    settled = _settle(rings, among)
    numbered = _number(settled, notices)
    for ring, rank in numbered:
        about = ring.about
        steps = book_waiting(_by_step(ring.slots, STEP, STEP_DTYPE))
        device_steps = _by_step(ring.slots, DEVICE, DEVICE_DTYPE)
        device_steps = device_steps[np.isin(device_steps["step"], steps["step"])]
        if ring.lost:
            notices.append(f"Rank {rank}: {ring.lost:,} records were overwritten before they could be read.")
        if ring.torn:
            notices.append(f"Rank {rank}: {ring.torn:,} records could not be read whole.")
        notes += _notes_of(ring, rank)
        series.append(
            RankSeries(
                identity=about.identity,
                rank=rank,
                state=about.state,
                phase_names=about.phase_names,
                steps=steps,
                device_steps=device_steps,
                anchor_mono_ns=about.anchor_mono_ns,
                anchor_wall_ns=about.anchor_wall_ns,
                live_phase=about.live_phase,
                live_since_ns=about.live_since_ns,
                lost=ring.lost,
                torn=ring.torn,
                hook_failures=about.hook_failures,
                ended_wall_ns=about.ended_wall_ns,
                facts=about.facts,
                groups=about.groups,
                comm=comm_rows(ring.slots, steps["step"], about.groups),
                collectives=collective_rows(ring.slots, steps["step"], about.groups),
            )
        )
    series.sort(key=lambda one: (one.identity.attempt, one.rank))
    pairs = {id(ring): (ring.about.identity.attempt, rank) for ring, rank in numbered}
    return Assembled(series=series, notes=notes, notices=notices, shown=[pairs.get(id(ring)) for ring in settled])


def book_waiting(steps: NDArray[Any]) -> NDArray[Any]:
    """What of a step's exchange of gradients came after their computing was waiting for peers: ``comm``.

    DDP works its figures out when the next iteration begins, so those read at the end of a step are of the step before.
    Of the last step there are none yet: it goes by those before it.
    """
    if not len(steps):
        return steps
    if not steps["ddp_exposed_ns"].any():
        return steps  # on a GPU DDP samples itself, and what is read may be of any earlier step
    known = np.flatnonzero((steps["step"][1:] == steps["step"][:-1] + 1) & (steps["ddp_compute_ns"][1:] > 0))
    for name in ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns"):
        steps[name][known] = steps[name][known + 1]
    waited = np.minimum(steps["ddp_exposed_ns"], steps["phase_ns"][:, BACKWARD])
    steps["phase_ns"][:, BACKWARD] -= waited
    steps["phase_ns"][:, COMM] += waited
    steps["ddp_exposed_ns"] = 0
    return steps


def _notes_of(ring: RingRecords, rank: int) -> list[dict[str, Any]]:
    """The user's notes as events, each timed by the end of the last step recorded before it."""
    kinds = _words(ring.slots, _KIND_AT, "<u2")
    if not (kinds == NOTE).any():
        return []
    steps = _slot_rows(ring.slots, STEP, STEP_DTYPE)
    about = ring.about
    events = []
    for slot in ring.slots[kinds == NOTE]:
        _, _, seq, step, length, said = NOTE_SLOT.unpack(slot.tobytes())
        text = said[:length].decode(errors="replace")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = {"text": text}
        before = int(np.searchsorted(steps["seq"], seq))
        at_ns = about.anchor_mono_ns
        if before:
            at_ns = int(steps["start_ns"][before - 1]) + int(steps["wall_ns"][before - 1])
        wall_ns = max(0, at_ns - about.anchor_mono_ns + about.anchor_wall_ns)
        who = {"rank": rank, "pid": about.pid, "key": about.key, "seq": seq}
        events.append({"schema": 1, "wall_ns": wall_ns, "event": "note", **who, "step": step, "values": values})
    return events


def _by_step(slots: NDArray[Any], kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    rows = _slot_rows(slots, kind, dtype)
    _, first = np.unique(rows["step"], return_index=True)
    rows = rows[first]
    for name in _RING_ONLY:
        if name in (dtype.names or ()):
            rows[name] = np.zeros((), dtype[name])
    return rows


def _slot_rows(slots: NDArray[Any], kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    chosen = slots[_words(slots, _KIND_AT, "<u2") == kind]  # a copy, and contiguous
    rows: NDArray[Any] = chosen.view(dtype).reshape(-1)
    return rows


def _words(slots: NDArray[Any], at: int, dtype: str) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(slots[:, at : at + width]).view(dtype).reshape(-1)


def _settle(rings: Sequence[RingRecords], among: Sequence[RankSeries]) -> list[RingRecords]:
    """Each with the attempt that it belongs to instead of what its launcher counted."""
    attempts = settle_attempts([*(_claim(ring) for ring in rings), *map(_settled_claim, among)])
    return [
        replace(ring, about=replace(ring.about, identity=replace(ring.about.identity, attempt=attempt)))
        for ring, attempt in zip(rings, attempts, strict=False)
    ]


def _settled_claim(series: RankSeries) -> RankClaim:
    identity, steps = series.identity, series.steps
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else series.anchor_mono_ns
    return RankClaim(
        rank=identity.rank,
        world_size=identity.world_size,
        host=identity.host,
        restarts=identity.attempt,
        began_ns=series.anchor_wall_ns,
        until_ns=series.ended_wall_ns or last_ns - series.anchor_mono_ns + series.anchor_wall_ns,
        active_ns=last_ns - series.anchor_mono_ns + series.anchor_wall_ns,
        made_steps=bool(len(steps)),
        in_order=series.state == "exited",
    )


def _claim(ring: RingRecords) -> RankClaim:
    about = ring.about
    return RankClaim(
        rank=about.identity.rank,
        world_size=about.identity.world_size,
        host=about.identity.host,
        restarts=about.identity.attempt,
        began_ns=about.anchor_wall_ns,
        until_ns=_until_ns(ring),
        active_ns=_active_ns(ring),
        made_steps=_has_steps(ring),
        in_order=about.state == "exited",
    )


def _until_ns(ring: RingRecords) -> int | None:
    """When its process ended; else when it was last known to live, if it is not known to live now."""
    about = ring.about
    if about.ended_wall_ns is not None:
        return about.ended_wall_ns
    if about.state in ("starting", "running"):
        return about.heard_wall_ns or None  # without, the ring itself was read: its process is here
    return max(about.heard_wall_ns, _active_ns(ring))


def _active_ns(ring: RingRecords) -> int:
    """When it ended its last step or entered its last phase."""
    about, steps = ring.about, _slot_rows(ring.slots, STEP, STEP_DTYPE)
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else 0
    return max(last_ns, about.live_since_ns) - about.anchor_mono_ns + about.anchor_wall_ns


def _number(rings: Sequence[RingRecords], notices: list[str]) -> list[tuple[RingRecords, int]]:
    """Give every process its rank; of two that claim the same one in the same attempt the second gets a free number.

    A process without a step that claims a taken rank is a helper of that rank (it inherited its environment) and is
    left out.
    """
    claims = sorted(rings, key=lambda ring: (not _has_steps(ring), ring.about.anchor_wall_ns, ring.about.pid))
    taken: set[tuple[int, int]] = set()
    claimed = {(ring.about.identity.attempt, ring.about.identity.rank) for ring in rings}
    numbered = []
    for ring in claims:
        attempt, rank = ring.about.identity.attempt, ring.about.identity.rank
        if (attempt, rank) in taken:
            if not _has_steps(ring):
                continue
            wanted, rank = rank, rank + 1
            while (attempt, rank) in taken or (attempt, rank) in claimed:
                rank += 1
            notices.append(f"Process {ring.about.pid} also said it was rank {wanted}; it is shown as rank {rank}.")
        taken.add((attempt, rank))
        numbered.append((ring, rank))
    return numbered


def _has_steps(ring: RingRecords) -> bool:
    return bool((_words(ring.slots, _KIND_AT, "<u2") == STEP).any())


# -- columns ----------------------------------------------------------------------------------------------------------
# The steps of all ranks as flat columns, one row per rank, attempt and step, and back.  No I/O.
#
# Columns are signed, so that a difference in SQL may be negative; no time of ours comes near 2**63.
# A user's phase is a column by its name, whatever slot each rank gave it; ``ranks.json`` keeps which slot is which.

STEP_COLUMNS = (
    "step",
    "start_ns",
    "wall_ns",
    "flags",
    "micro_batches",
    "forwards",
    "batches",
    "allocated",
    "reserved",
    "peak_allocated",
    "ddp_compute_ns",
    "ddp_comm_ns",
    "between_ns",
)
"""Fields of a step that are columns under their own names."""

BUILTIN_COLUMNS = tuple(f"{name}_ns" for name in BUILTIN_PHASES)
_LAST = BUILTIN_COLUMNS[OTHER]
"""What is left over stands last among the phases."""
DEVICE_PREFIX = "device_"
_UNSAFE = re.compile(r"\W+")


def phase_columns(ranks: Sequence[RankSeries]) -> list[list[str]]:
    """For each rank the column of each of its sixteen slots; empty for one without name and without time.

    Columns are told apart without regard to case, as SQL does, so "Loss" beside "loss" gets a number.
    """
    given: dict[str, str] = {}
    used: set[str] = set()
    chosen = []
    for series in ranks:
        columns: list[str] = []
        for slot, name in enumerate(series.phase_names):
            if slot < len(BUILTIN_PHASES):
                columns.append(BUILTIN_COLUMNS[slot])
                continue
            if not name and not series.steps["phase_ns"][:, slot].any():
                columns.append("")
                continue
            label = name or f"slot_{slot}"
            if label not in given or given[label] in columns:
                given[label] = _free("phase_" + _UNSAFE.sub("_", label), used)
                used.add(given[label].casefold())
            columns.append(given[label])
        chosen.append(columns)
    return chosen


def to_columns(ranks: Sequence[RankSeries], phases: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Rank by rank; device columns are masked where a step has no device times."""
    counts = [len(series.steps) for series in ranks]
    columns: dict[str, NDArray[Any]] = {
        "rank": np.repeat(np.array([series.rank for series in ranks], np.int64), counts),
        "attempt": np.repeat(np.array([series.identity.attempt for series in ranks], np.int64), counts),
    }
    for name in STEP_COLUMNS:
        columns[name] = _joined_columns([series.steps[name].astype(np.int64) for series in ranks], np.dtype(np.int64))
    present = _joined_columns([np.isin(s.steps["step"], s.device_steps["step"]) for s in ranks], np.dtype(bool))
    own = sorted({name for chosen in phases for name in chosen} - {*BUILTIN_COLUMNS, ""})
    names = [*(name for name in BUILTIN_COLUMNS if name != _LAST), *own, _LAST]
    for name in names:
        columns[name] = np.zeros(sum(counts), np.int64)
    for name in ("flags", "wall_ns", *names):
        columns[DEVICE_PREFIX + name] = np.ma.masked_array(np.zeros(sum(counts), np.int64), mask=~present)
    at = 0
    for series, chosen in zip(ranks, phases, strict=True):
        rows = slice(at, at + len(series.steps))
        has = np.flatnonzero(present[rows]) + at
        for name in ("flags", "wall_ns"):
            np.ma.getdata(columns[DEVICE_PREFIX + name])[has] = series.device_steps[name].astype(np.int64)
        for slot, name in enumerate(chosen):
            if not name:
                continue
            columns[name][rows] = series.steps["phase_ns"][:, slot].astype(np.int64)
            on_device = series.device_steps["phase_ns"][:, slot].astype(np.int64)
            np.ma.getdata(columns[DEVICE_PREFIX + name])[has] = on_device
        at = rows.stop
    return columns


def steps_of_columns(
    columns: Mapping[str, NDArray[Any]], rows: slice, chosen: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """``steps`` and ``device_steps`` of one rank; a column that is missing is zero (or has no device times)."""
    count = rows.stop - rows.start
    steps = np.zeros(count, STEP_DTYPE)
    steps["kind"] = STEP
    for name in STEP_COLUMNS:
        if name in columns:
            steps[name] = columns[name][rows]
    for slot in range(PHASE_SLOTS):
        if chosen[slot] in columns:
            steps["phase_ns"][:, slot] = columns[chosen[slot]][rows]
    wall = columns.get(DEVICE_PREFIX + "wall_ns")
    if wall is None:
        return steps, np.zeros(0, DEVICE_DTYPE)
    present = ~np.ma.getmaskarray(wall[rows])
    device = np.zeros(int(present.sum()), DEVICE_DTYPE)
    device["kind"] = DEVICE
    device["step"] = steps["step"][present]
    for name in ("flags", "wall_ns"):
        if DEVICE_PREFIX + name in columns:
            device[name] = np.ma.getdata(columns[DEVICE_PREFIX + name])[rows][present]
    for slot in range(PHASE_SLOTS):
        if DEVICE_PREFIX + chosen[slot] in columns:
            device["phase_ns"][:, slot] = np.ma.getdata(columns[DEVICE_PREFIX + chosen[slot]])[rows][present]
    return steps, device


def _free(name: str, used: set[str]) -> str:
    column, number = f"{name}_ns", 2
    while column.casefold() in used:
        column, number = f"{name}_{number}_ns", number + 1
    return column


def _joined_columns(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
