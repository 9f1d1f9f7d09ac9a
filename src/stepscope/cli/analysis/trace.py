"""``stepscope trace``: analyze the traces of a job, one file or one per rank; what-if, CSV tables, timeline."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.arguments import count, existing
from stepscope.cli.output import page_name, progress_bar, protect_inputs, require_page, write_page
from stepscope.errors import TraceError, UsageError
from stepscope.records.files import replaced
from stepscope.records.text import say

if TYPE_CHECKING:
    from stepscope.traces.engine import Options
    from stepscope.traces.exports import Track
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.model.columns import Trace
    from stepscope.traces.model.tables import Table
    from stepscope.traces.path.whatif import Change, WhatIf

__all__ = ["EPILOG", "HELP", "add_arguments", "analyze_traces", "more_words", "run", "unread_files"]


# -- operations on traces ---------------------------------------------------------------------------------------------


def analyze_traces(files: Sequence[Path], passed_over: Sequence[str], options: Options, engine: str) -> JobAnalysis:
    """Analyze all ranks that ``find_traces`` found; an unreadable file is a notice, unless there is no other."""
    from stepscope.records.text import bytes_text
    from stepscope.traces.engine import engine_named
    from stepscope.traces.trace_set import analyze_files

    with progress_bar("reading traces", bytes_text) as progress:
        return analyze_files(
            files, passed_over, options, engine_named(engine), lambda _files, _all, read, total: progress(read, total)
        )


def unread_files(job: JobAnalysis, files: Sequence[Path]) -> int:
    """How many of the files could not be read; those that were left out on purpose do not count."""
    return sum(any(notice.startswith(f"{path}: ") for notice in job.notices) for path in files)


def parse_changes(words: Sequence[str]) -> list[Change]:
    """Parse the values of ``--what-if``."""
    from stepscope.traces.path.whatif import parse_change

    try:
        return [parse_change(word) for word in words]
    except TraceError as error:
        raise UsageError(str(error)) from None


def what_if_results(job: JobAnalysis, options: Options, changes: Sequence[Change], rank: int) -> Table:
    """Step time after each change: for the whole job if the change is to a rank, else for one rank alone."""
    from stepscope.traces.across_ranks.replay import like_peers
    from stepscope.traces.model.window import window_of
    from stepscope.traces.path.graph import graph_of
    from stepscope.traces.path.whatif import what_if, what_if_table

    graph = None
    if any(change.kind != "rank" for change in changes):
        (trace,) = (trace for number, trace in _reopen_traces(job, options, rank) if number == rank)
        graph = graph_of(window_of(trace, keep_last=options.keep_last, only=job.step_numbers(rank)))

    def tried(change: Change) -> WhatIf:
        if graph is None or change.kind == "rank":
            try:
                return like_peers(job.ranks, job.collectives, change)
            except TraceError as error:
                raise UsageError(str(error)) from None
        return what_if(graph, change)

    return what_if_table([tried(change) for change in changes], title="Requested changes (--what-if)")


def write_tables(job: JobAnalysis, folder: Path) -> None:
    """Write the tables of all ranks together, and those that compare ranks."""
    from stepscope.traces.exports import write_csv

    of_job = (job.distributed, *job.collectives.tables.values())
    write_csv(folder, {analysis.rank: analysis.tables for analysis in job.ranks}, of_job)


def lay_out(job: JobAnalysis, folder: Path) -> None:
    """Write the ranks' traces where TensorBoard's profiler plugin finds them."""
    from stepscope.records.text import count_text
    from stepscope.traces.tensorboard import write_tensorboard

    files, notices = write_tensorboard(((analysis.rank, analysis.meta) for analysis in job.ranks), folder)
    for notice in notices:
        say(notice)
    say(f"{folder}: {count_text(len(files), 'trace')}; view with: tensorboard --logdir {folder.parent}")


def run_name(path: Path) -> str:
    """The name of the run in TensorBoard: that of the folder, or of the file without its endings."""
    name = path.resolve().name
    return name if path.is_dir() else name.split(".")[0] or "trace"


def write_timeline(job: JobAnalysis, options: Options, out: Path) -> None:
    """Write all ranks on one clock, with separate tracks for collectives and critical paths."""
    from stepscope.traces.exports import collective_tracks, path_track, write_perfetto
    from stepscope.traces.model.window import window_of

    def tracks() -> Iterator[Track]:
        yield from collective_tracks(job.collectives)
        for rank, trace in _reopen_traces(job, options):
            yield path_track(rank, window_of(trace, keep_last=options.keep_last, only=job.step_numbers(rank)))

    try:
        with replaced(out) as spare:
            write_perfetto(_reopen_traces(job, options), job.clocks, spare, tracks=tracks())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None


def page_timeline(job: JobAnalysis, options: Options) -> dict[str, Any] | None:
    """One step of a few ranks, for the page; None if there are no events."""
    from stepscope.traces.timeline import chosen_ranks, timeline_of

    traces = (pair for rank in chosen_ranks(job) for pair in _reopen_traces(job, options, rank) if pair[0] == rank)
    timeline = timeline_of(job, traces, keep_last=options.keep_last)
    return None if timeline is None else timeline.to_dict()


def _reopen_traces(job: JobAnalysis, options: Options, only: int | None = None) -> Iterator[tuple[int, Trace]]:
    """Reopen the traces one by one, or only the file of one rank; a file may hold several analyzed processes."""
    from stepscope.traces.reading.cache import open_traces

    ranks: dict[str, list[int]] = {}
    for analysis in job.ranks:
        ranks.setdefault(analysis.meta.path, []).append(analysis.rank)
    for path, numbers in ranks.items():
        if only is None or only in numbers:
            yield from zip(numbers, open_traces(Path(path), options.cache), strict=False)


# -- command ----------------------------------------------------------------------------------------------------------

HELP = "analyze profiler traces: where time is spent, which ranks wait, what to change"
EPILOG = """\
Reads traces of torch.profiler (.json, .json.gz, .json.zst) and Nsight Systems (`nsys export --type sqlite`): one file,
one per rank, or a folder of them; ranks are in the files' contents, or else in their names (docs/traces.md).

