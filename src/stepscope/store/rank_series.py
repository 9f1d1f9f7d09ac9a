"""The series of each rank: built from ring slots, numbered by attempt and rank, and converted to table columns.

All functions depend on their arguments only; no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.collectives import COLLECTIVE_ROW, COMM_ROW, FLAG_DEVICE, MAX_GROUPS, OPS, ProcessGroup
from stepscope.records.identity import RankIdentity
from stepscope.records.series import RankSeries, note_event
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    COLLECTIVE,
    COLLECTIVE_ENTRY,
    COMM,
    COMM_ENTRY,
    COMM_RECORD,
    DEVICE,
    ENTRIES_HEAD,
    NOTE,
    NOTE_SLOT,
    OTHER,
    PHASE_SLOTS,
    SLOT_BYTES,
    STEP,
    STEP_FIELDS,
)
from stepscope.records.text import count_text
from stepscope.step_table import (
    DEVICE_DTYPE,
    LARGEST,
    PLAIN,
    STEP_DTYPE,
    RankSteps,
    StepTable,
    TableBuilder,
    join_steps,
    phase_labels,
    phases_in_order,
    slots_in_use,
)
from stepscope.store.attempts import RankClaim, settle_attempts
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.live.ring_records import RingRecords

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COLLECTIVE_DTYPE",
    "COMM_DTYPE",
    "STEP_COLUMNS",
    "Assembled",
    "assemble_ranks",
    "book_waiting",
    "collective_rows",
    "comm_rows",
    "exchange_columns",
    "joined_rows",
    "phase_columns",
    "rows_of_columns",
    "series_of",
    "table_of_columns",
    "to_columns",
]


# -- collectives ------------------------------------------------------------------------------------------------------
# Convert collectives from slot entries to rows, and from rows to table columns and back.  Slots are not trusted:
# entries beyond their room, unknown groups and steps that were not recorded are skipped; an unrecognized operation is
# "unknown".

COMM_DTYPE = np.dtype(COMM_ROW)
COLLECTIVE_DTYPE = np.dtype(COLLECTIVE_ROW)

_HEAD = np.dtype([*STEP_FIELDS[:5], ("count", "<u8")])
"""The layout of ENTRIES_HEAD: like a step, up to its number."""
_AT_FRONT = ("step", "group", "op")
"""The row fields that are not plain numbers in the table: ``group`` and ``op`` are names; ``slot`` is the number."""


def comm_rows(slots: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup] = ()) -> NDArray[Any] | None:
    """Return the sums of ``steps`` (sorted numbers) by group and operation, in this order; None if there are no sums.

    ``groups`` are the rank's groups.  If one has two slots (the rank assigned one after the agent did), the lower
    counts.
    """
    rows = _entry_rows(slots, COMM_RECORD, COMM_ENTRY.size, COMM_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def collective_rows(
    slots: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup] = ()
) -> NDArray[Any] | None:
    """Return each individually recorded collective of ``steps`` in call order; None if no collective was recorded."""
    rows = _entry_rows(slots, COLLECTIVE, COLLECTIVE_ENTRY.size, COLLECTIVE_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def joined_rows(old: NDArray[Any] | None, new: NDArray[Any] | None) -> NDArray[Any] | None:
    """Merge later rows into earlier ones."""
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
    """Remove duplicates and sort by step; if device times of a group's operation are known, only they count."""
    rows["group"] = _one_slot_each(groups)[rows["group"]]
    place = np.searchsorted(steps, rows["step"])
    on_device = (rows["flags"] & FLAG_DEVICE) > 0
    if on_device.any() and not on_device.all():
        key = (place * MAX_GROUPS + rows["group"]) * len(OPS) + rows["op"]
        chosen = on_device | ~np.isin(key, np.unique(key[on_device]))
        rows, place = rows[chosen], place[chosen]
    return _once(rows, place, "nth" if "nth" in (rows.dtype.names or ()) else "op")


def _one_slot_each(groups: Sequence[ProcessGroup]) -> NDArray[np.uint8]:
    """[MAX_GROUPS]; slot → the lowest slot of the group with the same name."""
    slots = np.arange(MAX_GROUPS, dtype=np.uint8)
    first: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.slot):
        slots[group.slot] = first.setdefault(group.name, group.slot)
    return slots


