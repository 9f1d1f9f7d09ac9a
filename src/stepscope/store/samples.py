"""The samples of a run: all that disk has, of very many some in memory (``thinning.py``).

While a run lasts they are lines of ``samples.jsonl`` and of the segments before it (``sample_segments.py``); sealed,
they are rows of ``samples.parquet``.  The way from one to the other takes some thousands at a time: it is gone beside
the end of a job, which may need the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import duckdb

from stepscope.errors import NotARun
from stepscope.records.sql_paths import quoted, unglobbed
from stepscope.store import atomic, thinning
from stepscope.store.jsonl import record_in
from stepscope.store.parquet import COPY, connect, first_line, refuse_bomb
from stepscope.store.paths import SAMPLES_PARQUET
from stepscope.store.reading import open_file
from stepscope.store.sample_columns import SAMPLE_COLUMNS, add_samples, sample_rows
from stepscope.store.sample_segments import open_sample_files
from stepscope.store.thinning import SOURCE, Thinner, newest_of, source_of, span_of, strides, thinned

__all__ = ["make_sample_table", "open_samples", "sealed_samples", "write_samples"]

LARGE_BYTES = 1 << 16
"""Of a file that may hold more samples than are kept; a smaller one is read whole."""
BATCH = 20_000
"""Turned into columns at once."""
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
"""As ``Thinner`` chooses."""


def open_samples(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Of a run that is not sealed, those to keep; and how many lines were none."""
    with open_sample_files(run_dir) as files:
        bad = 0
        if sum(map(_count_lines, files)) <= thinning.MOST:
            samples = []
            for line in itertools.chain.from_iterable(files):
                record = record_in(line)
                if record is not None:
                    samples.append(_told(record))
                elif line.strip():
                    bad += 1
            return samples, bad
        counts: Counter[int] = Counter()
        for _, source, span_s in _with_sources(itertools.chain.from_iterable(files)):
            if source is not None:
                counts[span_s] += 1
        for file in files:
            file.seek(0)
        thinner: Thinner[bytes] = Thinner(strides(counts))
        for line, source, span_s in _with_sources(itertools.chain.from_iterable(files)):
            if source is not None:
                thinner.add(source, span_s, line)
            elif line.strip():
                bad += 1
        return [_told(json.loads(line)) for line in thinner.kept()], bad


def sealed_samples(folder: Path) -> list[dict[str, Any]]:
    """Of a sealed run, those to keep.  NotARun when the file is damaged, FileNotFoundError when it is not there."""
    path = folder / SAMPLES_PARQUET
    open_file(path).close()
    size = path.stat().st_size
    try:
        with connect(size) as con:
            refuse_bomb(con, path, size)
            columns = con.execute(_question(con, path)).fetchnumpy()
    except duckdb.Error as error:
        raise NotARun(f"{path} is damaged: {first_line(error)}") from error
    samples = sample_rows(columns)
    return samples if _is_large(path) else thinned(samples)


def write_samples(folder: Path, run_dir: Path, more: Sequence[dict[str, Any]]) -> bool:
    """``samples.parquet`` into ``folder``: all that ``run_dir`` has in either form, and ``more`` from other nodes.

    These come where they belong in time; else all stay as they lie.  Whether it reads back as it was written.
    """
    path, before = folder / SAMPLES_PARQUET, run_dir / SAMPLES_PARQUET
    batches = _batches(run_dir)
    first, second = next(batches, []), next(batches, [])
    with connect(0) as con:
        if second or more or before.exists():
            return _write_parts(con, path, before, itertools.chain([first, second], batches, [more]))
        add_samples(con, first)
        con.execute(f"COPY samples TO {quoted(path)} {COPY}")
    atomic.fsync_file(path)
    return len(sealed_samples(folder)) == len(first)


