"""Stragglers: ranks that the others wait for, since when, in which phase, and at what cost.

There are three ways to tell the culprit from its victims, in this order.

*By work.*  Where waiting is measured (or ranks do not run in lockstep) the culprit works longer than its peers: it is
the rank that waits least.

*By phase.*  A single phase is much less noisy than all work together, so an excess may be certain there and lost in the
total; where waiting is measured the rank's work must then still lean the same way.  Where waiting hides inside other
phases, every rank's work is equally long: the culprit takes longer than its peers in one phase and makes up for it in
another, where they wait and it does not.  Phases differ in how likely they are to hide a wait (``WAIT_HIDES_IN``); a
rank with its surplus in the less likely one is the culprit, the other way round it is a victim.

*By DDP's own samples.*  Where waiting on a GPU was not measured, DDP occasionally reports how long the gradients took
to compute, and the rank that needs longest is the culprit.

On NCCL a wait is measured where the device's stream waits (``recorder/hooks/ddp.py``).  Where it was not, it may hide
in any phase of the waiting ranks, and no rank is named by phase: it would be the victim as often as the culprit.

Each comparison is made step by step against the median of the peers, ranks that do as much work.  Whether an excess is
significant, and what late ranks cost, is decided in ``judge/late_ranks.py``, also for traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.batches import uneven_batches_of
from stepscope.diagnosis.engine.claims import exchange_at_stake_ns, least_step_ns
from stepscope.diagnosis.engine.code_location import seen_at
from stepscope.diagnosis.engine.processor_wait import (
    excess_without_waiting,
    levels_of,
    waited_ns,
    waiting_shares,
    without_waiting,
)
from stepscope.diagnosis.engine.view import (
    View,
    cost_of,
    host_excess_ns,
    host_ns,
    slow_host_phase,
    waits_for_host,
)
from stepscope.diagnosis.engine.window import times_the_tokens
from stepscope.diagnosis.rules.machine import busy_processes
from stepscope.diagnosis.rules.straggler_advice import (
    EXPERT_ADVICE,
    NODE_ADVICE,
    SHARED_CORE_ADVICE,
    straggler_advice,
)
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.late_ranks import Excess, excesses, last_ranks, peers_typical_ns, savings_ns
from stepscope.judge.statistics import (
    between_z,
    fold,
    local_median,
    median_of,
    medians,
    peer_deviation,
    spread,
    z_needed,
)
from stepscope.records.finding import Finding
from stepscope.records.layers import LayerSample, ModelTree
from stepscope.records.steps import COMPUTE_PHASES, GRAPH_PHASE
from stepscope.records.text import ms_text, named_ranks, share_text

__all__ = ["find_stragglers", "hides_wait"]


# -- from suspects to findings ----------------------------------------------------------------------------------------
# The kind says where a rank loses its time: ``input_straggler``, ``h2d_straggler``, ``compute_straggler`` (forward,
# backward or optimizer), ``between_steps`` (work that only this rank does between two steps), ``straggler`` (in no
# single phase, or in any other), ``node_straggler`` (all ranks of a host).

Floats = NDArray[np.float64]

BETWEEN = "between"
"""Names the part of ``other`` that lies between two steps, wherever times are compared by phase."""
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
"""With more ranks the evidence lists the culprits only, against the median of the others."""


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
    computing: bool = False
    """Whether most of it is in forward, backward and optimizer together, although in none of them alone."""

    @property
    def kind(self) -> str:
        if self.phase is None and self.computing:
            return "compute_straggler"
        if self.phase == "other" and self.by_phase.get(BETWEEN, 0.0) >= thresholds.EXPLAINS_SHARE * self.excess_ns:
            return "between_steps"
        return KINDS.get(self.phase or "", "straggler")


def straggler_claims(view: View, suspects: Sequence[Suspect]) -> list[Claim]:
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
    """Whether it covers all steps."""
    return claim.finding.steps == view.span


def _join(groups: list[list[Suspect]], suspect: Suspect) -> None:
    """Add a suspect to the group that is late in the same way since about the same time, or start a new group."""
    for group in groups:
        if _alike(group[0], suspect):
            group.append(suspect)
            return
    groups.append([suspect])


def _alike(suspect: Suspect, other: Suspect) -> bool:
    together = abs(suspect.at.start - other.at.start) <= thresholds.STRETCH_STEPS
    known_by = (suspect.by_work, suspect.sampled) == (other.by_work, other.sampled)
    return together and known_by and (suspect.kind, suspect.phase) == (other.kind, other.phase)


def _slow_hosts(view: View, suspects: Sequence[Suspect]) -> list[str]:
    """Hosts with nearly all ranks late, if at least half of the hosts are not like that."""
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
    gain = _gain(view, worst, saved_ns, at, phase)
    if gain.uncertain:
        less_ns = saved_ns.copy()
        less_ns[at] -= gain.at_stake_ns
        cost["least"] = cost_of(view, less_ns)
    ranks = tuple(view.ranks[index] for index in culprits)
    hosts = tuple(view.hosts[index] for index in culprits)
    side = _side(view, worst, phase)
    place = _place(view, ranks, kind, phase, at, side)
    layer = _slow_layer(view, worst, culprits, at, side) if kind == "compute_straggler" and phase else None
    tokens = _times_the_tokens(view, culprits, at) if kind in ("compute_straggler", "straggler") else 1.0
    routed = tokens >= thresholds.BYTES_ALIKE
    about_batches = _batch_advice(view, ranks, phase)
    about_layer = () if about_batches else _layer_advice(layer, view.ranks[worst.rank])
    advice = straggler_advice(
        ranks,
        hosts,
        phase,
        world_size=len(view.ranks),
        place=place,
        side=side,
        share_samples=view.window.share_samples,
        splits_sequences=view.window.splits_sequences,
    )
    if about_batches:  # which explain the rest, except for a line that only these ranks run
        advice = (*about_batches, *(advice[:1] if place else ()))
    if kind == "node_straggler":
        advice = tuple(line.format(host=hosts[0]) for line in NODE_ADVICE)
    finding = Finding(
        kind="imbalance" if routed else kind,
        severity=severity_by_cost(cost["share"], worst.excess_ns),
        title=_title(view, kind, group, phase, at, place, tokens, layer, gain),
        ranks=ranks,
        phase=phase,
        steps=(int(view.steps[at.start]), int(view.steps[at.stop - 1])),
        cost=cost,
        evidence=_evidence(view, group, culprits, phase, at, by_work=by_work, place=place)
        | {"side": side}
        | gain.evidence
        | (layer.evidence if layer else {})
        | ({"by": "experts", "times_the_bytes": round(tokens, 3)} if routed else {}),
        advice=advice_for(EXPERT_ADVICE, same_batches=_same_batches(view)) if routed else (*about_layer, *advice),
        confidence=_confidence(view, worst, at),
    )
    return Claim(finding=finding, explained_ns=saved_ns)


@dataclass(frozen=True, kw_only=True)
class _Gain:
    """What a title says of the time: per step of the stretch, on average, so that it agrees with the cost."""

    ns: float
    """By which a step is shorter when the ranks are as fast as their peers: the cost, divided by the steps."""
    excess_ns: float
    """By which the slowest of them works longer than its peers; in a title only where others hide most of it."""
    at_stake_ns: float
    """By which the exchange may become longer when all ranks arrive together."""

    @property
    def hidden(self) -> bool:
        """Whether other ranks are late, too, so that fixing these alone gains little."""
        return self.ns < thresholds.EXPLAINS_SHARE * self.excess_ns

    @property
    def uncertain(self) -> bool:
        return not self.hidden and self.at_stake_ns >= max(thresholds.UNCERTAIN_SHARE * self.ns, 1.0)

    @property
    def text(self) -> str:
        if self.hidden:
            return ms_text(self.excess_ns / 1e6)
        return f"{'about ' if self.uncertain else ''}{ms_text(self.ns / 1e6)}"

    @property
    def evidence(self) -> dict[str, Any]:
        least_ns = max(self.ns - self.at_stake_ns, 0.0) if self.uncertain else self.ns
        return {"gain_ms": round(self.ns / 1e6, 3), "least_gain_ms": round(least_ns / 1e6, 3)}


def _gain(view: View, worst: Suspect, saved_ns: Floats, at: slice, phase: str | None) -> _Gain:
    excess_ns = worst.excess_ns
    if view.comm_measured and not worst.sampled:
        # What is longer in one phase may be shorter in another; peers wait for the rest only.
        excess_ns = min(excess_ns, median_of(peer_deviation(view.work_ns, view.groups)[worst.rank, worst.at]))
    gain_ns = float(np.clip(saved_ns, 0.0, view.step_ns)[at].mean())
    at_stake_ns = exchange_at_stake_ns(view, worst.rank, phase, at, gain_ns)
    return _Gain(ns=gain_ns, excess_ns=excess_ns, at_stake_ns=at_stake_ns)


def _times_the_tokens(view: View, culprits: NDArray[np.intp], at: slice) -> float:
    """Bytes of these ranks in all_to_alls as a multiple of their peers'; 1: as many, or unknown."""
    routed = view.window.routed
    if routed is None:
        return 1.0
    peers = np.flatnonzero(np.isin(view.groups, view.groups[culprits]))
    others = view.rows[np.setdiff1d(peers, culprits)]
    return times_the_tokens(
        routed, view.rows[culprits], others, slice(view.columns[at.start], view.columns[at.stop - 1] + 1)
    )