def _entry_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an entry: the row's fields without the step, operation first."""
    fields = {name: dtype[name] for name in dtype.names or ()}
    order = ("op", "group", *(name for name in fields if name not in ("step", "op", "group")))
    return np.dtype([(name, fields[name]) for name in order])


def _once(rows: NDArray[Any], place: NDArray[np.intp], last_key: str) -> NDArray[Any]:
    """Sort by step and keep the first row per step, group and ``last_key``: a resumed agent may read a record twice.

    Device and host number calls separately, and sends have separate numbers: these never coincide.
    """
    order = np.lexsort((np.arange(len(rows)), rows["op"], rows[last_key], rows["group"], place))
    keys = rows[order]
    same = (np.diff(place[order]) == 0) & (np.diff(keys["group"].astype(np.int16)) == 0)
    same &= (keys[last_key][1:] == keys[last_key][:-1]) & (keys["op"][1:] == keys["op"][:-1])
    first = order[np.concatenate(([True], ~same))]
    if last_key == "nth":  # calls of different groups stay in the order in which they were made
        first = np.sort(first)
        first = first[np.argsort(place[first], kind="stable")]
    return rows[first]


def exchange_columns(
    ranks: Sequence[RankSeries], rows: Sequence[NDArray[Any] | None], dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    """Return the rows of all ranks as one table, rank by rank: signed numbers, groups and operations by name."""
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
    """Return the rows of one rank; a missing column reads as zero, an unrecognized operation as unknown."""
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
    """[MAX_GROUPS]; the name or the kind by slot; empty if the rank did not report it."""
    names = np.full(MAX_GROUPS, "", object)
    for group in groups:
        text = getattr(group, what)
        names[group.slot] = text if text.isprintable() else ascii(text)[1:-1]  # what a database can hold
    return names


def _joined_values(parts: Sequence[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


# -- assembling -------------------------------------------------------------------------------------------------------

_KIND_AT = np.dtype(STEP_FIELDS[:1]).itemsize
_RING_ONLY = ("head", "seq", "zero", "spare")
"""Ring bookkeeping; zero in a series, so that a run reads the same before and after sealing."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    series: list[RankSeries]
    """One per process, ordered by attempt and rank."""
    notes: list[dict[str, Any]]
    """User notes as events."""
    notices: list[str]
    shown: list[tuple[int, int] | None]
    """For each given ring, the attempt and rank of its series; None: it is left out."""


def assemble_ranks(rings: Sequence[RingRecords], *, among: Sequence[RankSeries] = ()) -> Assembled:
    """Build the series of all rings; ``among`` are series that already exist and that these join.

    A process that trained for a rank while its parent was that rank (a search in a forked child, say) is not a rank or
    a separate attempt: only a notice reports it.
    """
    notices: list[str] = []
    given, parents = rings, _trained(rings, among)
    helps = [_is_helper(ring, parents) for ring in given]
    rings = [ring for ring, is_helper in zip(given, helps, strict=True) if not is_helper]
    notices += [
        _helper_notice(ring) for ring, is_helper in zip(given, helps, strict=True) if is_helper and _has_steps(ring)
    ]
    settled = _settle(rings, among)
    numbered = _number(settled, notices)
    for ring, rank in numbered:
        if ring.lost:
            notices.append(f"Rank {rank}: {ring.lost:,} records were overwritten before they could be read.")
        if ring.torn:
            notices.append(f"Rank {rank}: {ring.torn:,} records could not be read completely.")
    ordered = sorted(numbered, key=lambda pair: (pair[0].about.identity.attempt, pair[1]))
    table = _table_of([ring for ring, _ in ordered])
    series = [_series(ring, rank, table.rank(place)) for place, (ring, rank) in enumerate(ordered)]
    notes = [note for ring, rank in numbered for note in _notes_of(ring, rank)]
    pairs = {id(ring): (ring.about.identity.attempt, rank) for ring, rank in numbered}
    shown = {id(ring): pairs.get(id(own)) for ring, own in zip(rings, settled, strict=True)}
    return Assembled(series=series, notes=notes, notices=notices, shown=[shown.get(id(ring)) for ring in given])


def _table_of(rings: Sequence[RingRecords]) -> StepTable:
    """Turn the records of all rings into one table, ring by ring: twice as much as one of them is in memory."""
    used = [slots_in_use(_phases_of(ring.slots), ring.about.phase_names) for ring in rings]
    rows = sum(int((_words(ring.slots, _KIND_AT, "<u2") == STEP).sum()) for ring in rings)
    names = (label for ring in rings for label in phase_labels(ring.about.phase_names))
    in_use = {label for labels in used for label in labels}
    builder = TableBuilder(rows, phases_in_order(label for label in dict.fromkeys(names) if label in in_use))
    for ring in rings:
        steps = book_waiting(_by_step(ring.slots, STEP, STEP_DTYPE))
        device = _by_step(ring.slots, DEVICE, DEVICE_DTYPE)
        builder.add(steps, device[np.isin(device["step"], steps["step"])], ring.about.phase_names)
    return builder.table()


def _phases_of(slots: NDArray[Any]) -> NDArray[Any]:
    """[n, 16]; times by phase slot, on the host (with ``comm`` if some of it is booked later) and on the device."""
    steps, device = _slot_rows(slots, STEP, STEP_DTYPE), _slot_rows(slots, DEVICE, DEVICE_DTYPE)
    waited = np.zeros((1, PHASE_SLOTS), np.uint64)
    waited[0, COMM] = steps["ddp_exposed_ns"].any()
    return np.concatenate([steps["phase_ns"], device["phase_ns"], waited])


def _series(ring: RingRecords, rank: int, steps: RankSteps) -> RankSeries:
    groups = ring.about.groups
    return series_of(
        ring.about,
        rank=rank,
        steps=steps,
        lost=ring.lost,
        torn=ring.torn,
        comm=comm_rows(ring.slots, steps["step"], groups),
        collectives=collective_rows(ring.slots, steps["step"], groups),
    )


_OF_SIDECAR = (
    *("identity", "state", "phase_names", "anchor_mono_ns", "anchor_wall_ns", "live_phase", "live_since_ns"),
    *("hook_failures", "ended_wall_ns", "facts", "groups"),
)


def series_of(about: RingSidecar, **more: Any) -> RankSeries:
    """Return a series with what its sidecar says; ``more``: the other fields."""
    return RankSeries(**{name: getattr(about, name) for name in _OF_SIDECAR}, **more)


TrainerKey = tuple[str, int, int, int]


def trainer_key(identity: RankIdentity, pid: int) -> TrainerKey:
    """What a process and a helper that it started have in common, if ``pid`` is the first one's."""
    return identity.host, pid, identity.rank, identity.world_size


def _is_helper(ring: RingRecords, parents: Collection[TrainerKey]) -> bool:
    """Whether one of ``parents`` started it; 0 is no process, and in a damaged file a process may name itself."""
    identity = ring.about.identity
    return identity.started_by not in (0, ring.about.pid) and trainer_key(identity, identity.started_by) in parents


def _trained(rings: Sequence[RingRecords], among: Sequence[RankSeries]) -> set[TrainerKey]:
    own = {trainer_key(ring.about.identity, ring.about.pid) for ring in rings if _has_steps(ring)}
    return own | {trainer_key(series.identity, series.identity.pid) for series in among if len(series.steps)}


def _helper_notice(ring: RingRecords) -> str:
    identity, steps = ring.about.identity, len(_slot_rows(ring.slots, STEP, STEP_DTYPE))
    return (
        f"Process {ring.about.pid}, started by rank {identity.rank} (process {identity.started_by}), trained as well: "
        f"{count_text(steps, 'step')} {'is' if steps == 1 else 'are'} not shown."
    )


def book_waiting(steps: NDArray[Any]) -> NDArray[Any]:
    """Move the part of the gradient exchange that was not hidden by the backward pass into ``comm``: it is waiting.

    DDP computes its figures when the next iteration begins, so the figures read at the end of a step describe the step
    before.  The last step has none yet and keeps those of the step before it.
    """
    if not len(steps):
        return steps
    if not steps["ddp_exposed_ns"].any():
        return steps  # on a GPU, DDP samples its figures, and they may describe any earlier step
    known = np.flatnonzero((steps["step"][1:] == steps["step"][:-1] + 1) & (steps["ddp_compute_ns"][1:] > 0))
    for name in ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns"):
        steps[name][known] = steps[name][known + 1]
    waited = np.minimum(steps["ddp_exposed_ns"], steps["phase_ns"][:, BACKWARD])
    steps["phase_ns"][:, BACKWARD] -= waited
    steps["phase_ns"][:, COMM] += waited
    steps["ddp_exposed_ns"] = 0
    return steps


def _notes_of(ring: RingRecords, rank: int) -> list[dict[str, Any]]:
    """Return notes and what the recorder saw itself as events, each timed by the end of the last step before it."""
    kinds = _words(ring.slots, _KIND_AT, "<u2")
    if not (kinds == NOTE).any():
        return []
    steps = _slot_rows(ring.slots, STEP, STEP_DTYPE)
    about = ring.about
    events = []
    for slot in ring.slots[kinds == NOTE]:
        _, _, seq, step, length, data = NOTE_SLOT.unpack(slot.tobytes())
        text = data[:length].decode(errors="replace")
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
        note = note_event(values)
        events.append({"schema": 1, "wall_ns": wall_ns, "event": note["event"], **who, "step": step, **note})
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
    """Replace each launcher count by the attempt that the ring belongs to."""
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
    """When the process ended; else when it was last known to be alive, unless it is alive now."""
    about = ring.about
    if about.ended_wall_ns is not None:
        return about.ended_wall_ns
    if about.state in ("starting", "running"):
        return about.heard_wall_ns or None  # 0: the ring itself was read, so its process is here
    return max(about.heard_wall_ns, _active_ns(ring))


def _active_ns(ring: RingRecords) -> int:
    """When it ended its last step or entered its last phase."""
    about, steps = ring.about, _slot_rows(ring.slots, STEP, STEP_DTYPE)
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else 0
    return max(last_ns, about.live_since_ns) - about.anchor_mono_ns + about.anchor_wall_ns


def _number(rings: Sequence[RingRecords], notices: list[str]) -> list[tuple[RingRecords, int]]:
    """Assign each process a rank; if two claim the same rank in one attempt, the second gets a free number.

    A process without steps that claims a taken rank is a helper of that rank (it inherited its environment) and is
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
            notices.append(f"Process {ring.about.pid} also claimed to be rank {wanted}; it is shown as rank {rank}.")
        taken.add((attempt, rank))
        numbered.append((ring, rank))
    return numbered


def _has_steps(ring: RingRecords) -> bool:
    return bool((_words(ring.slots, _KIND_AT, "<u2") == STEP).any())


# -- step columns -----------------------------------------------------------------------------------------------------
# The columns of ``steps.parquet``: a row of the table each, and back.
#
# Columns are signed, so that a difference in SQL may be negative; no recorded time comes near 2**63.  A user's phase is
# a column with its name, whatever slot each rank assigned to it; ``ranks.json`` maps slots to columns.

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
"""Quantities of a step that are columns under their own names."""

BUILTIN_COLUMNS = tuple(f"{name}_ns" for name in BUILTIN_PHASES)
_LAST = BUILTIN_COLUMNS[OTHER]
"""The remainder comes last among the phases."""
DEVICE_PREFIX = "device_"
_UNSAFE = re.compile(r"\W+")


def phase_columns(ranks: Sequence[RankSeries]) -> list[list[str]]:
    """Return for each rank the column of each of its sixteen slots; empty for a slot without name and time.

    Columns are compared without regard to case, as in SQL, so "Loss" next to "loss" gets a number.
    """
    given: dict[str, str] = {}
    used: set[str] = set()
    known: dict[tuple[str, ...], list[str]] = {}
    chosen = []
    for series in ranks:
        key = series.phase_names
        unnamed = [label for label in series.steps.table.phases if label in phase_labels(key) and label not in key]
        has_unnamed = any(series.steps.phase(label).any() for label in unnamed if label not in BUILTIN_PHASES)
        if has_unnamed or key not in known:
            columns = list(BUILTIN_COLUMNS)
            for slot, label in enumerate(phase_labels(key)):
                if slot < len(BUILTIN_PHASES):
                    continue
                if label in phase_labels(key)[:slot] or (not key[slot] and not series.steps.phase(label).any()):
                    columns.append("")  # of two slots with one name, the first has the time of both
                    continue
                if label not in given:
                    given[label] = _free("phase_" + _UNSAFE.sub("_", label), used)
                    used.add(given[label].casefold())
                columns.append(given[label])
            known[key] = columns
        chosen.append(known[key])
        if has_unnamed:
            del known[key]
    return chosen


def to_columns(ranks: Sequence[RankSeries], phases: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Return the columns, rank by rank; device columns are masked where a step has no device times."""
    table = join_steps([series.steps for series in ranks])
    counts = np.diff(table.first)
    columns: dict[str, NDArray[Any]] = {
        "rank": np.repeat(np.array([series.rank for series in ranks], np.int64), counts),
        "attempt": np.repeat(np.array([series.identity.attempt for series in ranks], np.int64), counts),
    }
    for name in STEP_COLUMNS:
        columns[name] = table.column(name).astype(np.int64)
    labels = {
        column: label
        for series, chosen in zip(ranks, phases, strict=True)
        for label, column in zip(phase_labels(series.phase_names), chosen, strict=True)
        if column
    } | dict(zip(BUILTIN_COLUMNS, BUILTIN_PHASES, strict=True))
    own = sorted(labels.keys() - {*BUILTIN_COLUMNS})
    names = [*(name for name in BUILTIN_COLUMNS if name != _LAST), *own, _LAST]
    for name in names:
        columns[name] = np.minimum(table.phase(labels[name]), LARGEST).astype(np.int64)
    untimed = np.ones(len(table), np.bool_) if table.timed is None else ~table.timed
    for name in ("flags", "wall_ns"):
        values = table.column(DEVICE_PREFIX + name).astype(np.int64)
        columns[DEVICE_PREFIX + name] = np.ma.masked_array(values, mask=untimed)
    for name in names:
        there = table.device_ns is not None and labels[name] in table.phases
        values = np.zeros(len(table), np.int64)
        if there and table.device_ns is not None:
            values[~untimed] = np.minimum(table.device_ns[table.phases.index(labels[name])][~untimed], LARGEST)
        columns[DEVICE_PREFIX + name] = np.ma.masked_array(values, mask=untimed)
    return columns


def table_of_columns(
    columns: dict[str, Any], counts: Sequence[int], names: Sequence[Sequence[str]], chosen: Sequence[Sequence[str]]
) -> StepTable:
    """Return the table; a missing column reads as zero (or as no device times).  Empties ``columns`` meanwhile.

    By rank: the number of its rows, its phase names, and the column of each of its slots.
    """
    first = np.cumsum([0, *counts]).astype(np.intp)
    rows = int(first[-1])
    step = np.ma.filled(columns.pop("step"), 0).astype(np.int64)
    plain = {
        name: np.ma.filled(columns.pop(name), 0).astype(PLAIN[name])
        for name in (*STEP_COLUMNS, f"{DEVICE_PREFIX}flags")
        if name in columns and name in PLAIN
    }
    timed = None
    if (wall := columns.pop(f"{DEVICE_PREFIX}wall_ns", None)) is not None:
        timed = ~np.ma.getmaskarray(wall)
        plain[f"{DEVICE_PREFIX}wall_ns"] = np.ma.filled(wall, 0).astype(np.float64)
    ways = _ways_to_read(names, chosen, first)
    labels = [label for pairs in ways for label, column in pairs if {column, DEVICE_PREFIX + column} & columns.keys()]
    phases = phases_in_order(labels)
    phase_ns = np.zeros((len(phases), rows))
    device_ns = None if timed is None else np.where(timed, 0.0, np.broadcast_to(np.nan, (len(phases), rows)))
    for pairs, places in ways.items():
        for label, column in pairs:
            for out, values in ((phase_ns, columns.get(column)), (device_ns, columns.get(DEVICE_PREFIX + column))):
                if out is not None and values is not None:
                    at = phases.index(label)
                    out[at, places] += np.ma.filled(values, 0)[places]
    return StepTable(
        first=first, step=step, plain=plain, phases=phases, phase_ns=phase_ns, device_ns=device_ns, timed=timed
    )


def _ways_to_read(
    names: Sequence[Sequence[str]], chosen: Sequence[Sequence[str]], first: NDArray[np.intp]
) -> dict[tuple[tuple[str, str], ...], Any]:
    """By pairs of phase and column, the rows of the ranks that have these pairs."""
    ranks: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, (own, columns) in enumerate(zip(names, chosen, strict=True)):
        pairs = tuple((label, column) for label, column in zip(phase_labels(own), columns, strict=True) if column)
        ranks.setdefault(pairs, []).append(rank)
    if len(ranks) == 1:
        return dict.fromkeys(ranks, slice(None))
    return {
        pairs: np.concatenate([np.arange(first[rank], first[rank + 1]) for rank in own]) for pairs, own in ranks.items()
    }


def _free(name: str, used: set[str]) -> str:
    column, number = f"{name}_ns", 2
    while column.casefold() in used:
        column, number = f"{name}_{number}_ns", number + 1
    return column
