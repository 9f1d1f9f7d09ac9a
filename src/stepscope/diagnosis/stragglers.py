"""Uneven ranks: the rank that all others wait for, and the phase that makes it late.

Two ways to tell the culprit from its victims, in this order.

*By work.*  Where waiting is measured (or ranks do not run in lockstep) the culprit works longer than its peers: it is
the rank that waits least.

*By phase.*  A single phase is much less noisy than all work together, so an excess may be certain there and lost in the
whole; where waiting is measured the rank's work must then still lean the same way.  Where waiting hides inside other
phases, every rank's work is equally long: the culprit takes longer than its peers in one phase and makes up for it in
another, where they wait and it does not.  A phase is more or less likely to hide a wait (``WAIT_HIDES_IN``); the rank
whose surplus lies in the less likely one is the culprit, the other way round it is a victim.

Each comparison is made step by step against the median of the peers; an excess must matter (``EXCESS_…``), be
significant over stretches of the run after correction for the number of comparisons, and stand out from slow wander.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice import for_straggler, named_ranks
from stepscope.diagnosis.robust import median_rank, medians, peer_deviation, persistence_z, shortest, z_needed
from stepscope.diagnosis.units import ms_text
from stepscope.diagnosis.view import View, cost_of, replay_without
from stepscope.records.finding import Finding, Severity

__all__ = ["find_stragglers"]

Floats = NDArray[np.float64]

WAIT_HIDES_IN = ("input", "h2d", "", "checkpoint", "optimizer", "eval", "other", "forward", "backward", "comm")
"""From the phase least likely to hide a wait for peers to the most likely; "" stands for the user's own phases.
Collectives run inside backward (DDP, FSDP) and forward (FSDP, SyncBatchNorm, buffers), and ``.item()`` or a barrier in
the loop (``other``) waits for whatever is outstanding."""
RANKS_SHOWN = 64
"""Above it the evidence lists the culprits only, against the median of the others."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    rank: int
    """Index into the view's ranks."""
    phase: str | None
    excess_ns: float
    by_work: bool
    z: float


def find_stragglers(view: View) -> list[Finding]:
    if len(view.ranks) < 2 or len(view.steps) < thresholds.MIN_STEPS:
        return []
    deviations = {name: medians(peer_deviation(view.phase(name))) for name in view.phases}
    work = peer_deviation(view.work_ns)
    suspects = _by_work(view, deviations, work)
    known = {suspect.rank for suspect in suspects}
    suspects += [suspect for suspect in _by_phase(view, deviations, medians(work)) if suspect.rank not in known]
    groups: dict[tuple[str | None, bool], list[Suspect]] = {}
    for suspect in suspects:
        groups.setdefault((suspect.phase, suspect.by_work), []).append(suspect)
    return [_finding(view, group, deviations) for group in groups.values()]


def _by_work(view: View, deviations: dict[str, Floats], work: Floats) -> list[Suspect]:
    found = []
    for rank, excess_ns, z in _excesses(view, work, comparisons=len(view.ranks)):
        parts = {name: float(by_rank[rank]) for name, by_rank in deviations.items() if name != "comm"}
        name, most = max(parts.items(), key=lambda item: item[1], default=("", 0.0))
        phase = name if most >= thresholds.EXPLAINS_SHARE * excess_ns else None
        found.append(Suspect(rank=rank, phase=phase, excess_ns=excess_ns, by_work=True, z=z))
    return found


def _by_phase(view: View, deviations: dict[str, Floats], work: Floats) -> list[Suspect]:
    names = [name for name in view.phases if name != "comm"]
    comparisons = len(names) * len(view.ranks)
    best: dict[int, Suspect] = {}
    for name in names:
        if not (deviations[name] >= _least_excess(view)).any():
            continue
        for rank, excess_ns, z in _excesses(view, peer_deviation(view.phase(name)), comparisons=comparisons):
            carried = view.comm_measured and work[rank] >= thresholds.CARRIED_SHARE * excess_ns
            holds_back = carried or _made_up_by_peers_waiting(view, deviations, name, rank, excess_ns)
            if holds_back and (rank not in best or excess_ns > best[rank].excess_ns):
                best[rank] = Suspect(rank=rank, phase=name, excess_ns=excess_ns, by_work=False, z=z)
    return list(best.values())


def _made_up_by_peers_waiting(
    view: View, deviations: dict[str, Floats], phase: str, rank: int, excess_ns: float
) -> bool:
    """Whether the rank is shorter than its peers where they are more likely to wait than in ``phase``."""
    other = min(deviations, key=lambda name: float(deviations[name][rank]))
    if view.comm_measured and other == "backward":
        return False  # the wait in backward is known: less of it is just less work
    enough = -deviations[other][rank] >= thresholds.EXPLAINS_SHARE * excess_ns
    return bool(enough) and _hides_wait(phase) < _hides_wait(other)


def _excesses(view: View, deviation: Floats, *, comparisons: int) -> Iterable[tuple[int, float, float]]:
    """(rank index, excess, z) of the ranks whose deviation matters and is no accident."""
    typical = medians(deviation)
    candidates = np.flatnonzero(typical >= _least_excess(view))
    needed = z_needed(comparisons)
    for rank in candidates:
        own = deviation[rank][~np.isnan(deviation[rank])]
        if len(own) >= thresholds.MIN_STEPS:
            z = persistence_z(own)
            if z >= needed:
                yield int(rank), float(typical[rank]), z


