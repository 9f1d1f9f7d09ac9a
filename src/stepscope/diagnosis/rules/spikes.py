"""Single slow steps: ``stall`` (happened once) and ``jitter`` (recurs), and where their time is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.claims import longer_by_passes
from stepscope.diagnosis.engine.code_location import seen_at
from stepscope.diagnosis.engine.processor_wait import waited_ns, without_waiting
from stepscope.diagnosis.engine.view import View, cost_of, where_stopped
from stepscope.diagnosis.rules.between_steps import STOPS
from stepscope.diagnosis.rules.stragglers import hides_wait
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.late_ranks import savings_ns
from stepscope.judge.statistics import (
    Fold,
    Rhythm,
    chance_of_at_least,
    fold,
    local_median,
    longest,
    mean_rank,
    median_rank,
    medians,
    rhythm,
    spread,
)
from stepscope.records.finding import Finding, Severity
from stepscope.records.steps import BUILTIN_PHASES, FLAG_EPOCH_START, FLAG_SAMPLED, GRAPH_PHASE
from stepscope.records.text import count_text, ms_text, ns_text, share_text

__all__ = [
    "JITTER_ADVICE",
    "STALL_ADVICE",
    "Place",
    "by_phase_ms",
    "find_spikes",
    "is_irregular",
    "is_rare",
    "locate",
    "spike_series",
    "typical_phase_ns",
    "where_text",
    "without_looks",
]


# -- spikes -----------------------------------------------------------------------------------------------------------
# Steps that are much longer than their neighbors, after everything explained is subtracted.
#
# What one rank does after the last collective of a step makes its peers wait in the next one, so neighboring spikes
# count as one.

Floats = NDArray[np.float64]
Columns = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Spike:
    columns: Columns
    """Consecutive steps, as indices into the view."""
    extra_ns: float
    """Lost in all of them together."""

    @property
    def first(self) -> int:
        return int(self.columns[0])


@dataclass(frozen=True, kw_only=True)
class SpikeSeries:
    values_ns: Floats
    local_ns: Floats
    typical_ns: float
    spiky: NDArray[np.bool_]

    @property
    def rest_ns(self) -> Floats:
        return self.values_ns - self.local_ns

    @property
    def smooth_rest_ns(self) -> Floats:
        """The same about a smoothed level: where every second step is slow, local medians alternate with them."""
        level = np.convolve(np.pad(self.local_ns, 1, mode="edge"), (0.25, 0.5, 0.25), mode="valid")
        return np.asarray(self.values_ns - level, np.float64)


def spike_series(values_ns: Floats) -> SpikeSeries:
    local = local_median(values_ns)
    typical_ns = float(np.median(values_ns))
    rest = values_ns - local
    least = max(thresholds.SPIKE_SHARE * typical_ns, thresholds.SPIKE_SPREADS * spread(rest), thresholds.SPIKE_FLOOR_NS)
    return SpikeSeries(values_ns=values_ns, local_ns=local, typical_ns=typical_ns, spiky=rest > least)


def stop_phases(view: View) -> list[str]:
    """Phases that occasionally pause training."""
    return [name for name in view.phases if name in STOPS or (name not in BUILTIN_PHASES and _rare(view, name))]


def without_stops(view: View, excess_ns: Floats) -> Floats:
    """[P, R]; the excess of spikes without pauses, which were subtracted before the search for spikes."""
    kept: Floats = excess_ns.copy()
    kept[[view.phases.index(name) for name in stop_phases(view)]] = 0.0
    return kept


def unexplained_stops(view: View, claims: Sequence[Claim]) -> Floats:
    """[S]; time in phases that occasionally pause training, as far as it is not explained yet.

    Such a phase on one rank makes its peers' next step longer, by what does not fit into its own step.
    """
    names = stop_phases(view)
    if not names:
        return np.zeros(len(view.steps))
    here = where_stopped(view, np.sum([view.phase(name) for name in names], axis=0))
    told = sum((claim.explained_ns for claim in claims if claim.finding.kind == "between_steps"), np.zeros(len(here)))
    return np.asarray(np.maximum(here - told, 0.0), np.float64)


def _rare(view: View, name: str) -> bool:
    """Whether it is a phase of the user's that most steps do not have."""
    return bool((longest(view.phase(name)) > 0).mean() < thresholds.EXPLAINS_SHARE)


def spikes_of(view: View, series: SpikeSeries) -> list[Spike]:
    """Neighboring slow steps together; a longer stretch of them is a change of level, not a spike.

    The step before is included if it is longer than usual too: one rank of many that is late after its last collective
    hardly shows in the mean of that step.
    """
    slow = series.spiky.copy()
    rest = series.rest_ns
    if view.lockstep and len(view.ranks) > 1:
        slow[:-1] |= series.spiky[1:] & (rest[:-1] > thresholds.SPREADS_APART * spread(rest))
    at = np.flatnonzero(slow)
    groups = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []
    return [
        Spike(columns=group, extra_ns=float(rest[group].sum()))
        for group in groups
        if len(group) < thresholds.DROP_STEPS
    ]


