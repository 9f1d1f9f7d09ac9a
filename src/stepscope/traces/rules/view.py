"""The figures of all ranks as arrays, and what a finding costs: the basis of all rules.

``pace`` defines the length of *steps*. Figures of the device cover the work that those steps launched. Ranks are
compared over the same steps. The median rank sets the price of a finding about all ranks; the worst rank sets the price
of a finding about some ranks, since the others wait for it. All shares are of one base, the job's step
(``step_time_ns``), which the titles name.

A device is *idle* in the gaps within its span in which no stream worked. The parts of the steps outside that span also
count as waiting for the host. A rank without device work computes on the host, and its whole step counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import cost_document, severity_by_cost
from stepscope.records.finding import Finding, Severity, lowest
from stepscope.records.text import ms_text, named_ranks, share_text
from stepscope.traces.across_ranks.arrivals import Arrivals, arrivals_of, shown_of
from stepscope.traces.rules import thresholds

if TYPE_CHECKING:
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["UNNAMED", "JobView", "claim_of", "cost_of", "halved", "holes_of", "in_ms", "severity_of", "view_of"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UNNAMED = "Python between operators"


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Idle time of the devices, [R] each."""

    host_ns: Ints
    """Nothing had been launched yet. For a rank without a device: the whole step."""
    sync_ns: Ints
    """The part of ``host_ns`` in which the launching thread was inside a synchronizing call."""
    kernel_ns: Ints
    """Short gaps before kernels that had already been launched."""
    other_ns: Ints
    """Long gaps before kernels that had already been launched: they wait for another stream or another process."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of the device, or of the threads of a rank without one; [R] each."""

    compute_ns: Ints
    comm_ns: Ints
    overlap_ns: Ints
    """Compute and communication at the same time."""

    @property
    def exposed_ns(self) -> Ints:
        """Communication while nothing computed."""
        return self.comm_ns - self.overlap_ns


