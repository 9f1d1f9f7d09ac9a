"""The rules on runs as one table: their order, what each needs, what time it may claim, and who wins.

Read ``RULES`` from top to bottom.  A rule may ask for the time that those above it leave (``claims.left_ns``: slow
steps and trends do); the others read the view, and what is already claimed.  Two claims on the same time are settled by
the relations that the rules declare, and by nothing else.  Ranks come first, because one late rank shows in every
rank's step, followed by what the ranks exchange; then pauses in training and single slow steps; then what takes time on
all ranks alike, and changes of it.  Findings about machines, memory and numbers claim no time.

Example: a rank is slow in forward while the loader is slow on all ranks.  "late ranks" claims what that rank has more
than its peers, "bounds" claims what all ranks have of ``input``.  No relation is declared between the two, so both are
reported.  Which one leads is decided by ``finding_order`` (``judge/finding_cost.py``): the more severe one, then the
one with the larger share of the time times its confidence, where an upper bound, as all bounds are, counts half.

Example: input is slow on all ranks from step 40 on.  "bounds" claims it and takes nothing, so "trends" sees it, too.
``LEVEL_CHANGED`` keeps the change alone if it explains at least half of the level; otherwise both are reported.

What is here is wiring; a rule's own file says how it decides.  ``make rule-table`` writes the table into
docs/diagnosis.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepscope.diagnosis.engine.claims import longer_by_passes
from stepscope.diagnosis.engine.view import View
from stepscope.diagnosis.rules.between_steps import find_outside, find_pauses
from stepscope.diagnosis.rules.bounds import find_bounds
from stepscope.diagnosis.rules.communication import find_communication
from stepscope.diagnosis.rules.imbalance import find_uneven, find_uneven_batches
from stepscope.diagnosis.rules.layers.gradients import History, find_silent, histories_of
from stepscope.diagnosis.rules.layers.replicas import find_desync, find_no_exchange
from stepscope.diagnosis.rules.loss import find_loss
from stepscope.diagnosis.rules.machine import find_machine
from stepscope.diagnosis.rules.memory import find_memory
from stepscope.diagnosis.rules.network import find_network, has_same_cause
from stepscope.diagnosis.rules.spikes import find_spikes, is_irregular, is_rare
from stepscope.diagnosis.rules.stragglers import find_stragglers
from stepscope.diagnosis.rules.trends import find_trends
from stepscope.judge import thresholds
from stepscope.judge.chain import Chain, Claim, Claims, Need, Relation, Rule, Scope
from stepscope.records.finding import Finding, highest
from stepscope.records.series import RunData
from stepscope.records.steps import COMM_HOOK_PHASE

__all__ = ["CHAIN", "RULES", "RecordedJob", "available"]


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """What rules on runs look at."""

    run: RunData
    view: View

    @cached_property
    def histories(self) -> list[History]:
        """What samples of layers show of each model."""
        return histories_of(self.view)


def available(view: View) -> frozenset[Need]:
    """What the rules find here."""
    there = {
        Need.STEPS: view.enough,
        Need.RANKS: len(view.ranks) > 1,
        Need.HOSTS: len(set(view.hosts)) > 1,
        Need.HOST_TIMES: not view.hides_device,
        Need.COLLECTIVES: view.window.communication is not None,
        Need.SAMPLES: bool(view.window.samples),
        Need.LAYERS: bool(view.window.layers.samples),
    }
    return frozenset(need for need, present in there.items() if present)


# -- relations --------------------------------------------------------------------------------------------------------

BOUNDS = ("input_bound", "h2d_bound", "comm_bound", "comm_hook_bound", "optimizer_bound", "pipeline_bubble")
OUTSIDE = ("between_steps", "wait_heavy")
CHANGES = ("drift", "change_point", "throughput_drop")


def _warns(claims: Iterable[Claim]) -> bool:
    return any(claim.finding.severity != "info" for claim in claims)


def _covers(own: Sequence[Claim], other: Claim) -> bool:
    """Whether they explain at least half of what the other one does."""
    own_ns = np.sum([claim.explained_ns for claim in own], axis=0)
    both_ns = float(np.minimum(own_ns, other.explained_ns).sum())
    return both_ns >= thresholds.EXPLAINS_SHARE * float(other.explained_ns.sum())


IDLE_GPU = Relation[RecordedJob](
    effect="lowers",
    kinds=("low_gpu_utilization",),
    when=lambda job, own, other: _warns(own),
    reason="an idle GPU is a symptom of what costs time, if that is a warning",
)


def _names_late_ranks(finding: Finding) -> bool:
    return finding.kind.endswith("straggler") or (finding.kind == "imbalance" and bool(finding.ranks))


LATE_STAGE = Relation[RecordedJob](
    effect="lowers",
    kinds=("pipeline_bubble",),
    when=lambda job, own, other: _warns(claim for claim in own if _names_late_ranks(claim.finding)),
    reason="stages wait for each other when one of them is late, if that is a warning",
)


def _is_of_network(job: RecordedJob, own: Sequence[Claim], other: Claim) -> bool:
    evidence = own[0].finding.evidence
    if has_same_cause(other.finding, evidence["where"], evidence["hosts"]):
        return True
    return float(other.explained_ns.sum()) > 0 and _covers(own, other)


BAD_NETWORK = Relation[RecordedJob](
    effect="replaces",
    kinds=("comm_straggler", "slow_collective", "group_imbalance", "low_overlap"),
    when=_is_of_network,
    reason="it is the same host, or explains at least half of the time",
)


def _is_burst(job: RecordedJob, own: Sequence[Claim], other: Claim) -> bool:
    """Whether slow steps come every few steps in a phase that bounds the job anyway: lagging workers, say."""
    period = other.finding.evidence.get("period")
    often = isinstance(period, int) and period <= thresholds.BURST_PERIOD
    return often and any(claim.finding.phase == other.finding.phase for claim in own)


RHYTHM = Relation[RecordedJob](
    effect="replaces",
    kinds=("jitter",),
    when=_is_burst,
    reason="slow steps every few steps in the same phase are its rhythm",
)
PART_OF_OUTSIDE = Relation[RecordedJob](
    effect="replaces",
    kinds=("jitter",),
    when=lambda job, own, other: other.finding.phase == "other" and is_irregular(other.finding) and _covers(own, other),
    reason="irregular slow steps in no phase are part of it, if it has at least half of their time",
)
IRREGULAR_OUTSIDE = Relation[RecordedJob](
    effect="takes from",
    kinds=OUTSIDE,
    rules=("outside phases",),
    when=lambda job, own, other: own[0].finding.phase == "other" and is_irregular(own[0].finding),
    reason="irregular slow steps outside all phases have their own cost",
)


def _is_same_level(level: Claim, change: Claim) -> bool:
    """Whether a level and a change are in one phase and are mostly the same time."""
    finding = level.finding
    same = finding.phase == change.finding.phase is not None and not finding.ranks
    return same and _covers([change], level)


def _counts_as_level(level: Claim, change: Claim) -> bool:
    """Whether the change alone would not be a warning: then the level counts."""
    return change.finding.severity == "info" and level.finding.severity != "info"


SMALL_CHANGE = Relation[RecordedJob](
    effect="replaces",
    kinds=CHANGES,
    when=lambda job, own, other: any(_is_same_level(claim, other) and _counts_as_level(claim, other) for claim in own),
    reason="it is a warning about the same phase and time, and the change alone is not",
)


def _with_place(change: Claim, level: Claim) -> Claim:
    """The change with the line that the other finding names, and with its severity if that is higher."""
    place, found = level.finding.evidence.get("place"), change.finding
    found = replace(found, severity=highest(found.severity, level.finding.severity))
    if place:
        found = replace(
            found,
            title=f"{found.title[:-1]}, mostly in {place}." if found.kind != "throughput_drop" else found.title,
            evidence={**found.evidence, "place": place},
            advice=(f"Look at {place}: the sampled stacks were there.", *found.advice),
        )
    return replace(change, finding=found)


LEVEL_CHANGED = Relation[RecordedJob](
    effect="replaces",
    kinds=(*BOUNDS, *OUTSIDE),
    rules=("bounds", "outside phases"),
    when=lambda job, own, other: any(
        _is_same_level(other, claim) and not _counts_as_level(other, claim) for claim in own
    ),
    merge=_with_place,
    reason="a phase that takes long because it became longer is reported as that change, with its line of code",
)
CHANGE_OUTSIDE = Relation[RecordedJob](
    effect="takes from",
    kinds=OUTSIDE,
    rules=("outside phases",),
    when=lambda job, own, other: own[0].finding.phase == "other",
    reason="the time of a change outside all phases is in one cost only",
)


# -- table ------------------------------------------------------------------------------------------------------------

ABOUT_RANKS = ("late ranks", "uneven ranks", "exchanges", "network")
NO_TIME = Scope(phases=())


def _known_phases(claims: Claims) -> set[str | None]:
    return {claim.finding.phase for claim in claims.of(*ABOUT_RANKS)}


def _find_outside(job: RecordedJob, claims: Claims) -> list[Claim]:
    regular = [claim for claim in claims.of("slow steps") if not is_irregular(claim.finding)]
    outside = [claim.explained_ns for claim in regular if claim.finding.phase == "other"]
    return find_outside(
        job.view,
        _known_phases(claims),
        pauses=claims.of("pauses"),
        explained_ns=np.sum(outside, axis=0) if outside else np.zeros(len(job.view.steps)),
        late=claims.ranks(*ABOUT_RANKS, phase="other"),
    )


def _without_time(job: RecordedJob, findings: Iterable[Finding]) -> list[Claim]:
    """Findings that explain no time."""
    return [Claim(finding=finding, explained_ns=np.zeros(len(job.view.steps))) for finding in findings]


RULES: tuple[Rule[RecordedJob], ...] = (
    Rule(
        name="late ranks",
        kinds=(
            "input_straggler",
            "compute_straggler",
            "h2d_straggler",
            "straggler",
            "node_straggler",
            "between_steps",
            "imbalance",
            "cpu_saturated",
        ),
        find=lambda job, claims: find_stragglers(job.view),
        scope=Scope(ranks="late"),
        needs=frozenset({Need.STEPS, Need.RANKS}),
        relations=(LATE_STAGE, IDLE_GPU),
        thresholds=("EXCESS_SHARE", "EXCESS_FLOOR_NS", "SPREADS_APART", "ANY_FALSE_ALARM"),
    ),
    Rule(
        name="uneven ranks",
        kinds=("rotating_straggler", "imbalance", "input_straggler", "h2d_straggler", "between_steps"),
        find=lambda job, claims: find_uneven(job.view, claims.ranks("late ranks")),
        scope=Scope(ranks="late"),
        needs=frozenset({Need.STEPS, Need.RANKS}),
        relations=(LATE_STAGE, IDLE_GPU),
        thresholds=("UNEVEN_SHARE", "UNEVEN_FLOOR_NS", "IMBALANCE_WARNING_SHARE"),
    ),
    Rule(
        name="exchanges",
        kinds=("comm_straggler", "slow_collective", "group_imbalance", "low_overlap"),
        find=lambda job, claims: find_communication(job.view),
        scope=Scope(phases=("comm",)),
        needs=frozenset({Need.STEPS, Need.COLLECTIVES}),
        relations=(LATE_STAGE, IDLE_GPU),
        thresholds=("BYTES_RATIO", "OVERLAP_HIDDEN", "OVERLAP_SHARE"),
    ),
    Rule(
        name="network",
        kinds=("slow_network",),
        find=lambda job, claims: find_network(
            job.view, claims.of("exchanges"), claims.of("late ranks", "uneven ranks")
        ),
        scope=Scope(phases=("comm",)),
        needs=frozenset({Need.STEPS, Need.HOSTS}),
        relations=(BAD_NETWORK, IDLE_GPU),
        thresholds=("SPEED_RATIO", "RETRANSMITS", "HIT_CHANCE"),
    ),
    Rule(
        name="pauses",
        kinds=("between_steps",),
        find=lambda job, claims: find_pauses(job.view, _known_phases(claims)),
        scope=Scope(steps="some"),
        needs=frozenset({Need.STEPS}),
        relations=(IDLE_GPU,),
        thresholds=("BETWEEN_SHARE", "BETWEEN_CRITICAL_SHARE", "STOPS_AT_LEAST"),
    ),
    Rule(
        name="slow steps",
        kinds=("stall", "jitter"),
        find=lambda job, claims: find_spikes(job.view, claims.left_ns, claims.of(*ABOUT_RANKS, "pauses")),
        scope=Scope(steps="some"),
        needs=frozenset({Need.STEPS}),
        relations=(IRREGULAR_OUTSIDE, IDLE_GPU),
        thresholds=("SPIKE_SHARE", "SPIKE_SPREADS", "STALL_NS", "JITTER_SHARE", "PERIODIC_SHARE"),
    ),
    Rule(
        name="bounds",
        kinds=BOUNDS,
        find=lambda job, claims: find_bounds(
            job.view, claims.of("exchanges", "network"), list(filter(is_rare, claims.of("slow steps")))
        ),
        scope=Scope(phases=("input", "h2d", "comm", COMM_HOOK_PHASE, "optimizer"), ranks="all", steps="all"),
        needs=frozenset({Need.STEPS}),
        takes=False,
        relations=(RHYTHM, SMALL_CHANGE, IDLE_GPU),
        thresholds=("INPUT_SHARE", "H2D_SHARE", "COMM_SHARE", "OPTIMIZER_SHARE", "BOTTLENECK_SHARE"),
    ),
    Rule(
        name="outside phases",
        kinds=OUTSIDE,
        find=_find_outside,
        scope=Scope(phases=("other",), ranks="all", steps="all"),
        needs=frozenset({Need.STEPS, Need.HOST_TIMES}),
        takes=False,
        relations=(PART_OF_OUTSIDE, SMALL_CHANGE, IDLE_GPU),
        thresholds=("BETWEEN_SHARE", "OTHER_SHARE", "OTHER_FLOOR_NS"),
    ),
    Rule(
        name="trends",
        kinds=CHANGES,
        find=lambda job, claims: find_trends(job.view, claims.left_ns),
        scope=Scope(steps="some"),
        needs=frozenset({Need.STEPS}),
        relations=(LEVEL_CHANGED, CHANGE_OUTSIDE, IDLE_GPU),
        thresholds=("TREND_STEPS", "GROWTH_SHARE", "TREND_CHANCE", "CHANGE_CHANCE", "DROP_SHARE"),
    ),
    Rule(
        name="machine",
        kinds=("low_gpu_utilization", "gpu_throttled", "cpu_saturated", "ram_pressure"),
        find=lambda job, claims: find_machine(job.view),
        scope=NO_TIME,
        needs=frozenset({Need.STEPS, Need.SAMPLES}),
        thresholds=("UTILIZATION_LOW_PERCENT", "THROTTLED_SHARE", "CPU_FULL_PERCENT", "RAM_LOW_SHARE"),
    ),
    Rule(
        name="memory",
        kinds=("memory_creep", "memory_pressure", "memory_imbalance", "fragmentation"),
        find=lambda job, claims: find_memory(job.view),
        scope=NO_TIME,
        needs=frozenset({Need.STEPS}),
        thresholds=("CREEP_SHARE", "PRESSURE_SHARE", "IMBALANCE_SHARE", "FRAGMENTED_SHARE"),
    ),
    Rule(
        name="loss",
        kinds=("loss_nan", "nan_gradients", "loss_spike", "exploding_gradients"),
        find=lambda job, claims: _without_time(job, find_loss(job.run, job.view, job.histories)),
        scope=NO_TIME,
        thresholds=("LOST_NOTES", "LOSS_JUMP_SPREADS", "EXPLODING_TIMES"),
    ),
    Rule(
        name="replicas",
        kinds=("replica_desync",),
        find=lambda job, claims: _without_time(job, find_desync(job.view)),
        scope=NO_TIME,
        needs=frozenset({Need.LAYERS}),
        thresholds=("DESYNC_COMPARISONS", "DESYNC_ALONE_STEPS"),
    ),
    Rule(
        name="gradient exchange",
        kinds=("no_gradient_exchange",),
        find=lambda job, claims: _without_time(job, find_no_exchange(job.view)),
        scope=NO_TIME,
        needs=frozenset({Need.STEPS, Need.RANKS}),
        thresholds=("EXCHANGED_SHARE",),
    ),
    Rule(
        name="layers",
        kinds=("vanishing_gradients", "dead_layer", "unused_parameters"),
        find=lambda job, claims: _without_time(job, find_silent(job.view, job.histories)),
        scope=NO_TIME,
        needs=frozenset({Need.LAYERS}),
        thresholds=("VANISHING_SHARE", "VANISHING_LAYERS", "DEAD_SAMPLES"),
    ),
    Rule(
        name="uneven batches",
        kinds=("uneven_batches",),
        find=lambda job, claims: _without_time(job, find_uneven_batches(job.view)),
        scope=NO_TIME,
        thresholds=("UNEVEN_BATCHES_STEPS", "BATCHES_ALIKE"),
    ),
)
"""The most specific first."""

CHAIN = Chain(rules=RULES, time_ns=lambda job: job.view.step_ns - longer_by_passes(job.view))
