"""Traces as tables for SQL: views over the cached Parquet of all files, with a ``rank`` column and strings as text.

``slices`` has one row per event with a duration. Columns that only some events have are in separate tables (``ops``,
``kernels``, ``copies``, ``collectives``, ``syncs``, ``pythons``), which repeat the slice's main columns. ``memory`` has
the allocator's events, ``ranks`` one row per trace. Times count from ``origin_ns`` in ``ranks``. All steps are
included, also the last.

The columns ``step`` and ``launch`` (the row of the launching call) are in no file. They are computed once and cached
with the others. Without a cache, the Parquet files are in a temporary folder for the duration of the query.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from stepscope.errors import TraceError
from stepscope.records.files import sql_input_path
from stepscope.traces.job import assign_ranks
from stepscope.traces.model.columns import ROW_TABLES, TABLES, Kind, Trace, TraceMeta, side_columns
from stepscope.traces.model.window import window_of
from stepscope.traces.reading.cache import (
    BROKEN,
    Cache,
    Entry,
    create_private_file,
    is_code,
    load_meta,
    write_table,
)
from stepscope.traces.reading.files import read_traces

__all__ = ["trace_database"]

KINDS: Final = "[" + ", ".join(f"'{kind.name.lower()}'" for kind in Kind) + "]"
OF_SLICE: Final = ("kind", "name", "start_ns", "dur_ns", "thread", "device", "stream", "step")
"""The columns of slices that side tables repeat."""
GLOB: Final = frozenset("*?[]{}")


class _Source(NamedTuple):
    rank: int
    number: int
    """Index of the trace within its file."""
    folder: Path
    meta: TraceMeta

    def file(self, table: str) -> Path:
        return self.folder / f"{self.number}-{table}.parquet"


@contextmanager
def trace_database(paths: Sequence[Path], cache: Cache | None) -> Iterator[tuple[Any, list[Path], list[str]]]:
    """Open a DuckDB connection with the views; also yield the files they read and remarks on the choice of ranks."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="stepscope-") as temporary:
        spare = Cache(folder=Path(temporary) / "traces", limit_bytes=1 << 62)
        usable = cache if cache is not None and not GLOB & set(str(cache.folder)) else None
        stored = [each for path in paths for each in _stored(path, usable, spare)]
        chosen = assign_ranks([meta for _, _, meta in stored])
        notices = [*([chosen.mixed] if chosen.mixed else []), *chosen.notices]
        sources = [_Source(rank, *each) for rank, each in zip(chosen.ranks, stored, strict=True) if rank is not None]
        with duckdb.connect(config={"threads": 2}) as database:
            _make_views(database, sources)
            tables = ("placed", "strings", "threads", "memory", *ROW_TABLES)
            yield database, [source.file(table) for source in sources for table in tables], notices


def _stored(path: Path, cache: Cache | None, spare: Cache) -> list[tuple[int, Path, TraceMeta]]:
    """Return the number, folder and metadata of each trace in one file."""
    for each in (cache, spare):
        entry = each.entry(path) if each is not None else None
        metas = _prepared(entry) if entry is not None else None
        if entry is not None and metas is not None:
            folder = entry.folder.absolute()
            return [(place, folder, replace(meta, path=str(path))) for place, meta in enumerate(metas)]
    read_traces(path)  # raises the reason if the path is bad
    raise TraceError(f"{path} cannot be prepared for queries: not enough space in {tempfile.gettempdir()}")


def _prepared(entry: Entry) -> list[TraceMeta] | None:
    """Return the metadata of an entry's traces after writing all their tables; None if they cannot be stored."""
    try:
        metas = load_meta(entry.folder)
        if all((entry.folder / f"{place}-placed.parquet").exists() for place in range(len(metas))):
            return metas
    except BROKEN:
        pass
    traces = entry.traces(read_traces)
    for number, trace in enumerate(traces):
        if not entry.add(f"{number}-placed.parquet", lambda path, trace=trace: _write_placed(path, trace)):  # type: ignore[misc]
            return None
    return [trace.meta for trace in traces]


