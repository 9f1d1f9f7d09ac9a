"""Which steps are spikes: much longer than their neighbours, once all that is explained is taken off.

What one rank does after the last collective of a step its peers wait for in the next one, so neighbouring spikes are
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim
from stepscope.diagnosis.robust import longest, spread
from stepscope.diagnosis.series_stats import Rhythm, local_median, rhythm
from stepscope.diagnosis.shares import where_stopped
from stepscope.diagnosis.unclaimed import STOPS
from stepscope.diagnosis.view import View
from stepscope.records.phases import BUILTIN_PHASES

__all__ = [
    "Spike",
    "SpikeSeries",
    "around",
    "beat_of",
    "saved_at",
    "spike_series",
    "spikes_of",
    "stop_phases",
    "stopped",
    "without_stops",
]

Floats = NDArray[np.float64]
Columns = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Spike:
    columns: Columns
    """Steps in a row, as places in the view."""
    extra_ns: float
    """Lost in all of them."""

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
        """The same about a smoothed level: where every second step is slow, local medians take turns with them."""
        level = np.convolve(np.pad(self.local_ns, 1, mode="edge"), (0.25, 0.5, 0.25), mode="valid")
        return np.asarray(self.values_ns - level, np.float64)


def spike_series(values_ns: Floats) -> SpikeSeries:
    local = local_median(values_ns)
    typical_ns = float(np.median(values_ns))
    rest = values_ns - local
    least = max(thresholds.SPIKE_SHARE * typical_ns, thresholds.SPIKE_SPREADS * spread(rest), thresholds.SPIKE_FLOOR_NS)
    return SpikeSeries(values_ns=values_ns, local_ns=local, typical_ns=typical_ns, spiky=rest > least)


def stop_phases(view: View) -> list[str]:
    """Phases that stop the training now and then."""
    return [name for name in view.phases if name in STOPS or (name not in BUILTIN_PHASES and _rare(view, name))]


def without_stops(view: View, excess_ns: Floats) -> Floats:
    """[P, R]; the excess of spikes: what stops the training was taken off before they were sought."""
    kept: Floats = excess_ns.copy()
    kept[[view.phases.index(name) for name in stop_phases(view)]] = 0.0
    return kept


def stopped(view: View, claims: Sequence[Claim]) -> Floats:
    """[S]; what phases that stop the training now and then take, as far as nobody has explained it yet.

    Such a phase of one rank makes its peers' next step longer, by what its own step is not long enough for.
    """
    names = stop_phases(view)
    if not names:
        return np.zeros(len(view.steps))
    here = where_stopped(view, np.sum([view.phase(name) for name in names], axis=0))
    told = sum((claim.saved_ns for claim in claims if claim.finding.kind == "between_steps"), np.zeros(len(here)))
    return np.asarray(np.maximum(here - told, 0.0), np.float64)


def _rare(view: View, name: str) -> bool:
    """A phase of the user's that most steps do not have."""
    return bool((longest(view.phase(name)) > 0).mean() < thresholds.EXPLAINS_SHARE)


def spikes_of(view: View, series: SpikeSeries) -> list[Spike]:
    """Neighbouring slow steps together; a longer stretch of them is a matter of levels, not of spikes.

    With the step before, where that is longer than usual too: one rank of many that is late after its last collective
    hardly shows in the mean of its own step.
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


def around(view: View, spike: Spike) -> Columns:
    """Where the cause may show: the step before too, when a single rank of many was late after its last collective."""
    return np.arange(max(spike.first - 1, 0) if view.lockstep else spike.first, int(spike.columns[-1]) + 1)


def beat_of(view: View, spikes: list[Spike]) -> Rhythm | None:
    return rhythm([int(view.steps[spike.first]) for spike in spikes])
