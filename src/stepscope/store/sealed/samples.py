"""The samples of a run as rows: read from lines or from ``samples.parquet``, and written as ``samples.parquet``.

While a run is active, samples are lines of ``samples.jsonl`` and of the segments before it
(``store/live/sample_files.py``); sealed, they are rows of ``samples.parquet``.  Disk has all of them; of very many,
only some are loaded.  They are converted several thousand at a time, because this happens at the end of a job, which
may need the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import duckdb
import numpy as np

from stepscope.errors import FrameError
from stepscope.records.files import open_file, sql_input_path, sql_output_path
from stepscope.records.steps import BACKWARD, COMM
from stepscope.store import file_io
from stepscope.store.documents import clock_offsets, read_nodes
from stepscope.store.file_io import MOST_STREAM_BYTES, MOST_STREAM_LINES, after_hole, bounded_lines, record_in
from stepscope.store.inbox.journal import SealedPositions, raw_sidecars_of, read_journal
from stepscope.store.inbox.parts import PHASE_COLUMNS, part_steps, rest_path
from stepscope.store.live import sample_files
from stepscope.store.live.sample_files import (
    SOURCE,
    Thinner,
    newest_of,
    open_sample_files,
    source_of,
    span_of,
    strides,
    thinned,
)
from stepscope.store.paths import SAMPLES_PARQUET
from stepscope.store.rank_series import BUILTIN_COLUMNS, STEP_COLUMNS
from stepscope.store.sealed.parquet import COPY, connect, open_parquet
from stepscope.wire.frames import read_frame, ring_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "add_parts",
    "add_samples",
    "make_sample_table",
    "make_table",
    "open_samples",
    "ranks_in_parts",
    "sample_rows",
    "sealed_samples",
    "write_samples",
]


# -- tables -----------------------------------------------------------------------------------------------------------
# Small records as DuckDB tables with fixed columns: events, findings, ranks and samples.

_LIST_GLUE = "\x1f"
_DTYPES = {"BIGINT": np.int64, "DOUBLE": np.float64, "BOOLEAN": np.bool_}


def make_table(
    con: duckdb.DuckDBPyConnection, name: str, types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
    """``CREATE TABLE name`` with these columns; a missing value or None becomes NULL."""
    con.execute(f"CREATE TABLE {name} {declared(types)}")
    columns = {column: Column(kind, len(rows)) for column, kind in types.items()}
    for column, made in columns.items():
        there = [(place, value) for place, row in enumerate(rows) if (value := row.get(column)) is not None]
        made.put(np.array([place for place, _ in there], np.intp), [value for _, value in there])
    insert_columns(con, name, types, columns)


def declared(types: Mapping[str, str]) -> str:
    return f"({', '.join(f'{_quoted(column)} {kind}' for column, kind in types.items())})"


def insert_columns(
    con: duckdb.DuckDBPyConnection, table: str, types: Mapping[str, str], columns: Mapping[str, Column]
) -> None:
    """Insert rows; missing columns are NULL."""
    casts = []
    for column in columns:
        kind, quoted = types[column], _quoted(column)
        cast = f"CAST({quoted} AS {kind})"
        if kind == "VARCHAR[]":
            text = f"CAST({quoted} AS VARCHAR)"
            cast = f"CASE {text} WHEN '' THEN [] ELSE string_split({text}, chr({ord(_LIST_GLUE)})) END::VARCHAR[]"
        casts.append(f"{cast} AS {quoted}")
    con.register("staged", {column: made.array() for column, made in columns.items()})
    con.execute(f"INSERT INTO {table} BY NAME SELECT {', '.join(casts)} FROM staged")
    con.unregister("staged")


def _quoted(name: str) -> str:
    return '"' + name + '"'


class Column:
    """One column of a table being built: ``length`` rows, NULL until a value is put in."""

    def __init__(self, kind: str, length: int) -> None:
        self._dtype = _DTYPES.get(kind)
        self._values = np.full(length, None, object) if self._dtype is None else np.zeros(length, self._dtype)
        self._missing = np.ones(length, np.bool_)

    def put(self, rows: NDArray[np.intp], values: Sequence[Any]) -> None:
        """Put values, none of them missing, into these rows."""
        if self._dtype is not None:
            self._values[rows] = np.array(values, self._dtype)
        else:
            self._values[rows] = [_LIST_GLUE.join(value) if isinstance(value, list) else value for value in values]
        self._missing[rows] = False

    def array(self) -> NDArray[Any]:
        return self._values if self._dtype is None else np.ma.masked_array(self._values, mask=self._missing)


# -- steps in parts ---------------------------------------------------------------------------------------------------
# SQL over the parts of a run that is too large to load: every step of every rank, read on demand.  ``ranks`` also has
# all ranks.  User phases are ``slot_9_ns`` …, by the slot that each rank assigned; device times and collectives exist
# only for ranks that were loaded.

_EXPOSED = "ddp_exposed_ns"
_WALL = ("anchor_wall_ns", "ended_wall_ns")
_RINGS = {"ring": "BIGINT", "rank": "BIGINT", "attempt": "BIGINT"}


def add_parts(con: Any, run_dir: Path, sealed: SealedPositions, rows: list[dict[str, Any]]) -> list[Path]:
    """Turn ``steps``, a table of the local ranks, into a view of these and of all in parts; return the files it reads.

    ``rows``: the result of ``ranks_in_parts``; the number of steps is added to each.
    """
    paths = [path.absolute() for path in part_steps(run_dir, sealed.parts)]
    for path in paths:
        open_file(path).close()
    files = ", ".join(map(sql_input_path, paths))
    table = f"read_parquet([{files}], union_by_name = true)"
    there = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
    counts = dict(con.execute(f"SELECT ring, count(*) FROM {table} GROUP BY ring").fetchall())
    for row in rows:
        row["steps"] = counts.get(row["ring"], 0)
    make_table(con, "rings", _RINGS, rows)
    columns = {name: f"coalesce(p.{name}, 0)" if name in there else "0" for name in (*STEP_COLUMNS, *PHASE_COLUMNS)}
    if _EXPOSED in there:
        waited = (
            f"least(coalesce(lead(p.{_EXPOSED}) OVER (PARTITION BY p.ring ORDER BY p.step), p.{_EXPOSED}, 0), "
            f"coalesce(p.{BUILTIN_COLUMNS[BACKWARD]}, 0))"
        )
        columns[BUILTIN_COLUMNS[BACKWARD]] += f" - {waited}"
        columns[BUILTIN_COLUMNS[COMM]] += f" + {waited}"
    own = [name for name in PHASE_COLUMNS[len(BUILTIN_COLUMNS) :] if name not in there]
    chosen = ", ".join(f"{value} AS {name}" for name, value in columns.items() if name not in own)
    con.execute("ALTER TABLE steps RENAME TO steps_here")
    con.execute(
        f"CREATE VIEW steps AS SELECT * FROM steps_here UNION ALL BY NAME "
        f"SELECT r.rank, r.attempt, {chosen} FROM {table} p JOIN rings r USING (ring)"
    )
    return paths


def ranks_in_parts(run_dir: Path, sealed: SealedPositions) -> list[dict[str, Any]]:
    """Return each ring in parts: its number and its last sidecar, flattened, with times on the hub's clock."""
    offsets = clock_offsets(read_nodes(run_dir))
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    for spool, raw, heard, key in _sidecars(run_dir, sealed):
        position = sealed.spools[spool].rings.get(ring_id(key)) if spool in sealed.spools else None
        if position is not None and position.number >= 0:
            before = found.get(position.number)
            if before is None or heard > before[0]:
                times = {name: raw[name] and raw[name] - offsets.get(spool, 0) for name in _WALL}
                found[position.number] = (heard, {**raw, **raw["identity"], **times, "ring": position.number})
    return [row for _, row in found.values()]