def saved_at(series: SpikeSeries, columns: Columns) -> Floats:
    saved = np.zeros(len(series.values_ns))
    saved[columns] = np.maximum(series.rest_ns[columns], 0.0)
    return saved


def steps_around(view: View, spike: Spike) -> Columns:
    """Where the cause may show: also the step before, if a single rank of many was late after its last collective."""
    return np.arange(max(spike.first - 1, 0) if view.lockstep else spike.first, int(spike.columns[-1]) + 1)


def beat_of(view: View, spikes: list[Spike]) -> Rhythm | None:
    return rhythm([int(view.steps[spike.first]) for spike in spikes])


# -- location of lost time --------------------------------------------------------------------------------------------
# In which phase, and on which rank, the time lost at some steps lies.
#
# The steps in question are compared with usual ones, phase by phase and rank by rank.  Waiting for a peer is excess
# too, so the phases least likely to hide a wait (``stragglers.WAIT_HIDES_IN``) come first and measured waits last.


@dataclass(frozen=True, kw_only=True)
class Place:
    row: int | None
    """Row of the rank in the view that lost the time; None: all of them, several, or unknown."""
    phase: str | None

    def ranks(self, view: View) -> tuple[int, ...]:
        return () if self.row is None else (view.ranks[self.row],)


def evenly_chosen(columns: NDArray[np.intp] | Sequence[int], most: int = thresholds.LOCATE_STEPS) -> NDArray[np.intp]:
    """Choose at most ``most`` columns, evenly spaced."""
    at = np.asarray(columns, np.intp)
    return at if len(at) <= most else at[np.linspace(0, len(at) - 1, most).round().astype(np.intp)]


def typical_phase_ns(view: View, columns: NDArray[np.intp]) -> Floats:
    """[P, R]; the median over (some of) these steps; nan for a rank that had ended."""
    chosen = view.phase_ns[:, :, evenly_chosen(columns)]
    phases, ranks, steps = chosen.shape
    return median_rank(chosen.reshape(phases * ranks, steps).T).reshape(phases, ranks)


def locate(view: View, excess_ns: Floats, lost_ns: float) -> Place:
    """``excess_ns`` [P, R] of the steps that lost ``lost_ns``.

    A phase must explain half of it on some rank; a rank is named if it alone has at least half as much there as the
    rank with the most.
    """
    known = np.nan_to_num(excess_ns)
    if not known.size:
        return Place(row=None, phase=None)
    most = known.max(axis=1)
    candidates = [index for index in range(len(most)) if most[index] >= thresholds.EXPLAINS_SHARE * lost_ns]
    work = [index for index in candidates if view.phases[index] != "comm"]
    if not candidates or (not work and view.comm_measured):
        own = known[[index for index, name in enumerate(view.phases) if name != "comm"]].sum(axis=0)
        if view.comm_measured and own.max() >= thresholds.EXPLAINS_SHARE * lost_ns:
            return Place(row=_only_rank(own), phase=None)
        return Place(row=None, phase="comm" if candidates else None)
    if view.comm_measured or not view.lockstep:
        at = max(work or candidates, key=lambda index: float(most[index]))
    else:
        at = min(candidates, key=lambda index: hides_wait(view.phases[index]))
    return Place(row=_only_rank(known[at]), phase=view.phases[at])


def by_phase_ms(view: View, excess_ns: Floats, row: int | None) -> dict[str, float]:
    """For the evidence: of one rank, or of the mean rank."""
    mine = excess_ns[:, row] if row is not None else mean_rank(excess_ns.T)
    return {name: round(float(value) / 1e6, 3) for name, value in zip(view.phases, np.nan_to_num(mine), strict=True)}


def where_text(place: Place, view: View) -> str:
    """`` on rank 1 in forward``, `` in input``, or nothing."""
    who = f" on rank {view.ranks[place.row]}" if place.row is not None else ""
    if place.phase == "other":
        return f"{who} outside model and optimizer (other)"
    if place.phase == "comm":
        return f"{who} in communication (comm)"
    return f"{who} in {place.phase}" if place.phase else who


def _only_rank(by_rank: Floats) -> int | None:
    having = np.flatnonzero(by_rank >= thresholds.EXPLAINS_SHARE * by_rank.max())
    return int(having[0]) if len(having) == 1 and len(by_rank) > 1 else None


# -- advice -----------------------------------------------------------------------------------------------------------