def _batch_advice(view: View, ranks: tuple[int, ...], phase: str | None) -> tuple[str, ...]:
    """What larger batches explain: any phase that handles a batch, on ranks that all have larger ones."""
    found = uneven_batches_of(view) if phase in (None, "input", "h2d", *COMPUTE_PHASES) else None
    if found is None or phase == "optimizer" or not found.are_larger(ranks):
        return ()
    return (f"{found.text}: that is more work for each step. Use one size on all ranks.",)


def _same_batches(view: View) -> bool:
    return view.window.routed is not None and view.window.routed.same_batches


def _place(view: View, ranks: tuple[int, ...], kind: str, phase: str | None, at: slice, side: str | None) -> str:
    """The line where the ranks were during the stretch; a host's line does not explain why a device takes longer."""
    if view.clock == "device" and phase in COMPUTE_PHASES and side != "host":
        return ""
    first, last = int(view.steps[at.start]), int(view.steps[at.stop - 1])
    steps = None if (first, last) == view.span else range(first, last + 1)
    between = kind == "between_steps" if phase == "other" else None
    place = seen_at(view, ranks, phase=phase, steps=steps, between=between)
    if not place and phase == "forward":
        place = seen_at(view, ranks, phase=phase, steps=steps, between=False, loss=True)
    return place


