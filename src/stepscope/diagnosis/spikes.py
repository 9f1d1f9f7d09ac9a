"""Over time, single steps: ``stall`` (it happened once) and ``jitter`` (it comes again, see ``jitter``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.excess import Place, by_phase_ms, locate, typical, where_text
from stepscope.diagnosis.jitter import find_jitter
from stepscope.diagnosis.places import seen_at
from stepscope.diagnosis.spike_steps import (
    Spike,
    SpikeSeries,
    around,
    beat_of,
    saved_at,
    spike_series,
    spikes_of,
    stopped,
    without_stops,
)
from stepscope.diagnosis.timing_advice import for_stall
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.finding import Finding
from stepscope.records.units import duration_text

__all__ = ["find_spikes"]

Floats = NDArray[np.float64]
Columns = NDArray[np.intp]

NEIGHBOURS = 10
"""Steps on each side of a stall that say what is usual there."""


def find_spikes(view: View, left_ns: Floats, claims: Sequence[Claim]) -> list[Claim]:
    """``left_ns`` [S]: the steps without what ``claims`` explain."""
    if not view.enough or not left_ns.any():
        return []
    series = spike_series(left_ns - stopped(view, claims))
    spikes = spikes_of(view, series)
    stalls = _one_off(view, series, spikes)
    known = {spike.first for spike in stalls}
    recurring = [spike for spike in spikes if spike.first not in known]
    return [*(_stall(view, series, spike) for spike in stalls), *find_jitter(view, series, recurring)]


def _one_off(view: View, series: SpikeSeries, spikes: list[Spike]) -> list[Spike]:
    """The few large ones, unless they keep a beat or are only the largest of many."""
    enough_ns = min(thresholds.STALL_STEPS * series.typical_ns, thresholds.STALL_NS)
    large = [spike for spike in spikes if spike.extra_ns >= enough_ns]
    if len(large) > thresholds.STALLS_AT_MOST or beat_of(view, large) is not None:
        return []
    others = [spike.extra_ns for spike in spikes if spike.extra_ns < enough_ns]
    floor_ns = float(thresholds.STALL_FLOOR_NS)
    if len(others) >= thresholds.RECURRING_SPIKES:
        floor_ns = max(floor_ns, thresholds.STALL_OVER_SPIKES * float(np.median(others)))
    return [spike for spike in large if spike.extra_ns >= floor_ns]


def _stall(view: View, series: SpikeSeries, spike: Spike) -> Claim:
    columns = around(view, spike)
    near = np.arange(max(columns[0] - NEIGHBOURS, 0), min(columns[-1] + NEIGHBOURS + 1, len(view.steps)))
    usual = typical(view, near[~series.spiky[near] & ~np.isin(near, columns)])
    over = view.phase_ns[:, :, columns] - usual[:, :, None]
    excess = over.sum(axis=2)
    place = locate(view, without_stops(view, excess), spike.extra_ns)
    at, last, took_ns = _when(view, series, place, columns, over)
    saved = saved_at(series, spike.columns)
    cost = cost_of(view, saved)
    ranks = place.ranks(view)
    seen = seen_at(view, ranks, phase=place.phase, steps={int(step) for step in view.steps[at : last + 1]})
    serious = cost["share"] >= thresholds.WARNING_SHARE and spike.extra_ns >= thresholds.STALL_NS
    return Claim(
        finding=Finding(
            kind="stall",
            severity="warning" if serious else "info",
            title=_stall_title(view, place, (at, last), took_ns, spike.extra_ns, seen=seen),
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
            advice=for_stall(
                phase=place.phase,
                alone=bool(ranks),
                host=view.hosts[place.row] if place.row is not None else "",
                nccl=view.nccl,
            ),
            confidence=0.95 if place.phase else 0.85,
        ),
        saved_ns=saved,
    )


def _when(view: View, series: SpikeSeries, place: Place, columns: Columns, over: Floats) -> tuple[int, int, float]:
    """The first and the last step in which the time was lost, and how long they were."""
    if place.row is not None:
        mine = over[:, place.row] if place.phase is None else over[view.phases.index(place.phase), place.row][None, :]
        lost, length = np.nan_to_num(mine.sum(axis=0)), view.wall_ns[place.row]
    else:
        lost, length = series.rest_ns[columns], view.step_ns
    at = columns[lost >= thresholds.CORE_SHARE * lost.max()]
    return int(at[0]), int(at[-1]), float(length[at].sum())


def _stall_title(view: View, place: Place, at: tuple[int, int], took_ns: float, extra_ns: float, *, seen: str) -> str:
    first, last = int(view.steps[at[0]]), int(view.steps[at[1]])
    lost = _seconds(extra_ns)
    where = where_text(place, view)
    where = f",{where}" if where else ""
    where += f", mostly in {seen}" if seen else ""
    if first == last:
        title = f"Step {first} took {_seconds(took_ns)}, {lost} longer than usual{where}"
    else:
        title = f"Steps {first} to {last} took {lost} longer than usual{where}"
    if place.row is not None and view.lockstep:
        title += "; the other rank waited" if len(view.ranks) == 2 else "; all other ranks waited"
    return f"{title}."


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.2f} s" if 1 <= ns / 1e9 < 10 else duration_text(ns / 1e9)