@dataclass(frozen=True, kw_only=True)
class ExposedTimes:
    """Communication while nothing was computed, [R] each; the first three add up to all of it."""

    transfer_ns: Ints
    """Includes the time that cannot be split into transfer and waiting."""
    wait_ns: Ints
    send_ns: Ints
    """Sends and receives."""
    stages_ns: Ints
    """Sends, receives and waiting across pipeline stages."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    job: JobAnalysis
    analyses: tuple[RankAnalysis, ...]
    """[R]; ranks whose steps are longer than zero."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(analysis.rank for analysis in self.analyses)

    @cached_property
    def step_ns(self) -> Ints:
        """[R]; total of all steps."""
        return self.each(lambda analysis: analysis.pace.total_ns)

    @cached_property
    def steps(self) -> Ints:
        return self.each(lambda analysis: len(analysis.steps))

    @cached_property
    def stepped(self) -> bool:
        """Whether the profiler marked steps; otherwise the whole trace is one step."""
        return all(step.name for analysis in self.analyses for step in analysis.steps)

    @cached_property
    def on_device(self) -> Bools:
        return self.each(lambda analysis: analysis.pace.work.span_ns) > 0

    @cached_property
    def idle(self) -> Idle:
        apportioned = [
            _idle_of(analysis, int(step_ns)) for analysis, step_ns in zip(self.analyses, self.step_ns, strict=True)
        ]
        host, sync, kernel, other = np.array(apportioned, np.int64).reshape(-1, 4).T
        return Idle(host_ns=host, sync_ns=sync, kernel_ns=kernel, other_ns=other)

    @cached_property
    def times(self) -> Times:
        compute, comm, overlap = (
            np.array([_times_of(analysis) for analysis in self.analyses], np.int64).reshape(-1, 3).T
        )
        return Times(compute_ns=compute, comm_ns=comm, overlap_ns=overlap)

    @cached_property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """One entry for every set of ranks that shares collectives; empty for a single rank."""
        return arrivals_of(self.job.ranks, self.job.collectives)

    @cached_property
    def exposed(self) -> ExposedTimes:
        return _exposed_of(self)

    @cached_property
    def host_comm(self) -> Bools:
        """[R]; whether the rank communicates through host threads (gloo) while its device idles."""
        return self.each(lambda analysis: len(analysis.exchanges) if not analysis.pace.work.comm_ns else 0) > 0

    def each(self, figure: Callable[[RankAnalysis], int]) -> Ints:
        """Return one figure per rank, [R]."""
        return np.array([figure(analysis) for analysis in self.analyses], np.int64)

    @cached_property
    def step_time_ns(self) -> float:
        """How long a step of the job takes, which is as long as that of its slowest rank; without steps, the trace.

        Every share in the findings of a job is a share of this.
        """
        return float(self.per_step(self.step_ns).max())

    def share(self, time_ns: Ints) -> Floats:
        """Return the share of the job's step, [R]."""
        return self.per_step(time_ns) / self.step_time_ns

    def per_step(self, values: Ints | Floats) -> Floats:
        """Return the mean per step, [R]."""
        return np.asarray(values / self.steps, np.float64)

    def typical(self, values: Ints | Floats, where: Bools) -> float:
        """Return the (lower) median if ``where`` covers all ranks, otherwise the worst, as ``cost_of`` does."""
        chosen = np.sort(np.asarray(values)[where])
        return float(chosen[(len(chosen) - 1) // 2 if where.all() else -1])

    def each_ns(self, total_ns: Ints | Floats, where: Bools) -> float:
        """Return what a step has of it, on the rank that the title describes."""
        return self.typical(self.per_step(total_ns), where)

    def compiled(self, where: Bools) -> bool:
        """Return whether compiled code runs on one of these ranks."""
        return bool((self.each(lambda analysis: analysis.host.compiled_regions)[where] > 0).any())

    def culprits(self, where: Bools) -> tuple[int, ...]:
        """Return the ranks in ``where``; empty when it covers all ranks."""
        return () if where.all() else tuple(rank for rank, hit in zip(self.ranks, where, strict=True) if hit)

    def of_whom(self, where: Bools) -> str:
        """Return a suffix for a sentence, `` on rank 3``; empty when ``where`` covers all ranks."""
        ranks = self.culprits(where)
        return f" on {named_ranks(ranks).lower()}" if ranks else ""

    @property
    def in_what(self) -> str:
        return "a step" if self.stepped else "in all"

    @property
    def whole(self) -> str:
        """What shares are shares of."""
        return "the step" if self.stepped else "the trace"

    def each_step(self, time_ns: float) -> str:
        """Return ``12.3 ms of each 41.0 ms step (30%)``, or ``… of the 41.0 ms trace (30%)``."""
        step = ms_text(self.step_time_ns / 1e6)
        whole = f"each {step} step" if self.stepped else f"the {step} trace"
        return f"{ms_text(time_ns / 1e6)} of {whole} ({share_text(time_ns / self.step_time_ns)})"

    @property
    def span(self) -> tuple[int, int] | None:
        numbers = [step.number for analysis in self.analyses for step in analysis.steps]
        return (min(numbers), max(numbers)) if numbers and self.stepped else None

    def confidence(self, at_most: float = thresholds.SURE) -> float:
        if not self.stepped:
            return min(at_most, thresholds.NO_STEPS)
        fewest = int(self.steps.min(initial=thresholds.SURE_STEPS))
        seen = {1: thresholds.ONE_STEP, 2: thresholds.TWO_STEPS}.get(fewest, thresholds.SURE)
        return min(at_most, seen)


def claim_of(
    view: JobView,
    kind: str,
    title: str,
    *,
    where: Bools,
    saved_ns: Ints,
    evidence: dict[str, Any],
    advice: tuple[str, ...],
    explained_ns: Ints | None = None,
    phase: str | None = None,
    at_most: Severity = "critical",
    confidence: float = thresholds.SURE,
    most_ns: Ints | None = None,
) -> Claim:
    """Build a claim and price it.

    ``where`` [R]: the ranks it is about. ``saved_ns`` [R]: its price on those ranks. ``explained_ns`` [R]: the idle
    time it explains. ``most_ns`` [R]: what a perfect remedy would save, where the price is what a remedy is likely to
    save.
    """
    cost = cost_of(view, saved_ns, where)
    if most_ns is not None:
        most = cost_of(view, most_ns, where)
        cost |= {"most_share": most["share"], "most_seconds": most["seconds"]}
    severity = lowest(severity_of(view, cost), at_most)
    finding = Finding(
        kind=kind,
        severity=severity,
        title=title,
        ranks=view.culprits(where),
        phase=phase,
        steps=view.span,
        cost=cost,
        evidence={
            **evidence,
            "step_ms": in_ms(view.step_time_ns),
            "steps_used": int(view.steps.min()),
        },
        advice=advice,
        confidence=view.confidence(confidence),
    )
    return Claim(finding=finding, explained_ns=np.where(where, 0 if explained_ns is None else explained_ns, 0))


def view_of(job: JobAnalysis) -> JobView:
    long_enough = (analysis for analysis in job.ranks if any(step.end_ns > step.start_ns for step in analysis.steps))
    return JobView(job=job, analyses=tuple(long_enough))


def cost_of(view: JobView, saved_ns: Ints, where: Bools) -> dict[str, Any]:
    """Price a fix on some ranks: ``saved_ns`` [R] of their steps, as a share of the job's step."""
    saved_ns = np.where(where, np.clip(saved_ns, 0, view.step_ns), 0)
    # Each figure is that of the rank that the title describes, so none exceeds what the title says.
    saved, share = view.typical(saved_ns, where), min(view.typical(view.share(saved_ns), where), 1.0)
    # A trace covers few steps: its seconds have more digits than those of a run.
    return cost_document(share=share, seconds=saved / 1e9, ranks=len(view.ranks), step_ns=view.step_time_ns, digits=6)


def in_ms(time_ns: float) -> float:
    """Return milliseconds as evidence has them."""
    return round(time_ns / 1e6, 3)


def halved(time_ns: Ints) -> Ints:
    """Return what a remedy saves of a time that has no single cause, [R]."""
    return (time_ns * thresholds.REMEDY_GAIN).astype(np.int64)


def severity_of(view: JobView, cost: dict[str, Any]) -> Severity:
    """Rate a finding by its cost and by how much of the job was traced."""
    steps = float(view.steps.max())
    if float(view.step_ns.max()) < thresholds.TRACE_FLOOR_NS:
        return "info"
    severity = severity_by_cost(cost["share"], cost["seconds"] * 1e9 / steps)
    return severity if view.stepped and steps >= thresholds.CRITICAL_STEPS else lowest(severity, "warning")


def holes_of(analysis: RankAnalysis) -> list[tuple[str, int]]:
    """List where the main thread ran no operator for long, longest first: by line, else by the enclosing call."""
    table = analysis.tables.get("holes")
    times: dict[str, int] = {}
    for row in table.to_rows() if table else ():
        place = row["source"] or row["inside"] or UNNAMED
        times[place] = times.get(place, 0) + row["dur_ns"]
    return sorted(times.items(), key=lambda each: -each[1])


def _exposed_of(view: JobView) -> ExposedTimes:
    job = view.job
    shown = shown_of(job.ranks, job.collectives, view.arrivals)
    rows = [at for at, analysis in enumerate(job.ranks) if analysis.rank in view.ranks]
    exposed_ns = view.times.exposed_ns
    total_ns = (shown.transfer_ns + shown.wait_ns + shown.send_ns)[rows]
    # Two concurrent collectives count twice in their sum but once in the exposed time.
    scale = np.where(total_ns > 0, exposed_ns / np.maximum(total_ns, 1), 0.0)

    def scaled(values: Ints) -> Ints:
        return np.minimum(np.rint(values[rows] * scale).astype(np.int64), exposed_ns)

    wait_ns, send_ns = scaled(shown.wait_ns), scaled(shown.send_ns)
    return ExposedTimes(
        transfer_ns=np.maximum(exposed_ns - wait_ns - send_ns, 0),
        wait_ns=wait_ns,
        send_ns=send_ns,
        stages_ns=send_ns + scaled(shown.stages_ns),
    )


def _times_of(analysis: RankAnalysis) -> tuple[int, int, int]:
    """Return compute, communication and the overlap of both."""
    temporal, exchanges = analysis.pace.work, analysis.exchanges
    if not temporal.span_ns and exchanges.host is not None:
        return exchanges.host.compute_ns, exchanges.host.comm_ns, exchanges.host.overlap_ns
    if temporal.comm_ns or not len(exchanges):
        return temporal.compute_ns, temporal.comm_ns, temporal.overlap_ns
    inside = exchanges.step >= 0
    took_ns = int((exchanges.end_ns - exchanges.start_ns)[inside].sum())
    return temporal.compute_ns, took_ns, int(exchanges.overlap_ns[inside].sum())


def _idle_of(analysis: RankAnalysis, step_ns: int) -> tuple[int, int, int, int]:
    """Return the wait for the host, the part of it in synchronizing calls, short gaps and long gaps."""
    temporal = analysis.pace.work
    if not temporal.span_ns:
        return step_ns, 0, 0, 0
    idle = analysis.pace.device.idle
    stepped = all(step.name for step in analysis.steps)
    outside = max(step_ns - temporal.span_ns, 0) if stepped else 0
    return idle.host_wait_ns + outside, idle.sync_ns, idle.kernel_wait_ns, idle.other_ns
