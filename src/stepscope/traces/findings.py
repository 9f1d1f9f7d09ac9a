"""The findings of a job, the largest certain gain first, and the verdict: JobAnalysis → findings.

Findings have the same form as live ones. ``rulebook.py`` has the rules and their order. No finding means that nothing
stands out; there is no finding that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.finding_cost import finding_order
from stepscope.records.finding import Finding, as_remark, worded_for
from stepscope.records.text import count_text, ms_text, share_text
from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.across_ranks.job_path import job_path
from stepscope.traces.job import JobAnalysis, distributed_table
from stepscope.traces.rank_analysis import RankAnalysis
from stepscope.traces.rulebook import CHAIN, available
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.practices import find_start_up
from stepscope.traces.rules.view import JobView, view_of

__all__ = ["analyze_job", "find", "is_judged", "verdict_of"]

Ints = NDArray[np.int64]


def analyze_job(
    analyses: Sequence[RankAnalysis], notices: Sequence[str] = (), *, mixed: str | None = None
) -> JobAnalysis:
    ranks = tuple(sorted(analyses, key=lambda analysis: analysis.rank))
    collectives = match(ranks)
    job = JobAnalysis(
        ranks=ranks,
        collectives=collectives,
        distributed=distributed_table(ranks, collectives),
        path=job_path(ranks, collectives),
        notices=(*notices, *collectives.notices),
        mixed=mixed,
    )
    job = replace(job, findings=find(job))
    return replace(job, verdict=verdict_of(job))


def find(job: JobAnalysis) -> tuple[Finding, ...]:
    view = view_of(job)
    claims = CHAIN.run(view, available(view)).all
    findings = sorted((claim.finding for claim in claims), key=finding_order, reverse=True)
    start_up = find_start_up(view) if view.analyses else []
    if start_up:
        # It says little about training: everything else is only information.
        findings = [*start_up, *map(as_remark, findings)]
    return tuple(worded_for(finding, len(view.ranks)) for finding in findings)


def verdict_of(job: JobAnalysis) -> str:
    """Summarize in one sentence what costs most, or that nothing stands out and how the time is spent."""
    first = next((finding for finding in job.findings if finding.severity != "info"), None)
    first = first or next((finding for finding in job.findings if finding.kind == "start_up"), None)
    if first is not None:
        return first.title
    view = view_of(job)
    if not view.analyses:
        return "The trace contains nothing to analyze."
    step = ms_text(view.step_time_ns / 1e6)
    if not view.stepped:
        seen = f"{step} without profiler steps"
    else:
        seen = f"{count_text(int(view.steps.min()), 'step')} of {step}"
    if not is_judged(job):
        return f"Too little data: {seen}{_spent(view)}."
    of = f" on {count_text(len(view.ranks), 'rank')}" if len(view.ranks) > 1 else ""
    return f"Nothing stands out: {seen}{of}{_spent(view)}."


def is_judged(job: JobAnalysis) -> bool:
    """Return whether the trace is long enough to say that nothing stands out."""
    view = view_of(job)
    return bool(view.analyses) and int(view.step_ns.max()) >= thresholds.TRACE_FLOOR_NS


def _spent(view: JobView) -> str:
    """Describe how the median rank's device spends its time, leaving out small parts."""
    everywhere = np.ones(len(view.ranks), np.bool_)
    if not view.on_device.any():
        loading = view.typical(view.share(view.each(lambda analysis: analysis.host.loading_ns)), everywhere)
        loaded = f", {share_text(loading)} in the DataLoader" if loading >= thresholds.PART_SHARE else ""
        return f", all of it on the host{loaded}"

    def share(figure_ns: Ints) -> float:
        values = np.sort(view.share(figure_ns)[view.on_device])
        return float(values[(len(values) - 1) // 2])

    busy_ns = view.each(lambda analysis: analysis.pace.work.span_ns - analysis.pace.work.idle_ns)
    parts = {
        "exposed communication": share(view.each(lambda analysis: analysis.pace.work.exposed_comm_ns)),
        "exposed copies": share(view.each(lambda analysis: analysis.pace.work.exposed_memory_ns)),
        "idle": share(np.maximum(view.step_ns - busy_ns, 0)),
    }
    computing = share_text(share(view.each(lambda analysis: analysis.pace.work.compute_ns)))
    spent = "".join(f", {share_text(part)} {name}" for name, part in parts.items() if part >= thresholds.PART_SHARE)
    return f"; the device computes {computing} of {view.whole}{spent}"
