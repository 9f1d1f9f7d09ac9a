"""SQL over one run, sealed or not.

The database is in memory and sees only the tables ``steps``, ``comm``, ``collectives``, ``samples``, ``events``,
``metrics``, ``findings`` and ``ranks``: it cannot read or write files, load extensions, or undo that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from stepscope.errors import UsageError
from stepscope.records.files import sql_input_path, sql_output_path
from stepscope.records.series import RankSeries, logged_by_script, noted_names, noted_numbers
from stepscope.records.text import Progress, duration_text, no_progress
from stepscope.store.documents import load_summary
from stepscope.store.load import Loaded, load_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.store.inbox.journal import SealedPositions

__all__ = ["QUERY_S", "QueryResult", "ReadOnly", "RunDatabase", "ask", "query"]

EVENT_COLUMNS = {
    "wall_ns": "BIGINT", "event": "VARCHAR", "rank": "BIGINT", "pid": "BIGINT", "step": "BIGINT", "data": "VARCHAR"
}  # fmt: skip
METRIC_COLUMNS = {"rank": "BIGINT", "step": "BIGINT", "name": "VARCHAR", "value": "DOUBLE"}
FINDING_COLUMNS = {
    "kind": "VARCHAR",
    "severity": "VARCHAR",
    "title": "VARCHAR",
    "phase": "VARCHAR",
    "confidence": "DOUBLE",
    "ranks": "VARCHAR",
    "steps": "VARCHAR",
    "cost": "VARCHAR",
    "evidence": "VARCHAR",
    "advice": "VARCHAR",
}
RANK_COLUMNS = {
    "rank": "BIGINT", "attempt": "BIGINT", "local_rank": "BIGINT", "world_size": "BIGINT", "host": "VARCHAR",
    "pid": "BIGINT", "state": "VARCHAR", "steps": "BIGINT", "device": "VARCHAR", "device_name": "VARCHAR",
    "device_index": "BIGINT", "device_uuid": "VARCHAR", "device_timed": "BOOLEAN", "backend": "VARCHAR",
    "torch": "VARCHAR", "python": "VARCHAR", "script": "VARCHAR", "lost": "BIGINT", "torn": "BIGINT",
    "hook_failures": "BIGINT", "anchor_mono_ns": "BIGINT", "anchor_wall_ns": "BIGINT", "ended_wall_ns": "BIGINT",
    "facts": "VARCHAR",
}  # fmt: skip

QUERY_S = 300.0
"""The default limit of a query; the largest runs answer in seconds."""
MOST_ROWS = 10_000_000
"""Of a result, which is held in memory: several gigabytes."""
_ROWS_AT_ONCE = 10_000
_AGAIN_S = 0.05
_LARGEST = (1 << 63) - 1
_NOT_ONE = "SQL: only one statement is allowed; the query has {}"
_OURS = ("schema", "key", "seq")
"""Event fields that only the store needs."""
_NEITHER = ("COPY", "EXPORT", "ATTACH")
"""Statements that write to files: a file that may be read must not be written."""
_READS = ("SELECT", "EXPLAIN")
"""DESCRIBE, SHOW and SUMMARIZE are SELECT, too."""
_SHUT = (
    "SET temp_directory = ''",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool = False
    """Whether rows were left out."""


@dataclass(frozen=True, kw_only=True)
class ReadOnly:
    """For a query that another program sends: only one that reads, and bounds on what it returns and takes."""

    rows: int
    """The rest is left out."""
    memory_bytes: int = 1 << 30
    """Beyond the tables of the run."""


def query(
    run_dir: Path,
    sql: str,
    *,
    limit_s: float = QUERY_S,
    read_only: ReadOnly | None = None,
    progress: Progress = no_progress,
) -> QueryResult:
    """Run one query; UsageError, in one line, if it is invalid, empty or more than one, or takes too long.

    ``limit_s``: after this time it is interrupted; 0: never.  ``progress`` reports opening the run.
    """
    loaded = load_run(run_dir, progress=progress)
    findings = (load_summary(run_dir) or {}).get("findings", [])
    with open_database(run_dir, loaded, findings, read_only=read_only) as con:
        return _ask(con, sql, limit_s=limit_s, read_only=read_only)


class RunDatabase:
    """The tables of a loaded run, for any number of queries; ``columns`` has each answer as columns."""

    def __init__(self, run_dir: Path, loaded: Loaded, findings: Sequence[Any]) -> None:
        self._con = open_database(run_dir, loaded, findings)

    def columns(self, sql: str, *, limit_s: float = QUERY_S) -> dict[str, NDArray[Any]]:
        """Run one query; errors as in ``query``.  Columns are masked where a value is unknown."""
        with self._con.cursor() as con:
            found: dict[str, NDArray[Any]] = _checked(
                con, sql, lambda statement: _execute_columns(con, statement), limit_s=limit_s
            )
        return found


def open_database(run_dir: Path, loaded: Loaded, findings: Sequence[Any], *, read_only: ReadOnly | None = None) -> Any:
    """Open a database with the tables of a run and restrict it to them; the caller closes it."""
    import duckdb

    from stepscope.store.inbox.journal import read_positions
    from stepscope.store.inbox.remote import is_too_large

    sealed = read_positions(run_dir)
    con = duckdb.connect(config={"threads": 2})
    try:
        _make_tables(con, loaded, findings)
        readable = _add_parts(con, run_dir, sealed) if is_too_large(sealed) else ()
        _restrict(con, readable, read_only)
    except BaseException:
        con.close()
        raise
    return con


def _add_parts(con: Any, run_dir: Path, sealed: SealedPositions) -> list[Path]:
    """Replace the loaded ranks of other nodes by all of them."""
    from stepscope.store.sealed.samples import add_parts, make_table, ranks_in_parts

    rows = ranks_in_parts(run_dir, sealed)
    here = load_run(run_dir, alone=True).data.ranks
    for name in ("steps", "ranks"):
        con.execute(f"DROP TABLE {name}")
    _make_steps(con, here)
    paths = add_parts(con, run_dir, sealed, rows)
    make_table(con, "ranks", RANK_COLUMNS, [*map(_rank, here), *(_fields(RANK_COLUMNS, row) for row in rows)])
    return paths


def ask(
    con: Any,
    sql: str,
    readable: Sequence[Path] = (),
    *,
    limit_s: float = QUERY_S,
    read_only: ReadOnly | None = None,
) -> QueryResult:
    """Restrict a database to its tables and the files its views read, and run one query; UsageError as above."""
    _restrict(con, readable, read_only)
    return _ask(con, sql, limit_s=limit_s, read_only=read_only)


def _restrict(con: Any, readable: Sequence[Path], read_only: ReadOnly | None) -> None:
    """Let queries see only the tables and the files its views read; this cannot be undone."""
    if readable:
        allowed = [form(path) for path in readable for form in (sql_output_path, sql_input_path)]
        con.execute(f"SET allowed_paths = [{', '.join(allowed)}]")
    if read_only is not None:
        used = con.execute("SELECT sum(memory_usage_bytes) FROM duckdb_memory()").fetchone()[0] or 0
        con.execute(f"SET memory_limit = '{int(used) + read_only.memory_bytes} bytes'")
    for statement in _SHUT:
        con.execute(statement)


def _ask(con: Any, sql: str, *, limit_s: float, read_only: ReadOnly | None) -> QueryResult:
    most = MOST_ROWS if read_only is None else read_only.rows
    columns, rows = _checked(
        con,
        sql,
        lambda statement: _execute(con, statement, most),
        limit_s=limit_s,
        read_only=read_only,
    )
    if len(rows) > MOST_ROWS:
        raise UsageError(f"SQL: the result has more than {MOST_ROWS:,} rows; aggregate them, or add a LIMIT")
    return QueryResult(columns=columns, rows=tuple(rows[:most]), more=len(rows) > most)


def _checked(
    con: Any,
    sql: str,
    execute: Callable[[Any], T],
    *,
    limit_s: float,
    read_only: ReadOnly | None = None,
) -> T:
    """Run the only statement of ``sql`` on a restricted database."""
    import duckdb

    try:
        statements = con.extract_statements(sql)
        if len(statements) != 1:
            raise UsageError(_NOT_ONE.format(len(statements)) if statements else "SQL: the query is empty")
        if statements[0].type.name in _NEITHER:
            raise UsageError(f"SQL: {statements[0].type.name} is not allowed: queries cannot write files")
        if read_only is not None and statements[0].type.name not in _READS:
            raise UsageError(f"SQL: {statements[0].type.name} is not allowed: queries can only read")
        return _within(limit_s, con, lambda: execute(statements[0]))
    except duckdb.InterruptException:
        hint = " (see --timeout)" if read_only is None else "; select fewer steps or ranks"
        raise UsageError(f"SQL: the query took longer than {duration_text(limit_s)}{hint}") from None
    except duckdb.Error as error:
        raise UsageError(f"SQL: {_one_line(error)}") from error


def _within(seconds: float, con: Any, work: Callable[[], T]) -> T:
    """Do work with a connection and interrupt it after that time (0: never), or at Ctrl-C.

    In a thread: while DuckDB computes, the main thread would not hear the signal.
    """
    begun, ended = Event(), Event()

    def run() -> T:
        begun.set()
        try:
            return work()
        finally:
            ended.set()

    with ThreadPoolExecutor(1, thread_name_prefix="query") as pool:
        try:
            done = pool.submit(run)  # Ctrl-C may arrive in here, too, when the query has begun
            wait([done], seconds or None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while begun.wait(_AGAIN_S) and not ended.is_set():
                con.interrupt()
                ended.wait(_AGAIN_S)
        return done.result()


def _execute(con: Any, statement: Any, most: int) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    result = con.execute(statement)
    columns = tuple(column[0] for column in result.description or ())
    return columns, _rows(result, most) if columns else []


def _execute_columns(con: Any, statement: Any) -> dict[str, NDArray[Any]]:
    result = con.execute(statement)
    columns: dict[str, NDArray[Any]] = result.fetchnumpy() if result.description else {}
    return columns


def _rows(result: Any, most: int) -> list[tuple[Any, ...]]:
    """Fetch the rows; at least one more than ``most`` if there are more."""
    rows: list[tuple[Any, ...]] = []
    while len(rows) <= most and (some := result.fetchmany(min(_ROWS_AT_ONCE, most + 1))):
        rows += some
    return rows


def _make_tables(con: Any, loaded: Loaded, findings: Sequence[Any]) -> None:
    from stepscope.store.rank_series import COLLECTIVE_DTYPE, COMM_DTYPE, exchange_columns
    from stepscope.store.sealed.samples import make_sample_table, make_table

    data = loaded.data
    _make_steps(con, data.ranks)
    tables = {
        "comm": exchange_columns(data.ranks, [series.comm for series in data.ranks], COMM_DTYPE),
        "collectives": exchange_columns(data.ranks, [series.collectives for series in data.ranks], COLLECTIVE_DTYPE),
    }
    for name, columns in tables.items():
        _make(con, name, columns)
    make_sample_table(con, Path(data.path), loaded.sent_samples)
    make_table(con, "events", EVENT_COLUMNS, [_event(event) for event in data.events])
    make_table(con, "metrics", METRIC_COLUMNS, list(_metrics(data.events)))
    rows = [_fields(FINDING_COLUMNS, finding) for finding in findings if isinstance(finding, dict)]
    make_table(con, "findings", FINDING_COLUMNS, rows)
    make_table(con, "ranks", RANK_COLUMNS, [_rank(series) for series in data.ranks])


def _metrics(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The numbers among the script's notes, and those that the recorder saw itself."""
    own = logged_by_script(noted_names(events))
    for event in events:
        for name, value in noted_numbers(event, own).items():
            yield {"rank": event.get("rank"), "step": event.get("step"), "name": name, "value": value}


