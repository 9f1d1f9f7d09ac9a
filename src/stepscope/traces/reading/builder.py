"""Columns that grow piece by piece and become a trace at the end: what every reader writes into."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import (
    Collectives,
    Copies,
    Flows,
    Kernels,
    Memory,
    Ops,
    Pythons,
    Slices,
    Syncs,
    Thread,
    Trace,
    TraceMeta,
)

__all__ = ["Numbering", "TraceBuilder"]

Key = TypeVar("Key", bound=Hashable)

DTYPES: dict[str, Any] = {
    # column: type; all that are not here are int64
    "kind": np.uint8,
    "name": np.int32,
    "thread": np.int32,
    "device": np.int16,
    "stream": np.int32,
    "row": np.int32,
    "dims": np.int32,
    "types": np.int32,
    "concrete": np.int32,
    "stack": np.int32,
    "occupancy": np.float32,
    "blocks_per_sm": np.float32,
    "warps_per_sm": np.float32,
    "op": np.int32,
    "group": np.int32,
    "description": np.int32,
    "ranks": np.int32,
    "dtype": np.int32,
    "device_type": np.int16,
    "from_thread": np.int32,
    "to_thread": np.int32,
}
TABLES: dict[str, Any] = {
    "slices": Slices,
    "ops": Ops,
    "kernels": Kernels,
    "copies": Copies,
    "collectives": Collectives,
    "syncs": Syncs,
    "pythons": Pythons,
    "memory": Memory,
    "flows": Flows,
}
ROW_TABLES = ("ops", "kernels", "copies", "collectives", "syncs", "pythons")
STRING_COLUMNS = {("ops", "module")}
"""Codes although the column of that name is a number elsewhere."""


class Numbering(dict[Key, int]):
    """Numbers its keys in the order they are first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_in_order: list[Key] = []

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        self.keys_in_order.append(key)
        return number


def dtype_of(table: str, column: str) -> Any:
    return np.int32 if (table, column) in STRING_COLUMNS else DTYPES.get(column, np.int64)


class TraceBuilder:
    """``add`` pieces of each table, then ``build``; ``row`` of a side table counts slices in the order of adding."""

    def __init__(self) -> None:
        self.strings: Numbering[str] = Numbering()
        self.threads: Numbering[tuple[int | str, int | str]] = Numbering()
        self.thread_names: dict[tuple[int | str, int | str], str] = {}
        self.count = 0
        """Slices so far."""
        self._pieces: dict[str, list[dict[str, NDArray[Any]]]] = {name: [] for name in TABLES}

    def add(self, table: str, **columns: Sequence[Any] | NDArray[Any]) -> None:
        """Columns of equal length, all that the table has."""
        piece = {name: np.asarray(values, dtype_of(table, name)) for name, values in columns.items()}
        self._pieces[table].append(piece)
        if table == "slices":
            self.count += len(piece["start_ns"])

    def build(self, meta: TraceMeta) -> Trace:
        """Sorted, with times from the earliest slice or instant on; ``meta.origin_ns`` is what they counted from."""
        columns = {name: self._joined(name) for name in TABLES}
        slices = columns["slices"]
        first_ns = min((int(columns[t][c].min()) for t, c in TIMES if len(columns[t][c])), default=0)
        for table, column in TIMES:
            columns[table][column] -= first_ns
        self._one_number_per_thread(columns)
        order = np.lexsort((-slices["dur_ns"], slices["start_ns"]))
        columns["slices"] = {name: values[order] for name, values in slices.items()}
        now_at = np.empty(len(order), np.int32)
        now_at[order] = np.arange(len(order), dtype=np.int32)
        for name in ROW_TABLES:
            side = columns[name]
            row = now_at[side["row"]]
            by_row = np.argsort(row, kind="stable")
            columns[name] = {column: values[by_row] for column, values in side.items()} | {"row": row[by_row]}
        memory = columns["memory"]
        by_time = np.argsort(memory["time_ns"], kind="stable")
        columns["memory"] = {column: values[by_time] for column, values in memory.items()}
        return Trace(
            meta=replace(meta, origin_ns=meta.origin_ns + first_ns),
            strings=self.strings.keys_in_order,
            threads=[
                Thread(pid=pid, tid=tid, name=self.thread_names.get((pid, tid), ""))
                for pid, tid in self.threads.keys_in_order
            ],
            **{name: TABLES[name](**columns[name]) for name in TABLES},
        )

    def _one_number_per_thread(self, columns: dict[str, dict[str, NDArray[Any]]]) -> None:
        """Some writers have a thread's id as text with slices and as a number with the allocator's events."""
        first: dict[tuple[str, str], int] = {}
        same = [first.setdefault((str(pid), str(tid)), at) for at, (pid, tid) in enumerate(self.threads)]
        if len(first) < len(same):
            for table, column in THREADS:
                columns[table][column] = np.array(same, np.int32)[columns[table][column]]

    def _joined(self, table: str) -> dict[str, NDArray[Any]]:
        """All pieces of a table; they are let go of column by column, so that hardly anything is held twice."""
        pieces = self._pieces[table]
        out = {}
        for each in fields(TABLES[table]):
            parts = [piece.pop(each.name) for piece in pieces]
            out[each.name] = np.concatenate(parts) if parts else np.empty(0, dtype_of(table, each.name))
        return out


TIMES = (("slices", "start_ns"), ("memory", "time_ns"), ("flows", "from_ns"), ("flows", "to_ns"))
THREADS = (("slices", "thread"), ("memory", "thread"), ("flows", "from_thread"), ("flows", "to_thread"))
