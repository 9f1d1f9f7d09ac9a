"""From paths to the analysis of a job, and to what has to look at its traces once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli.progress import progress_bar
from stepscope.errors import TraceError, UsageError
from stepscope.records.replacing import replaced

if TYPE_CHECKING:
    from stepscope.traces.engine.analyse import Options
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.model.columns import Trace
    from stepscope.traces.model.table import Table
    from stepscope.traces.path.whatif import Change, WhatIf
    from stepscope.traces.timeline.perfetto import Track

__all__ = ["analysed", "changed", "changes_of", "write_tables", "write_timeline"]


def analysed(files: Sequence[Path], passed_over: Sequence[str], options: Options, engine: str) -> JobAnalysis:
    """All ranks of what ``find_traces`` found; a file that cannot be read is a remark, unless there is no other."""
    from stepscope.records.units import bytes_text
    from stepscope.traces.engine.analyse import Problem
    from stepscope.traces.engine.engines import analyse_paths, engine_named
    from stepscope.traces.job import analyse_job
    from stepscope.traces.reading.one_per_rank import one_per_rank

    with progress_bar("reading traces", bytes_text) as told:
        found = analyse_paths(files, options, engine_named(engine), lambda _files, _all, read, total: told(read, total))
    problems = [outcome.message for outcome in found if isinstance(outcome, Problem)]
    analyses = [outcome for outcome in found if not isinstance(outcome, Problem)]
    if not analyses:
        raise TraceError(problems[0] + (f" (and {len(problems) - 1} more such files)" if len(problems) > 1 else ""))
    ranks, chosen = one_per_rank(analyses)
    return analyse_job(ranks, [*passed_over, *problems, *chosen.notices], mixed=chosen.mixed)


def changes_of(words: Sequence[str]) -> list[Change]:
    """What ``--what-if`` asks for."""
    from stepscope.traces.path.whatif import parse_change

    try:
        return [parse_change(word) for word in words]
    except TraceError as error:
        raise UsageError(str(error)) from None


def changed(job: JobAnalysis, options: Options, changes: Sequence[Change], rank: int) -> Table:
    """The steps after each change: of the whole job if it is to a rank, else of one rank by itself."""
    from stepscope.traces.model.window import window_of
    from stepscope.traces.path.graph import graph_of
    from stepscope.traces.path.peers import like_peers
    from stepscope.traces.path.whatif import what_if, what_if_table

    graph = None
    if any(change.kind != "rank" for change in changes):
        (trace,) = (trace for number, trace in _traces(job, options, rank) if number == rank)
        graph = graph_of(window_of(trace, keep_last=options.keep_last))

    def tried(change: Change) -> WhatIf:
        if graph is None or change.kind == "rank":
            try:
                return like_peers(job.ranks, job.collectives, change)
            except TraceError as error:
                raise UsageError(str(error)) from None
        return what_if(graph, change)

    return what_if_table([tried(change) for change in changes])


def write_tables(job: JobAnalysis, folder: Path) -> None:
    """Of all ranks together, and those that compare them."""
    from stepscope.traces.csv_out import write_csv

    of_job = (job.distributed, *job.collectives.tables.values())
    write_csv(folder, {analysis.rank: analysis.tables for analysis in job.ranks}, of_job)


def write_timeline(job: JobAnalysis, options: Options, out: Path) -> None:
    """All ranks on one clock, with their collectives and critical paths as tracks of their own."""
    from stepscope.traces.model.window import window_of
    from stepscope.traces.timeline.collective_tracks import collective_tracks
    from stepscope.traces.timeline.path_tracks import path_track
    from stepscope.traces.timeline.perfetto import write_perfetto

    def tracks() -> Iterator[Track]:
        yield from collective_tracks(job.collectives)
        for rank, trace in _traces(job, options):
            yield path_track(rank, window_of(trace, keep_last=options.keep_last))

    try:
        with replaced(out) as spare:
            write_perfetto(_traces(job, options), job.clocks, spare, tracks=tracks())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None


def _traces(job: JobAnalysis, options: Options, only: int | None = None) -> Iterator[tuple[int, Trace]]:
    """Once more, one by one, or only those of one file; of a file with several processes each that was analysed."""
    from stepscope.traces.reading.opening import open_traces

    ranks: dict[str, list[int]] = {}
    for analysis in job.ranks:
        ranks.setdefault(analysis.meta.path, []).append(analysis.rank)
    for path, numbers in ranks.items():
        if only is None or only in numbers:
            yield from zip(numbers, open_traces(Path(path), options.cache), strict=False)