GARBAGE_COLLECTION = (
    "If it is Python's garbage collection: gc.freeze() after the set-up, gc.disable() and gc.collect() at set points.",
    "Or occasional work in the loop: logging, printing, metrics with .item(), saving.",
)
SLOW_STEPS_QUERY = (
    'See what the steps have in common: stepscope sql "select * from steps order by wall_ns desc limit 20".'
)
ABSORBED = "A larger prefetch_factor absorbs single slow batches; more workers do not."
SOMETIMES_SLOW = "The exchange itself is sometimes slow: other jobs use the network, or traffic takes a slower route."

JITTER_ADVICE = (
    say("Look at {place}: the stacks sampled in these steps were there.", place=True),
    say(
        "The waits come when an epoch starts: persistent_workers=True keeps the DataLoader's workers.",
        "If the epochs are short by accident, a longer one (or an endless sampler) starts fewer iterators.",
        phase="input",
        at_epoch_starts=True,
    ),
    say(
        "One step in {period} (num_workers) waits: the workers cannot keep up; raise num_workers.",
        "If all cores are busy, do less per sample or cache decoded data.",
        phase="input",
        a_step_per_worker=True,
    ),
    say(
        "Something in the dataset happens every {period} steps: opening the next file or shard; read ahead.",
        ABSORBED,
        phase="input",
        period=True,
    ),
    say(
        "Some batches take much longer to prepare: look at their largest samples and at the storage.",
        ABSORBED,
        phase="input",
    ),
    say(
        "The ranks exchange more in these steps than in others (averaged weights, metrics): do it less often.",
        phase="comm",
        more_bytes=True,
    ),
    say(SOMETIMES_SLOW, "NCCL_DEBUG=INFO shows which route it takes.", phase="comm", nccl=True),
    say(SOMETIMES_SLOW, SLOW_STEPS_QUERY, phase="comm"),
    say(
        "Some copies are slow, probably from pageable memory: pin_memory=True keeps batches pinned.",
        SLOW_STEPS_QUERY,
        phase="h2d",
    ),
    say(
        "Look for occasional work in the optimizer: a logged norm, an EMA, a scheduler.",
        SLOW_STEPS_QUERY,
        phase="optimizer",
    ),
    say(
        "A different rank each time: the machine (other processes, interrupts) or batches of varying size.",
        "On a crowded CPU, fewer threads (OMP_NUM_THREADS) and DataLoader workers make steps more even.",
        varying_rank=True,
        period=None,
    ),
    say(
        "Look for what the loop does every {period} steps.",
        *GARBAGE_COLLECTION,
        phase=(None, "forward", "backward", GRAPH_PHASE, "other"),
        period=True,
    ),
    say(*GARBAGE_COLLECTION, phase=(None, "forward", "backward", GRAPH_PHASE, "other")),
    say("Look at what the phase {phase!r} does in these steps only.", SLOW_STEPS_QUERY),
)
"""``more_bytes``: the ranks exchange more in these steps than in others."""
STALL_ADVICE = (
    say(
        "One wait for data: a cold or remote file, a worker that died and was replaced, a full page cache{where}.",
        phase="input",
    ),
    say(
        "All ranks waited for the exchange: a network hiccup; NCCL_DEBUG=INFO shows retries{where}.",
        phase="comm",
        nccl=True,
    ),
    say("All ranks waited for the exchange: a network hiccup{where}.", phase="comm"),
    say("One slow copy to the device: memory was being moved or swapped{where}.", phase="h2d"),
    say(
        "The first use of something in the optimizer, or the process was stopped for a while{where}.",
        phase="optimizer",
    ),
    say("One checkpoint was slow; the storage was probably busy{where}.", phase="checkpoint"),
    say("Evaluation took this long once{where}.", phase="eval"),
    say(
        "The loop did other work in that step, such as saving, evaluation or a network request{where}.",
        phase="other",
    ),
    say("A first kernel of a new shape, garbage collection, swapping, or the process was stopped{where}."),
)


# -- jitter -----------------------------------------------------------------------------------------------------------
# Spikes that recur: with their period if they have one, and the phase and the rank they have in common.
#
# Slow steps that are too small to be spikes are found only by their period: the series is folded at every period.

STEPS_SHOWN = 20
WAITED_IN = ("other", "backward", "comm")
"""Where a wait for peers hides if it is not measured."""


@dataclass(frozen=True, kw_only=True)
class _Recurring:
    columns: Columns
    """All the steps that are too long."""
    groups: list[Columns]
    """By spike."""
    saved_ns: Floats
    period: int | None
    regular: float | None
    each_ns: float


