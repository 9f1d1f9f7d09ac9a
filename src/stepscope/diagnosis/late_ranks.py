"""From suspects to findings: which kind, who together, what it costs, in which words.

The kind says where a rank loses its time: ``input_straggler``, ``h2d_straggler``, ``compute_straggler`` (forward,
backward or optimizer), ``between_steps`` (work that only this rank does between two steps), ``straggler`` (in no single
phase, or in one that is none of these), ``node_straggler`` (all ranks of a host).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice import for_experts, for_straggler
from stepscope.diagnosis.claims import Claim, severity_of
from stepscope.diagnosis.expert_tokens import times_the_tokens
from stepscope.diagnosis.host_bound import host_ns, waits_for_host
from stepscope.diagnosis.least_step import least_step_ns
from stepscope.diagnosis.places import seen_at
from stepscope.diagnosis.robust import median_rank, medians, shortest
from stepscope.diagnosis.view import View, cost_of, replay_without
from stepscope.records.finding import Finding
from stepscope.records.phases import COMPUTE_PHASES, GRAPH_PHASE
from stepscope.records.units import ms_text, named_ranks

__all__ = ["BETWEEN", "Suspect", "claims_of"]

Floats = NDArray[np.float64]

BETWEEN = "between"
"""Stands for the part of ``other`` that lies between two steps, wherever times are compared by phase."""
KINDS = {
    "input": "input_straggler",
    "h2d": "h2d_straggler",
    "forward": "compute_straggler",
    "backward": "compute_straggler",
    "optimizer": "compute_straggler",
    GRAPH_PHASE: "compute_straggler",
    "eval": "between_steps",
    "checkpoint": "between_steps",
}
RANKS_SHOWN = 64
"""Above it the evidence lists the culprits only, against the median of the others."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    rank: int
    """Index into the view's ranks."""
    phase: str | None
    at: slice
    """Columns of the view."""
    excess_ns: float
    by_phase: dict[str, float]
    """Its excess in each phase, and ``BETWEEN``."""
    by_work: bool
    sampled: bool
    """Whether it is known from DDP's samples only."""
    z: float

    @property
    def kind(self) -> str:
        if self.phase == "other" and self.by_phase.get(BETWEEN, 0.0) >= thresholds.EXPLAINS_SHARE * self.excess_ns:
            return "between_steps"
        return KINDS.get(self.phase or "", "straggler")


def claims_of(view: View, suspects: Sequence[Suspect]) -> list[Claim]:
    claims = []
    left = list(suspects)
    for host in _slow_hosts(view, suspects):
        own = [suspect for suspect in left if view.hosts[suspect.rank] == host]
        left = [suspect for suspect in left if view.hosts[suspect.rank] != host]
        claims.append(_claim(view, own, kind="node_straggler"))
    groups: list[list[Suspect]] = []
    for suspect in left:
        _join(groups, suspect)
    claims += [_claim(view, group, kind=group[0].kind) for group in groups]
    return [claim for claim in claims if claim.finding.cost["share"] >= thresholds.PASSING_SHARE or _whole(view, claim)]


def _whole(view: View, claim: Claim) -> bool:
    """Whether it speaks of all steps."""
    return claim.finding.steps == view.span


def _join(groups: list[list[Suspect]], suspect: Suspect) -> None:
    """To those who are late in the same way and began at about the same time."""
    for group in groups:
        if _alike(group[0], suspect):
            group.append(suspect)
            return
    groups.append([suspect])


def _alike(one: Suspect, other: Suspect) -> bool:
    together = abs(one.at.start - other.at.start) <= thresholds.STRETCH_STEPS
    known_by = (one.by_work, one.sampled) == (other.by_work, other.sampled)
    return together and known_by and (one.kind, one.phase) == (other.kind, other.phase)


