"""The findings of a job, the largest certain gain first, and the verdict: JobAnalysis → findings.

Findings have the same form as live ones. The rules run in order, the most specific first, and each works on what the
earlier ones left: a device that idles while the host is in the DataLoader also waits for the host, and that is one
cause, not two. No finding means that nothing stands out; there is no finding that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Claim, unexplained
from stepscope.records.finding import Finding, as_remark, worded_for
from stepscope.records.finding_cost import finding_order
from stepscope.records.text import count_text, ms_text, share_text
from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.across_ranks.job_path import job_path
from stepscope.traces.job import JobAnalysis, distributed_table
from stepscope.traces.rank_analysis import RankAnalysis
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.communication import exposed_times, find_communication, find_slow_rank
from stepscope.traces.rules.device import find_device, find_memory, find_underused
from stepscope.traces.rules.host import find_compiling, find_garbage, find_host, find_loading, find_python
from stepscope.traces.rules.stragglers import find_bubble, find_jitter, find_stragglers
from stepscope.traces.rules.view import JobView, cost_of, view_of

__all__ = ["analyze_job", "find", "is_judged", "verdict_of"]


# -- practices and incomplete traces ----------------------------------------------------------------------------------
# Choices that are known to be slow whatever they cost here, and traces that do not contain everything.


def find_practices(view: JobView) -> list[Finding]:
    return [*_data_parallel(view), *_without_nccl(view)]


def _data_parallel(view: JobView) -> list[Finding]:
    where = np.array([one.host.uses_data_parallel for one in view.analyses], np.bool_)
    if not where.any():
        return []
    return [
        Finding(
            kind="data_parallel",
            severity="warning",
            title=(
                f"The model runs in torch.nn.DataParallel{view.of_whom(where)}: one process copies it to every device "
                "in each step."
            ),
            ranks=view.culprits(where),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={"ranks": int(where.sum())},
            advice=(
                "DistributedDataParallel (torchrun, one process per device) neither copies the model nor shares a GIL.",
            ),
            confidence=0.9,
        )
    ]


def _without_nccl(view: JobView) -> list[Finding]:
    backends = [(one.host.ddp_backend or "").lower() for one in view.analyses]
    worlds = [one.meta.world_size or 1 for one in view.analyses]
    where = view.on_device & np.array(
        [
            world > 1 and "gloo" in backend and "nccl" not in backend
            for backend, world in zip(backends, worlds, strict=True)
        ]
    )
    if not where.any():
        return []
    row = int(where.argmax())
    return [
        Finding(
            kind="ddp_without_nccl",
            severity="warning",
            title=f"The ranks compute on GPUs but communicate with {backends[row]}, through host memory.",
            ranks=view.culprits(where),
            phase="comm",
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={"backend": backends[row], "world_size": worlds[row]},
            advice=('init_process_group("nccl") (or "cpu:gloo,cuda:nccl") sends from device to device.',),
            confidence=0.9,
        )
    ]


def find_start_up(view: JobView) -> list[Finding]:
    """Flag a trace that is mostly the first runtime call: it says little about later training."""
    longest = [one.host.longest_call or ("", 0) for one in view.analyses]
    shares = view.share(np.array([ns for _, ns in longest], np.int64))
    row = int(shares.argmax())
    if view.stepped or shares[row] <= thresholds.START_UP_SHARE:
        return []
    name, call_ns = longest[row]
    return [
        Finding(
            kind="start_up",
            severity="info",
            title=(
                f"Most of this is start-up: a single {name} call takes {ms_text(call_ns / 1e6)}, "
                f"{share_text(float(shares[row]))} of the trace, which has no profiler steps."
            ),
            evidence={"call": name, "call_ms": round(call_ns / 1e6, 3), "call_share": round(float(shares[row]), 4)},
            advice=("Trace later steps: use schedule(wait=…, warmup=…, active=…) and call step() after each.",),
            confidence=view.confidence(),
        )
    ]


def find_truncated(view: JobView) -> list[Finding]:
    """Report truncated traces of all ranks, including those without a complete step."""
    cut = [one for one in view.job.ranks if one.meta.truncated]
    if not cut:
        return []
    return [
        Finding(
            kind="truncated_trace",
            severity="info",
            title=(
                f"The trace of rank {cut[0].rank} ends early: {cut[0].meta.truncated}."
                if len(cut) == 1
                else f"The traces of {count_text(len(cut), 'rank')} end early: what came after is unknown."
            ),
            ranks=tuple(one.rank for one in cut),
            evidence={"reasons": {str(one.rank): one.meta.truncated for one in cut}},
            advice=("A rank killed while writing leaves such a file; everything before the cut is used.",),
        )
    ]


# -- findings ---------------------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
OF_THE_HOST: tuple[Callable[[JobView, Ints], list[Claim]], ...] = (
    find_loading,
    find_compiling,
    find_garbage,
    find_python,
    find_host,
)
"""In the order in which they explain why a device waits for the host."""


def analyze_job(
    analyses: Sequence[RankAnalysis], notices: Sequence[str] = (), *, mixed: str | None = None
) -> JobAnalysis:
    ranks = tuple(sorted(analyses, key=lambda one: one.rank))
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
    if not view.analyses:
        return tuple(find_truncated(view))
    late, exposed = find_stragglers(view), exposed_times(view)
    claims: list[Claim] = []
    for rule in OF_THE_HOST:
        claims += rule(view, unexplained(view.idle.host_ns, (*late, *claims)).astype(np.int64))
    jitter = [] if late else find_jitter(view)
    claims += [*find_device(view, claims), *find_communication(view, exposed), *jitter]
    # If the other ranks do not wait for this rank in particular, it was only unlucky in the traced steps.
    claims += _told(find_slow_rank(view)) if jitter else find_slow_rank(view)
    claims += find_bubble(view, exposed.stages_ns)
    claims = [*late, *_of_late_ranks(claims, late)]
    claims += find_underused(view, claims)
    findings = [claim.finding for claim in claims]
    findings += [*find_memory(view), *find_practices(view), *find_truncated(view)]
    findings.sort(key=finding_order, reverse=True)
    start_up = find_start_up(view)
    told = (*start_up, *(as_remark(each) if start_up else each for each in findings))
    return tuple(worded_for(finding, len(view.ranks)) for finding in told)


def verdict_of(job: JobAnalysis) -> str:
    """Summarize in one sentence what costs most, or that nothing stands out and how the time is spent."""
    first = next((finding for finding in job.findings if finding.severity != "info"), None)
    first = first or next((finding for finding in job.findings if finding.kind == "start_up"), None)
    if first is not None:
        return first.title
    view = view_of(job)
    if not view.analyses:
        return "The trace contains nothing to analyze."
    everywhere = np.ones(len(view.ranks), np.bool_)
    step = ms_text(view.typical(view.per_step(view.step_ns), everywhere) / 1e6)
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
        loading = view.typical(view.share(view.each(lambda one: one.host.loading_ns)), everywhere)
        told = f", {share_text(loading)} in the DataLoader" if loading >= thresholds.PART_SHARE else ""
        return f", all of it on the host{told}"

    def share(figure_ns: Ints) -> float:
        values = np.sort(view.share(figure_ns)[view.on_device])
        return float(values[(len(values) - 1) // 2])

    busy_ns = view.each(lambda one: one.pace.work.span_ns - one.pace.work.idle_ns)
    parts = {
        "exposed communication": share(view.each(lambda one: one.pace.work.exposed_comm_ns)),
        "exposed copies": share(view.each(lambda one: one.pace.work.exposed_memory_ns)),
        "idle": share(np.maximum(view.step_ns - busy_ns, 0)),
    }
    computing = share_text(share(view.each(lambda one: one.pace.work.compute_ns)))
    told = "".join(f", {share_text(part)} {name}" for name, part in parts.items() if part >= thresholds.PART_SHARE)
    return f"; the device computes {computing} of the time{told}"


def _told(claims: Sequence[Claim]) -> list[Claim]:
    """Downgrade findings to info."""
    return [replace(claim, finding=as_remark(claim.finding)) for claim in claims]


def _of_late_ranks(claims: list[Claim], late: Sequence[Claim]) -> list[Claim]:
    """Downgrade findings that only concern late ranks: they explain the lateness, whose finding already names them.

    A ``slow_rank`` finding is left out if longer computation is that cause, as it would be reported twice.
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