def _write_parts(
    con: duckdb.DuckDBPyConnection, path: Path, before: Path, batches: Iterable[Sequence[dict[str, Any]]]
) -> bool:
    """Each batch into a file of its own, then all of them, and what was sealed before, into one."""
    parts: list[Path] = []
    more: Sequence[dict[str, Any]] = ()
    for batch in batches:
        more = batch  # the last one is from other nodes
        add_samples(con, batch)
        parts.append(path.with_name(f"part-{len(parts)}-{path.name}"))
        con.execute(f"COPY samples TO {quoted(parts[-1])} {COPY}")
        con.execute("DELETE FROM samples")
    files = ", ".join(map(unglobbed, [*([before] if before.exists() else []), *parts]))
    table = f"read_parquet([{files}], union_by_name = true)"
    con.execute(f"COPY (SELECT * FROM {table} {'ORDER BY wall_ns' if more else ''}) TO {quoted(path)} {COPY}")
    atomic.fsync_file(path)
    checks = [
        con.execute(f"SELECT count(*), sum(hash(rows)::HUGEINT) FROM {one} rows").fetchone()
        for one in (table, f"read_parquet({unglobbed(path)})")
    ]
    for part in parts:
        part.unlink()
    return checks[0] == checks[1]


def make_sample_table(con: duckdb.DuckDBPyConnection, run_dir: Path, more: Sequence[dict[str, Any]]) -> None:
    """The table ``samples``, with all that ``run_dir`` has in either form, and ``more`` from other nodes."""
    add_samples(con, more)
    path = run_dir / SAMPLES_PARQUET
    if path.exists():
        table = f"read_parquet({unglobbed(path)})"
        there = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
        known = ", ".join(f'"{name}"' for name in there if name in SAMPLE_COLUMNS)  # a later version may have more
        con.execute(f"INSERT INTO samples BY NAME SELECT {known} FROM {table}")
    for batch in _batches(run_dir):
        add_samples(con, batch)


def _question(con: duckdb.DuckDBPyConnection, path: Path) -> str:
    """For those to keep; of a small file for all, since whatever the database does takes memory beside the job."""
    table = f"read_parquet({unglobbed(path)}, file_row_number = true)"
    if not _is_large(path):
        return f"SELECT * FROM read_parquet({unglobbed(path)})"
    columns = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    span = "greatest(coalesce(span_s, 0), 0)" if "span_s" in columns else "0"
    sources = (con.execute(f"SELECT count(DISTINCT ({_WHO})) FROM {table}").fetchone() or (0,))[0]
    counts = dict(con.execute(f"SELECT {span}, count(*) FROM {table} GROUP BY 1 ORDER BY 1").fetchall())
    every = " ".join(f"WHEN {span_s} THEN {every}" for span_s, every in strides(counts).items()) or "WHEN 0 THEN 1"
    return _CHOSEN.format(who=_WHO, table=table, span=span, every=every, newest=newest_of(sources))


def _is_large(path: Path) -> bool:
    return path.stat().st_size >= LARGE_BYTES


def _count_lines(file: BinaryIO) -> int:
    count = 0
    while piece := file.read(1 << 20):
        count += piece.count(b"\n")
    file.seek(0)
    return count


def _with_sources(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Hashable | None, int]]:
    """Each line, whose it is (None: it is no sample) and how many seconds it stands for."""
    from stepscope.store.sample_source import whose_of  # loads msgspec, which few runs have use for

    for line in lines:
        whose = whose_of(line)
        if whose is not None:
            yield line, (whose.node, whose.kind, whose.pid, whose.index, whose.peer), whose.seconds
        else:  # another reader may take it all the same
            record = record_in(line)
            yield (line, None, 0) if record is None else (line, source_of(record), span_of(record))


def _batches(run_dir: Path) -> Iterator[list[dict[str, Any]]]:
    """What is not sealed, some thousand lines at a time."""
    if (run_dir / SAMPLES_PARQUET).exists():
        return  # whoever sealed it was killed before the lines were removed
    with open_sample_files(run_dir) as files:
        every = itertools.chain.from_iterable(files)
        while lines := list(itertools.islice(every, BATCH)):
            yield _records(lines)


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    if len(lines) == BATCH:
        import msgspec  # several times as fast, and too large to be loaded beside a small job

        decoder = msgspec.json.Decoder(dict[str, Any])
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return list(map(decoder.decode, lines))
    return [record for line in lines if (record := record_in(line)) is not None]


def _told(sample: dict[str, Any]) -> dict[str, Any]:
    """Without what it has no value for."""
    return {key: value for key, value in sample.items() if value is not None}