def _slow_hosts(view: View, suspects: Sequence[Suspect]) -> list[str]:
    """Hosts nearly all of whose ranks are late while at least half of the hosts are not so."""
    members, late = Counter(view.hosts), Counter(view.hosts[suspect.rank] for suspect in suspects)
    slow = [host for host, count in late.items() if count >= max(2, thresholds.NODE_SHARE * members[host])]
    return slow if 0 < len(slow) <= len(members) / 2 else []


def _claim(view: View, group: list[Suspect], *, kind: str) -> Claim:
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    phases = {suspect.phase for suspect in group}
    phase = phases.pop() if len(phases) == 1 else None
    by_work = all(suspect.by_work for suspect in group)
    culprits = np.array(sorted(suspect.rank for suspect in group))
    at = slice(min(suspect.at.start for suspect in group), max(suspect.at.stop for suspect in group))
    if all(suspect.sampled for suspect in group):
        saved_ns = np.full(len(view.steps), worst.excess_ns)
    else:
        saved_ns = _saved(view, culprits, phase, at, by_work=by_work)
        saved_ns[at] -= _too_much_by_chance(view, worst.rank, saved_ns[at], at)
    if view.comm_measured:
        saved_ns = np.minimum(saved_ns, view.step_ns - least_step_ns(view))
    cost = cost_of(view, saved_ns)
    ranks = tuple(view.ranks[index] for index in culprits)
    hosts = tuple(view.hosts[index] for index in culprits)
    side = _side(view, worst, phase)
    place = _place(view, ranks, kind, phase, at, side)
    tokens = _times_the_tokens(view, culprits, at) if kind in ("compute_straggler", "straggler") else 1.0
    routed = tokens >= thresholds.BYTES_ALIKE
    finding = Finding(
        kind="imbalance" if routed else kind,
        severity=severity_of(cost["share"], worst.excess_ns),
        title=_title(view, kind, group, phase, at, place, tokens),
        ranks=ranks,
        phase=phase,
        steps=(int(view.steps[at.start]), int(view.steps[at.stop - 1])),
        cost=cost,
        evidence=_evidence(view, group, culprits, phase, at, by_work=by_work, place=place)
        | {"side": side}
        | ({"by": "experts", "times_the_bytes": round(tokens, 3)} if routed else {}),
        advice=for_experts(same_batches=_same_batches(view))
        if routed
        else for_straggler(
            ranks,
            hosts,
            phase,
            world_size=len(view.ranks),
            place=place,
            node=kind == "node_straggler",
            side=side,
            share_samples=view.window.share_samples,
            splits_sequences=view.window.splits_sequences,
        ),
        confidence=_confidence(view, worst, at),
    )
    return Claim(finding=finding, saved_ns=saved_ns)


def _times_the_tokens(view: View, culprits: NDArray[np.intp], at: slice) -> float:
    """How many times the bytes of their peers these ranks have in all_to_alls; 1: as many, or not known."""
    routed = view.window.routed
    if routed is None:
        return 1.0
    peers = np.flatnonzero(np.isin(view.groups, view.groups[culprits]))
    others = view.rows[np.setdiff1d(peers, culprits)]
    return times_the_tokens(
        routed, view.rows[culprits], others, slice(view.columns[at.start], view.columns[at.stop - 1] + 1)
    )


def _same_batches(view: View) -> bool:
    return view.window.routed is not None and view.window.routed.same_batches


def _place(view: View, ranks: tuple[int, ...], kind: str, phase: str | None, at: slice, side: str | None) -> str:
    """The line in which they were seen meanwhile; a host's line does not explain why a device takes longer."""
    if view.clock == "device" and phase in COMPUTE_PHASES and side != "host":
        return ""
    first, last = int(view.steps[at.start]), int(view.steps[at.stop - 1])
    steps = None if (first, last) == view.span else range(first, last + 1)
    between = kind == "between_steps" if phase == "other" else None
    return seen_at(view, ranks, phase=phase, steps=steps, between=between)