def find_jitter(view: View, series: SpikeSeries, spikes: list[Spike]) -> list[Claim]:
    beat = beat_of(view, spikes)
    if beat is None:
        alike = _similar_spikes(spikes)
        beat = beat_of(view, alike)
        spikes = spikes if beat is None else alike
    if beat is not None and _only_scatter(view, series, spikes):
        beat = None
    found: _Recurring | None = None
    if beat is not None or len(spikes) >= thresholds.RECURRING_SPIKES:
        found = _of_spikes(series, spikes, beat)
    if beat is None:
        small = fold(series.smooth_rest_ns)
        found = _of_fold(series, small) if small is not None else found
    if found is None:
        return []
    cost = cost_of(view, found.saved_ns)
    least = thresholds.JITTER_SHARE if found.period is None else thresholds.PERIODIC_SHARE
    if cost["share"] < least or found.each_ns < thresholds.EXCESS_FLOOR_NS:
        return []
    return [Claim(finding=_jitter_finding(view, series, found, cost), explained_ns=found.saved_ns)]


def is_irregular(finding: Finding) -> bool:
    """Whether it is about slow steps that recur without a period."""
    return finding.kind == "jitter" and finding.evidence.get("period") is None


def is_rare(claim: Claim) -> bool:
    """Whether slow steps are a warning and rare: then they are not part of a bottleneck as well."""
    period = claim.finding.evidence.get("period")
    often = isinstance(period, int) and period <= thresholds.BURST_PERIOD
    rare = float((claim.explained_ns > 0).mean()) * thresholds.BURST_PERIOD <= 1
    return claim.finding.severity != "info" and rare and not often


def _similar_spikes(spikes: list[Spike]) -> list[Spike]:
    """Those about as large as most: periodic ones do the same each time, and strays are of any size."""
    if not spikes:
        return []
    middle = float(np.median([spike.extra_ns for spike in spikes]))
    return [spike for spike in spikes if middle / 2 <= spike.extra_ns <= middle * 2]


def _only_scatter(view: View, series: SpikeSeries, spikes: list[Spike]) -> bool:
    """Whether the beat is that of steps with more backward passes, most of which are no longer than they should be.

    They are the longest, so a busy machine adds most to them.
    """
    longer = longer_by_passes(view) > 0
    on_longer = [bool(longer[spike.columns].any()) for spike in spikes]
    if not longer.any() or np.mean(on_longer) < thresholds.EXPLAINS_SHARE:
        return False
    usual_ns = float(np.median([spike.extra_ns for spike in spikes]))
    return float(np.median(series.rest_ns[longer])) < thresholds.EXPLAINS_SHARE * usual_ns


def _of_spikes(series: SpikeSeries, spikes: list[Spike], beat: Rhythm | None) -> _Recurring:
    columns = np.concatenate([spike.columns for spike in spikes])
    return _Recurring(
        columns=columns,
        groups=[spike.columns for spike in spikes],
        saved_ns=saved_at(series, columns),
        period=None if beat is None else beat.period,
        regular=None if beat is None else beat.regular,
        each_ns=float(np.median([spike.extra_ns for spike in spikes])),
    )


def _of_fold(series: SpikeSeries, small: Fold) -> _Recurring:
    saved = np.zeros(len(series.values_ns))
    # A stall that happens to fall on the beat does not belong to it.
    saved[small.at] = np.clip(series.smooth_rest_ns[small.at] - small.usual, 0.0, 2 * small.excess)
    return _Recurring(
        columns=small.at,
        groups=np.split(small.at, np.flatnonzero(np.diff(small.at) > 1) + 1),
        saved_ns=saved,
        period=small.period,
        regular=small.agrees,
        each_ns=small.excess,
    )


def _more_bytes(view: View, columns: NDArray[np.intp]) -> bool:
    """Whether the ranks exchange more in these steps than in the others: then it is not the network that is slow."""
    sent = view.window.exchanged_bytes[view.columns]
    others = np.delete(sent, columns)
    return bool(len(others)) and float(np.median(sent[columns])) >= thresholds.MORE_BYTES_RATIO * max(
        float(np.median(others)), 1.0
    )


# Next to other programs every step is uneven, and the rank that has to wait for a processor hides what another does.
# A rhythm is then looked for in each phase of each rank.