def _least_excess(view: View) -> float:
    return max(thresholds.EXCESS_SHARE * view.median_step_ns, thresholds.EXCESS_FLOOR_NS)


def _hides_wait(phase: str) -> int:
    return WAIT_HIDES_IN.index(phase if phase in WAIT_HIDES_IN else "")


def _finding(view: View, group: list[Suspect], deviations: dict[str, Floats]) -> Finding:
    phase = group[0].phase
    culprits = np.array(sorted(suspect.rank for suspect in group))
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    durations_ns = view.work_ns if worst.by_work or phase is None else view.phase(phase)
    cost = cost_of(view, _saved(view, culprits, phase, by_work=worst.by_work))
    ranks = tuple(view.ranks[index] for index in culprits)
    return Finding(
        kind="straggler",
        severity=_severity(cost["share"], worst.excess_ns),
        title=_title(view, ranks, phase, worst.excess_ns),
        ranks=ranks,
        phase=phase,
        steps=(int(view.steps[0]), int(view.steps[-1])),
        cost=cost,
        evidence=_evidence(view, group, durations_ns, deviations),
        advice=for_straggler(ranks, tuple(view.hosts[index] for index in culprits), phase, len(view.ranks)),
        confidence=_confidence(view, worst),
    )


def _saved(view: View, culprits: NDArray[np.intp], phase: str | None, *, by_work: bool) -> Floats:
    """[S]; what each step would be shorter by, had the culprits taken as long as the others in that phase."""
    if phase is None:
        return replay_without(view.work_ns, culprits, _others_median(view.work_ns, culprits))
    durations_ns = view.phase(phase)
    typical_ns = _others_median(durations_ns, culprits)
    if not (view.comm_measured or by_work):
        # Work is unknown: the phase alone decides who is last.
        return replay_without(durations_ns, culprits, typical_ns)
    in_other_phases = view.work_ns[culprits] - durations_ns[culprits]
    return replay_without(view.work_ns, culprits, in_other_phases + typical_ns)


def _others_median(durations_ns: Floats, culprits: NDArray[np.intp]) -> Floats:
    """[S]; the median of the ranks that are no culprits; where none of them is left, what the best culprit took."""
    typical = median_rank(np.delete(durations_ns, culprits, axis=0))
    return np.where(np.isnan(typical), shortest(durations_ns), typical)


def _severity(share: float, excess_ns: float) -> Severity:
    if share < thresholds.WARNING_SHARE or excess_ns < thresholds.WARNING_FLOOR_NS:
        return "info"
    return "critical" if share >= thresholds.CRITICAL_SHARE else "warning"


def _title(view: View, ranks: tuple[int, ...], phase: str | None, excess_ns: float) -> str:
    who = f"Rank {ranks[0]} is" if len(ranks) == 1 else f"{named_ranks(ranks)} are"
    where = f" in {phase}" if phase else ", in no single phase,"
    if phase == "other":
        where = " outside model and optimizer (other)"
    waiting = "the other rank waits" if len(view.ranks) == 2 else "all other ranks wait"
    if len(ranks) > 1:
        waiting = "the other ranks wait"
    if not view.lockstep:
        waiting = "ranks do not wait for each other here, but the run lasts as long as its slowest"
    return f"{who} {ms_text(excess_ns / 1e6)} slower than the peers{where} every step; {waiting}."


def _evidence(view: View, group: list[Suspect], durations_ns: Floats, deviations: dict[str, Floats]) -> dict[str, Any]:
    culprits = np.array(sorted(suspect.rank for suspect in group))
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    by_rank = medians(durations_ns) / 1e6
    last = np.argmax(np.where(np.isnan(durations_ns), -np.inf, durations_ns), axis=0)
    shown = by_rank if len(by_rank) <= RANKS_SHOWN else by_rank[culprits]
    numbers = view.ranks if len(by_rank) <= RANKS_SHOWN else [view.ranks[index] for index in culprits]
    return {
        "compared": "work" if worst.by_work or worst.phase is None else worst.phase,
        "clock": view.clock,
        "excess_ms": round(worst.excess_ns / 1e6, 3),
        "excess_share": round(worst.excess_ns / view.median_step_ns, 4),
        "median_ms_by_rank": {str(rank): round(float(value), 3) for rank, value in zip(numbers, shown, strict=True)},
        "peers_median_ms": round(float(np.nanmedian(np.delete(by_rank, culprits))), 3)
        if len(culprits) < len(by_rank)
        else None,
        "excess_ms_by_phase": {
            name: round(float(by_phase[worst.rank]) / 1e6, 3) for name, by_phase in deviations.items()
        },
        "last_in_steps": int(np.isin(last, culprits).sum()),
        "steps_used": len(view.steps),
        "wait_measured": view.comm_measured,
        "lockstep": view.lockstep,
        "z": None if np.isinf(worst.z) else round(worst.z, 2),
    }


def _confidence(view: View, worst: Suspect) -> float:
    confidence = 0.97 if worst.by_work else 0.85
    if not worst.by_work and len(view.ranks) == 2:
        # One rank's surplus is the other's shortfall: which of the two waits is a guess from the kind of phase.
        confidence = 0.6
    if worst.phase is None:
        confidence -= 0.2
    if len(view.steps) < 3 * thresholds.MIN_STEPS:
        confidence -= 0.1
    return confidence