def _side(view: View, worst: Suspect, phase: str | None) -> str | None:
    """``device``: a rank launched in time and its kernels took longer; ``host``: its device waited for its launches.

    None where that cannot be told: a host that takes long in that phase may be what its device waits for, or may stand
    still itself because its device is behind.
    """
    if view.clock != "device" or phase is None:
        return None
    own_ns = float(medians(host_ns(view, phase, worst.at)[[worst.rank]])[0])
    if own_ns < thresholds.AHEAD_SHARE * worst.excess_ns:
        return "device"
    return "host" if waits_for_host(view, worst) else None


def _saved(view: View, culprits: NDArray[np.intp], phase: str | None, at: slice, *, by_work: bool) -> Floats:
    """[S]; what each step would be shorter by, had the culprits taken as long as their peers."""
    durations_ns = view.work_ns if phase is None or by_work else view.phase(phase)
    typical_ns = np.full((len(culprits), len(view.steps)), np.inf)
    typical_ns[:, at] = _peers_median(view, durations_ns, culprits)[:, at]
    if phase is None or by_work or not view.comm_measured:
        # Who is late by all its work is priced by all of it; without knowing the work, the phase alone decides.
        return replay_without(durations_ns, culprits, typical_ns)
    in_other_phases = view.work_ns[culprits] - durations_ns[culprits]
    return replay_without(view.work_ns, culprits, in_other_phases + typical_ns)


def _too_much_by_chance(view: View, rank: int, saved_ns: Floats, at: slice) -> float:
    """What the steps that were timed on the device save more than all steps would; negative: less.

    The host of the rank that all wait for has timed every step: if those timed on the device happen to be longer, they
    save more as well, as far as the two go together.  While a host gets ahead of its device its steps are too short: a
    difference that chance does not explain is left alone, and so is one that is not known.
    """
    if view.clock != "device":
        return 0.0
    first, stop = view.columns[at.start], view.columns[at.stop - 1] + 1
    all_ns = view.window.wall_ns[view.rows[rank], first:stop][view.window.steady[first:stop]]
    all_ns = all_ns[~np.isnan(all_ns)]
    if not len(all_ns):
        return 0.0
    timed_ns = view.step_ns[at]
    off_ns = timed_ns - timed_ns.mean()
    squares = float(off_ns @ off_ns)
    too_long_ns = float(timed_ns.mean() - all_ns.mean())
    error_ns = np.sqrt(squares) / len(timed_ns)
    if squares == 0 or not abs(too_long_ns) <= thresholds.CHANCE_ERRORS * error_ns:
        return 0.0
    together = float(off_ns @ np.nan_to_num(saved_ns)) / squares
    return float(np.clip(together, 0.0, 1.0)) * too_long_ns


def _peers_median(view: View, durations_ns: Floats, culprits: NDArray[np.intp]) -> Floats:
    """[culprits, S]; the median of the peers that are no culprits; where none is left, what the best culprit took."""
    out = np.empty((len(culprits), durations_ns.shape[1]))
    for group in np.unique(view.groups[culprits]):
        members = np.flatnonzero(view.groups == group)
        typical = median_rank(durations_ns[np.setdiff1d(members, culprits)])
        out[view.groups[culprits] == group] = np.where(np.isnan(typical), shortest(durations_ns[members]), typical)
    return out