def _side(view: View, worst: Suspect, phase: str | None) -> str | None:
    """``device``: a rank launched in time and its kernels took longer; ``host``: its device waited for its launches.

    None where that cannot be decided: a host that takes long in that phase may be delaying its device, or may itself be
    blocked because its device is behind.
    """
    if view.clock != "device" or phase is None:
        return None
    own_ns = float(medians(host_ns(view, phase, worst.at)[[worst.rank]])[0])
    if own_ns < thresholds.AHEAD_SHARE * worst.excess_ns:
        return "device"
    return "host" if waits_for_host(view, worst) else None


def _saved(view: View, culprits: NDArray[np.intp], phase: str | None, at: slice, *, by_work: bool) -> Floats:
    """[S]; by how much each step would be shorter had the culprits been as fast as their peers."""
    durations_ns = view.work_ns if phase is None or by_work else view.phase(phase)
    typical_ns = np.full((len(culprits), len(view.steps)), np.inf)
    typical_ns[:, at] = peers_typical_ns(durations_ns, culprits, view.groups)[:, at]
    if phase is None or by_work or not view.comm_measured:
        # The cost of a rank that is late by all its work is all of it; if the work is unknown, the phase alone decides.
        return savings_ns(durations_ns, culprits, typical_ns)
    in_other_phases = view.work_ns[culprits] - durations_ns[culprits]
    return savings_ns(view.work_ns, culprits, in_other_phases + typical_ns)