examples:
  stepscope trace trace.json.gz                          one rank
  stepscope trace traces/                                all ranks of a job: which ones are late, and the cost
  stepscope trace traces/ --html trace.html              also write a page with charts and a timeline
  stepscope trace traces/ --json                         the result as JSON
  stepscope trace traces/ --perfetto merged.json.gz      one timeline of all ranks on one clock, for ui.perfetto.dev
  stepscope trace new/ --against old/                    what became slower or faster, and why
  stepscope trace traces/ --watch                        one verdict per recording that arrives, until Ctrl-C
  stepscope trace traces/ --what-if comm=hidden          the step time after a change
"""
WIDEST = 120
ROWS_ON_A_PAGE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="traces of one job: files or folders")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page with charts and a timeline to this file"
    )
    parser.add_argument("--csv", metavar="DIR", type=Path, help="write every table as a CSV file into this folder")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="write all ranks as one timeline (.json.gz)")
    parser.add_argument(
        "--tensorboard", metavar="DIR", type=Path, help="lay the traces out for TensorBoard's profiler plugin"
    )
    parser.add_argument(
        "--ncu",
        metavar="FILE",
        type=Path,
        help="add what Nsight Compute measured of kernels (ncu --csv), by their names",
    )
    parser.add_argument(
        "--watch", action="store_true", help="analyze recordings that arrive in the folder PATH; ends with Ctrl-C"
    )
    parser.add_argument("--last-step", action="store_true", help="include the last profiler step")
    parser.add_argument("--no-cache", action="store_true", help="do not read or write the cache")
    parser.add_argument("--against", metavar="PATH", type=Path, nargs="+", help="earlier traces to compare with")
    parser.add_argument(
        "--what-if",
        metavar="CHANGE",
        action="append",
        default=[],
        help="kernel:NAME=2x, op:NAME=0, comm=hidden …",
    )
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="where to read the files: here or on a Ray cluster"
    )
    parser.add_argument("--top", metavar="N", type=count("rows"), help="show all tables in the text, with N rows each")


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Accept ``trace A --json B``: B is a trace as well."""
    args.paths += map(Path, words)


def run(args: argparse.Namespace) -> int:
    # numpy and the readers are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.reports.trace import document_of, rank_shown, table_document
    from stepscope.traces.exports import tables_in
    from stepscope.traces.reading.files import find_traces

    for path in (*args.paths, *(args.against or ())):
        existing(path)
    if args.watch:
        return _watch(args)
    require_page(args.html)
    changes = parse_changes(args.what_if)
    options = _options(args)
    found, found_before = find_traces(args.paths), find_traces(args.against or ())
    protect_inputs([args.html, args.perfetto, *tables_in(args.csv)], [*found[0], *found_before[0]])
    job = analyze_traces(*found, options, args.engine)
    if args.ncu is not None:
        from stepscope.traces.nsight_compute import read_ncu, with_ncu

        job = with_ncu(job, read_ncu(existing(args.ncu)), args.ncu)
    before = analyze_traces(*found_before, options, args.engine) if args.against else None
    document = document_of(job, before=before)
    if changes:
        document["what_if"] = table_document(what_if_results(job, options, changes, int(rank_shown(document) or 0)))
    if args.csv is not None:
        write_tables(job, args.csv)
    if args.perfetto is not None:
        write_timeline(job, options, args.perfetto)
    if args.tensorboard is not None:
        lay_out(job, args.tensorboard / run_name(args.paths[0]))
    if args.html is not None:
        from stepscope.reports.page.trace_views import trace_page

        top, timeline = args.top or ROWS_ON_A_PAGE, page_timeline(job, options)
        write_page(args.html, trace_page(document, name=page_name(args.paths), top=top, timeline=timeline))
    _print(document, args)
    return 0


def _watch(args: argparse.Namespace) -> int:
    from stepscope.cli.analysis.trace_watch import watch_folder

    files = (args.html, args.csv, args.perfetto, args.tensorboard, args.ncu, args.against, args.what_if)
    if len(args.paths) > 1 or any(files):
        raise UsageError("--watch takes one folder, and of the other options --json, --last-step and --no-cache")
    return watch_folder(args.paths[0], _options(args), as_json=args.json)


def _options(args: argparse.Namespace) -> Options:
    from stepscope.traces.engine import Options
    from stepscope.traces.reading.cache import Cache

    return Options(keep_last=args.last_step, cache=None if args.no_cache else Cache.of_environment())


def _print(document: dict[str, Any], args: argparse.Namespace) -> None:
    from stepscope.reports.trace import render_trace

    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    print(render_trace(document, width=width, color=color, top=args.top), end="")
