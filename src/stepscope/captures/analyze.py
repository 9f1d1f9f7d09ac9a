"""Analyze a capture: its traces → ``analysis.json``, and its record with verdict, findings and differences.

It runs in a separate process at low priority (``__main__.py``), on the machine of the run's hub.  Traces are read one
by one, and within limits: one that is missing, damaged, cut or too large leaves its rank out, and the record says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepscope.captures.differences import changes_of, differences_of
from stepscope.captures.rank_times import RankTimes, rank_times_of
from stepscope.errors import StepscopeError
from stepscope.judge.finding_cost import finding_order
from stepscope.records.capture import CaptureOrder, CaptureRecord, Difference
from stepscope.records.finding import Finding, as_remark
from stepscope.records.paths import capture_folder
from stepscope.records.text import bytes_text, count_text, duration_text, share_text
from stepscope.reports.trace import document_of
from stepscope.store.captures import is_capture_id, open_trace, read_capture, read_captures, trace_name, trace_sizes
from stepscope.store.file_io import write_bytes
from stepscope.store.paths import CAPTURE_ANALYSIS
from stepscope.traces.collective_calls import exchanges_of
from stepscope.traces.findings import analyze_job, verdict_of
from stepscope.traces.job import CommonSteps, JobAnalysis, common_steps
from stepscope.traces.model.window import window_of
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.reading.files import read_trace
from stepscope.traces.rules import thresholds

__all__ = ["Limits", "analyze_capture"]


MOST_OF_BASELINE = 4
"""Ranks of a baseline that are read if it lacks the rank to compare."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an analysis may cost; traces beyond it are left out."""

    trace_bytes: int = 512 << 20
    """Of one trace, compressed."""
    all_bytes: int = 2 << 30
    ranks: int = 64
    seconds: float = 180.0
    """No further trace is begun after that; the reader has its own limits on what is inside."""
    findings: int = 20