def _too_much_by_chance(view: View, rank: int, saved_ns: Floats, at: slice) -> float:
    """What the steps that were timed on the device save more than all steps would; negative: less.

    The host of the rank that all wait for has timed every step: if those timed on the device happen to be longer, they
    save more as well, to the extent that the two correlate.  While a host gets ahead of its device its steps are too
    short, so a difference that chance does not explain is not corrected, and neither is an unknown one.
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


def _title(
    view: View,
    kind: str,
    group: list[Suspect],
    phase: str | None,
    at: slice,
    place: str,
    tokens: float,
    layer: _SlowLayer | None,
    gain: _Gain,
) -> str:
    ranks = tuple(view.ranks[suspect.rank] for suspect in sorted(group, key=lambda suspect: suspect.rank))
    worst = max(group, key=lambda suspect: suspect.excess_ns)
    excess = gain.text
    when = _when(view, at)
    waiting = "the other rank waits for it" if len(view.ranks) == 2 else "all other ranks wait for it"
    if len(ranks) > 1:
        waiting = "the other ranks wait for them"
    if not view.lockstep:
        waiting = "ranks do not wait for each other here, but the run lasts as long as its slowest"
    its = "its" if len(ranks) == 1 else "their"
    if gain.hidden:
        it = "it" if len(ranks) == 1 else "them"
        waiting = f"fixing {it} alone gains {ms_text(gain.ns / 1e6)}, because other ranks are late, too"
    if kind == "node_straggler":
        host = view.hosts[group[0].rank]
        where = f" in {phase}" if phase else ""
        slower = f"are {excess} slower than their peers"
        return f"All {len(ranks)} ranks of host {host} {slower}{where} {when}; {waiting}."
    if kind == "between_steps":
        doing = {"eval": "evaluating", "checkpoint": "in checkpoints"}.get(phase or "", "between two steps")
        spend = "spends" if len(ranks) == 1 else "spend"
        seen = f" ({place})" if place else ""
        return f"{named_ranks(ranks)} {spend} {excess} more than {its} peers {doing}{seen} {when}; {waiting}."
    who = f"Rank {ranks[0]} is" if len(ranks) == 1 else f"{named_ranks(ranks)} are"
    seen = f" ({place})" if place else ""
    where = {None: ", in no single phase,", "other": f" within the step but outside all phases{seen}"}.get(
        phase, f" in {phase}{seen}"
    )
    if layer is not None:
        which = "" if len(ranks) == 1 else f" on rank {view.ranks[worst.rank]}"
        where += f", {layer.text}{which},"
    if tokens >= thresholds.BYTES_ALIKE:
        it = "it has" if len(ranks) == 1 else "they have"
        more = f"{it} {tokens:.2g}× as many bytes as {its} peers in all_to_all"
        why = f"{its} experts get more tokens ({more})" if _same_batches(view) else more
        return f"{who} {excess} slower than {its} peers{where} {when}: {why}; {waiting}."
    return f"{who} {excess} slower than {its} peers{where} {when}; {waiting}."


def _when(view: View, at: slice) -> str:
    """``every step``, ``from step 40 on``, ``in steps 40 to 80``."""
    if at.start <= thresholds.STRETCH_STEPS and at.stop >= len(view.steps) - thresholds.STRETCH_STEPS:
        return "every step"
    if at.stop >= len(view.steps) - thresholds.STRETCH_STEPS // 2:
        return f"from step {int(view.steps[at.start])} on"
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
    last = last_ranks(durations_ns)
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


# -- the layer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SlowLayer:
    name: str
    own_ms: float
    peers_ms: float
    steps: int
    """Sampled steps that were compared."""
    share: float
    """Of the extra time."""
    backward: bool = False
    """Then functions of autograd that run between layers count as part of the layer before them."""

    @property
    def called(self) -> str:
        """``layers.7.mlp``, ``layer 0``: names in an nn.Sequential are numbers."""
        return f"layer {self.name}" if self.name[:1].isdigit() else self.name

    @property
    def text(self) -> str:
        """``mostly in layers.7.mlp (12.1 ms instead of 2.00 ms)``."""
        how = "mostly" if self.share >= thresholds.LAYER_MOSTLY else f"{share_text(self.share)} of it"
        where = "in or right after" if self.backward else "in"
        return f"{how} {where} {self.called} ({ms_text(self.own_ms)} instead of {ms_text(self.peers_ms)})"

    @property
    def evidence(self) -> dict[str, Any]:
        return {
            "layer": self.name,
            "layer_ms": round(self.own_ms, 3),
            "layer_peers_ms": round(self.peers_ms, 3),
            "layer_steps": self.steps,
        }


def _slow_layer(
    view: View, worst: Suspect, culprits: NDArray[np.intp], at: slice, side: str | None
) -> _SlowLayer | None:
    """The layer in which the slowest of the ranks loses at least half of its extra time, by samples of layers."""
    if worst.phase not in ("forward", "backward"):
        return None
    clock = "host" if side == "host" else view.clock
    rank = view.ranks[worst.rank]
    peers = {view.ranks[row] for row in np.flatnonzero(view.groups == view.groups[worst.rank])}
    peers -= {view.ranks[row] for row in culprits}
    first, last = int(view.steps[at.start]), int(view.steps[at.stop - 1])
    sampled: dict[tuple[str, int], dict[int, LayerSample]] = {}
    for sample in view.window.layers.samples:
        if sample.clock == clock and first <= sample.step <= last:
            sampled.setdefault((sample.model, sample.step), {})[sample.rank] = sample
    compared: dict[str, list[tuple[Floats, Floats]]] = {}
    for (model, _), by_rank in sampled.items():
        others = [by_rank[each] for each in sorted(peers & by_rank.keys())]
        if rank in by_rank and others:
            tree = view.window.layers.models[model]
            usual = np.median([_own_us(tree, sample, worst.phase) for sample in others], axis=0)
            compared.setdefault(model, []).append((_own_us(tree, by_rank[rank], worst.phase), usual))
    excess_us = worst.by_phase.get(worst.phase, worst.excess_ns) / 1e3
    found = [_most_of(view.window.layers.models[model], pairs, excess_us) for model, pairs in compared.items()]
    slow = (replace(layer, backward=worst.phase == "backward") for layer in found if layer is not None)
    return max(slow, key=lambda layer: layer.own_ms - layer.peers_ms, default=None)


def _most_of(tree: ModelTree, pairs: Sequence[tuple[Floats, Floats]], excess_us: float) -> _SlowLayer | None:
    """The module with half of the extra time, both of the finding and of the sampled steps."""
    if len(pairs) < thresholds.LAYER_STEPS:
        return None
    own, usual = (np.stack(rows) for rows in zip(*pairs, strict=True))
    more = np.median(own - usual, axis=0)
    module = int(more.argmax())
    extra_us = max(excess_us, float(np.median((own - usual).sum(axis=1))))
    if not tree.modules[module].name or more[module] < thresholds.EXPLAINS_SHARE * extra_us:
        return None
    peers_us = float(np.median(usual[:, module]))
    return _SlowLayer(
        name=tree.label(module),
        own_ms=(peers_us + float(more[module])) / 1e3,
        peers_ms=peers_us / 1e3,
        steps=len(pairs),
        share=float(more[module]) / extra_us,
    )


def _own_us(tree: ModelTree, sample: LayerSample, phase: str) -> Floats:
    """[M]; each module's time without that of the modules inside it; 0 where it is not known."""
    if phase == "backward":
        return np.nan_to_num(np.array(sample.backward_us, np.float64))
    whole = np.array(sample.forward_us, np.float64)
    inside = np.zeros(len(whole))
    for at in reversed(range(len(whole))):  # parents come before their children
        if np.isnan(whole[at]):  # a ModuleList is not called, but what is in it is
            whole[at] = inside[at]
        if (parent := tree.modules[at].parent) >= 0:
            inside[parent] += whole[at]
    return np.asarray(np.maximum(whole - inside, 0.0), np.float64)