def _sidecars(run_dir: Path, sealed: SealedPositions) -> Iterator[tuple[str, dict[str, Any], Any, str]]:
    for number in sealed.parts:
        for received in read_journal(rest_path(run_dir, number)):
            try:
                frame = read_frame(received.raw)
                for part in frame.parts:
                    if part.kind == "rings":
                        for key, heard, raw in raw_sidecars_of(part):
                            yield frame.head.spool, raw, heard, key
            except FrameError:
                continue


# -- sample columns ---------------------------------------------------------------------------------------------------
# Samples as columns of a table, and back.  Samples from our agent fit their columns and are converted many at a time;
# anything else in a line is kept as JSON in ``extra``.

SAMPLE_COLUMNS = {
    "wall_ns": "BIGINT",
    "mono_ns": "BIGINT",
    "node": "VARCHAR",
    "kind": "VARCHAR",
    "pid": "BIGINT",
    "rank": "BIGINT",
    "index": "BIGINT",
    "uuid": "VARCHAR",
    "name": "VARCHAR",
    "cpu_percent": "DOUBLE",
    "cpu_count": "BIGINT",
    "own_cpu_percent": "DOUBLE",
    "busy_processes": "VARCHAR[]",
    "cpu_wait": "DOUBLE",
    "cpu_quota": "DOUBLE",
    "throttled": "DOUBLE",
    "cpu_steal": "DOUBLE",
    "processors": "BIGINT",
    "disk_wait": "DOUBLE",
    "major_faults_ps": "DOUBLE",
    "children_disk_wait": "DOUBLE",
    "children_major_faults_ps": "DOUBLE",
    "swapped": "BIGINT",
    "load1": "DOUBLE",
    "procs_running": "BIGINT",
    "cpu_pressure": "DOUBLE",
    "io_pressure": "DOUBLE",
    "memory_pressure": "DOUBLE",
    "mem_total": "BIGINT",
    "mem_available": "BIGINT",
    "mem_used": "BIGINT",
    "swap_used": "BIGINT",
    "rss": "BIGINT",
    "rss_file": "BIGINT",
    "rss_answers": "BIGINT",
    "threads": "BIGINT",
    "log_bytes": "BIGINT",
    "net_rx_bps": "DOUBLE",
    "net_tx_bps": "DOUBLE",
    "net_errors_ps": "DOUBLE",
    "net_drops_ps": "DOUBLE",
    "net_speed_bps": "DOUBLE",
    "tcp_out_ps": "DOUBLE",
    "tcp_retrans_ps": "DOUBLE",
    "tcp_errors_ps": "DOUBLE",
    "tcp_timeouts_ps": "DOUBLE",
    "ib_rx_bps": "DOUBLE",
    "ib_tx_bps": "DOUBLE",
    "ib_errors_ps": "DOUBLE",
    "ib_link_downed_ps": "DOUBLE",
    "ib_xmit_wait_ps": "DOUBLE",
    "ib_speed_bps": "DOUBLE",
    "peer": "VARCHAR",
    "peer_node": "BIGINT",
    "sent": "BIGINT",
    "lost": "BIGINT",
    "rtt_us_min": "DOUBLE",
    "rtt_us_p50": "DOUBLE",
    "rtt_us_max": "DOUBLE",
    "disk_read_bps": "DOUBLE",
    "disk_write_bps": "DOUBLE",
    "io_read_bps": "DOUBLE",
    "io_write_bps": "DOUBLE",
    "util_percent": "DOUBLE",
    "mem_util_percent": "DOUBLE",
    "temperature_c": "DOUBLE",
    "power_w": "DOUBLE",
    "power_limit_w": "DOUBLE",
    "sm_clock_mhz": "DOUBLE",
    "mem_clock_mhz": "DOUBLE",
    "throttle_reasons": "VARCHAR[]",
    "span_s": "BIGINT",
    "extra": "VARCHAR",
}
"""``extra``: JSON of everything that has no column or does not fit its type."""

