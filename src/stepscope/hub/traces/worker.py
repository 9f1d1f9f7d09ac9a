"""The worker process that makes the views of one set of traces: ``python -m stepscope.hub.traces.worker``.

The hub starts it (``desk.py``) before there is a task, if it can. It loads what it needs, reads the task as one line
of JSON from standard input, and works at low priority and with a memory limit, so that neither the hub nor a job next
to it notices how large or damaged the files are. It writes files into the folder ``out``, each completely or not at
all, and reports on standard output, one JSON object per line:

    {"read": 1048576, "total": 8388608}         while it reads
    {"problem": "…"}                            it cannot continue; the reason as a sentence

``view``: ``page.json``, which has the rank that is shown first, then ``rank-N.json`` and ``raw-N.json`` of all ranks,
then ``timeline.json``.
``timeline``: ``timeline-N.json``, the same with another rank first. ``perfetto``: ``perfetto.json.gz``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import StepscopeError
from stepscope.records.files import replaced

if TYPE_CHECKING:
    from stepscope.traces.engine import Options
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.model.columns import Trace

__all__ = ["PAGE", "PERFETTO", "TIMELINE", "Task", "rank_file", "raw_file", "timeline_file"]

PAGE = "page.json"
TIMELINE = "timeline.json"
PERFETTO = "perfetto.json.gz"
SCHEMA = 1
WORTH_TWO_BYTES = 8 << 20
"""Of files together: more are read in two processes."""
RAW_TABLES = ("operators", "kernels")
"""Of a rank, for the comparison of two ranks."""
PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, forbid_unknown_fields=True):
    action: str
    files: list[str]
    name: str
    out: str
    rank: int | None = None
    memory_bytes: int = 4 << 30
    nice: int = 5


def rank_file(rank: int) -> str:
    return f"rank-{rank}.json"


def raw_file(rank: int) -> str:
    return f"raw-{rank}.json"


def timeline_file(rank: int | None) -> str:
    return TIMELINE if rank is None else f"timeline-{rank}.json"


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no life without the hub
    _load()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    task = msgspec.json.decode(line, type=Task)
    _restrict(task)
    try:
        _run(task)
    except StepscopeError as error:
        _report({"problem": str(error)})
        return 1
    except MemoryError:
        _report({"problem": "not enough memory to analyze these traces; try `stepscope trace` on a larger machine"})
        return 1
    except OSError as error:
        _report({"problem": f"cannot write the views: {error.strerror or error}"})
        return 1
    return 0


def _load() -> None:
    """Import now what a view needs: it takes as long as reading a trace of average size."""
    import stepscope.reports.page.trace_views
    import stepscope.reports.trace
    import stepscope.traces.timeline
    import stepscope.traces.trace_set  # noqa: F401

    # Few objects of a trace are in cycles, and looking for them took up to a third of the time.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def _restrict(task: Task) -> None:
    """Low priority and little memory."""
    os.nice(task.nice)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = task.memory_bytes if hard == resource.RLIM_INFINITY else min(task.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _report(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _run(task: Task) -> None:
    from stepscope.traces.engine import Options
    from stepscope.traces.reading.cache import Cache

    options = Options(cache=Cache.of_environment())
    job = _analyzed(task, options)
    out = Path(task.out)
    if task.action == "perfetto":
        _write_perfetto(job, options, out / PERFETTO)
    elif task.action == "timeline":
        _write_timeline(job, options, out, task.rank)
    else:
        _write_views(job, task.name, out)
        _write_timeline(job, options, out, None)


def _analyzed(task: Task, options: Options) -> JobAnalysis:
    from stepscope.traces.engine import LocalEngine
    from stepscope.traces.trace_set import analyze_files

    files = [Path(path) for path in task.files]
    size_bytes = sum(path.stat().st_size for path in files if path.exists())
    engine = LocalEngine(2 if size_bytes > WORTH_TWO_BYTES else 1)
    return analyze_files(
        files, [], options, engine, lambda _done, _files, read, total: _report({"read": read, "total": total})
    )


def _write_views(job: JobAnalysis, name: str, out: Path) -> None:
    """The page comes first: the other ranks are written while someone reads it."""
    from stepscope.reports.page.trace_views import rank_parts, trace_page
    from stepscope.reports.trace import document_of

    document = document_of(job, lazy=True)
    _write(out / PAGE, {"state": "done", **trace_page(document, name=name, embedded=1)})
    for rank, found in document["ranks"].items():
        _write(out / rank_file(int(rank)), {"rank": int(rank), "parts": rank_parts(document, rank)})
        tables = {table: found["tables"][table] for table in RAW_TABLES if table in found["tables"]}
        host = {"stops": found["host"]["stops"]}
        raw = {"steps": found["steps"], "pace": found["pace"], "host": host, "tables": tables}
        _write(out / raw_file(int(rank)), raw)


def _write_timeline(job: JobAnalysis, options: Options, out: Path, first: int | None) -> None:
    from stepscope.reports.page.trace_views import timeline_part
    from stepscope.traces.timeline import chosen_ranks, timeline_of

    chosen, apart = chosen_ranks(job), set(job.clocks.unaligned)
    if first is not None:
        others = [] if first in apart else [rank for rank in chosen if rank not in apart and rank != first]
        chosen = [first, *others][: max(len(chosen), 1)]
    traces = (pair for rank in chosen for pair in _reopened(job, options, rank))
    timeline = timeline_of(job, traces, keep_last=options.keep_last)
    part = None if timeline is None else timeline_part(timeline.to_dict())
    _write(out / timeline_file(first), {"state": "done", "part": part})


def _write_perfetto(job: JobAnalysis, options: Options, path: Path) -> None:
    from stepscope.traces.exports import collective_tracks, path_track, write_perfetto
    from stepscope.traces.model.window import window_of

    def tracks() -> Iterator[Any]:
        yield from collective_tracks(job.collectives)
        for rank, trace in _reopened(job, options):
            yield path_track(rank, window_of(trace, keep_last=options.keep_last, only=job.step_numbers(rank)))

    with replaced(path) as spare:
        write_perfetto(_reopened(job, options), job.clocks, spare, tracks=tracks())


def _reopened(job: JobAnalysis, options: Options, only: int | None = None) -> Iterator[tuple[int, Trace]]:
    """The traces of the job one by one, or that of one rank; a file may hold several processes."""
    from stepscope.traces.reading.cache import open_traces

    ranks: dict[str, list[int]] = {}
    for analysis in job.ranks:
        ranks.setdefault(analysis.meta.path, []).append(analysis.rank)
    for path, numbers in ranks.items():
        if only is None or only in numbers:
            pairs = zip(numbers, open_traces(Path(path), options.cache), strict=False)
            yield from (pair for pair in pairs if only is None or pair[0] == only)


def _write(path: Path, document: dict[str, Any]) -> None:
    with replaced(path) as spare:
        spare.write_bytes(msgspec.json.encode({"schema": SCHEMA, **document}))


if __name__ == "__main__":
    sys.exit(main())