def _layer_advice(layer: _SlowLayer | None, rank: int) -> Iterator[str]:
    if layer is not None:
        after = ", and what runs after it in backward" if layer.backward else ""
        yield f"Compare what {layer.called} does on rank {rank}{after}: input sizes, a branch, a hook, another kernel."


# -- detection --------------------------------------------------------------------------------------------------------

WAIT_HIDES_IN = ("input", "h2d", "", "checkpoint", "optimizer", "eval", "other", "forward", "backward", "comm")
"""From the phase least likely to hide a wait for peers to the most likely; "" means the user's own phases.  Collectives
run inside backward (DDP, FSDP) and forward (FSDP, SyncBatchNorm, buffers), and ``.item()`` or a barrier in the loop
(``other``) waits for whatever is outstanding."""


class _Comparisons:
    """Excess of each rank over its peers, by phase, computed on demand."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.names = [name for name in view.phases if name != "comm"]
        self._known: dict[str, Floats] = {}

    @cached_property
    def work(self) -> Floats:
        return peer_deviation(self.view.work_ns, self.view.groups)

    def phase(self, name: str) -> Floats:
        if name not in self._known:
            durations = self.view.between_ns if name == BETWEEN else self.view.phase(name)
            self._known[name] = peer_deviation(durations, self.view.groups)
        return self._known[name]

    def typical(self, rank: int, at: slice) -> dict[str, float]:
        """Typical excess of one rank in one stretch, by phase."""
        found = {name: median_of(self.phase(name)[rank, at]) for name in self.view.phases}
        if found.get("other", 0.0) >= thresholds.EXPLAINS_SHARE * max(found.values()):
            found[BETWEEN] = median_of(self.phase(BETWEEN)[rank, at])
        return found

    def typical_work(self, rank: int, at: slice) -> float:
        return median_of(self.work[rank, at])


def find_stragglers(view: View) -> list[Claim]:
    suspects = _suspects(view)
    suspects += _of_late_workers(view, {suspect.rank for suspect in suspects})
    waited = waited_ns(view)
    if waited is None:
        return straggler_claims(view, suspects)
    crowded = [suspect for suspect in suspects if _is_crowded_out(view, suspect, waited)]
    own = [suspect for suspect in suspects if suspect not in crowded]
    claims = straggler_claims(view, own)
    known = {rank for claim in claims for rank in claim.finding.ranks}
    if (calm := without_waiting(view)) is not None:
        # Waiting comes and goes with other programs and hides what a rank always does more than its peers.
        hidden = [claim for claim in _found_without_waiting(view, calm) if not known & set(claim.finding.ranks)]
        claims += hidden
        known |= {rank for claim in hidden for rank in claim.finding.ranks}
    return [
        *claims,
        *(_crowded_claim(view, suspect, waited) for suspect in crowded if view.ranks[suspect.rank] not in known),
    ]


def _of_late_workers(view: View, known: Collection[int]) -> list[Suspect]:
    """Ranks (rows) whose DataLoader workers are late: n of them deliver n batches at once, so every n-th step waits."""
    loader = view.facts.get("loader")
    workers = loader.get("num_workers") if isinstance(loader, dict) else None
    if not isinstance(workers, int) or not 2 <= workers <= thresholds.BURST_PERIOD or "input" not in view.phases:
        return []
    at = view.phases.index("input")
    sums = np.cumsum(np.pad(view.phase("input"), ((0, 0), (workers, 0))), axis=1)
    counts = np.minimum(np.arange(1, len(view.steps) + 1), workers)
    mean_ns = (sums[:, workers:] - sums[:, :-workers]) / counts
    phase_ns = view.phase_ns.copy()
    phase_ns[at] = mean_ns
    even = replace(view, phase_ns=phase_ns, wall_ns=view.wall_ns + mean_ns - view.phase("input"))
    return [suspect for suspect in _suspects(even) if suspect.phase == "input" and suspect.rank not in known]


def _found_without_waiting(view: View, calm: View) -> list[Claim]:
    """What shows once the waiting for a processor is subtracted, which is known from second to second only.

    Phases of single seconds are as noisy as before, so ranks are compared by all their work.
    """
    compared = _Comparisons(calm)
    deviation = compared.work
    excesses = _excesses(calm, deviation, comparisons=len(calm.ranks))
    found = {late.rank: late for late in excesses if _lasts_seconds(deviation[late.rank], late.at)}
    for late in _excesses_by_second(calm, deviation):
        found.setdefault(late.rank, late)
    suspects = [
        _without_waiting(compared, late)
        for late in found.values()
        if not _of_rhythm(view.work_ns[late.rank, late.at], late.excess_ns)
    ]
    claims = straggler_claims(calm, suspects)
    return [_priced(view, claim) for claim in claims if claim.finding.cost["share"] >= thresholds.PASSING_SHARE]


def _lasts_seconds(own: Floats, at: slice) -> bool:
    """Whether it lasts to the end, for some seconds: each of them has an error, and what passes is other programs'."""
    return at.stop == len(own) and len(levels_of(own[at])[0]) > thresholds.LEAST_SECONDS


