"""The sealed form of a run's ranks: ``steps.parquet``, ``ranks.json`` and tables of collectives.

``comm.parquet`` and ``collectives.parquet`` exist only if collectives were recorded.  DuckDB writes and reads them;
version 2 of Parquet has the delta encodings that noisy times need.  A column that is zero in every row is left out,
which matters for short runs: every column costs about 100 bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np

from stepscope.errors import NotARun
from stepscope.records.files import open_file, sql_output_path
from stepscope.records.series import RankSeries
from stepscope.records.text import Progress, no_progress
from stepscope.store import file_io
from stepscope.store.file_io import read_document
from stepscope.store.live.ring_files import RingSidecar, groups_as_kept
from stepscope.store.paths import COLLECTIVES_PARQUET, COMM_PARQUET, RANKS, STEPS_PARQUET
from stepscope.store.rank_series import (
    COLLECTIVE_DTYPE,
    COMM_DTYPE,
    STEP_COLUMNS,
    exchange_columns,
    phase_columns,
    rows_of_columns,
    series_of,
    table_of_columns,
    to_columns,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COPY", "connect", "first_line", "one_database", "open_parquet", "read_ranks", "write_ranks"]

SCHEMA = 1
MOST_UNPACKED = 256 << 20
MOST_TIMES = 4000
"""Our own files unpack to about ten times their size; samples of a machine on which nothing changes, to a thousand."""
_WORTH_THREADS = 1 << 20
COPY = "(FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL 9)"
_ALWAYS = ("rank", "attempt", *STEP_COLUMNS[:3], "device_wall_ns", "group", "op")
_EXCHANGES = (("comm", COMM_PARQUET, COMM_DTYPE), ("collectives", COLLECTIVES_PARQUET, COLLECTIVE_DTYPE))
"""Attribute of a series, its file, and the type of its rows."""


def write_ranks(folder: Path, ranks: Sequence[RankSeries], notices: Sequence[str]) -> None:
    """Write ``steps.parquet``, ``ranks.json`` and the collectives, if any, into ``folder``, durably."""
    phases = phase_columns(ranks)
    _write(folder / STEPS_PARQUET, to_columns(ranks, phases))
    for name, file, dtype in _EXCHANGES:
        rows = [getattr(series, name) for series in ranks]
        if any(own is not None for own in rows):
            _write(folder / file, exchange_columns(ranks, rows, dtype))
    about = [_about(series, chosen) for series, chosen in zip(ranks, phases, strict=True)]
    file_io.write_json(folder / RANKS, {"schema": SCHEMA, "ranks": about, "notices": list(notices)}, durable=True)


def read_ranks(folder: Path, *, progress: Progress = no_progress) -> tuple[list[RankSeries], list[str]]:
    """Read what ``write_ranks`` wrote; NotARun if it is damaged, FileNotFoundError if it is missing.

    ``progress`` counts ranks.
    """
    columns = _fetch_steps(folder / STEPS_PARQUET)
    path = folder / RANKS
    ranks: list[RankSeries] = []
    try:
        raw = json.loads(read_document(path))
        abouts = [(about, _checked(about)) for about in raw["ranks"]]
        there, at = len(columns["step"]), 0
        for about, _ in abouts:
            at = _next_rows(about["steps"], at, there).stop
        if at != there:
            raise NotARun(f"{folder / STEPS_PARQUET} does not have the {at:,} steps that {path} lists")
        counts, names = [about["steps"] for about, _ in abouts], [checked.phase_names for _, checked in abouts]
        table = table_of_columns(columns, counts, names, [about["columns"] for about, _ in abouts])
        parts = {name: _Parts(folder / file, dtype, name, raw["ranks"]) for name, file, dtype in _EXCHANGES}
        for place, (about, checked) in enumerate(abouts):
            exchanges = {name: part.take(about) for name, part in parts.items()}
            counts_of = {name: int(about[name]) for name in ("rank", "lost", "torn")}
            ranks.append(series_of(checked, steps=table.rank(place), **counts_of, **exchanges))
            progress(len(ranks), len(abouts))
        notices = [str(notice) for notice in raw["notices"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NotARun(f"{path} is damaged") from error
    return ranks, notices


class _Parts:
    """The rows of a table of collectives, rank by rank; empty if no rank has any."""

    def __init__(self, path: Path, dtype: np.dtype[Any], name: str, abouts: Sequence[Mapping[str, Any]]) -> None:
        self._name, self._dtype, self._at = name, dtype, 0
        self._columns: Mapping[str, Any] = {"step": ()}
        if any(about.get(name) for about in abouts):
            self._columns = _fetch_steps(path)

    def take(self, about: Mapping[str, Any]) -> NDArray[Any] | None:
        count = about.get(self._name) or 0
        rows = _next_rows(count, self._at, len(self._columns["step"]))
        self._at = rows.stop
        return rows_of_columns(self._columns, rows, self._dtype) if count else None


def _next_rows(count: int, at: int, there: int) -> slice:
    if not 0 <= count <= there - at:
        raise ValueError("more rows than available")
    return slice(at, at + count)


@contextmanager
def connect(size: int) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection for ``size`` bytes; its tables must be temporary.

    A small one uses one thread, since each takes memory while the job ends.
    """
    made = _shared.get()
    if size >= _WORTH_THREADS or made is None:
        with duckdb.connect(config={"threads": 1} if size < _WORTH_THREADS else {}) as con:
            yield con
        return
    if not made or made[-1] is None:
        # Without a cache, so that what was just written is read back from the disk.
        made.append(duckdb.connect(config={"threads": 1, "enable_external_file_cache": False}))
    database = made[-1]
    assert database is not None
    try:
        with database.cursor() as con:
            yield con
    except duckdb.Error:
        made.append(None)  # a fatal error disables the database
        raise


