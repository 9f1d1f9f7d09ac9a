"""The figures of all ranks as arrays, and what a finding costs: the basis of all rules.

``pace`` defines the length of *steps*. Figures of the device cover the work that those steps launched. Ranks are
compared over the same steps. The median rank sets the price of a finding about all ranks; the worst rank sets the price
of a finding about some ranks, since the others wait for it.

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
from stepscope.records.finding import Finding, Severity, lowest
from stepscope.records.finding_cost import cost_document, severity_by_cost
from stepscope.records.text import ms_text, named_ranks
from stepscope.traces.across_ranks.arrivals import Arrivals, arrivals_of
from stepscope.traces.rules import thresholds

if TYPE_CHECKING:
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["JobView", "claim_of", "cost_of", "halved", "holes_of", "severity_of", "view_of"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
UNTOLD = "Python between operators"


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
class JobView:
    job: JobAnalysis
    analyses: tuple[RankAnalysis, ...]
    """[R]; ranks whose steps are longer than zero."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self.analyses)

    @cached_property
    def step_ns(self) -> Ints:
        """[R]; total of all steps."""
        return self.each(lambda one: one.pace.total_ns)

    @cached_property
    def steps(self) -> Ints:
        return self.each(lambda one: len(one.steps))

    @cached_property
    def stepped(self) -> bool:
        """Whether the profiler marked steps; otherwise the whole trace is one step."""
        return all(step.name for one in self.analyses for step in one.steps)

    @cached_property
    def on_device(self) -> Bools:
        return self.each(lambda one: one.pace.work.span_ns) > 0

    @cached_property
    def idle(self) -> Idle:
        apportioned = [_idle_of(one, int(step_ns)) for one, step_ns in zip(self.analyses, self.step_ns, strict=True)]
        host, sync, kernel, other = np.array(apportioned, np.int64).reshape(-1, 4).T
        return Idle(host_ns=host, sync_ns=sync, kernel_ns=kernel, other_ns=other)

    @cached_property
    def times(self) -> Times:
        compute, comm, overlap = np.array([_times_of(one) for one in self.analyses], np.int64).reshape(-1, 3).T
        return Times(compute_ns=compute, comm_ns=comm, overlap_ns=overlap)

    @cached_property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """One entry for every set of ranks that shares collectives; empty for a single rank."""
        return arrivals_of(self.job.ranks, self.job.collectives)

    @cached_property
    def host_comm(self) -> Bools:
        """[R]; whether the rank communicates through host threads (gloo) while its device idles."""
        return self.each(lambda one: len(one.exchanges) if not one.pace.work.comm_ns else 0) > 0

    def each(self, figure: Callable[[RankAnalysis], int]) -> Ints:
        """Return one figure per rank, [R]."""
        return np.array([figure(one) for one in self.analyses], np.int64)

    def share(self, time_ns: Ints) -> Floats:
        """Return the share of the rank's steps, [R]."""
        return np.asarray(time_ns / self.step_ns, np.float64)

    def per_step(self, values: Ints) -> Floats:
        """Return the mean per step, [R]."""
        return np.asarray(values / self.steps, np.float64)

    def typical(self, values: Ints | Floats, where: Bools) -> float:
        """Return the (lower) median if ``where`` covers all ranks, otherwise the worst, as ``cost_of`` does."""
        chosen = np.sort(np.asarray(values)[where])
        return float(chosen[(len(chosen) - 1) // 2 if where.all() else -1])

    def compiled(self, where: Bools) -> bool:
        """Return whether compiled code runs on one of these ranks."""
        return bool((self.each(lambda one: one.host.compiled_regions)[where] > 0).any())

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

    def each_step(self, time_ns: float) -> str:
        """Return ``12.3 ms of every step``."""
        return f"{ms_text(time_ns / 1e6)} of {'every step' if self.stepped else 'the trace'}"

    @property
    def span(self) -> tuple[int, int] | None:
        numbers = [step.number for one in self.analyses for step in one.steps]
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
    of_ns: Ints | None = None,
    most_ns: Ints | None = None,
) -> Claim:
    """Build a claim and price it.

    ``where`` [R]: the ranks it is about. ``saved_ns`` [R]: its price on those ranks. ``explained_ns`` [R]: the idle
    time it explains. ``of_ns`` [R]: the total that the price is a part of, if not the ranks' own steps. ``most_ns``
    [R]: what a perfect remedy would save, where the price is what a remedy is likely to save.
    """
    cost = cost_of(view, saved_ns, where, of_ns)
    if most_ns is not None:
        most = cost_of(view, most_ns, where, of_ns)
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
            "step_ms": round(view.typical(view.per_step(view.step_ns if of_ns is None else of_ns), where) / 1e6, 3),
            "steps_used": int(view.steps.min()),
        },
        advice=advice,
        confidence=view.confidence(confidence),
    )
    return Claim(finding=finding, explained_ns=np.where(where, 0 if explained_ns is None else explained_ns, 0))