def _of_rhythm(work_ns: Floats, excess_ns: float) -> bool:
    """Whether every n-th step makes the mean as much longer: that is not a rank that is slow."""
    beat = fold(work_ns - local_median(work_ns))
    return beat is not None and beat.excess / beat.period >= thresholds.EXPLAINS_SHARE * excess_ns


def _without_waiting(compared: _Comparisons, late: Excess) -> Suspect:
    means = {name: float(np.nanmean(compared.phase(name)[late.rank, late.at])) for name in compared.names}
    name, most_ns = max(means.items(), key=lambda item: item[1], default=("", 0.0))
    phase = name if most_ns >= thresholds.EXPLAINS_SHARE * late.excess_ns else None
    computing_ns = sum(means.get(name, 0.0) for name in COMPUTE_PHASES)
    suspect = _suspect(late, phase, compared.typical(late.rank, late.at), by_work=True)
    return replace(suspect, computing=computing_ns >= thresholds.EXPLAINS_SHARE * late.excess_ns)


def _excesses_by_second(view: View, deviation: Floats) -> Iterator[Excess]:
    """Ranks whose work is longer than their peers' from some second on, as a t test between the seconds shows."""
    least_ns = _least_excess(view)
    late = np.where(np.isnan(deviation).any(axis=1), -np.inf, deviation[:, len(view.steps) // 2 :].mean(axis=1))
    for rank in np.argsort(-late)[:RANKS_SHOWN]:
        own = deviation[rank]
        if late[rank] < least_ns / 2:
            break
        starts, seconds, _ = levels_of(own)
        best: tuple[float, int] | None = None
        for first in (0, *range(3, len(seconds) - thresholds.LEAST_SECONDS)):
            inside, before = seconds[first:], seconds[: max(first - 1, 0)]  # it may begin within a second
            if inside.mean() - (before.mean() if first else 0.0) < least_ns:
                continue
            z = between_z(inside, before)
            if z >= z_needed(len(deviation) * len(seconds), thresholds.ANY_REMARK) and (best is None or z > best[0]):
                best = z, first
        if best is not None:
            at = slice(int(starts[best[1]]), len(own))
            yield Excess(rank=int(rank), at=at, excess_ns=float(own[at].mean()), z=best[0])


def _priced(view: View, claim: Claim) -> Claim:
    """With its share of the time that really passed; what the rank waits for a processor on top is not its own."""
    cost = cost_of(view, claim.explained_ns)
    calm_cost = claim.finding.cost
    if "least" in calm_cost:
        cost["least"] = cost_of(view, claim.explained_ns * (calm_cost["least"]["share"] / calm_cost["share"]))
    excess_ns = claim.finding.evidence["excess_ms"] * 1e6
    return replace(
        claim, finding=replace(claim.finding, cost=cost, severity=severity_by_cost(cost["share"], excess_ns))
    )


def _suspects(view: View) -> list[Suspect]:
    compared = _Comparisons(view)
    suspects = [suspect for suspect in _by_work(view, compared) if not _is_cleared(view, suspect)]
    known = {suspect.rank for suspect in suspects}
    if view.comm_measured or not view.nccl:
        by_phase = (suspect for suspect in _by_phase(view, compared) if suspect.rank not in known)
        suspects += [suspect for suspect in by_phase if not _is_cleared(view, suspect)]
    if not view.comm_measured:
        known = {suspect.rank for suspect in suspects}
        suspects += [suspect for suspect in _by_ddp(view) if suspect.rank not in known]
    return suspects


def _is_crowded_out(view: View, suspect: Suspect, waited: Floats) -> bool:
    """Whether it is slow because it waits longer for a processor than its peers do for the same work."""
    shares = waiting_shares(view, waited, suspect.at)
    peers = np.delete(shares, suspect.rank)
    if suspect.sampled or not shares[suspect.rank] - np.nanmin(peers, initial=np.inf) >= thresholds.WAITING_MORE_SHARE:
        return False
    durations_ns = view.work_ns if suspect.by_work or suspect.phase is None else view.phase(suspect.phase)
    left_ns = excess_without_waiting(view, durations_ns, suspect.rank, suspect.at, shares)
    return left_ns < thresholds.EXPLAINS_SHARE * suspect.excess_ns


def _crowded_claim(view: View, suspect: Suspect, waited: Floats) -> Claim:
    """Its price is the straggler's; the cause is not its code.  A stall among these steps has another one."""
    claim = _claim(view, [suspect], kind=suspect.kind)
    saved_ns = claim.explained_ns
    if (saved_ns > 0).any():
        saved_ns = np.minimum(saved_ns, (1 + thresholds.STALL_STEPS) * float(np.median(saved_ns[saved_ns > 0])))
    shares = waiting_shares(view, waited, suspect.at)
    own, peers = float(shares[suspect.rank]), float(np.nanmedian(np.delete(shares, suspect.rank)))
    rank, host = view.ranks[suspect.rank], view.hosts[suspect.rank]
    others = "the other rank waits for it" if len(view.ranks) == 2 else "all other ranks wait for it"
    compared = f"{share_text(own)} of its time, its peers {share_text(peers)}"
    each_ms = float(np.nanmean(waited[suspect.rank, suspect.at])) / 1e6
    gain_ms = round(float(saved_ns.sum()) / (suspect.at.stop - suspect.at.start) / 1e6, 3)
    evidence = {
        "gain_ms": gain_ms,
        "least_gain_ms": gain_ms,
        "node": host,
        "cpu_wait_share": round(own, 4),
        "peers_cpu_wait_share": round(peers, 4),
        "busy_processes": [process.document for process in busy_processes(view, host)],
    }
    finding = replace(
        claim.finding,
        kind="cpu_saturated",
        phase=None,
        cost=cost_of(view, saved_ns),
        title=(
            f"Rank {rank} waits {ms_text(each_ms)} a step for a core ({compared}), {_when(view, suspect.at)}; "
            f"{others}, which costs {ms_text(gain_ms)} a step."
        ),
        evidence=claim.finding.evidence | evidence,
        advice=advice_for(
            SHARED_CORE_ADVICE, rank=rank, busy=", ".join(process.text for process in busy_processes(view, host))
        ),
    )
    return replace(claim, finding=finding, explained_ns=saved_ns)


def _by_work(view: View, compared: _Comparisons) -> list[Suspect]:
    found = []
    for excess in _excesses(view, compared.work, comparisons=len(view.ranks)):
        by_phase = compared.typical(excess.rank, excess.at)
        parts = {name: by_phase[name] for name in compared.names}
        name, most = max(parts.items(), key=lambda item: item[1], default=("", 0.0))
        phase = name if most >= thresholds.EXPLAINS_SHARE * excess.excess_ns else None
        suspect = _suspect(excess, phase, by_phase, by_work=True)
        if phase is None and waits_for_host(view, suspect):
            # A device that waits for its host does so a little in every phase; the host knows which one delays it.
            suspect = replace(suspect, phase=slow_host_phase(view, suspect))
        found.append(suspect)
    return found


def _is_cleared(view: View, suspect: Suspect) -> bool:
    """Whether another measurement clears it."""
    return _keeps_pace(view, suspect) or _waits_for_peers(view, suspect)


def _waits_for_peers(view: View, suspect: Suspect) -> bool:
    """Whether NCCL's Flight Recorder shows it waiting for its peers, rather than them for it.

    A wait without a mark (``recorder/hooks/ddp.py`` does not know all of them) looks like work.
    """
    if view.waited_ns is None:
        return False
    more_ns = peer_deviation(view.waited_ns, view.groups)[suspect.rank, suspect.at]
    return median_of(more_ns) >= thresholds.EXPLAINS_SHARE * suspect.excess_ns


def _keeps_pace(view: View, suspect: Suspect) -> bool:
    """Whether its device waits for its host, and that host takes no longer than those of its peers.

    In a job bound by its hosts, the rank that happens to be behind has an idle device, and the others, whose devices
    are a little ahead, wait for it; but none of them would be faster alone.
    """
    return waits_for_host(view, suspect) and host_excess_ns(view, suspect) < thresholds.EXPLAINS_SHARE * (
        suspect.excess_ns
    )


def _by_phase(view: View, compared: _Comparisons) -> list[Suspect]:
    comparisons = len(compared.names) * len(view.ranks)
    best: dict[int, Suspect] = {}
    for name in compared.names:
        for excess in _excesses(view, compared.phase(name), comparisons=comparisons):
            if excess.rank in best and excess.excess_ns <= best[excess.rank].excess_ns:
                continue
            by_phase = compared.typical(excess.rank, excess.at)
            work_ns = compared.typical_work(excess.rank, excess.at)
            carried = view.comm_measured and work_ns >= thresholds.CARRIED_SHARE * excess.excess_ns
            if carried or _made_up_by_peers_waiting(view, by_phase, name, excess.excess_ns):
                best[excess.rank] = _suspect(excess, name, by_phase, by_work=False)
    return list(best.values())


def _by_ddp(view: View) -> list[Suspect]:
    """Compare the n-th sample of all ranks, which is of the same step on each."""
    samples = [view.window.ddp_ns[row] for row in view.rows]
    count = min(map(len, samples), default=0)
    if count < thresholds.DDP_SAMPLES:
        return []
    deviation = peer_deviation(np.stack([own[len(own) - count :] for own in samples]), view.groups)
    found = []
    for rank, own in enumerate(deviation):
        excess_ns = median_of(own)
        always = float((own > 0).mean()) >= thresholds.DDP_SHARE
        if excess_ns >= _least_excess(view) and always and excess_ns >= thresholds.SPREADS_APART * spread(own):
            whole = Excess(rank=rank, at=slice(0, len(view.steps)), excess_ns=excess_ns, z=float("inf"))
            found.append(_suspect(whole, "backward", {"backward": excess_ns}, by_work=False, sampled=True))
    return found


def _suspect(
    excess: Excess, phase: str | None, by_phase: dict[str, float], *, by_work: bool, sampled: bool = False
) -> Suspect:
    return Suspect(
        rank=excess.rank,
        phase=phase,
        at=excess.at,
        excess_ns=excess.excess_ns,
        by_phase=by_phase,
        by_work=by_work,
        sampled=sampled,
        z=excess.z,
    )


def _made_up_by_peers_waiting(view: View, by_phase: dict[str, float], phase: str, excess_ns: float) -> bool:
    """Whether the rank is faster than its peers where they are more likely to wait than in ``phase``."""
    other = min((name for name in by_phase if name != BETWEEN), key=lambda name: by_phase[name])
    if view.comm_measured and other == "backward":
        return False  # the wait in backward is known: less of it is just less work
    enough = -by_phase[other] >= thresholds.EXPLAINS_SHARE * excess_ns
    return bool(enough) and hides_wait(phase) < hides_wait(other)


def hides_wait(phase: str) -> int:
    return WAIT_HIDES_IN.index(phase if phase in WAIT_HIDES_IN else "")


def _excesses(view: View, excess_ns: Floats, *, comparisons: int) -> Iterator[Excess]:
    return excesses(excess_ns, least_ns=_least_excess(view), comparisons=comparisons, stretch=_least_stretch(view))


def _least_stretch(view: View) -> int:
    sampled = view.clock == "device" and len(view.steps) * 2 <= int(view.steps[-1] - view.steps[0]) + 1
    return thresholds.SAMPLED_STRETCH_STEPS if sampled else thresholds.STRETCH_STEPS


def _least_excess(view: View) -> float:
    return max(thresholds.EXCESS_SHARE * view.median_step_ns, thresholds.EXCESS_FLOOR_NS)
