"""After the chain: findings that a crowded machine explains become information.

Other programs take a machine's processors at times.  Then some steps and stretches get longer, the late rank changes,
one rank is late for a while, or a phase of all ranks seems long that is not.  Where the agent sampled how long ranks
waited for a processor (``engine/processor_wait.py``), that time decides; elsewhere a full CPU and the fastest steps do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.processor_wait import waited_ns, waiting_shares
from stepscope.diagnosis.engine.view import View, lower_median_rank
from stepscope.diagnosis.rules.between_steps import STOPS
from stepscope.diagnosis.rules.machine import others_fill
from stepscope.diagnosis.rules.spikes import is_irregular
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import longest
from stepscope.records.finding import Finding, as_remark

__all__ = ["BOTTLENECKS", "UNEVEN", "lower_crowded"]

Floats = NDArray[np.float64]
UNEVEN = ("rotating_straggler", "pipeline_bubble", "drift", "change_point", "throughput_drop", "slow_collective")
"""Kinds that a busy machine causes as well."""
BOTTLENECKS = {
    "input_bound": thresholds.INPUT_SHARE,
    "h2d_bound": thresholds.H2D_SHARE,
    "comm_bound": thresholds.COMM_SHARE,
    "comm_hook_bound": thresholds.COMM_HOOK_SHARE,
    "optimizer_bound": thresholds.OPTIMIZER_SHARE,
    "wait_heavy": thresholds.OTHER_SHARE,
    "between_steps": thresholds.BETWEEN_SHARE,
}
"""Where the time goes on all ranks alike, with the share from which on each is reported."""


def lower_crowded(view: View, claims: Sequence[Claim], *, cpu_saturated: bool) -> list[Claim]:
    """The same claims; ``cpu_saturated``: whether the samples of the machine warn of a full CPU."""
    if not claims or not view.enough:
        return list(claims)
    waited = waited_ns(view)
    crowded = cpu_saturated or (waited is not None and _waits(view, waited)) or others_fill(view)
    if crowded:
        return [_as_info(claim) if _is_from_crowding(view, claim.finding, waited) else claim for claim in claims]
    if waited is not None:
        return [_as_info(claim) if _only_waits(view, claim, waited) else claim for claim in claims]
    return list(claims)


def _is_from_crowding(view: View, finding: Finding, waited: Floats | None) -> bool:
    varying = finding.kind == "imbalance" and finding.evidence.get("by") == "steps"
    uneven = is_irregular(finding) or varying or finding.kind in UNEVEN
    return uneven or _is_over(view, finding) or _is_disturbed(view, finding, waited)


def _waits(view: View, waited: Floats) -> bool:
    """Whether some rank spends a good part of its work waiting for a processor."""
    shares = waiting_shares(view, waited, slice(None))
    return bool(np.nanmax(shares, initial=0.0) >= thresholds.WAITING_SHARE)


def _is_disturbed(view: View, finding: Finding, waited: Floats | None) -> bool:
    """Whether a bottleneck of all ranks may be no more than their waiting for a processor.

    Nobody knows in which phase they waited.  Where it is not known how long, the fastest steps count, which other
    programs disturbed least.
    """
    least = BOTTLENECKS.get(finding.kind)
    if finding.kind == "between_steps" and finding.phase in STOPS and waited is not None:
        had = 1.0 - min(float(np.nanmean(waited)) / float(np.nanmean(view.work_ns)), thresholds.WAITING_AT_MOST)
        return bool(finding.cost["share"] * had < thresholds.BETWEEN_SHARE)
    if least is None or finding.ranks or finding.phase not in view.phases or finding.phase in STOPS:
        return False
    durations_ns = lower_median_rank(view.between_ns if finding.kind == "between_steps" else view.phase(finding.phase))
    if waited is None:
        fast = view.step_ns <= np.quantile(view.step_ns, thresholds.UNDISTURBED_STEPS)
        return float(durations_ns[fast].sum()) < least * float(view.step_ns[fast].sum())
    return float(durations_ns.mean()) - float(np.nanmean(waited)) < least * float(view.step_ns.mean())


def _only_waits(view: View, claim: Claim, waited: Floats) -> bool:
    """Whether the steps that a change or a stretch makes longer would be as short as the others without waiting."""
    hit = claim.explained_ns > 0
    if claim.finding.kind not in (*UNEVEN, "stall", "jitter") or hit.all() or not hit.any():
        return False
    shares = np.minimum(longest(waited / view.wall_ns), thresholds.WAITING_AT_MOST)
    known = ~np.isnan(shares)
    if not known[hit].any() or not known[~hit].any():
        return False
    inside, outside = float(np.nanmean(shares[hit])), float(np.nanmean(shares[~hit]))
    left_ns = float(view.step_ns[hit].mean()) * (1.0 - inside) / (1.0 - outside) - float(view.step_ns[~hit].mean())
    return left_ns < thresholds.EXPLAINS_SHARE * float(claim.explained_ns[hit].mean())


def _is_over(view: View, finding: Finding) -> bool:
    """Whether a rank computed more slowly for a while and then recovered."""
    slow = finding.kind in ("compute_straggler", "straggler")
    return slow and finding.steps is not None and finding.steps[1] < view.span[1]


def _as_info(claim: Claim) -> Claim:
    return replace(claim, finding=as_remark(claim.finding))
