"""``stepscope trace``: what is wrong in the traces of a job, one file or one per rank."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.outputs import spare_inputs, write_page
from stepscope.cli.trace_job import analysed, changed, changes_of, write_tables, write_timeline
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.traces.engine.analyse import Options

__all__ = ["EPILOG", "HELP", "add_arguments", "more_words", "run"]

HELP = "read profiler traces: where the time goes, who waits for whom, what to change"
EPILOG = """\
Traces of torch.profiler (.json, .json.gz, .json.zst) and of Nsight Systems (`nsys export --type sqlite`), one file, a
folder of them, or one per rank; ranks are read from inside the files (docs/traces.md).

examples:
  stepscope trace trace.json.gz                          one rank
  stepscope trace traces/                                all ranks of a job: who came last, and what that costs
  stepscope trace traces/ --html trace.html              and as a page with charts
  stepscope trace traces/ --json                         the same for programs
  stepscope trace traces/ --perfetto merged.json.gz      one timeline of all ranks on one clock, for ui.perfetto.dev
  stepscope trace new/ --against old/                    what became slower, what faster, and why
  stepscope trace traces/ --what-if comm=hidden          the step time after a change
"""
WIDEST = 120
ROWS_ON_A_PAGE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="traces of one job: files or folders")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with charts to this file")
    parser.add_argument("--csv", metavar="DIR", type=Path, help="write every table as a CSV file into this folder")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="write all ranks as one timeline (.json.gz)")
    parser.add_argument("--last-step", action="store_true", help="count the last profiler step, too")
    parser.add_argument("--no-cache", action="store_true", help="read afresh and keep nothing")
    parser.add_argument("--against", metavar="PATH", type=Path, nargs="+", help="traces from before, to compare with")
    parser.add_argument(
        "--what-if",
        metavar="CHANGE",
        action="append",
        default=[],
        help="kernel:NAME=2x, op:NAME=0, comm=hidden …",
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="what reads the files")
    parser.add_argument("--top", metavar="N", type=int, help="rows of each table, and all tables in the text")


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    """``trace A --json B``: traces as well."""
    args.paths += map(Path, words)


def run(args: argparse.Namespace) -> int:
    # numpy and the readers are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.reports.trace_document import document_of, table_document
    from stepscope.reports.trace_shown import rank_shown
    from stepscope.traces.csv_out import tables_in
    from stepscope.traces.reading.read import find_traces

    if args.top is not None and args.top < 1:
        raise UsageError(f"--top {args.top} shows nothing")
    changes = changes_of(args.what_if)
    options = _options(args)
    found, found_before = find_traces(args.paths), find_traces(args.against or ())
    spare_inputs([args.html, args.perfetto, *tables_in(args.csv)], [*found[0], *found_before[0]])
    job = analysed(*found, options, args.engine)
    before = analysed(*found_before, options, args.engine) if args.against else None
    document = document_of(job, before=before)
    if changes:
        document["what_if"] = table_document(changed(job, options, changes, int(rank_shown(document) or 0)))
    if args.csv is not None:
        write_tables(job, args.csv)
    if args.perfetto is not None:
        write_timeline(job, options, args.perfetto)
    if args.html is not None:
        from stepscope.reports.trace_html import render_trace_html

        write_page(args.html, render_trace_html(document, top=args.top or ROWS_ON_A_PAGE))
    _print(document, args)
    return 0


def _options(args: argparse.Namespace) -> Options:
    from stepscope.traces.cache.store import Cache
    from stepscope.traces.engine.analyse import Options

    return Options(keep_last=args.last_step, cache=None if args.no_cache else Cache.of_environment())


def _print(document: dict[str, Any], args: argparse.Namespace) -> None:
    from stepscope.reports.trace_text import render_trace

    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    print(render_trace(document, width=width, color=color, top=args.top), end="")