def _jitter_beside_load(view: View) -> list[Claim]:
    if without_waiting(view) is None:
        return []
    names = [name for name in view.phases if name != "comm" and name not in stop_phases(view)]
    there = np.flatnonzero(~np.isnan(view.wall_ns).any(axis=1))
    heights = {name: _stands_out(view.phase(name)[there]) for name in names}
    rows = [(name, int(row), height) for name in names for row, height in zip(there, heights[name], strict=True)]
    rows = sorted(rows, key=lambda row: row[2], reverse=True)[: thresholds.SERIES_AT_MOST]
    best: tuple[Fold, SpikeSeries, Place] | None = None
    for name, row, _ in rows:
        series = spike_series(without_looks(view, view.phase(name)[row]))
        small = fold(series.smooth_rest_ns, comparisons=len(names) * len(view.ranks))
        if small is None or small.excess < thresholds.PERIODIC_SHARE * small.period * view.median_step_ns:
            continue
        if best is None or small.z > best[0].z:
            best = small, series, Place(row=row, phase=name)
    if best is None:
        return []
    small, series, place = best
    found = _of_fold(series, small)
    if (others := _also_hit(view, place, small)) and len(view.ranks) > 1:
        place = replace(place, row=None)
    culprits = np.array([best[2].row, *others], np.intp)
    typical_ns = view.work_ns[culprits] - found.saved_ns
    found = replace(found, saved_ns=savings_ns(view.work_ns, culprits, typical_ns))
    return [
        Claim(
            finding=_jitter_finding(view, series, found, cost_of(view, found.saved_ns), place),
            explained_ns=found.saved_ns,
        )
    ]


def _stands_out(values: Floats) -> Floats:
    """[R]; how far the longest steps of a rank are from its others, relative to their spread."""
    middle, high = np.quantile(values, (0.5, 0.99), axis=1)
    spreads = np.median(np.abs(values - middle[:, None]), axis=1)
    return np.asarray((high - middle) / np.maximum(spreads, 1.0), np.float64)


def _also_hit(view: View, place: Place, small: Fold) -> list[int]:
    """Other ranks that are longer in the same phase of the same steps, by half as much."""
    hit = np.zeros(len(view.steps), np.bool_)
    hit[small.at] = True
    longer = medians(view.phase(place.phase or "")[:, hit]) - medians(view.phase(place.phase or "")[:, ~hit])
    return [row for row in np.flatnonzero(longer >= small.excess / 2).tolist() if row != place.row]


def _jitter_finding(
    view: View, series: SpikeSeries, found: _Recurring, cost: dict[str, Any], known: Place | None = None
) -> Finding:
    """``known``: where it is, if that is known already."""
    place, varying, hit, excess = _jitter_place(view, series, found)
    if known is not None:
        place, varying = known, False
    slow = {int(step) for step in view.steps[found.columns]}
    seen = seen_at(view, place.ranks(view), phase=place.phase, steps=slow)
    epoch_starts = ((view.flags[:, found.columns] & FLAG_EPOCH_START) > 0).any(axis=0).mean()
    steps = view.steps[[group[0] for group in found.groups]]
    return Finding(
        kind="jitter",
        severity=_jitter_severity(view, cost["share"], found, place, varying),
        title=_jitter_title(
            view, found, place, varying, cost["share"], seen=seen, besides=_besides(view, series, found)
        ),
        ranks=place.ranks(view),
        phase=place.phase,
        steps=(int(steps[0]), int(view.steps[found.columns[-1]])),
        cost=cost,
        evidence={
            "clock": view.clock,
            "spikes": len(found.groups),
            "period": found.period,
            "regular": None if found.regular is None else round(found.regular, 3),
            "extra_ms": round(found.each_ns / 1e6, 3),
            "most_extra_ms": round(float(found.saved_ns.max()) / 1e6, 3),
            "usual_ms": round(view.median_step_ns / 1e6, 3),
            "at_steps": [int(step) for step in steps[:STEPS_SHOWN]],
            "spikes_by_rank": hit,
            "extra_ms_by_phase": by_phase_ms(view, excess, place.row),
            "at_epoch_starts": round(float(epoch_starts), 3),
            "place": seen or None,
        },
        advice=advice_for(
            JITTER_ADVICE,
            phase=place.phase,
            period=found.period,
            a_step_per_worker=found.period is not None and found.period == _num_workers(view),
            at_epoch_starts=epoch_starts >= thresholds.EXPLAINS_SHARE,
            varying_rank=varying,
            nccl=view.nccl,
            more_bytes=_more_bytes(view, found.columns),
            place=seen,
        ),
        confidence=0.9 if found.period is not None else 0.7,
    )


