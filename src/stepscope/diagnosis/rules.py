"""Ask every family of rules and put the answers in order.

The order in which they are asked matters: each explains some of the time, and the next looks at what is left
(``claims.py``).  Ranks come first, since one late rank shows in everybody's step, and what the ranks exchange; then
what stops the training, single slow steps and trends; then where the time goes on all ranks alike.  Memory and machines
explain no time by themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.bounds import find_bounds, find_compute_bound
from stepscope.diagnosis.claims import Claim, unexplained
from stepscope.diagnosis.communication_rules import find_communication
from stepscope.diagnosis.crashes import find_crashes
from stepscope.diagnosis.disagreement import find_disagreement
from stepscope.diagnosis.hangs import find_hangs, led_by_hangs, with_stalls
from stepscope.diagnosis.healthy import find_healthy, find_insufficient
from stepscope.diagnosis.machine import find_machine
from stepscope.diagnosis.memory import find_memory
from stepscope.diagnosis.network import led_by_network
from stepscope.diagnosis.shares import common
from stepscope.diagnosis.spikes import find_spikes
from stepscope.diagnosis.stragglers import find_stragglers
from stepscope.diagnosis.trends import find_trends
from stepscope.diagnosis.unclaimed import find_between_steps, find_wait_heavy, stops_of
from stepscope.diagnosis.uneven import find_uneven
from stepscope.diagnosis.view import View, view_of
from stepscope.diagnosis.window import Window, build_window
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.series import RunData

__all__ = ["diagnose"]

REMARKS = frozenset(
    {
        "jitter",
        "stall",
        "throughput_drop",
        "memory_creep",
        "memory_pressure",
        "memory_imbalance",
        "fragmentation",
        "low_gpu_utilisation",
        "gpu_throttled",
        "cpu_saturated",
        "ram_pressure",
        "slow_network",
        "rank_crashed",
    }
)
"""Kinds that, as long as they are no warning, stand beside \"healthy\" and not in its place."""

CHANGES = frozenset({"drift", "change_point", "throughput_drop"})


def diagnose(
    run: RunData, window: Window | None = None, *, reached: bool = False, alive: bool = False
) -> list[Finding]:
    """All findings, the most severe and most costly first; never empty, never an exception for what a run lacks.

    ``window``: the steps to judge by, all of them when not given; ``reached``: whether the recorder is known to have
    got into any process, recorded or not; ``alive``: whether the job goes on.
    """
    window = build_window(run) if window is None else window
    view = view_of(window)
    hangs = find_hangs(run)
    if all(hang.kind == "rank_crashed" for hang in hangs):  # who died first may only have waited too long
        hangs = find_disagreement(run) or hangs
    crashes = find_crashes(run, alive=alive)
    survived = [crash for crash in crashes if crash.severity == "info"]
    stopped = led_by_hangs(hangs, [crash for crash in crashes if crash not in survived])
    slow = sorted(with_stalls(run, [claim.finding for claim in _explained(view)]), key=_weight, reverse=True)
    # A death is never a matter of its price, and after one nobody asks for more steps.
    insufficient = [] if stopped else find_insufficient(run, window, view, reached=reached)
    findings = [*stopped, *slow, *insufficient, *survived]
    if all(finding.severity == "info" and finding.kind in REMARKS for finding in findings):
        compute = [claim.finding for claim in find_compute_bound(view)]
        findings = [*find_healthy(view), *findings, *compute]
    return findings


def _explained(view: View) -> list[Claim]:
    claims = find_stragglers(view)
    late = {rank for claim in claims for rank in claim.finding.ranks}
    claims += find_uneven(view, late)
    network = led_by_network(view, find_communication(view), claims)
    bounds = find_bounds(view, network)
    claims += network
    known = {claim.finding.phase for claim in claims}
    late = {rank for claim in claims if claim.finding.phase == "other" for rank in claim.finding.ranks}
    between = find_between_steps(view, known, late=late)
    # What is named by nothing but its place in the step may have begun at some step, or come and go.
    claims += [claim for claim in between if claim.finding.phase != "other"]
    spikes = find_spikes(view, unexplained(view, claims), claims)
    spikes = [claim for claim in spikes if not _is_burst(claim, bounds)]
    outside = _outside(view, between, spikes, known, late)
    spikes = [claim for claim in spikes if not _is_part(claim, outside)]
    claims += spikes
    rare = [claim for claim in spikes if _is_rare(claim)]
    bounds = find_bounds(view, network, rare) if rare else bounds
    trends = find_trends(view, unexplained(view, claims))
    told = _one_cause([*outside, *bounds], trends)
    changes = [claim for claim in told if claim.finding.kind in CHANGES and claim.finding.phase == "other"]
    if changes:  # the same moment is in one price only
        still = {claim.finding.kind for claim in told}
        less = {claim.finding.kind: claim for claim in _outside(view, between, [*spikes, *changes], known, late)}
        first = {claim.finding.kind for claim in outside}
        told = [claim for claim in told if claim.finding.kind not in first]
        told += [claim for kind, claim in less.items() if kind in still]
    claims += told
    return [*_symptoms(view, claims, find_machine(view)), *find_memory(view)]


