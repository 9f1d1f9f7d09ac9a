"""Spikes that come again: with their beat where they have one, the phase and the rank they have in common.

Slow steps that are too small to be spikes are found only by their beat: the series is folded at every period.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.excess import Place, by_phase_ms, locate, some, typical, where_text
from stepscope.diagnosis.passes import longer_by_passes
from stepscope.diagnosis.places import seen_at
from stepscope.diagnosis.series_stats import Fold, Rhythm, at_least, fold
from stepscope.diagnosis.spike_steps import Spike, SpikeSeries, beat_of, saved_at, stop_phases, without_stops
from stepscope.diagnosis.timing_advice import for_jitter
from stepscope.diagnosis.unclaimed import STOPS
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding, Severity
from stepscope.records.slot import FLAG_EPOCH_START
from stepscope.records.units import count_text, ms_text, share_text

__all__ = ["find_jitter"]

Floats = NDArray[np.float64]
Columns = NDArray[np.intp]

STEPS_SHOWN = 20
MORE_SHARE = 0.25
"""Of what a slow step takes longer: other reasons that make it longer by so much must not be hidden in the sentence."""
WAITED_IN = ("other", "backward", "comm")
"""Where a wait for peers hides when it is not measured."""


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
        alike = _alike(spikes)
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
    return [Claim(finding=_jitter_finding(view, series, found, cost), saved_ns=found.saved_ns)]


def _alike(spikes: list[Spike]) -> list[Spike]:
    """Those about as large as most: what keeps a beat does the same each time, and strays are of any size."""
    if not spikes:
        return []
    middle = float(np.median([spike.extra_ns for spike in spikes]))
    return [spike for spike in spikes if middle / 2 <= spike.extra_ns <= middle * 2]


def _only_scatter(view: View, series: SpikeSeries, spikes: list[Spike]) -> bool:
    """Whether the beat is that of the steps with more backward passes, most of which are no longer than they should be.

    They are the longest, so what a busy machine adds is most in them.
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
    # A stall that happens to fall on the beat is not of it.
    saved[small.at] = np.clip(series.smooth_rest_ns[small.at] - small.usual, 0.0, 2 * small.excess)
    return _Recurring(
        columns=small.at,
        groups=np.split(small.at, np.flatnonzero(np.diff(small.at) > 1) + 1),
        saved_ns=saved,
        period=small.period,
        regular=small.agrees,
        each_ns=small.excess,
    )


def _jitter_finding(view: View, series: SpikeSeries, found: _Recurring, cost: dict[str, Any]) -> Finding:
    place, varying, hit, excess = _who(view, series, found)
    slow = {int(step) for step in view.steps[found.columns]}
    seen = seen_at(view, place.ranks(view), phase=place.phase, steps=slow)
    epoch_starts = ((view.flags[:, found.columns] & FLAG_EPOCH_START) > 0).any(axis=0).mean()
    steps = view.steps[[group[0] for group in found.groups]]
    return Finding(
        kind="jitter",
        severity=_severity(view, cost["share"], found, place, varying),
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
        advice=for_jitter(
            phase=place.phase,
            period=found.period,
            num_workers=_num_workers(view),
            at_epoch_starts=bool(epoch_starts >= thresholds.EXPLAINS_SHARE),
            varying_rank=varying,
            nccl=view.nccl,
            place=seen,
        ),
        confidence=0.9 if found.period is not None else 0.7,
    )


def _who(view: View, series: SpikeSeries, found: _Recurring) -> tuple[Place, bool, dict[str, int], Floats]:
    """The place that most of the spikes have in common; whether another rank has them each time; the mean excess."""
    slow = np.zeros(len(view.steps), np.bool_)
    slow[found.columns] = True
    usual = typical(view, np.flatnonzero(~slow & ~series.spiky))
    chosen = [found.groups[index] for index in some(np.arange(len(found.groups)))]
    before = 1 if view.lockstep and found.period != 2 else 0
    wide = [np.arange(max(int(group[0]) - before, 0), int(group[-1]) + 1) for group in chosen]
    columns = np.concatenate(wide)
    over = view.phase_ns[:, :, columns] - usual[:, :, None]
    borders = np.cumsum([len(one) for one in wide])[:-1]
    by_spike = [part.sum(axis=2) for part in np.split(over, borders, axis=2)]
    excess = np.mean([np.nan_to_num(one) for one in by_spike], axis=0)
    lost = [float(found.saved_ns[group].sum()) for group in chosen]
    if found.each_ns < thresholds.SPIKE_SHARE * series.typical_ns:
        # Too small to be told from the noise one by one: the mean of all.
        return locate(view, without_stops(view, excess), float(np.mean(lost))), False, {}, excess
    places = [locate(view, without_stops(view, one), lost_ns) for one, lost_ns in zip(by_spike, lost, strict=True)]
    rows = Counter(place.row for place in places)
    phases = Counter(place.phase for place in places)
    row, times = rows.most_common(1)[0]
    same = times >= thresholds.SAME_RANK_SHARE * len(places)
    if found.period is None and row is not None:
        chance = at_least(times, len(places), 1 / len(view.ranks)) * len(view.ranks)
        same = same and chance <= thresholds.SAME_RANK_CHANCE
    phase, agreeing = phases.most_common(1)[0]
    alone = sum(count for one, count in rows.items() if one is not None)
    return (
        Place(row=row if same else None, phase=phase if agreeing >= thresholds.SAME_RANK_SHARE * len(places) else None),
        not same and alone >= thresholds.EXPLAINS_SHARE * len(places),
        {str(view.ranks[one]): count for one, count in sorted(rows.items(), key=str) if one is not None},
        excess,
    )


def _severity(view: View, share: float, found: _Recurring, place: Place, varying: bool) -> Severity:
    """Never critical.  What comes without a beat is a warning only if it is always in the same place: chance is not.

    A phase in which ranks may only wait for each other is no place.
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
            return f"{every} takes {longer} longer besides {besides}{where}: {share_text(share)} of the time."
        usual = ms_text(view.median_step_ns / 1e6)
        return f"{every} takes {longer} longer than the usual {usual}{where}: {share_text(share)} of the time."
    return (
        f"{len(found.groups):,} of {count_text(len(view.steps), 'step')} are much longer than the rest, "
        f"typically by {longer}{where}: {share_text(share)} of the time."
    )


def _besides(view: View, series: SpikeSeries, found: _Recurring) -> str:
    """What else, explained already, makes the same steps longer by a good part of that again; mostly nothing."""
    explained_ns = view.step_ns - series.values_ns
    usual_ns = float(np.median(explained_ns))
    more_ns = [float((explained_ns[group] - usual_ns).sum()) for group in found.groups]
    if float(np.median(more_ns)) <= MORE_SHARE * found.each_ns:
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