def _jitter_place(view: View, series: SpikeSeries, found: _Recurring) -> tuple[Place, bool, dict[str, int], Floats]:
    """The place that most spikes have in common; whether the rank varies; spikes by rank; the mean excess."""
    slow = np.zeros(len(view.steps), np.bool_)
    slow[found.columns] = True
    usual = typical_phase_ns(view, np.flatnonzero(~slow & ~series.spiky))
    chosen = [found.groups[index] for index in evenly_chosen(np.arange(len(found.groups)))]
    before = 1 if view.lockstep and found.period != 2 else 0
    wide = [np.arange(max(int(group[0]) - before, 0), int(group[-1]) + 1) for group in chosen]
    columns = np.concatenate(wide)
    over = view.phase_ns[:, :, columns] - usual[:, :, None]
    borders = np.cumsum([len(columns) for columns in wide])[:-1]
    by_spike = [part.sum(axis=2) for part in np.split(over, borders, axis=2)]
    excess = np.mean([np.nan_to_num(excess_ns) for excess_ns in by_spike], axis=0)
    lost = [float(found.saved_ns[group].sum()) for group in chosen]
    if found.each_ns < thresholds.SPIKE_SHARE * series.typical_ns:
        # Too small to distinguish from the noise one by one: use the mean of all.
        return locate(view, without_stops(view, excess), float(np.mean(lost))), False, {}, excess
    places = [locate(view, without_stops(view, stall), lost_ns) for stall, lost_ns in zip(by_spike, lost, strict=True)]
    rows = Counter(place.row for place in places)
    phases = Counter(place.phase for place in places)
    row, times = rows.most_common(1)[0]
    same = times >= thresholds.SAME_RANK_SHARE * len(places)
    if found.period is None and row is not None:
        chance = chance_of_at_least(times, len(places), 1 / len(view.ranks)) * len(view.ranks)
        same = same and chance <= thresholds.SAME_RANK_CHANCE
    phase, agreeing = phases.most_common(1)[0]
    alone = sum(count for stall, count in rows.items() if stall is not None)
    return (
        Place(row=row if same else None, phase=phase if agreeing >= thresholds.SAME_RANK_SHARE * len(places) else None),
        not same and alone >= thresholds.EXPLAINS_SHARE * len(places),
        {str(view.ranks[stall]): count for stall, count in sorted(rows.items(), key=str) if stall is not None},
        excess,
    )


def _jitter_severity(view: View, share: float, found: _Recurring, place: Place, varying: bool) -> Severity:
    """Never critical.  Irregular spikes are a warning only if they are always in the same place, unlike chance.

    A phase in which ranks may only wait for each other does not count as a place.
    """
    if varying or found.each_ns < thresholds.WARNING_FLOOR_NS:
        return "info"
    if found.period is not None:
        return "warning" if share >= thresholds.WARNING_SHARE else "info"
    much = share >= thresholds.JITTER_WARNING_SHARE and found.saved_ns.sum() >= thresholds.STALL_NS
    alone = len(view.ranks) == 1 or view.comm_measured
    same_place = place.phase is not None and (alone or place.phase not in WAITED_IN)
    return "warning" if much and same_place else "info"


def _jitter_title(
    view: View, found: _Recurring, place: Place, varying: bool, share: float, *, seen: str, besides: str
) -> str:
    longer = ms_text(found.each_ns / 1e6)
    where = where_text(place, view)
    where = f",{where}" if where else ""
    where += f", mostly in {seen}" if seen else ""
    if varying:
        where += ", on a different rank each time" if len(view.ranks) > 2 else ", now on one rank, now on the other"
    if found.period is not None:
        every = f"Every {_ordinal(found.period)} step"
        if besides:
            return f"{every} takes {longer} longer besides {besides}{where}: {share_text(share)} of the training time."
        usual = ms_text(view.median_step_ns / 1e6)
        return f"{every} takes {longer} longer than the usual {usual}{where}: {share_text(share)} of the training time."
    return (
        f"{len(found.groups):,} of {count_text(len(view.steps), 'step')} are much longer than the rest, "
        f"typically by {longer}{where}: {share_text(share)} of the training time."
    )


def _besides(view: View, series: SpikeSeries, found: _Recurring) -> str:
    """Other explained causes that make the same steps longer by a good part of that again; mostly none."""
    explained_ns = view.step_ns - series.values_ns
    usual_ns = float(np.median(explained_ns))
    more_ns = [float((explained_ns[group] - usual_ns).sum()) for group in found.groups]
    if float(np.median(more_ns)) <= thresholds.MORE_CAUSES_SHARE * found.each_ns:
        return ""
    took = {name: np.fmax.reduce(view.phase(name), axis=0) for name in stop_phases(view)}
    names = [name for name, own in took.items() if np.median([own[group].max() for group in found.groups]) > 0]
    causes = [STOPS.get(name, f"the phase {name!r}") for name in names]
    designed_ns = longer_by_passes(view)
    if np.median([designed_ns[group].max() for group in found.groups]) > 0:
        causes.append("its additional backward passes")
    return " and ".join(causes) or "what is explained already"


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{suffix}"


def _num_workers(view: View) -> int | None:
    loader = view.facts.get("loader")
    workers = loader.get("num_workers") if isinstance(loader, dict) else None
    return workers if isinstance(workers, int) else None


