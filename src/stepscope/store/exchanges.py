"""Collectives as they are kept: from the entries of slots to rows, and from rows to the columns of a table and back.

Functions of their arguments, no I/O.  What a slot claims is not trusted: more entries than it has room for, operations
and groups that nobody has, and steps that were not recorded are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.collectives import COLLECTIVE_ROW, COMM_ROW, FLAG_DEVICE, MAX_GROUPS, OPS, ProcessGroup
from stepscope.records.series import RankSeries
from stepscope.records.slot import (
    COLLECTIVE,
    COLLECTIVE_ENTRY,
    COMM_ENTRY,
    COMM_RECORD,
    ENTRIES_HEAD,
    SLOT_BYTES,
    STEP_FIELDS,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COLLECTIVE_DTYPE",
    "COMM_DTYPE",
    "collective_rows",
    "comm_rows",
    "exchange_columns",
    "joined_rows",
    "rows_of_columns",
]

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
    rows = _rows(slots, COMM_RECORD, COMM_ENTRY.size, COMM_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def collective_rows(
    slots: NDArray[Any], steps: NDArray[Any], groups: Sequence[ProcessGroup] = ()
) -> NDArray[Any] | None:
    """Each collective of ``steps`` that was kept by itself, in the order of the calls; None when there are none."""
    rows = _rows(slots, COLLECTIVE, COLLECTIVE_ENTRY.size, COLLECTIVE_DTYPE, steps)
    return None if rows is None else _settled(rows, steps, groups)


def joined_rows(old: NDArray[Any] | None, new: NDArray[Any] | None) -> NDArray[Any] | None:
    """Those that came later with those that were there."""
    if old is None or new is None:
        return new if old is None else old
    rows = np.concatenate([old, new])
    return _settled(rows, np.unique(rows["step"]), ())


def _rows(
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
        "step": _joined([own["step"].astype(np.int64) for _, own in parts]),
    }
    for column, what in (("group", "name"), ("kind", "kind")):
        table[column] = _joined([_named(series.groups, what)[own["group"]] for series, own in parts], object)
    table["op"] = _joined([np.array(OPS, object)[own["op"]] for _, own in parts], object)
    table["slot"] = _joined([own["group"].astype(np.int64) for _, own in parts])
    for name in dtype.names or ():
        if name not in _AT_FRONT:
            table[name] = _joined([own[name].astype(np.int64) for _, own in parts])
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


def _joined(parts: Sequence[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
