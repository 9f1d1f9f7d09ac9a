"""``stepscope sql``: query a run or traces with SQL."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import RUN_OR_URL_HELP, RUNS_FOLDER, amount, locate_run, run_or_url, run_path, runs_in
from stepscope.cli.output import format_table, progress_bar
from stepscope.errors import TraceError, UsageError
from stepscope.records.text import printable, say
from stepscope.store.paths import META
from stepscope.store.sealed.sql import QUERY_S, QueryResult, ask, query

__all__ = ["EPILOG", "HELP", "add_arguments", "more_words", "run"]

HELP = "query a run or traces with SQL"
EPILOG = """\
tables of a run: steps (a row per rank and step), samples, events, findings, ranks
tables of the fleet (--fleet, all your runs): runs, run_hosts, run_findings, run_gpus; `number` joins them
tables of traces: slices (a row per event with a duration), ops, kernels, copies, collectives (for gloo: slices named
                  gloo:…), syncs, pythons, memory, ranks

examples:
  stepscope sql runs/NAME "select rank, median(wall_ns) / 1e6 as ms from steps group by rank order by rank"
  stepscope sql "describe steps"                 the newest run in runs/
  stepscope sql --csv runs/NAME "select * from steps" > steps.csv
  stepscope sql --fleet "select host, count(*) from run_hosts group by host"
  stepscope sql traces/ "select rank, name, sum(dur_ns) / 1e6 as ms from kernels group by all order by ms desc limit 9"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", type=run_or_url, metavar="RUN", nargs="*", help=f"{RUN_OR_URL_HELP}; or traces, or folders of them"
    )
    parser.add_argument("sql", metavar="SQL", help="the query (DuckDB's SQL)")
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="query the records of all your runs, or of these folders (`stepscope fleet`)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="comma-separated values instead of a table")
    form.add_argument("--json", action="store_true", help="print a JSON array of objects instead of a table")
    parser.add_argument(
        "--timeout",
        type=amount("seconds"),
        default=QUERY_S,
        metavar="SECONDS",
        help=f"end the query after this time (default: {QUERY_S:g}; 0: never)",
    )


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Accept ``sql traces/ --csv QUERY``: the last word is the query."""
    args.paths += map(run_or_url, [args.sql, *words[:-1]])
    args.sql = words[-1]


def run(args: argparse.Namespace) -> int:
    if args.fleet:
        result = _query_fleet(args.paths, args.sql, args.timeout)
    else:
        paths = [run_path(path) if isinstance(path, ArchiveUrl) else path for path in args.paths]
        result = _query(paths, args.sql, args.timeout)
    if args.json:
        rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
        print(json.dumps(rows, indent=2, default=str))
    elif args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        shown = _harmless if sys.stdout.isatty() else list
        writer.writerows(shown(row) for row in (result.columns, *result.rows))
    else:
        print(_table(result))
    return 0


def _query_fleet(paths: Sequence[Path | ArchiveUrl], sql: str, limit_s: float) -> QueryResult:
    """On the catalog: all its runs, or those of these folders."""
    from stepscope.cli.catalog import catalog_folders, updated_catalog

    folders, archives = catalog_folders(paths)
    catalog, problems = updated_catalog(folders, archives)
    for problem in problems:
        say(problem)
    keys = [*folders, *map(str, archives)] if paths else None
    result: QueryResult = catalog.query(sql, keys=keys, limit_s=limit_s)
    return result


def _query(paths: Sequence[Path], sql: str, limit_s: float) -> QueryResult:
    # A long query is no error of the file system's.
    if os.path.exists(sql) or sql in runs_in(RUNS_FOLDER):  # noqa: PTH110
        raise UsageError(f'no query: stepscope sql {shlex.quote(sql)} "select …" (see `stepscope sql --help`)')
    found = [_traces(path) for path in paths]
    if len(paths) < 2 and not any(found):
        run_dir = locate_run(paths[0] if paths else None)
        with progress_bar("querying", None) as progress:
            return query(run_dir, sql, limit_s=limit_s, progress=progress)
    if not all(found):
        raise UsageError(
            f"{paths[found.index(None)]} contains no trace; with several paths each one must (or name a single run)"
        )
    files = list(dict.fromkeys(file for of_path in found for file in of_path or ()))
    from stepscope.traces.reading.cache import Cache
    from stepscope.traces.sql import trace_database

    with trace_database(files, Cache.of_environment()) as (database, readable, notices):
        for notice in notices:
            say(notice)
        return ask(database, sql, readable, limit_s=limit_s)


def _traces(path: Path) -> list[Path] | None:
    """The file, or the traces in a folder that is not a run; None without any."""
    if path.is_file():
        return [path]
    if not path.is_dir() or (path / META).exists():
        return None
    from stepscope.traces.reading.files import find_traces

    try:
        return find_traces([path])[0]
    except TraceError:
        return None


def _table(result: QueryResult) -> str:
    from stepscope.records.text import count_text

    numeric = [
        column
        for column in range(len(result.columns))
        if all(isinstance(row[column], int | float | None) for row in result.rows)
    ]
    cells = [[_cell(value) for value in row] for row in result.rows]
    return f"{format_table(result.columns, cells, numeric=numeric)}\n({count_text(len(result.rows), 'row')})"


def _harmless(row: Sequence[Any]) -> list[Any]:
    return [printable(value, keep="\n\t") if isinstance(value, str) else value for value in row]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