@contextmanager
def one_database() -> Iterator[None]:
    """Let small connections inside share a database: creating one takes 20 times as long as reading a small file."""
    if _shared.get() is not None:
        yield
        return
    made: list[duckdb.DuckDBPyConnection | None] = []
    outside = _shared.set(made)
    try:
        yield
    finally:
        _shared.reset(outside)
        for database in made:
            if database is not None:
                database.close()


_shared: ContextVar[list[duckdb.DuckDBPyConnection | None] | None] = ContextVar("small databases", default=None)
"""All that were created inside ``one_database``; the last is in use, or None after an error."""


def _write(path: Path, columns: Mapping[str, Any]) -> None:
    stored = {name: values for name, values in columns.items() if _worth_keeping(name, values)}
    with connect(sum(values.nbytes for values in stored.values())) as con:
        con.register("columns", stored)
        con.execute(f"COPY (SELECT * FROM columns) TO {sql_output_path(path)} {COPY}")
    file_io.fsync_file(path)


def _fetch(path: Path) -> dict[str, Any]:
    with open_parquet(path) as (con, file, _):
        columns: dict[str, Any] = con.execute(f"SELECT * FROM read_parquet({file})").fetchnumpy()
    return columns


@contextmanager
def open_parquet(
    path: Path, within: duckdb.DuckDBPyConnection | None = None
) -> Iterator[tuple[duckdb.DuckDBPyConnection, str, int]]:
    """Open a file of a run in a database; yield a connection, its name there in SQL, and its size.

    DuckDB opens files by name, and would wait for a pipe.  It gets the file that was checked: whatever has its name
    now.  NotARun if it is damaged or would take disproportionate memory.  ``within``: a connection to use.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        name = f"/proc/self/fd/{file.fileno()}"
        try:
            with nullcontext(within) if within is not None else connect(size) as con:
                _refuse_bomb(con, name, path, size)
                yield con, f"'{name}'", size
        except duckdb.Error as error:
            raise NotARun(f"{path} is damaged: {first_line(error).replace(name, path.name)}") from error


def _refuse_bomb(con: duckdb.DuckDBPyConnection, name: str, path: Path, size: int) -> None:
    """Raise NotARun if a file would take disproportionate memory: a few bytes can encode a billion equal rows."""
    cells = con.execute(f"SELECT sum(num_values) FROM parquet_metadata('{name}')").fetchone()
    memory = 8 * int((cells or (0,))[0] or 0)
    if memory > MOST_UNPACKED and memory > MOST_TIMES * size:
        raise NotARun(f"{path} is damaged: its {size:,} bytes would expand to {memory:,}")


def _fetch_steps(path: Path) -> dict[str, Any]:
    columns = _fetch(path)
    if "step" not in columns:
        raise NotARun(f"{path} contains no Stepscope steps")
    return columns


def _about(series: RankSeries, chosen: Sequence[str]) -> dict[str, Any]:
    values = asdict(series.identity)
    names = ("rank", "state", "anchor_mono_ns", "anchor_wall_ns", "live_phase", "live_since_ns")
    counts = ("lost", "torn", "hook_failures", "ended_wall_ns")
    return {
        **{name: getattr(series, name) for name in (*names, *counts)},
        "identity": values,
        "facts": series.facts,
        "phase_names": list(series.phase_names),
        "columns": list(chosen),
        "steps": len(series.steps),
        "groups": groups_as_kept(series.groups),
        **{name: 0 if getattr(series, name) is None else len(getattr(series, name)) for name, _, _ in _EXCHANGES},
    }


def _checked(about: dict[str, Any]) -> RingSidecar:
    """The values are those of a sidecar and are checked in the same way."""
    return RingSidecar.from_dict({**_NOT_KEPT, "pid": about["identity"]["pid"], **about})


_NOT_KEPT = {"schema": SCHEMA, "start_ticks": 0, "live_step": 0, "heard_wall_ns": 0}


def _worth_keeping(name: str, values: Any) -> bool:
    if name.startswith("device_") and np.ma.getmaskarray(values).all():
        return False
    return name in _ALWAYS or bool(np.ma.getdata(values).any())


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
