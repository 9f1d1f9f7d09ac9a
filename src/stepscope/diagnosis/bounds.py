"""Where the time goes: phases that bound the step on all ranks alike.

``input_bound``, ``h2d_bound``, ``comm_bound`` and ``optimizer_bound`` are one rule with different numbers: a phase
takes at least so much of the median rank's time, in at least half of the run's stretches, and more than what is natural
for it in Python.  ``compute_bound`` is told, never warned of: it is what training should be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.bound_advice import for_comm, for_compute, for_h2d, for_input_of, for_optimizer
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.communication_rules import between_stages, bubble_share, exchanges_of
from stepscope.diagnosis.least_step import least_step_ns
from stepscope.diagnosis.places import seen_at
from stepscope.diagnosis.robust import longest, shortest
from stepscope.diagnosis.shares import Part, common, is_even, ordinary_steps, part_of, stretches_with
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding
from stepscope.records.phases import COMPUTE_PHASES, GRAPH_PHASE
from stepscope.records.units import bytes_text, ms_text, share_text

__all__ = ["find_bounds", "find_compute_bound"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    kind: str
    phase: str
    share: float
    critical: float
    floor_ns: float
    words: str
    """How the title begins."""
    advice: Callable[[View, Floats], tuple[str, ...]]
    """Of the view and what the phase takes of each step [S]."""


RULES = (
    _Rule(
        kind="input_bound",
        phase="input",
        share=thresholds.INPUT_SHARE,
        critical=thresholds.INPUT_CRITICAL_SHARE,
        floor_ns=thresholds.INPUT_FLOOR_NS,
        words="Training waits for input:",
        advice=for_input_of,
    ),
    _Rule(
        kind="h2d_bound",
        phase="h2d",
        share=thresholds.H2D_SHARE,
        critical=thresholds.INPUT_CRITICAL_SHARE,
        floor_ns=thresholds.H2D_FLOOR_NS,
        words="Copies to the device take",
        advice=for_h2d,
    ),
    _Rule(
        kind="comm_bound",
        phase="comm",
        share=thresholds.COMM_SHARE,
        critical=thresholds.COMM_CRITICAL_SHARE,
        floor_ns=thresholds.COMM_FLOOR_NS,
        words="All ranks wait for the network:",
        advice=for_comm,
    ),
    _Rule(
        kind="optimizer_bound",
        phase="optimizer",
        share=thresholds.OPTIMIZER_SHARE,
        critical=thresholds.OPTIMIZER_CRITICAL_SHARE,
        floor_ns=thresholds.OPTIMIZER_FLOOR_NS,
        words="The optimizer takes",
        advice=for_optimizer,
    ),
)


def find_bounds(view: View, network: Sequence[Claim] = (), rare: Sequence[Claim] = ()) -> list[Claim]:
    """``network``: what is explained already of the time that all ranks wait; ``rare``: steps that are long at times.

    A step that is long at times in a phase says nothing of what the phase takes of the others.
    """
    if not view.enough:
        return []
    unknown = {"h2d"} if view.hides_device else set()
    if all(view.window.identities[row].world_size <= 1 for row in view.rows):
        unknown.add("comm")  # DDP of one process exchanges with nobody: what it says of that is its own work
    rules = [rule for rule in RULES if rule.phase in view.phases and rule.phase not in unknown]
    return [claim for rule in rules for claim in _apply(view, rule, network, rare)]


def _apply(view: View, rule: _Rule, network: Sequence[Claim], rare: Sequence[Claim]) -> list[Claim]:
    used, epoch_starts_count = ordinary_steps(view)
    for claim in rare:
        if claim.finding.phase == rule.phase:
            used &= ~(claim.saved_ns > 0)
    durations_ns = _durations(view, rule, network)
    part = part_of(view, durations_ns, used)
    if part.share < rule.share or part.mean_ns < rule.floor_ns:
        return []
    shared_ns = common(durations_ns)
    if stretches_with(shared_ns[used], view.step_ns[used], rule.share) < thresholds.BOTTLENECK_SHARE:
        return []
    saved_ns = _everywhere(_saved(view, rule, durations_ns, shared_ns), used)
    taken_share = cost_of(view, saved_ns)["share"]
    if view.comm_measured:
        saved_ns = np.minimum(saved_ns, view.step_ns - least_step_ns(view, rule.phase))
    # Nobody gets rid of all of it; how much of it depends on what is done.
    cost = {**cost_of(view, saved_ns), "up_to": True}
    finite = part.by_rank[~np.isnan(part.by_rank)]
    exchanges = exchanges_of(view) if rule.phase == "comm" else []
    place = seen_at(view, phase="input") if rule.phase == "input" else ""
    if rule.phase == "comm" and between_stages(view):
        return [_bubble(view, part, saved_ns, shared_ns[used], exchanges)]
    finding = Finding(
        kind=rule.kind,
        severity="critical" if part.share >= rule.critical else "warning",
        title=(
            f"{_words(view, rule)} {ms_text(part.mean_ns / 1e6)} {_how_often(shared_ns[used])}, "
            f"{share_text(taken_share)} of the time"
            f"{f', mostly in {place}' if place else _mostly(exchanges, part.mean_ns)}."
        ),
        phase=rule.phase,
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            f"{rule.phase}_share": round(part.share, 4),
            f"{rule.phase}_ms_per_step": round(part.mean_ns / 1e6, 3),
            "taken_share": round(taken_share, 4),
            "lowest_share": round(float(finite.min()), 4),
            "highest_share": round(float(finite.max()), 4),
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "steps_used": int(used.sum()),
            "epoch_starts_included": epoch_starts_count,
            **({"place": place or None} if rule.phase == "input" else {}),
            **({"exchanges": exchanges} if exchanges else {}),
        },
        advice=(
            *([f"Look at {place}: that is where the ranks were seen."] if place else []),
            *rule.advice(view, np.where(used, shared_ns, np.nan)),
        ),
        confidence=0.95 if len(view.steps) >= 3 * thresholds.MIN_STEPS else 0.8,
    )
    return [Claim(finding=finding, saved_ns=saved_ns)]


def _words(view: View, rule: _Rule) -> str:
    if rule.phase == "comm" and len(set(view.hosts)) == 1:
        return "All ranks wait for the exchange:"
    return rule.words


def _bubble(view: View, part: Part, saved_ns: Floats, shared_ns: Floats, exchanges: list[dict[str, Any]]) -> Claim:
    """Stages of a pipeline that wait for each other: while it fills and drains, some have nothing to do.

    As much of that as even stages have is a matter of the schedule, and no fault.
    """
    least = bubble_share(view)
    finding = Finding(
        kind="pipeline_bubble",
        severity="warning" if least is None or part.share >= least + thresholds.BUBBLE_SLACK else "info",
        title=(
            f"Pipeline stages wait for each other: {ms_text(part.mean_ns / 1e6)} {_how_often(shared_ns)}, "
            f"{share_text(part.share)} of the time"
            f"{'' if least is None else f' ({share_text(least)} if all were even)'}."
        ),
        phase="comm",
        steps=view.span,
        cost={**cost_of(view, saved_ns), "up_to": True},
        evidence={
            "clock": view.clock,
            "comm_share": round(part.share, 4),
            "comm_ms_per_step": round(part.mean_ns / 1e6, 3),
            "even_share": None if least is None else round(least, 4),
            "stages": len(np.unique(view.groups)),
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "exchanges": exchanges,
            "steps_used": len(shared_ns),
        },
        advice=(
            "Split the batch into more microbatches: filling and draining the pipeline takes a smaller part of a step.",
            "An interleaved schedule (several smaller stages per rank) or zero-bubble one leaves less idle.",
        ),
        confidence=0.8,
    )
    return Claim(finding=finding, saved_ns=saved_ns)


def _how_often(shared_ns: Floats) -> str:
    return "of every step" if is_even(shared_ns) else "a step on average"


def _durations(view: View, rule: _Rule, network: Sequence[Claim]) -> Floats:
    """[R, S]; of communication only what every rank has: the rest is waiting for a rank, not for the network."""
    durations_ns = view.phase(rule.phase)
    if rule.phase != "comm" or len(view.ranks) < 2:
        return durations_ns
    left_ns = shortest(durations_ns)
    for claim in network:
        left_ns = np.maximum(left_ns - claim.saved_ns, 0.0)
    return np.where(np.isnan(durations_ns), np.nan, left_ns)


def _mostly(exchanges: Sequence[dict[str, Any]], mean_ns: float) -> str:
    """The operation that takes most of it, where one does."""
    if not exchanges or exchanges[0]["ms_per_step"] < thresholds.EXPLAINS_SHARE * mean_ns / 1e6:
        return ""
    most = exchanges[0]
    size = f" of {bytes_text(most['bytes_per_step'])}" if most["bytes_per_step"] else ""
    where = f" in group {most['group']} ({most['kind']})" if most["group"] else ""
    return f", mostly in {most['op']}{size}{where}"


def _saved(view: View, rule: _Rule, durations_ns: Floats, shared_ns: Floats) -> Floats:
    """[S]; what would be saved without it: with waits measured, by replay; else what the median rank has of it."""
    if view.comm_measured and rule.phase != "comm":
        return longest(view.work_ns) - longest(view.work_ns - durations_ns)
    return shared_ns


def _everywhere(saved_ns: Floats, used: NDArray[np.bool_]) -> Floats:
    """[S]; of steps that say nothing about it (the longest, epoch starts) at most what the others have on average.

    They wait as the others do; what they have beyond that is for other rules to tell.
    """
    return np.where(used, saved_ns, np.minimum(saved_ns, saved_ns[used].mean()))


def find_compute_bound(view: View) -> list[Claim]:
    """Forward, backward and optimizer take nearly all of the step: said beside ``healthy``."""
    if not view.enough:
        return []
    used, _ = ordinary_steps(view)
    durations_ns = np.sum([view.phase(name) for name in COMPUTE_PHASES], axis=0)
    part = part_of(view, durations_ns, used)
    if part.share < thresholds.COMPUTE_SHARE:
        return []
    names = [name for name in COMPUTE_PHASES if name != GRAPH_PHASE or name in view.phases]
    by_phase: dict[str, Any] = {name: round(part_of(view, view.phase(name), used).share, 4) for name in names}
    graphed = by_phase.get(GRAPH_PHASE, 0.0)
    what = "forward, backward and optimizer" if part.share - graphed >= thresholds.OPPORTUNITY_SHARE else ""
    what = " and ".join(filter(None, (what, "replays of a CUDA graph" if graphed else "")))
    finding = Finding(
        kind="compute_bound",
        severity="info",
        title=f"The time goes into the training itself: {what} are {share_text(part.share)}.",
        steps=view.span,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "clock": view.clock,
            "compute_share": round(part.share, 4),
            "shares": by_phase,
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "steps_used": int(used.sum()),
        },
        advice=for_compute(view),
        confidence=0.9,
    )
    return [Claim(finding=finding, saved_ns=np.zeros(len(view.steps)))]
