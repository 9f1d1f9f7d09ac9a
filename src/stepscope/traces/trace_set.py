"""Traces for Python: ``stepscope.traces.open(path)`` gives a ``TraceSet``, whose answers are data frames.

A ``Frame`` is columns by name, as numpy arrays; ``to_pandas``, ``to_polars`` and ``to_arrow`` convert it if that
library is installed. Nothing here needs torch or any of them. The figures are those of ``stepscope trace``: files are
read by the same workers with the same cache, and each number is defined in docs/traces.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from stepscope.errors import TraceError
from stepscope.frame import Frame, frame_of_findings, frame_of_rows
from stepscope.traces.collective_calls import OPS
from stepscope.traces.engine import Engine, Options, Problem, Progress, analyze_paths
from stepscope.traces.findings import analyze_job
from stepscope.traces.job import CommonSteps, JobAnalysis, common_steps, one_per_rank
from stepscope.traces.model.columns import Kind, Trace
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import launches_of
from stepscope.traces.phases import PHASE_COLUMNS
from stepscope.traces.rank_analysis import RankAnalysis
from stepscope.traces.reading.cache import Cache, open_traces
from stepscope.traces.reading.files import find_traces

__all__ = ["Frame", "TraceSet", "analyze_files", "open_set"]


# -- a job's traces ---------------------------------------------------------------------------------------------------

SLICE_COLUMNS: Final = ("start_ns", "dur_ns", "kind", "name", "thread", "device", "stream", "correlation", "launch")
MEMORY_COLUMNS: Final = ("time_ns", "device_type", "device", "bytes", "allocated", "reserved", "address")


@dataclass(frozen=True, kw_only=True)
class TraceSet:
    """The traces of a job; times count from ``origin_ns`` of each rank's file unless a column says otherwise."""

    job: JobAnalysis
    """Everything that was computed; its fields may change between versions, what the methods return does not."""
    options: Options

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(analysis.rank for analysis in self.job.ranks)

    @property
    def verdict(self) -> str:
        """The first finding in one sentence, or that nothing stands out."""
        return self.job.verdict

    def findings(self) -> Frame:
        """One row per finding, the most severe and costly first; ``job.findings`` has them with their evidence."""
        return frame_of_findings([each.to_dict() for each in self.job.findings])

    @property
    def notices(self) -> tuple[str, ...]:
        """What could not be read or compared, in sentences."""
        return (*([self.job.mixed] if self.job.mixed else []), *self.job.notices)

    def files(self) -> Frame:
        """One row per rank: its file, host and process."""
        rows = [
            (each.rank, each.meta.path, each.meta.format, each.meta.host, each.meta.pid, each.meta.origin_ns)
            for each in self.job.ranks
        ]
        return frame_of_rows(("rank", "path", "format", "host", "pid", "origin_ns"), rows)

    def steps(self) -> Frame:
        """One row per rank and step that counts."""
        rows = [
            (each.rank, step.number, step.name, step.start_ns, step.end_ns, step.end_ns - step.start_ns)
            for each in self.job.ranks
            for step in each.steps
        ]
        return frame_of_rows(("rank", "step", "name", "start_ns", "end_ns", "dur_ns"), rows)

    def phases(self) -> Frame:
        """One row per rank and step: input, forward … on host and device; ranks without a known phase are missing."""
        known = [analysis for analysis in self.job.ranks if analysis.phases.sources]
        rows = [(analysis.rank, *row.values) for analysis in known for row in analysis.phases.rows]
        return frame_of_rows(("rank", *PHASE_COLUMNS), rows)

    def operators(self, rank: int) -> Frame:
        """One row per operator of this rank."""
        return self.table("operators", rank)

    def kernels(self, rank: int) -> Frame:
        """One row per name of a kernel of this rank."""
        return self.table("kernels", rank)

    def table(self, name: str, rank: int) -> Frame:
        """Return any table of a rank (docs/traces.md); without rows if the trace has nothing for it."""
        table = self._analysis(rank).tables.get(name)
        return Frame({}) if table is None else _of_table(table)

    def table_names(self, rank: int) -> tuple[str, ...]:
        return tuple(self._analysis(rank).tables)

    def collectives(self) -> Frame:
        """One row per rank of each collective that two or more ranks share; times are on the first rank's clock."""
        found = self.job.collectives
        pairs, split = found.pairs, found.split
        parts = np.flatnonzero(split.counts[pairs.whole])
        whole = pairs.whole[parts]
        ranks = np.array(pairs.ranks, np.int64)
        groups = [group.name for group in pairs.groups]
        return Frame(
            {
                "collective": whole.astype(np.int64),
                "rank": ranks[pairs.rank[parts]],
                "op": [OPS[op] for op in pairs.op[whole].tolist()],
                "group": [groups[group] for group in pairs.group[whole].tolist()],
                "start_ns": pairs.start_ns[parts],
                "end_ns": pairs.end_ns[parts],
                "wait_ns": split.wait_ns[parts],
                "bytes": [None if size < 0 else size for size in pairs.bytes[whole].tolist()],
                "last_rank": ranks[split.last[whole]],
                "cost_ns": split.cost_ns[whole],
            }
        )

    def memory(self, rank: int) -> Frame:
        """One row per event of the allocator, by time; empty unless recorded with ``profile_memory``."""
        memory = self.trace(rank).memory
        return Frame({name: getattr(memory, name) for name in MEMORY_COLUMNS})

    def slices(self, rank: int) -> Frame:
        """One row per event with a duration, all steps; ``launch``: the row of the call that launched it, else −1."""
        trace = self.trace(rank)
        slices = trace.slices
        names = np.array(trace.strings, object)
        kinds = np.array([kind.name.lower() for kind in Kind], object)
        threads = np.array([thread.name or str(thread.tid) for thread in trace.threads] or [""], object)
        columns = {
            **{name: getattr(slices, name) for name in SLICE_COLUMNS[:-1]},
            "kind": kinds[slices.kind],
            "name": names[slices.name] if len(slices) else names[:0],
            "thread": threads[slices.thread],
            "launch": launches_of(trace),
        }
        return Frame({name: columns[name] for name in SLICE_COLUMNS})

    def trace(self, rank: int) -> Trace:
        """Read a rank's trace again, as columns."""
        path = self._analysis(rank).meta.path
        ranks = [analysis.rank for analysis in self.job.ranks if analysis.meta.path == path]
        for number, trace in zip(ranks, open_traces(Path(path), self.options.cache), strict=False):
            if number == rank:
                return trace
        raise TraceError(f"{path}: rank {rank} is no longer in this file")

    def _analysis(self, rank: int) -> Any:
        for analysis in self.job.ranks:
            if analysis.rank == rank:
                return analysis
        raise KeyError(f"there is no trace of rank {rank}; ranks: {', '.join(map(str, self.ranks))}")