def _title(view: View, kind: str, group: list[Suspect], phase: str | None, at: slice, place: str, tokens: float) -> str:
    ranks = tuple(view.ranks[suspect.rank] for suspect in sorted(group, key=lambda suspect: suspect.rank))
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    excess = ms_text(worst.excess_ns / 1e6)
    when = _when(view, at)
    waiting = "the other rank waits" if len(view.ranks) == 2 else "all other ranks wait"
    if len(ranks) > 1:
        waiting = "the other ranks wait"
    if not view.lockstep:
        waiting = "ranks do not wait for each other here, but the run lasts as long as its slowest"
    if kind == "node_straggler":
        host = view.hosts[group[0].rank]
        where = f" in {phase}" if phase else ""
        slower = f"are up to {excess} slower than their peers"
        return f"All {len(ranks)} ranks of host {host} {slower}{where} {when}; {waiting}."
    if kind == "between_steps":
        doing = {"eval": "evaluating", "checkpoint": "in checkpoints"}.get(phase or "", "between two steps")
        spend = "spends" if len(ranks) == 1 else "spend"
        seen = f" ({place})" if place else ""
        return f"{named_ranks(ranks)} {spend} {excess} more than the peers {doing}{seen} {when}; {waiting}."
    who = f"Rank {ranks[0]} is" if len(ranks) == 1 else f"{named_ranks(ranks)} are"
    seen = f" ({place})" if place else ""
    where = {None: ", in no single phase,", "other": f" within the step but in no known phase{seen}"}.get(
        phase, f" in {phase}{seen}"
    )
    if tokens >= thresholds.BYTES_ALIKE:
        it = "it has" if len(ranks) == 1 else "they have"
        more = f"{it} {tokens:.2g}× the bytes of the peers in all_to_all"
        its = "its" if len(ranks) == 1 else "their"
        why = f"{its} experts get more tokens ({more})" if _same_batches(view) else more
        return f"{who} {excess} slower than the peers{where} {when}: {why}; {waiting}."
    return f"{who} {excess} slower than the peers{where} {when}; {waiting}."


def _when(view: View, at: slice) -> str:
    """``every step``, ``since step 40``, ``in steps 40 to 80``."""
    if at.start <= thresholds.STRETCH_STEPS and at.stop >= len(view.steps) - thresholds.STRETCH_STEPS:
        return "every step"
    if at.stop >= len(view.steps) - thresholds.STRETCH_STEPS // 2:
        return f"since step {int(view.steps[at.start])}"
    return f"in steps {int(view.steps[at.start])} to {int(view.steps[at.stop - 1])}"


def _evidence(
    view: View,
    group: list[Suspect],
    culprits: NDArray[np.intp],
    phase: str | None,
    at: slice,
    *,
    by_work: bool,
    place: str,
) -> dict[str, Any]:
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    durations_ns = (view.work_ns if by_work or phase is None else view.phase(phase))[:, at]
    by_rank = medians(durations_ns) / 1e6
    last = np.argmax(np.where(np.isnan(durations_ns), -np.inf, durations_ns), axis=0)
    shown = np.arange(len(by_rank)) if len(by_rank) <= RANKS_SHOWN else culprits
    others = np.delete(by_rank, culprits)
    others = others[~np.isnan(others)]
    return {
        "compared": "ddp" if worst.sampled else "work" if by_work or phase is None else phase,
        "clock": view.clock,
        "excess_ms": round(worst.excess_ns / 1e6, 3),
        "excess_share": round(worst.excess_ns / (view.median_step_ns or 1.0), 4),
        "median_ms_by_rank": {
            str(view.ranks[index]): None if np.isnan(by_rank[index]) else round(float(by_rank[index]), 3)
            for index in shown
        },
        "peers_median_ms": round(float(np.median(others)), 3) if len(others) else None,
        "excess_ms_by_phase": {name: round(excess_ns / 1e6, 3) for name, excess_ns in worst.by_phase.items()},
        "last_in_steps": int(np.isin(last, culprits).sum()),
        "steps_used": at.stop - at.start,
        "wait_measured": view.comm_measured,
        "lockstep": view.lockstep,
        "hosts": sorted({view.hosts[index] for index in culprits}),
        "place": place or None,
        "z": None if np.isinf(worst.z) else round(worst.z, 2),
    }


def _confidence(view: View, worst: Suspect, at: slice) -> float:
    confidence = 0.97 if worst.by_work else 0.85
    if not (worst.by_work or worst.sampled or view.comm_measured) and len(view.ranks) == 2:
        # One rank's surplus is the other's shortfall: which of the two waits is a guess from the kind of phase.
        confidence = 0.6
    if worst.phase is None:
        confidence -= 0.2
    if at.stop - at.start < 3 * thresholds.MIN_STEPS:
        confidence -= 0.1
    return confidence
