"""A trace in files and back: one Parquet file per table, strings and threads too, and an index in JSON.

    0-slices.parquet  0-ops.parquet  …  0-strings.parquet  0-threads.parquet  1-slices.parquet  …  index

The number is the trace's (an export of Nsight Systems may hold several processes).  What comes back equals what was
written, types included.  Nothing in the files is believed: not where a page lies, nor that a code has a string.  The
index, as all that is no Parquet, begins with a checksum of the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import zstandard

from stepscope.traces.cache.parquet import Places, read_column, read_strings, write_table
from stepscope.traces.model.columns import Thread, Trace, TraceMeta, side_columns
from stepscope.traces.reading.builder import ROW_TABLES, STRING_COLUMNS, TABLES, dtype_of

__all__ = [
    "BROKEN",
    "INDEX",
    "create",
    "is_code",
    "load_meta",
    "load_traces",
    "read_sealed",
    "save_traces",
    "write_sealed",
]

INDEX: Final = "index"
BROKEN: Final = (OSError, ValueError, KeyError, msgspec.MsgspecError, zstandard.ZstdError, UnicodeError)
"""What damaged, foreign or missing files end in."""
DIGEST_BYTES: Final = 32
CODES: Final = {
    *("name", "dims", "types", "concrete", "stack", "op", "group", "description", "ranks", "dtype"),
}
"""Columns of codes, whatever their table; ``STRING_COLUMNS`` has the others."""
THREADS: Final = {"thread", "from_thread", "to_thread"}


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    rows: int
    places: Places


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    meta: TraceMeta
    threads: list[Thread]
    tables: dict[str, _Table]


def create(path: Path) -> BinaryIO:
    """A new file that nobody else may read."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def save_traces(folder: Path, traces: Sequence[Trace]) -> None:
    """Into an empty folder; the index comes last."""
    kept = [_save(folder, number, trace) for number, trace in enumerate(traces)]
    write_sealed(folder / INDEX, msgspec.json.encode(kept))


def write_sealed(path: Path, data: bytes) -> None:
    """A new file, with a checksum in front."""
    with create(path) as file:
        file.write(hashlib.sha256(data).digest() + data)


def read_sealed(path: Path) -> bytes:
    """ValueError where it is not as it was written."""
    whole = path.read_bytes()
    digest, data = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path} is damaged")
    return data


def load_meta(folder: Path) -> list[TraceMeta]:
    """Of the traces there, without their columns."""
    return [kept.meta for kept in _index(folder)]


def is_code(table: str, column: str) -> bool:
    """Whether a column's numbers stand for strings."""
    return column in CODES or (table, column) in STRING_COLUMNS


def load_traces(folder: Path, path: str) -> list[Trace]:
    """What ``save_traces`` wrote, or one of ``BROKEN``; ``path``: for messages."""
    kept = _index(folder)
    return [_load(folder, number, each, path) for number, each in enumerate(kept)]


def _index(folder: Path) -> list[_Kept]:
    return msgspec.json.decode(read_sealed(folder / INDEX), type=list[_Kept])


def _save(folder: Path, number: int, trace: Trace) -> _Kept:
    columns: dict[str, Mapping[str, Any]] = {name: side_columns(getattr(trace, name)) for name in TABLES}
    columns["strings"] = {"code": np.arange(len(trace.strings), dtype=np.int32), "text": trace.strings}
    columns["threads"] = {
        "thread": np.arange(len(trace.threads), dtype=np.int32),
        "pid": [str(thread.pid) for thread in trace.threads],
        "tid": [str(thread.tid) for thread in trace.threads],
        "name": [thread.name for thread in trace.threads],
    }
    tables = {}
    for name, own in columns.items():
        with create(folder / f"{number}-{name}.parquet") as file:
            places = write_table(file, own)
        tables[name] = _Table(rows=len(next(iter(own.values()))), places=places)
    return _Kept(meta=trace.meta, threads=trace.threads, tables=tables)


def _load(folder: Path, number: int, kept: _Kept, path: str) -> Trace:
    loaded: dict[str, Any] = {}
    for name, kind in TABLES.items():
        table = kept.tables[name]
        data = memoryview((folder / f"{number}-{name}.parquet").read_bytes())
        loaded[name] = kind(
            **{
                column: read_column(data, table.places[column], table.rows, dtype_of(name, column))
                for column in kind.__dataclass_fields__
            }
        )
    strings = kept.tables["strings"]
    data = memoryview((folder / f"{number}-strings.parquet").read_bytes())
    texts = read_strings(data, strings.places["text"], strings.rows)
    trace = Trace(meta=replace(kept.meta, path=path), strings=texts, threads=kept.threads, **loaded)
    _check(trace)
    return trace


def _check(trace: Trace) -> None:
    """That every index points at something."""
    for table in TABLES:
        for column, values in side_columns(getattr(trace, table)).items():
            lowest = -1
            if is_code(table, column):
                end = len(trace.strings)
                lowest = 0 if table == "slices" else -1
            elif column in THREADS:
                end, lowest = len(trace.threads), 0
            elif column == "row" and table in ROW_TABLES:
                end, lowest = len(trace.slices), 0
            else:
                continue
            if len(values) and not (values.min() >= lowest and values.max() < end):
                raise ValueError(f"{table}.{column} points at nothing")
