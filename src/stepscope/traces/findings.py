"""JobAnalysis → findings, in the form of live ones, the most severe and most costly first.

The rules are asked in order, the most telling first, and each works on what those before it have left: a device that
idles because the host is in the DataLoader waits for the host, too, and that is one cause, not two.  No finding means
that nothing stands out; there is no finding that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.units import count_text, ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.communication import exposed_times, find_communication, find_slow_rank
from stepscope.traces.rules.device import find_device, find_underused
from stepscope.traces.rules.host import find_host
from stepscope.traces.rules.jitter import find_bubble, find_jitter
from stepscope.traces.rules.loading import find_compiling, find_garbage, find_loading
from stepscope.traces.rules.memory import find_memory
from stepscope.traces.rules.practices import find_practices, find_start_up, find_truncated
from stepscope.traces.rules.python import find_python
from stepscope.traces.rules.stragglers import find_stragglers
from stepscope.traces.rules.view import Claim, View, view_of

if TYPE_CHECKING:
    from stepscope.traces.job import JobAnalysis

__all__ = ["find", "is_judged", "verdict_of"]

Ints = NDArray[np.int64]
OF_THE_HOST: tuple[Callable[[View, Ints], list[Claim]], ...] = (
    find_loading,
    find_compiling,
    find_garbage,
    find_python,
    find_host,
)
"""In the order in which they explain why a device waits for the host."""


def find(job: JobAnalysis) -> tuple[Finding, ...]:
    view = view_of(job)
    if not view.analyses:
        return tuple(find_truncated(view))
    late, exposed = find_stragglers(view), exposed_times(view)
    claims: list[Claim] = []
    for rule in OF_THE_HOST:
        explained_ns = sum((claim.idle_ns for claim in (*late, *claims)), np.zeros(len(view.ranks), np.int64))
        claims += rule(view, np.maximum(view.idle.host_ns - explained_ns, 0))
    jitter = [] if late else find_jitter(view)
    claims += [*find_device(view, claims), *find_communication(view, exposed), *jitter]
    # A rank that nobody waits for more than for others had bad luck in the steps traced.
    claims += _told(find_slow_rank(view)) if jitter else find_slow_rank(view)
    claims += find_bubble(view, exposed.stages_ns)
    claims = [*late, *_of_late_ranks(claims, late)]
    claims += find_underused(view, claims)
    findings = [claim.finding for claim in claims]
    findings += [*find_memory(view), *find_practices(view), *find_truncated(view)]
    findings.sort(key=_weight, reverse=True)
    start_up = find_start_up(view)
    return (*start_up, *(replace(each, severity="info") if start_up else each for each in findings))


def verdict_of(job: JobAnalysis) -> str:
    """One sentence: what costs most, or that nothing stands out and how the time is spent."""
    first = next((finding for finding in job.findings if finding.severity != "info"), None)
    first = first or next((finding for finding in job.findings if finding.kind == "start_up"), None)
    if first is not None:
        return first.title
    view = view_of(job)
    if not view.analyses:
        return "The trace holds nothing to judge by."
    everywhere = np.ones(len(view.ranks), np.bool_)
    step = ms_text(view.typical(view.per_step(view.step_ns), everywhere) / 1e6)
    if not view.stepped:
        seen = f"{step} without profiler steps"
    else:
        seen = f"{count_text(int(view.steps.min()), 'step')} of {step}"
    if not is_judged(job):
        return f"Too little to judge by: {seen}{_spent(view)}."
    of = f" on {count_text(len(view.ranks), 'rank')}" if len(view.ranks) > 1 else ""
    return f"Nothing stands out: {seen}{of}{_spent(view)}."


def is_judged(job: JobAnalysis) -> bool:
    """Whether enough was seen to say that nothing stands out."""
    view = view_of(job)
    return bool(view.analyses) and int(view.step_ns.max()) >= thresholds.TRACE_FLOOR_NS


def _spent(view: View) -> str:
    """How a device spends its time, of the median rank: all parts that are not small."""
    everywhere = np.ones(len(view.ranks), np.bool_)
    if not view.on_device.any():
        loading = view.typical(view.share(view.each(lambda one: one.host.loading_ns)), everywhere)
        told = f", {share_text(loading)} in the DataLoader" if loading >= thresholds.PART_SHARE else ""
        return f", all of it on the host{told}"

    def share(figure_ns: Ints) -> float:
        values = np.sort(view.share(figure_ns)[view.on_device])
        return float(values[(len(values) - 1) // 2])

    busy_ns = view.each(lambda one: one.pace.work.span_ns - one.pace.work.idle_ns)
    parts = {
        "is communication that shows": share(view.each(lambda one: one.pace.work.exposed_comm_ns)),
        "copies that nothing hides": share(view.each(lambda one: one.pace.work.exposed_memory_ns)),
        "idle": share(np.maximum(view.step_ns - busy_ns, 0)),
    }
    computing = share_text(share(view.each(lambda one: one.pace.work.compute_ns)))
    told = "".join(f", {share_text(part)} {name}" for name, part in parts.items() if part >= thresholds.PART_SHARE)
    return f"; the device computes {computing} of the time{told}"


def _told(claims: Sequence[Claim]) -> list[Claim]:
    """Without a warning."""
    return [replace(claim, finding=replace(claim.finding, severity="info")) for claim in claims]


def _of_late_ranks(claims: list[Claim], late: Sequence[Claim]) -> list[Claim]:
    """What only a late rank does is why it is late: one cause, and it is named there already.

    That it computes longer is left out where that is the cause: it would be said twice.
    """
    computing = {
        int(rank)
        for claim in late
        for rank, cause in claim.finding.evidence["causes"].items()
        if cause["cause"] in ("slower_kernels", "more_work")
    }
    claims = [
        claim
        for claim in claims
        if claim.finding.kind != "slow_rank" or not claim.finding.ranks or not computing.issuperset(claim.finding.ranks)
    ]
    known = {rank for claim in late if claim.finding.severity != "info" for rank in claim.finding.ranks}
    return [
        _told([claim])[0] if claim.finding.ranks and known.issuperset(claim.finding.ranks) else claim
        for claim in claims
    ]


def _weight(finding: Finding) -> tuple[int, float]:
    """Late ranks by what the others wait for them: while they do, nothing that makes those faster gains anything."""
    share, severity = float(finding.cost.get("share", 0.0)), finding.severity
    if finding.kind == "collective_straggler" and severity != "info":
        share = max(share, float(finding.evidence["waited_share"]))
        severity = "critical" if share >= thresholds.CRITICAL_SHARE else severity
    return SEVERITIES.index(severity), share