_LARGEST = 1 << 53
_ALWAYS = "wall_ns"
"""Present even in an empty sample, so that it is still a row."""


def add_samples(
    con: duckdb.DuckDBPyConnection, samples: Sequence[Mapping[str, Any]], *, temporary: bool = False
) -> None:
    """Append rows to the table ``samples``, which is created if necessary."""
    table = "TEMP TABLE" if temporary else "TABLE"
    con.execute(f"CREATE {table} IF NOT EXISTS samples {declared(SAMPLE_COLUMNS)}")
    insert_columns(con, "samples", SAMPLE_COLUMNS, _columns_of(samples))


def _columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Convert samples to columns.  Samples of one kind have the same fields in the same order: one conversion each."""
    columns = {_ALWAYS: Column(SAMPLE_COLUMNS[_ALWAYS], len(samples))}
    for names, rows in _alike(samples):
        own = [samples[row] for row in rows]
        values = [*zip(*(sample.values() for sample in own), strict=True)]
        if all(map(_all_fit, names, values)):
            _put(columns, len(samples), rows, names, values)
            continue
        fitting = [_fitted(sample) for sample in own]
        for fields, places in _alike(fitting):
            values = [*zip(*(fitting[place].values() for place in places), strict=True)]
            _put(columns, len(samples), [rows[place] for place in places], fields, values)
    return columns


def _alike(samples: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Group samples by their fields: the fields, and the rows that have them."""
    found: dict[tuple[str, ...], list[int]] = {}
    for row, sample in enumerate(samples):
        found.setdefault(tuple(sample), []).append(row)
    return list(found.items())