def _make_steps(con: Any, ranks: Sequence[RankSeries]) -> None:
    from stepscope.store.rank_series import phase_columns, to_columns

    _make(con, "steps", to_columns(ranks, phase_columns(ranks)))


def _make(con: Any, name: str, columns: Mapping[str, Any]) -> None:
    con.register("columns", columns)
    con.execute(f"CREATE TABLE {name} AS SELECT * FROM columns")
    con.unregister("columns")


def _rank(series: RankSeries) -> dict[str, Any]:
    own = {name: getattr(series, name, None) for name in RANK_COLUMNS}
    values = {name: getattr(series.identity, name, own[name]) for name in RANK_COLUMNS}
    return _fields(RANK_COLUMNS, {**values, "rank": series.rank, "steps": len(series.steps)})


def _event(event: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in event.items() if name not in EVENT_COLUMNS and name not in _OURS}
    return {**_fields(EVENT_COLUMNS, event), "data": json.dumps(rest)}


def _fields(types: dict[str, str], raw: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(kind, raw.get(name)) for name, kind in types.items()}


def _value(kind: str, value: Any) -> Any:
    """Return the value if its column can hold it; lists and objects as JSON text."""
    if kind == "VARCHAR":
        return value if value is None or (isinstance(value, str) and value.isprintable()) else json.dumps(value)
    if kind == "BOOLEAN":
        return value if isinstance(value, bool) else None
    if not isinstance(value, int if kind == "BIGINT" else (int, float)) or isinstance(value, bool):
        return None
    return value if abs(value) <= _LARGEST else None


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Did you mean", "Candidate bindings"))]
    return " ".join([lines[0], *hints])