def _of_table(table: Table) -> Frame:
    return frame_of_rows(table.columns, table.rows, note=table.note, left_out=table.left_out)


def open_set(
    *paths: str | PathLike[str], last_step: bool = False, cache: bool = True, engine: Engine | None = None
) -> TraceSet:
    """Read and analyze traces of one job: files, folders, or both; see ``stepscope.traces.open``."""
    if not paths:
        raise TypeError("name at least one file or folder")
    for path in map(Path, paths):
        if not path.exists():
            raise TraceError(f"{path}: no such file or folder")
    files, passed_over = find_traces(map(Path, paths))
    options = Options(keep_last=last_step, cache=Cache.of_environment() if cache else None)
    return TraceSet(job=analyze_files(files, passed_over, options, engine), options=options)


def analyze_files(
    files: Sequence[Path],
    passed_over: Sequence[str],
    options: Options,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> JobAnalysis:
    """Analyze all ranks that ``find_traces`` found; an unreadable file is a notice, unless there is no other."""
    found = analyze_paths(files, options, engine, progress)
    problems = [outcome.message for outcome in found if isinstance(outcome, Problem)]
    analyses = [outcome for outcome in found if not isinstance(outcome, Problem)]
    if not analyses:
        raise TraceError(problems[0] + (f" (and {len(problems) - 1} more such files)" if len(problems) > 1 else ""))
    ranks, chosen = one_per_rank(analyses)
    notices = [*passed_over, *problems, *chosen.notices]
    common = common_steps(ranks)
    if common is not None:
        ranks = _of_common_steps(ranks, common, options, engine)
        notices.append(common.notice)
    return analyze_job(ranks, notices, mixed=chosen.mixed)


def _of_common_steps(
    ranks: Sequence[RankAnalysis], common: CommonSteps, options: Options, engine: Engine | None
) -> list[RankAnalysis]:
    """Analyze the ranks that have more steps again; only the cache makes that quick, but few traces need it."""
    paths = list(dict.fromkeys(Path(each.meta.path) for each in ranks if each.rank in common.ranks))
    outcomes = analyze_paths(paths, replace(options, only=common.numbers), engine)
    found = [outcome for outcome in outcomes if not isinstance(outcome, Problem)]
    return [
        next((replace(each, rank=analysis.rank) for each in found if each.meta == analysis.meta), analysis)
        for analysis in ranks
    ]