def _put(
    columns: dict[str, Column], length: int, rows: list[int], names: Sequence[str], values: Sequence[Sequence[Any]]
) -> None:
    places = np.array(rows, np.intp)
    for name, own in zip(names, values, strict=True):
        if name not in columns:
            columns[name] = Column(SAMPLE_COLUMNS[name], length)
        columns[name].put(places, own)


def _all_fit(name: str, values: tuple[Any, ...]) -> bool:
    """Whether all values fit the column; decided for all at once where possible."""
    kind, found = SAMPLE_COLUMNS.get(name), set(map(type, values))
    if name == "extra":
        return False
    if kind == "DOUBLE" and found == {float}:
        return True
    if found == {int}:
        return _fits(kind, min(values)) and _fits(kind, max(values))
    return all(_fits(kind, value) for value in (set(values) if found == {str} else values))


def sample_rows(columns: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """Undo ``add_samples``; ``columns`` as DuckDB returns them, masked where a value is missing.

    Samples with the same fields are converted at once.
    """
    there = {name: ~np.ma.getmaskarray(values) for name, values in columns.items()}
    names = [name for name, mask in there.items() if mask.any()]
    samples: list[dict[str, Any]] = [{} for _ in next(iter(there.values()), ())]
    if not names:
        return samples
    bits = np.packbits(np.stack([there[name] for name in names], axis=1), axis=1)
    alike: dict[bytes, list[int]] = {}
    for row, key in enumerate(bits.view(f"V{bits.shape[1]}").reshape(-1).tolist()):
        alike.setdefault(key, []).append(row)
    for rows in alike.values():
        own = [name for name in names if there[name][rows[0]]]
        if not own:
            continue
        values = [_plain(name, np.ma.getdata(columns[name])[rows].tolist()) for name in own]
        for row, cells in zip(rows, zip(*values, strict=True), strict=True):
            samples[row] = _unfolded(dict(zip(own, cells, strict=True)))
    return samples


def _plain(name: str, values: list[Any]) -> list[Any]:
    return [list(value) for value in values] if SAMPLE_COLUMNS.get(name) == "VARCHAR[]" else values


def _unfolded(sample: dict[str, Any]) -> dict[str, Any]:
    extra = sample.pop("extra", None)
    return {**sample, **json.loads(extra)} if extra else sample


def _fitted(sample: Mapping[str, Any]) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    extra = {}
    for name, value in sample.items():
        if name != "extra" and _fits(SAMPLE_COLUMNS.get(name), value):
            fitting[name] = value
        elif value is not None:
            extra[name] = value
    if extra:
        fitting["extra"] = json.dumps(extra)
    return fitting


def _fits(kind: str | None, value: Any) -> bool:
    if kind == "BIGINT":
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind == "DOUBLE":
        return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)
    if kind == "VARCHAR":
        return _is_text(value)
    return kind == "VARCHAR[]" and isinstance(value, list) and all(v and _is_text(v) for v in value)


def _is_text(value: Any) -> bool:
    """Whether the database can hold the text: no lone surrogates, no zero bytes, no list separator."""
    return isinstance(value, str) and value.isprintable()