@dataclass(kw_only=True)
class _Read:
    analyses: list[RankAnalysis] = field(default_factory=list)
    times: list[RankTimes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One sentence each."""


def analyze_capture(
    folder: Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
) -> CaptureRecord:
    """Analyze the traces in ``captures/ID``, write ``analysis.json`` there and return the complete record.

    The record is ``done``, or ``failed`` with a sentence if no trace can be used.  ``capture.json`` is not written.
    """
    limits = limits or Limits()
    began_s = clock()
    run_dir, capture = folder.parent.parent, folder.name
    record = read_capture(run_dir, capture) or _unknown(folder)
    sizes = trace_sizes(run_dir, capture) if is_capture_id(capture) else {}
    record = replace(record, files=tuple(sizes), size_bytes=sum(sizes.values()))
    if not sizes:
        return _failed(record, "None of the ranks delivered a trace.")
    read = _read_traces(folder, sizes, limits, lambda: clock() - began_s)
    if not read.analyses:
        return _failed(record, read.problems[0])
    common = common_steps(read.analyses)
    if clock() - began_s > limits.seconds / 3:
        common = None  # no time to read them again
    if common is not None:
        _read_again(folder, common, read)
    job = analyze_job(read.analyses, [*read.problems, *([common.notice] if common is not None else [])])
    job = _judged_by_run(job, record.figures)
    document = document_of(job)
    differences = differences_of(read.times)
    baseline, changes = _since_baseline(run_dir, record, read.times, limits)
    document["differences"] = [each.text for each in (*differences, *changes)]
    problem = " ".join([record.problem, *read.problems]).strip()
    try:
        write_bytes(folder / CAPTURE_ANALYSIS, json.dumps(document, allow_nan=False).encode() + b"\n")
    except OSError as error:
        problem = f"{problem} The analysis could not be written: {error.strerror or type(error).__name__}.".strip()
    steps = sorted({number for times in read.times for number in times.steps})
    figures: dict[str, Any] = {
        # Of the pace: a host that never waits is done with its steps long before the device is.
        "step_ms": round(max(analysis.pace.step_ns for analysis in read.analyses) / 1e6, 3),
        "work_ms": {str(times.rank): round(times.work_ns / 1e6, 3) for times in read.times},
        "steps": [steps[0], steps[-1]] if steps else None,
        **baseline,
        "analysis_s": round(clock() - began_s, 2),
    }
    leading = differences or changes
    return replace(
        record,
        state="done",
        problem=problem,
        verdict=leading[0].text if leading else job.verdict,
        severity="warning" if leading else document["verdict"]["severity"],
        findings=tuple(_row(finding) for finding in job.findings[: limits.findings]),
        differences=differences,
        changes=changes,
        figures={**record.figures, **figures},
    )


def _judged_by_run(job: JobAnalysis, figures: Mapping[str, Any]) -> JobAnalysis:
    """Lower what is within the limit in the steps that were not profiled: profiling makes small operators longer.

    Only for ranks without a device: the run's phases are times of the host.
    """
    usual_ms, spent_ms = figures.get("usual_step_ms"), figures.get("usual_optimizer_ms")
    if not isinstance(usual_ms, int | float) or not isinstance(spent_ms, int | float) or usual_ms <= 0:
        return job
    share = spent_ms / usual_ms
    if share >= thresholds.OPTIMIZER_SHARE or any(analysis.temporal.span_ns for analysis in job.ranks):
        return job
    text = f"; without the profiler, which makes small operators longer, the optimizer takes {share_text(share)}."
    findings = [
        as_remark(replace(each, title=each.title.removesuffix(".") + text))
        if each.kind == "unfused_optimizer"
        else each
        for each in job.findings
    ]
    job = replace(job, findings=tuple(sorted(findings, key=finding_order, reverse=True)))
    return replace(job, verdict=verdict_of(job))


def _since_baseline(
    run_dir: Path, record: CaptureRecord, times: Sequence[RankTimes], limits: Limits
) -> tuple[dict[str, Any], tuple[Difference, ...]]:
    """What takes longer than in the run's baseline, and the baseline; nothing if the run has none with traces."""
    earlier = [
        each
        for each in read_captures(run_dir)
        if each.reason == "baseline" and each.order.at_step < record.order.at_step
    ]
    if not earlier or record.reason == "baseline":
        return {}, ()
    baseline = earlier[-1]
    sizes = trace_sizes(run_dir, baseline.order.id)
    ranks = {_rank_in(name): name for name in sizes}
    slow = min(times, key=lambda each: (-each.work_ns, each.rank)).rank
    chosen = [slow] if slow in ranks else sorted(ranks)[:MOST_OF_BASELINE]
    before = _Read()
    for rank in chosen:
        if sizes[ranks[rank]] <= limits.trace_bytes:
            _read_trace(capture_folder(run_dir, baseline.order.id), rank, before, compared=True)
    steps = sorted({number for each in before.times for number in each.steps})
    if not steps:
        return {}, ()
    of = f"step {steps[0]}" if steps[0] == steps[-1] else f"steps {steps[0]} to {steps[-1]}"
    about = {"baseline": {"id": baseline.order.id, "steps": [steps[0], steps[-1]]}}
    return about, changes_of(times, before.times, f"the baseline of {of}")


def _unknown(folder: Path) -> CaptureRecord:
    """Stand in for a record that is missing or damaged: its traces may still be of use."""
    order = CaptureOrder(id=folder.name, ranks=(), at_step=0)
    return CaptureRecord(order=order, state="analyzing", requested_wall_ns=0, reason="request")


def _failed(record: CaptureRecord, problem: str) -> CaptureRecord:
    return replace(record, state="failed", problem=f"{record.problem} {problem}".strip())


def _read_traces(folder: Path, sizes: dict[str, int], limits: Limits, elapsed_s: Callable[[], float]) -> _Read:
    read = _Read()
    total = 0
    for number, (name, size) in enumerate(sizes.items()):
        rank = _rank_in(name)
        if elapsed_s() > limits.seconds:
            left = count_text(len(sizes) - number, "trace")
            read.problems.append(f"After {duration_text(limits.seconds)} {left} had not been read; they are left out.")
            break
        if number >= limits.ranks:
            read.problems.append(f"Only the traces of {count_text(limits.ranks, 'rank')} are analyzed.")
            break
        if size > limits.trace_bytes or total + size > limits.all_bytes:
            read.problems.append(f"Rank {rank}'s trace is left out: it is too large ({bytes_text(size)}).")
            continue
        total += size
        problem = _read_trace(folder, rank, read)
        if problem:
            read.problems.append(f"Rank {rank}'s trace is left out: {problem}.")
    return read


def _read_again(folder: Path, common: CommonSteps, read: _Read) -> None:
    """Replace what is known of the ranks that recorded more steps than others."""
    shorter = _Read()
    for rank in common.ranks:
        _read_trace(folder, rank, shorter, only=common.numbers)
    analyses = {each.rank: each for each in shorter.analyses}
    times = {each.rank: each for each in shorter.times}
    read.analyses = [analyses.get(each.rank, each) for each in read.analyses]
    read.times = [times.get(each.rank, each) for each in read.times]


def _rank_in(name: str) -> int:
    return int(name.removeprefix("rank-").partition(".")[0])


def _read_trace(folder: Path, rank: int, read: _Read, *, compared: bool = False, only: Collection[int] = ()) -> str:
    """Analyze a rank, or only what is compared; return why that was not possible."""
    path = folder / trace_name(rank)
    try:
        # A run may come from anyone: no link is followed, nor is a pipe opened.
        open_trace(folder.parent.parent, folder.name, path.name).close()
        trace = read_trace(path)
        window = window_of(trace, only=only)
        if not window.steps:
            return "it contains no events"
        if not compared:
            read.analyses.append(analyze_rank(trace, rank, only=only))
        read.times.append(rank_times_of(window, exchanges_of(window, rank), rank))
        if trace.meta.truncated or trace.meta.problems:
            read.problems.append(f"Rank {rank}'s trace: {trace.meta.truncated or trace.meta.problems[0]}.")
    except StepscopeError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return error.strerror or type(error).__name__
    except MemoryError:
        return "there is not enough memory to read it"
    return ""


def _row(finding: Finding) -> dict[str, Any]:
    """A finding in the record; ``analysis.json`` has all of it."""
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "title": finding.title,
        "ranks": list(finding.ranks),
        "share": finding.cost.get("share"),
        "advice": list(finding.advice),
    }