# -- stalls -----------------------------------------------------------------------------------------------------------


def find_spikes(view: View, left_ns: Floats, claims: Sequence[Claim]) -> list[Claim]:
    """``left_ns`` [S]: the steps without what ``claims`` explain."""
    if not left_ns.any():
        return []
    series = spike_series(without_looks(view, left_ns - unexplained_stops(view, claims)))
    spikes = spikes_of(view, series)
    stalls = _one_off(view, series, spikes)
    known = {spike.first for spike in stalls}
    recurring = [spike for spike in spikes if spike.first not in known]
    found = [_stall(view, series, spike) for spike in stalls]
    in_turn = any(claim.finding.kind == "rotating_straggler" for claim in claims)  # a rhythm of each rank
    jitter = (not in_turn and _jitter_beside_load(view)) or find_jitter(view, series, recurring)
    return [*_one_for_each_place(view, found), *jitter]


def without_looks(view: View, values_ns: Floats) -> Floats:
    """[S]; steps in which Stepscope looked at layers or memory are not longer than others, as far as it may be that.

    They recur at a fixed distance, so even a small excess would be found.
    """
    looked = ((view.flags & FLAG_SAMPLED) > 0).any(axis=0)
    if not looked.any() or looked.all():
        return values_ns
    usual = local_median(values_ns)
    excess = values_ns - usual
    most_ns = np.full(len(values_ns), max(thresholds.LAYER_LOOK_STEPS * np.median(values_ns), thresholds.LOOK_NS))
    most_ns[int(np.argmax(looked))] = thresholds.FIRST_LOOK_NS
    explained = looked & (excess > 0) & (excess <= most_ns)
    return np.where(explained, usual, values_ns)


def _one_off(view: View, series: SpikeSeries, spikes: list[Spike]) -> list[Spike]:
    """The few large ones, unless they are periodic or just the largest of many."""
    enough_ns = min(thresholds.STALL_STEPS * series.typical_ns, thresholds.STALL_NS)
    large = [spike for spike in spikes if spike.extra_ns >= enough_ns]
    if len(large) > thresholds.STALLS_AT_MOST or beat_of(view, large) is not None:
        return []
    others = [spike.extra_ns for spike in spikes if spike.extra_ns < enough_ns]
    floor_ns = float(thresholds.STALL_FLOOR_NS)
    if len(others) >= thresholds.RECURRING_SPIKES:
        floor_ns = max(floor_ns, thresholds.STALL_OVER_SPIKES * float(np.median(others)))
    if without_waiting(view) is not None:
        # A few steps that wait for a processor are no stall, however much they lose together.
        large = [spike for spike in large if float(series.rest_ns[spike.columns].max()) >= enough_ns]
    return [spike for spike in large if spike.extra_ns >= floor_ns]


def _stall(view: View, series: SpikeSeries, spike: Spike) -> tuple[Claim, str]:
    """And the end of its title, which says where."""
    columns = steps_around(view, spike)
    near = np.arange(
        max(columns[0] - thresholds.STALL_NEIGHBORS, 0),
        min(columns[-1] + thresholds.STALL_NEIGHBORS + 1, len(view.steps)),
    )
    usual = typical_phase_ns(view, near[~series.spiky[near] & ~np.isin(near, columns)])
    over = view.phase_ns[:, :, columns] - usual[:, :, None]
    excess = over.sum(axis=2)
    place = locate(view, without_stops(view, excess), spike.extra_ns)
    at, last, took_ns = _stall_steps(view, series, place, columns, over)
    saved = saved_at(series, spike.columns)
    cost = cost_of(view, saved)
    ranks = place.ranks(view)
    seen = seen_at(view, ranks, phase=place.phase, steps={int(step) for step in view.steps[at : last + 1]})
    serious = cost["share"] >= thresholds.WARNING_SHARE and spike.extra_ns >= thresholds.STALL_NS
    if without_waiting(view) is not None:
        longest_ns = float(series.rest_ns[spike.columns].max())
        serious = serious and longest_ns >= thresholds.EXPLAINS_SHARE * thresholds.STALL_NS
        serious = serious and not _is_waiting(view, spike.columns)
    where = _stall_where(view, place, seen)
    claim = Claim(
        finding=Finding(
            kind="stall",
            severity="warning" if serious else "info",
            title=_stall_title(view, (at, last), took_ns, spike.extra_ns) + f"{where}.",
            ranks=ranks,
            phase=place.phase,
            steps=(int(view.steps[at]), int(view.steps[last])),
            cost=cost,
            evidence={
                "clock": view.clock,
                "extra_ms": round(spike.extra_ns / 1e6, 3),
                "usual_ms": round(float(view.step_ns[at] - series.rest_ns[at]) / 1e6, 3),
                "steps_longer": [int(step) for step in view.steps[spike.columns]],
                "extra_ms_by_phase": by_phase_ms(view, excess, place.row),
                "place": seen or None,
            },
            advice=(
                *advice_for(
                    STALL_ADVICE,
                    phase=place.phase,
                    where=f" (host {view.hosts[place.row]})" if place.row is not None and view.hosts[place.row] else "",
                    nccl=view.nccl,
                ),
                "It happened once; no action is needed unless it recurs. The log from that time may explain it.",
            ),
            confidence=0.95 if place.phase else 0.85,
        ),
        explained_ns=saved,
    )
    return claim, where


