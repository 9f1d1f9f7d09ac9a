"""Trace analysis for torch.profiler and Nsight Systems: files → columns → analyses → findings.

The layers, lowest first. A module imports only from layers above it in this list:

    model/               a trace as columns in integer nanoseconds; which rows count, what launched what
    reading/             files → columns, with a cache for files that were read before
    device/ host/        analyses of one rank: its device work, its host threads
    collective_calls.py  the collective calls of one rank
    path/                the critical path of one rank, and what-if changes to it
    rank_analysis.py     all analyses of one rank → one RankAnalysis of bounded size
    engine.py            many files → many RankAnalyses, in local processes or on Ray
    across_ranks/        (same layer) ranks compared: calls matched, clocks, who arrives last, critical path, replay
    job.py               which files are the job; one JobAnalysis of all ranks
    rules/               figures of a job → findings, one file per family of rules
    rulebook.py          the rules in order, what each may claim, and who wins
    findings.py          runs them; order of findings, and the verdict
    outputs              exports.py, job_diff.py, sql.py, tensorboard.py: timelines, CSV, two jobs compared, SQL
    nsight_compute.py    (same layer) what ncu measured of kernels, joined by name
    trace_set.py         all of it for Python: files → job → data frames

Analyses are functions from columns to plain values. Nothing here renders output.

For users:

    import stepscope.traces

    traces = stepscope.traces.open("traces/")
    traces.verdict                        # one sentence
    traces.phases().to_pandas()           # each step of each rank: input, forward, backward …
    traces.kernels(0)["total_ns"].sum()   # columns are numpy arrays

Only the functions and classes of ``__all__`` are public. Importing this loads neither torch nor numpy.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.traces.trace_set import Frame, TraceSet

__all__ = ["Frame", "TraceSet", "open"]


def open(*paths: str | PathLike[str], last_step: bool = False, cache: bool = True) -> TraceSet:  # noqa: A001
    """Read and analyze the traces of one job: files, folders, or both.

    ``last_step``: include the profiler's last step. ``cache``: use the cache of traces that were read before.
    Raises ``stepscope.errors.TraceError``, with one line that says why, if none of the files can be read.
    """
    from stepscope.traces.trace_set import open_set

    return open_set(*paths, last_step=last_step, cache=cache)


def __getattr__(name: str) -> Any:
    if name in ("Frame", "TraceSet"):
        from stepscope.traces import trace_set

        return getattr(trace_set, name)
    raise AttributeError(f"module 'stepscope.traces' has no attribute {name!r}")