# -- samples of a run -------------------------------------------------------------------------------------------------

LARGE_BYTES = 1 << 16
"""From this size, a file may hold more samples than are kept; a smaller one is read whole."""
BATCH = 20_000
"""Samples converted to columns at once."""
_WHO = ", ".join(f'"{name}"' for name in SOURCE)
_CHOSEN = """
    WITH chosen AS (
        SELECT file_row_number FROM (
            SELECT file_row_number,
                row_number() OVER (PARTITION BY {who} ORDER BY file_row_number) - 1 AS number,
                count(*) OVER (PARTITION BY {who}) AS there,
                row_number() OVER (PARTITION BY {who}, {span} ORDER BY file_row_number) - 1 AS place,
                CASE {span} {every} ELSE 1 END AS every
            FROM {table}
        ) WHERE place % every = 0 OR number >= there - {newest}
    )
    SELECT * EXCLUDE (file_row_number) FROM {table} SEMI JOIN chosen USING (file_row_number) ORDER BY file_row_number
"""
"""Chooses the same samples as ``Thinner``."""


def open_samples(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the samples to keep of a run that is not sealed, and the number of invalid lines."""
    with open_sample_files(run_dir) as files:
        bad = 0
        if sum(map(_count_lines, files)) <= sample_files.MOST_SAMPLES:
            samples = []
            for line in _lines(files):
                record = record_in(line)
                if record is not None:
                    samples.append(_sample_of_line(record))
                elif line.strip():
                    bad += 1
            return samples, bad
        counts: Counter[int] = Counter()
        for _, source, span_s in _with_sources(_lines(files)):
            if source is not None:
                counts[span_s] += 1
        for file in files:
            file.seek(0)
        thinner: Thinner[bytes] = Thinner(strides(counts))
        for line, source, span_s in _with_sources(_lines(files)):
            if source is not None:
                thinner.add(source, span_s, line)
            elif line.strip():
                bad += 1
        return [_sample_of_line(json.loads(line)) for line in thinner.chosen()], bad


def sealed_samples(folder: Path) -> list[dict[str, Any]]:
    """Return a sealed run's samples to keep.  NotARun if the file is damaged, FileNotFoundError if it is missing."""
    with open_parquet(folder / SAMPLES_PARQUET) as (con, file, size):
        columns = con.execute(_question(con, file, large=size >= LARGE_BYTES)).fetchnumpy()
    samples = sample_rows(columns)
    return samples if size >= LARGE_BYTES else thinned(samples)


def write_samples(folder: Path, run_dir: Path, more: Sequence[dict[str, Any]]) -> bool:
    """Write ``samples.parquet`` into ``folder``: the run's samples in either form, and ``more`` from other nodes.

    With ``more``, all are sorted by time; otherwise they keep their order.  Returns whether the file reads back the
    same.
    """
    path, before = folder / SAMPLES_PARQUET, run_dir / SAMPLES_PARQUET
    batches = _batches(run_dir)
    first, second = next(batches, []), next(batches, [])
    with connect(0) as con:
        if second or more or before.exists():
            return _write_parts(con, path, before, itertools.chain([first, second], batches, [more]))
        add_samples(con, first, temporary=True)
        con.execute(f"COPY samples TO {sql_output_path(path)} {COPY}")
    file_io.fsync_file(path)
    return len(sealed_samples(folder)) == len(first)


def _write_parts(
    con: duckdb.DuckDBPyConnection, path: Path, before: Path, batches: Iterable[Sequence[dict[str, Any]]]
) -> bool:
    """Write each batch into a separate file, then combine them and what was sealed before into one."""
    parts: list[Path] = []
    more: Sequence[dict[str, Any]] = ()
    for batch in batches:
        more = batch  # the last batch is from other nodes
        add_samples(con, batch, temporary=True)
        parts.append(path.with_name(f"part-{len(parts)}-{path.name}"))
        con.execute(f"COPY samples TO {sql_output_path(parts[-1])} {COPY}")
        con.execute("DELETE FROM samples")
    files = ", ".join(map(sql_input_path, [*([before] if before.exists() else []), *parts]))
    table = f"read_parquet([{files}], union_by_name = true)"
    con.execute(f"COPY (SELECT * FROM {table} {'ORDER BY wall_ns' if more else ''}) TO {sql_output_path(path)} {COPY}")
    file_io.fsync_file(path)
    checks = [
        con.execute(f"SELECT count(*), sum(hash(rows)::HUGEINT) FROM {source} rows").fetchone()
        for source in (table, f"read_parquet({sql_input_path(path)})")
    ]
    for part in parts:
        part.unlink()
    return checks[0] == checks[1]


def make_sample_table(con: duckdb.DuckDBPyConnection, run_dir: Path, more: Sequence[dict[str, Any]]) -> None:
    """Make the table ``samples`` with all samples of ``run_dir`` in either form, and ``more`` from other nodes."""
    add_samples(con, more)
    path = run_dir / SAMPLES_PARQUET
    if path.exists():
        with open_parquet(path, con) as (_, file, _size):
            table = f"read_parquet({file})"
            there = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
            known = ", ".join(f'"{name}"' for name in there if name in SAMPLE_COLUMNS)  # a later version may have more
            con.execute(f"INSERT INTO samples BY NAME SELECT {known} FROM {table}")
    for batch in _batches(run_dir):
        add_samples(con, batch)


def _question(con: duckdb.DuckDBPyConnection, file: str, *, large: bool) -> str:
    """Return the query for the samples to keep; for all if the file is small, to save memory while the job ends."""
    if not large:
        return f"SELECT * FROM read_parquet({file})"
    table = f"read_parquet({file}, file_row_number = true)"
    columns = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    span = "greatest(coalesce(span_s, 0), 0)" if "span_s" in columns else "0"
    sources = (con.execute(f"SELECT count(DISTINCT ({_WHO})) FROM {table}").fetchone() or (0,))[0]
    counts = dict(con.execute(f"SELECT {span}, count(*) FROM {table} GROUP BY 1 ORDER BY 1").fetchall())
    every = " ".join(f"WHEN {span_s} THEN {every}" for span_s, every in strides(counts).items()) or "WHEN 0 THEN 1"
    return _CHOSEN.format(who=_WHO, table=table, span=span, every=every, newest=newest_of(sources))


def _lines(files: Iterable[BinaryIO]) -> Iterator[bytes]:
    bounded = partial(bounded_lines, most_bytes=MOST_STREAM_BYTES, most_lines=MOST_STREAM_LINES)
    return itertools.chain.from_iterable(map(bounded, files))


def _count_lines(file: BinaryIO) -> int:
    count = 0
    while piece := file.read(1 << 20):
        count += piece.count(b"\n")
        file.seek(after_hole(file.fileno(), file.tell()))
    file.seek(0)
    return count


def _with_sources(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Hashable | None, int]]:
    """Yield each line, its source (None: not a sample) and how many seconds it represents."""
    from stepscope.store.sealed.sample_source import whose_of  # loads msgspec, which few runs need

    for line in lines:
        whose = whose_of(line)
        if whose is not None:
            yield line, (whose.node, whose.kind, whose.pid, whose.index, whose.peer), whose.seconds
        else:  # the standard JSON parser may still accept it
            record = record_in(line)
            yield (line, None, 0) if record is None else (line, source_of(record), span_of(record))


def _batches(run_dir: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the unsealed samples, several thousand lines at a time."""
    if (run_dir / SAMPLES_PARQUET).exists():
        return  # a seal was killed before it removed the lines
    with open_sample_files(run_dir) as files:
        every = _lines(files)
        while lines := list(itertools.islice(every, BATCH)):
            yield _records(lines)


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    if len(lines) == BATCH:
        import msgspec  # several times as fast, but too large to load next to a small job

        decoder = msgspec.json.Decoder(dict[str, Any])
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return list(map(decoder.decode, lines))
    return [record for line in lines if (record := record_in(line)) is not None]


def _sample_of_line(sample: dict[str, Any]) -> dict[str, Any]:
    """Drop fields without a value."""
    return {key: value for key, value in sample.items() if value is not None}