def _is_waiting(view: View, columns: Columns) -> bool:
    """Whether the rank that works longest in these steps spends nearly all of them waiting for a processor."""
    waited = waited_ns(view)
    if waited is None:
        return False
    work_ns = np.nan_to_num(view.work_ns[:, columns]).sum(axis=1)
    row = int(work_ns.argmax())
    return float(np.nansum(waited[row, columns])) >= thresholds.WAITING_KNOWN_SHARE * float(work_ns[row])


def _one_for_each_place(view: View, stalls: Sequence[tuple[Claim, str]]) -> list[Claim]:
    """Stalls at the same line have one cause, and are one finding."""
    places: dict[Any, list[tuple[Claim, str]]] = {}
    for number, (claim, where) in enumerate(stalls):
        finding = claim.finding
        seen = finding.evidence["place"]
        places.setdefault((finding.ranks, finding.phase, seen) if seen else number, []).append((claim, where))
    return [_joined(view, same) if len(same) > 1 else same[0][0] for same in places.values()]


def _joined(view: View, stalls: Sequence[tuple[Claim, str]]) -> Claim:
    """Two or three stalls at one line."""
    saved = np.sum([claim.explained_ns for claim, _ in stalls], axis=0)
    cost = cost_of(view, saved)
    findings = [claim.finding for claim, _ in stalls]
    extra_ms = [float(stall.evidence["extra_ms"]) for stall in findings]
    worst = findings[int(np.argmax(extra_ms))]
    stretches = [stall.steps for stall in findings if stall.steps]
    steps = _and(["–".join(map(str, dict.fromkeys(stretch))) for stretch in stretches])
    by_phase = [stall.evidence["extra_ms_by_phase"] for stall in findings]
    serious = cost["share"] >= thresholds.WARNING_SHARE and max(extra_ms) * 1e6 >= thresholds.STALL_NS
    finding = replace(
        worst,
        severity="warning" if serious else "info",
        title=f"Steps {steps} took {_and([ms_text(ms) for ms in extra_ms])} longer than usual{stalls[0][1]}.",
        steps=(min(first for first, _ in stretches), max(last for _, last in stretches)),
        cost=cost,
        evidence={
            **worst.evidence,
            "extra_ms": round(sum(extra_ms), 3),
            "steps_longer": sorted({step for stall in findings for step in stall.evidence["steps_longer"]}),
            "extra_ms_by_phase": {phase: round(sum(each[phase] for each in by_phase), 3) for phase in by_phase[0]},
        },
        advice=(worst.advice[0], f"It happened {len(findings)} times at this line."),
    )
    return Claim(finding=finding, explained_ns=saved)


def _and(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _stall_steps(
    view: View, series: SpikeSeries, place: Place, columns: Columns, over: Floats
) -> tuple[int, int, float]:
    """The first and the last step in which the time was lost, and their total length."""
    if place.row is not None:
        mine = over[:, place.row] if place.phase is None else over[view.phases.index(place.phase), place.row][None, :]
        lost, length = np.nan_to_num(mine.sum(axis=0)), view.wall_ns[place.row]
    else:
        lost, length = series.rest_ns[columns], view.step_ns
    core = lost >= thresholds.CORE_SHARE * lost.max()
    at = columns[core] if core.any() else columns  # none of them is longer in that phase
    return int(at[0]), int(at[-1]), float(length[at].sum())


def _stall_title(view: View, at: tuple[int, int], took_ns: float, extra_ns: float) -> str:
    first, last = int(view.steps[at[0]]), int(view.steps[at[1]])
    if first == last:
        return f"Step {first} took {ns_text(took_ns)}, {ns_text(extra_ns)} longer than usual"
    return f"Steps {first} to {last} took {ns_text(extra_ns)} longer than usual"


def _stall_where(view: View, place: Place, seen: str) -> str:
    where = where_text(place, view)
    where = f",{where}" if where else ""
    where += f", mostly in {seen}" if seen else ""
    if place.row is not None and view.lockstep:
        where += "; the other rank waited" if len(view.ranks) == 2 else "; all other ranks waited"
    return where
