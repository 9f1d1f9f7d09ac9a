"""One file → what is to be known of each rank in it: the piece of work that workers and Ray spread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.traces.cache.results import decode_analyses, encode_analyses
from stepscope.traces.cache.store import Cache, Entry
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.rank import RankAnalysis, analyse_rank
from stepscope.traces.reading.opening import open_traces, read_traces

__all__ = ["Job", "Options", "Outcome", "Problem", "outcome_of"]


@dataclass(frozen=True, kw_only=True)
class Options:
    keep_last: bool = False
    """The last profiler step counts too."""
    cache: Cache | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    path: Path
    number: int = 0
    """Its rank, if the file does not say."""
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why there is nothing of a file."""

    path: str
    message: str
    """One line that names the file."""


Outcome = list[RankAnalysis] | Problem


def outcome_of(job: Job, options: Options) -> Outcome:
    try:
        return _analyses(job, options)
    except StepscopeError as error:
        return Problem(path=str(job.path), message=str(error))
    except MemoryError:
        return Problem(path=str(job.path), message=f"{job.path}: there is not enough memory to read it")


def _analyses(job: Job, options: Options) -> list[RankAnalysis]:
    entry = options.cache.entry(job.path) if options.cache is not None else None
    if entry is None:
        return _afresh(job, options, None)
    name = "analyses-with-last.msgpack" if options.keep_last else "analyses.msgpack"
    kept = entry.results(name, decode_analyses)
    if kept is not None:
        return [
            replace(found, rank=_rank(job, place, found.meta), meta=replace(found.meta, path=str(job.path)))
            for place, found in enumerate(kept)
        ]
    found = _afresh(job, options, entry)
    data = encode_analyses(found)
    if data is not None:
        entry.keep(name, data)
    return found


def _rank(job: Job, place: int, meta: TraceMeta) -> int:
    return job.number + place if meta.rank is None else meta.rank


def _afresh(job: Job, options: Options, entry: Entry | None) -> list[RankAnalysis]:
    traces = open_traces(job.path, None) if entry is None else entry.traces(read_traces)
    return [
        analyse_rank(trace, _rank(job, place, trace.meta), keep_last=options.keep_last)
        for place, trace in enumerate(traces)
    ]