def _outside(
    view: View, between: list[Claim], spikes: list[Claim], known: Collection[str | None], late: Collection[int]
) -> list[Claim]:
    """Time in no phase, as far as neither slow steps nor what stops the training (``between``) have it in their price.

    None where a host without device times may just wait for its device.
    """
    if view.hides_device or not view.enough:
        return []
    told_ns = np.zeros(len(view.steps))
    for claim in spikes:
        if claim.finding.phase == "other" and not _is_irregular(claim.finding):
            told_ns += claim.saved_ns
    stops = [claim for claim in between if claim.finding.phase != "other"]
    if stops:
        in_phases_ns = np.sum(list(stops_of(view).values()), axis=0)
        told_ns += np.maximum(np.sum([claim.saved_ns for claim in stops], axis=0) - in_phases_ns, 0.0)
    again = [] if stops else find_between_steps(view, known, told_ns=told_ns, late=late)
    inside_ns = np.maximum(told_ns - common(view.between_ns), 0.0)
    return [
        *(claim for claim in again if claim.finding.phase == "other"),
        *find_wait_heavy(view, inside_ns, late=late),
    ]


def _one_cause(always: list[Claim], trends: list[Claim]) -> list[Claim]:
    """What takes time on all ranks, and steps that become slower: in one phase, and mostly the same time, it is one.

    A phase that takes much because it began to, or grew, is told as the change, with the line in which it was seen.
    Where the change alone would be no warning, the phase is what counts.
    """
    kept, changed = list(always), list(trends)
    for phase in always:
        for at, trend in enumerate(changed):
            same = phase.finding.phase == trend.finding.phase is not None and not phase.finding.ranks
            both_ns = float(np.minimum(phase.saved_ns, trend.saved_ns).sum())
            if not same or both_ns < thresholds.EXPLAINS_SHARE * float(phase.saved_ns.sum()):
                continue
            if trend.finding.severity == "info" and phase.finding.severity != "info":
                del changed[at]
            else:
                kept.remove(phase)
                changed[at] = _seen_at(trend, phase.finding)
            break
    return [*changed, *kept]


def _seen_at(trend: Claim, phase: Finding) -> Claim:
    """With the line that the other finding names, and as severe as that."""
    place, found = phase.evidence.get("place"), trend.finding
    found = replace(found, severity=max(found.severity, phase.severity, key=SEVERITIES.index))
    if place:
        found = replace(
            found,
            title=f"{found.title[:-1]}, mostly in {place}." if found.kind != "throughput_drop" else found.title,
            evidence={**found.evidence, "place": place},
            advice=(f"Look at {place}: that is where the ranks were seen.", *found.advice),
        )
    return replace(trend, finding=found)


def _is_part(claim: Claim, outside: list[Claim]) -> bool:
    """Whether slow steps without a beat are what time outside all phases consists of anyway."""
    if claim.finding.phase != "other" or not _is_irregular(claim.finding):
        return False
    told_ns = sum((one.saved_ns for one in outside), np.zeros(len(claim.saved_ns)))
    covered_ns = float(np.minimum(claim.saved_ns, told_ns).sum())
    return covered_ns >= thresholds.EXPLAINS_SHARE * float(claim.saved_ns.sum())


def _is_burst(claim: Claim, bounds: list[Claim]) -> bool:
    """Whether every few steps are long in a phase that bounds the job anyway: workers that fall behind, say."""
    period = claim.finding.evidence.get("period")
    often = isinstance(period, int) and period <= thresholds.BURST_PERIOD
    return often and any(bound.finding.phase == claim.finding.phase for bound in bounds)


def _is_rare(claim: Claim) -> bool:
    """Whether long steps are warned of and come only now and then: then they are no part of a bottleneck as well."""
    return claim.finding.severity != "info" and float((claim.saved_ns > 0).mean()) * thresholds.BURST_PERIOD <= 1


def _symptoms(view: View, claims: list[Claim], machine: list[Claim]) -> list[Claim]:
    """What follows from another finding is told, not warned of.

    An idle GPU is what a job that waits for something looks like from outside; stages of a pipeline wait for each other
    when one of them is slow; and on a machine whose CPUs are in other hands, steps are longer now and then and for a
    while, and now this rank is late and now that, or one for a while.
    """
    uneven = any(claim.finding.severity != "info" and _of_ranks(claim.finding) for claim in claims)
    claims = [_as_info(claim) if uneven and claim.finding.kind == "pipeline_bubble" else claim for claim in claims]
    crowded = any(claim.finding.kind == "cpu_saturated" and claim.finding.severity != "info" for claim in machine)
    costly = any(claim.finding.severity != "info" for claim in claims)
    told = [_as_info(claim) if crowded and _of_crowding(view, claim.finding) else claim for claim in claims]
    seen = [_as_info(claim) if costly and claim.finding.kind == "low_gpu_utilisation" else claim for claim in machine]
    return [*told, *seen]


def _of_crowding(view: View, finding: Finding) -> bool:
    varying = finding.kind == "imbalance" and finding.evidence.get("by") == "steps"
    kinds = ("rotating_straggler", "pipeline_bubble", "drift", "change_point", "throughput_drop", "slow_collective")
    return _is_irregular(finding) or varying or _is_over(view, finding) or finding.kind in kinds


def _is_over(view: View, finding: Finding) -> bool:
    """Whether a rank computed more slowly for a while, and then as fast as the others again."""
    slow = finding.kind in ("compute_straggler", "straggler")
    return slow and finding.steps is not None and finding.steps[1] < view.span[1]


def _is_irregular(finding: Finding) -> bool:
    return finding.kind == "jitter" and finding.evidence.get("period") is None


def _of_ranks(finding: Finding) -> bool:
    """Whether it names ranks that the others wait for."""
    return finding.kind.endswith("straggler") or (finding.kind == "imbalance" and bool(finding.ranks))


def _as_info(claim: Claim) -> Claim:
    return replace(claim, finding=replace(claim.finding, severity="info"))


def _weight(finding: Finding) -> tuple[int, float]:
    return SEVERITIES.index(finding.severity), float(finding.cost.get("share", 0.0))