def view_of(job: JobAnalysis) -> JobView:
    long_enough = (one for one in job.ranks if any(step.end_ns > step.start_ns for step in one.steps))
    return JobView(job=job, analyses=tuple(long_enough))


def cost_of(view: JobView, saved_ns: Ints, where: Bools, of_ns: Ints | None = None) -> dict[str, Any]:
    """Price a fix on some ranks: ``saved_ns`` [R] as a part of their steps or of ``of_ns`` [R]."""
    of_ns = view.step_ns if of_ns is None else of_ns
    saved_ns = np.where(where, np.clip(saved_ns, 0, of_ns), 0)
    # Each figure is that of the rank that the title describes, so none exceeds what the title says.
    saved, share = view.typical(saved_ns, where), view.typical(saved_ns / of_ns, where)
    step_ns = view.typical(view.per_step(of_ns), where)
    # A trace covers few steps: its seconds have more digits than those of a run.
    return cost_document(share=share, seconds=saved / 1e9, ranks=len(view.ranks), step_ns=step_ns, digits=6)


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


def holes_of(one: RankAnalysis) -> list[tuple[str, int]]:
    """List where the main thread ran no operator for long, longest first: by line, else by the enclosing call."""
    table = one.tables.get("holes")
    times: dict[str, int] = {}
    for row in table.to_rows() if table else ():
        place = row["source"] or row["inside"] or UNTOLD
        times[place] = times.get(place, 0) + row["dur_ns"]
    return sorted(times.items(), key=lambda each: -each[1])


def _times_of(one: RankAnalysis) -> tuple[int, int, int]:
    """Return compute, communication and the overlap of both."""
    temporal, exchanges = one.pace.work, one.exchanges
    if not temporal.span_ns and exchanges.host is not None:
        return exchanges.host.compute_ns, exchanges.host.comm_ns, exchanges.host.overlap_ns
    if temporal.comm_ns or not len(exchanges):
        return temporal.compute_ns, temporal.comm_ns, temporal.overlap_ns
    inside = exchanges.step >= 0
    took_ns = int((exchanges.end_ns - exchanges.start_ns)[inside].sum())
    return temporal.compute_ns, took_ns, int(exchanges.overlap_ns[inside].sum())


def _idle_of(one: RankAnalysis, step_ns: int) -> tuple[int, int, int, int]:
    """Return the wait for the host, the part of it in synchronizing calls, short gaps and long gaps."""
    temporal = one.pace.work
    if not temporal.span_ns:
        return step_ns, 0, 0, 0
    idle = one.pace.device.idle
    stepped = all(step.name for step in one.steps)
    outside = max(step_ns - temporal.span_ns, 0) if stepped else 0
    return idle.host_wait_ns + outside, idle.sync_ns, idle.kernel_wait_ns, idle.other_ns