def _write_placed(path: Path, trace: Trace) -> None:
    """Write the slices with their rows, steps and launches."""
    window = window_of(trace, keep_last=True)
    numbers = np.array([step.number for step in window.steps] + [-1], np.int64)
    with create_private_file(path) as file:
        write_table(
            file,
            {
                "row": np.arange(len(trace), dtype=np.int32),
                **side_columns(trace.slices),
                "step": numbers[window.step_of],
                "launch": window.launch,
            },
        )


def _make_views(database: Any, sources: Sequence[_Source]) -> None:
    views = {"slices": _slices, "memory": _memory, **{table: _side(table) for table in ROW_TABLES}}
    for name, select in views.items():
        selects = " UNION ALL ".join(f"({select(source)})" for source in sources)
        database.execute(f"CREATE VIEW {name} AS {selects}")
    database.execute(
        "CREATE TABLE ranks (rank BIGINT, path VARCHAR, format VARCHAR, host VARCHAR, pid BIGINT, world_size BIGINT, "
        "origin_ns BIGINT, device VARCHAR, events BIGINT)"
    )
    rows = [
        (
            source.rank,
            meta.path,
            meta.format,
            meta.host,
            meta.pid,
            meta.world_size,
            meta.origin_ns,
            device,
            meta.read_events,
        )
        for source in sources
        for meta in [source.meta]
        for device in [next((str(each.get("name")) for each in meta.devices), None)]
    ]
    database.executemany("INSERT INTO ranks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _slices(source: _Source) -> str:
    return (
        f"SELECT {source.rank} AS rank, {_slice_columns(('row', *OF_SLICE))}, s.correlation, s.external, "
        f"NULLIF(s.launch, -1) AS launch FROM {_placed(source)}"
    )


def _side(table: str) -> Any:
    def select(source: _Source) -> str:
        joins, columns = [], []
        for each in fields(TABLES[table]):
            if each.name == "row":
                continue
            if is_code(table, each.name):
                text = f'"{each.name}_text"'
                joins.append(f'LEFT JOIN {_parquet(source, "strings")} {text} ON {text}.code = t."{each.name}"')
                columns.append(f'{text}.text AS "{each.name}"')
            else:
                columns.append(f't."{each.name}"')
        return (
            f"SELECT {source.rank} AS rank, {_slice_columns(('row', *OF_SLICE))}, {', '.join(columns)} "
            f"FROM {_parquet(source, table)} t JOIN {_placed(source)} ON s.row = t.row {' '.join(joins)}"
        )

    return select


def _memory(source: _Source) -> str:
    columns = ", ".join(f"m.{each.name}" for each in fields(TABLES["memory"]) if each.name != "thread")
    return (
        f"SELECT {source.rank} AS rank, {columns}, {_THREAD} AS thread FROM {_parquet(source, 'memory')} m "
        f"LEFT JOIN {_parquet(source, 'threads')} th ON th.thread = m.thread"
    )


_THREAD: Final = "CASE WHEN th.name = '' THEN th.pid || '/' || th.tid ELSE th.name END"
_COLUMNS: Final = {
    "kind": f"{KINDS}[s.kind + 1] AS kind",
    "name": "n.text AS name",
    "thread": f"{_THREAD} AS thread",
    "device": "NULLIF(s.device, -1) AS device",
    "stream": "NULLIF(s.stream, -1) AS stream",
    "step": "NULLIF(s.step, -1) AS step",
}


def _slice_columns(names: Sequence[str]) -> str:
    return ", ".join(_COLUMNS.get(name, f"s.{name}") for name in names)


def _placed(source: _Source) -> str:
    """Select the slices with their names and threads."""
    return (
        f"{_parquet(source, 'placed')} s LEFT JOIN {_parquet(source, 'strings')} n ON n.code = s.name "
        f"LEFT JOIN {_parquet(source, 'threads')} th ON th.thread = s.thread"
    )


def _parquet(source: _Source, table: str) -> str:
    return f"read_parquet({sql_input_path(source.file(table))})"
