"""Moments at which many jobs became slower or faster together, and what changed then.

A series is the runs of one command with as many ranks on the same devices.  For each day and each series, the median
step time of the runs before is compared with that of as many runs after it (8 to 40, a tenth of the series).  Whether a
difference counts is decided by how far the series' successive runs differ.  One job changes for its own reasons, on
many days; so how often a series has such a difference at all is its chance to have one on any given day.  A day on
which more series changed in one direction than that explains, after correction for all days, is a change of the
cluster.  The clearest is taken, removed from the series, and the rest is searched again.

What changed is whatever is recorded of the runs (image, driver, torch …) and differs between before and after in at
least half of the series that changed.  It also dates the change: the first runs with the new value.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stepscope.fleet.chance import ALPHA, corrected, least_chance, median_interval
from stepscope.fleet.columns import ATTRIBUTES, Fleet
from stepscope.fleet.hours import DAY_NS, known_hours, rounded_hours
from stepscope.fleet.record import PHASES
from stepscope.records.text import count_text, percent_text

__all__ = ["change_rows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FEWEST_RUNS, MOST_RUNS, OF_SERIES = 8, 40, 10
"""On each side: a tenth of the series, but at least and at most so many."""
LEAST_SHARE = 0.005
"""A smaller change of a series does not count."""
TIMES_ERROR = 3.5
"""A change of a series is so many times its standard error."""
LEAST_SPREAD = 0.001
FEWEST_SERIES = 3
"""That changed together."""
LEAST_OF_SERIES = 0.25
"""Of those with runs on both sides."""
LEAST_CHANCE = 0.005
"""Of a series to change on any given day, whatever was seen of it."""
LONGEST_NS = 60 * DAY_NS
"""Between the day and the runs that are compared."""
MOST_CHANGES = 10
HALF = 0.5
MEDIAN_ERROR = 1.2533
"""The standard error of a median, compared with that of a mean."""


@dataclass(kw_only=True)
class _Series:
    runs: Integers
    window: int
    """Runs on each side."""
    levels: Floats
    """Logarithms of the step times."""
    spread: float
    shift: Floats
    """By day: the difference between after and before; NaN: not known."""


def change_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    if not len(fleet.started_ns):
        return []
    first_ns = int(fleet.started_ns.min()) // DAY_NS * DAY_NS
    days_ns = first_ns + DAY_NS * np.arange((int(fleet.started_ns.max()) - first_ns) // DAY_NS + 1)
    found = [series for own in _runs_by_series(fleet) if (series := _series(fleet, own, days_ns)) is not None]
    rows: list[dict[str, Any]] = []
    while len(found) >= FEWEST_SERIES and len(rows) < MOST_CHANGES:
        row = _clearest(fleet, found, days_ns, limit)
        if row is None:
            break
        rows.append(row)
    return sorted(rows, key=lambda row: -row["wall_ns"])


def _runs_by_series(fleet: Fleet) -> list[Integers]:
    runs = np.flatnonzero(np.isfinite(fleet.step_ms) & (fleet.step_ms > 0))
    order = runs[np.argsort(fleet.series[runs], kind="stable")]
    edges = np.flatnonzero(np.diff(fleet.series[order])) + 1
    return [own for own in np.split(order, edges) if len(own) >= 2 * FEWEST_RUNS]


def _series(fleet: Fleet, runs: Integers, days_ns: Integers) -> _Series | None:
    levels = np.log(fleet.step_ms[runs])
    steps = np.abs(np.diff(levels))
    # Successive runs: a change of the level moves few of these differences.
    spread = max(float(np.median(steps)) * 1.4826 / np.sqrt(2), LEAST_SPREAD)
    window = min(max(len(runs) // OF_SERIES, FEWEST_RUNS), MOST_RUNS)
    series = _Series(runs=runs, window=window, levels=levels, spread=spread, shift=np.zeros(0))
    series.shift = _shift(fleet, series, days_ns)
    return series if np.isfinite(series.shift).any() else None


def _shift(fleet: Fleet, series: _Series, days_ns: Integers) -> Floats:
    started, window = fleet.started_ns[series.runs], series.window
    medians = np.median(sliding_window_view(series.levels, window), axis=1)
    at = np.searchsorted(started, days_ns)
    inside = np.flatnonzero((at >= window) & (at + window <= len(started)))
    places = at[inside]
    near = (days_ns[inside] - started[places - window] <= LONGEST_NS) & (
        started[places + window - 1] - days_ns[inside] <= LONGEST_NS
    )
    shift = np.full(len(days_ns), np.nan)
    shift[inside[near]] = medians[places[near]] - medians[places[near] - window]
    return shift


def _limit(series: _Series) -> float:
    return max(LEAST_SHARE, TIMES_ERROR * MEDIAN_ERROR * series.spread * float(np.sqrt(2 / series.window)))


def _clearest(fleet: Fleet, found: list[_Series], days_ns: Integers, limit: int) -> dict[str, Any] | None:
    """The clearest change of all series; it is removed from them."""
    shifts = np.stack([series.shift for series in found])
    limits = np.array([_limit(series) for series in found])
    known = np.isfinite(shifts)
    best: tuple[float, int, int, float] | None = None
    """Size, day, sign and probability."""
    # Windows of neighboring days overlap: so many are independent, in two directions; twice, for those in between.
    tested = 4 * round(max(len(series.runs) / series.window for series in found))
    for sign in (1, -1):
        beyond = known & (np.nan_to_num(shifts) * sign > limits[:, None])
        # How often a series changes at all; a change lasts as long as its windows, so the days are not independent.
        usual = np.maximum(beyond.sum(axis=1) / np.maximum(known.sum(axis=1), 1), LEAST_CHANCE)
        for day in np.flatnonzero(beyond.sum(axis=0) >= FEWEST_SERIES).tolist():
            own = known[:, day]
            count = int(beyond[:, day].sum())
            if count < LEAST_OF_SERIES * int(own.sum()):
                continue
            chance = corrected(least_chance(count, int(own.sum()), float(usual[own].sum())), tested)
            if chance > ALPHA:
                continue
            size = float(np.abs(shifts[beyond[:, day], day]).sum())
            if best is None or size > best[0]:
                best = (size, day, sign, chance)
    if best is None:
        return None
    _, day, sign, chance = best
    changed = [at for at in range(len(found)) if known[at, day] and shifts[at, day] * sign > limits[at]]
    row = _row(fleet, found, changed, int(known[:, day].sum()), days_ns, day, chance, limit)
    for at in changed:
        series = found[at]
        after = fleet.started_ns[series.runs] >= days_ns[day]
        series.levels = np.where(after, series.levels - np.log1p(row["change_share"]), series.levels)
        series.levels = np.where(after, series.levels - _rest(series, after), series.levels)
        series.shift = _shift(fleet, series, days_ns)
    return row


def _rest(series: _Series, after: NDArray[np.bool_]) -> float:
    """What is left of the change in this series: its own size may differ."""
    place = int(np.argmax(after))
    window = series.window
    if not after.any() or place < window or len(after) - place < window:
        return 0.0
    return float(np.median(series.levels[place : place + window]) - np.median(series.levels[place - window : place]))


def _row(
    fleet: Fleet,
    found: list[_Series],
    changed: list[int],
    of: int,
    days_ns: Integers,
    day: int,
    chance: float,
    limit: int,
) -> dict[str, Any]:
    pairs = []
    for at in changed:
        runs, window = found[at].runs, found[at].window
        place = int(np.searchsorted(fleet.started_ns[runs], days_ns[day]))
        pairs.append((runs[place - window : place], runs[place : place + window]))
    what = _what_changed(fleet, pairs)
    from_ns, until_ns = _when(fleet, pairs, what)
    shares = np.expm1(np.array([found[at].shift[day] for at in changed]))
    share, low, high = median_interval(shares)
    firsts = [
        runs[int(np.searchsorted(fleet.started_ns[runs], until_ns))]
        for runs in _reaching(fleet, found, changed, until_ns)
    ]
    hours = 0.0
    useful = known_hours(fleet)[:, 0]
    for at, own in zip(changed, shares.tolist(), strict=True):
        runs = found[at].runs
        after = runs[fleet.started_ns[runs] >= until_ns]
        hours += float(useful[after].sum()) * own / (1 + own)
    firsts.sort(key=lambda run: fleet.started_ns[run])
    row: dict[str, Any] = {
        "wall_ns": until_ns,
        "from_wall_ns": from_ns,
        "until_wall_ns": until_ns,
        "change_share": round(share, 4),
        "low_share": round(low, 4),
        "high_share": round(high, 4),
        "direction": "slower" if share > 0 else "faster",
        "jobs": of,
        "changed_jobs": len(changed),
        "confidence": round(1 - chance, 6),
        "phase": _phase(fleet, pairs),
        "what": what,
        "gpu_hours_lost": rounded_hours(hours),
        "run_count": len(firsts),
        "runs": [fleet.ids[run] for run in firsts[:limit]],
    }
    return {**row, "title": _title(row)}


def _reaching(fleet: Fleet, found: list[_Series], changed: list[int], until_ns: int) -> list[Integers]:
    return [found[at].runs for at in changed if fleet.started_ns[found[at].runs[-1]] >= until_ns]


def _what_changed(fleet: Fleet, pairs: list[tuple[Integers, Integers]]) -> list[dict[str, Any]]:
    rows = []
    for name in ATTRIBUTES:
        values, names = fleet.attributes[name], fleet.names[name]
        seen: Counter[tuple[str, str]] = Counter()
        for before, after in pairs:
            old, new = _usual(values[before]), _usual(values[after])
            if old != new:
                seen[names[old], names[new]] += 1
        differing = sum(seen.values())
        if differing >= HALF * len(pairs):
            (old_name, new_name), _ = seen.most_common(1)[0]
            rows.append({"name": name, "before": old_name or None, "after": new_name or None, "jobs": differing})
    return sorted(rows, key=lambda row: -row["jobs"])


def _usual(values: Integers) -> int:
    number: int = Counter(values.tolist()).most_common(1)[0][0]
    return number


def _when(fleet: Fleet, pairs: list[tuple[Integers, Integers]], what: list[dict[str, Any]]) -> tuple[int, int]:
    """The last run before the change and the first after it, of all jobs; by what changed, if that is known."""
    if what:
        name, after_name = what[0]["name"], what[0]["after"] or ""
        values, names = fleet.attributes[name], fleet.names[name]
        runs = np.unique(np.concatenate([run for pair in pairs for run in pair]))
        new = np.array([names[value] == after_name for value in values[runs].tolist()])
        # A run that had the new value early, on a node that was changed first, does not date the change.
        first = new & np.isin(runs, np.concatenate([after for _, after in pairs]))
        if first.any() and not new.all():
            until_ns = int(fleet.started_ns[runs[first]].min())
            earlier = fleet.started_ns[runs[~new]]
            before = earlier[earlier < until_ns]
            return (int(before.max()) if len(before) else until_ns), until_ns
    from_ns = max(int(fleet.started_ns[before[-1]]) for before, _ in pairs)
    until_ns = min(int(fleet.started_ns[after[0]]) for _, after in pairs)
    return min(from_ns, until_ns), max(from_ns, until_ns)


def _phase(fleet: Fleet, pairs: list[tuple[Integers, Integers]]) -> str | None:
    """The phase with most of the difference."""
    moved: dict[str, float] = {}
    for phase in PHASES:
        own = fleet.phases_ms[phase]
        parts = [np.median(own[after]) - np.median(own[before]) for before, after in pairs]
        shares = [
            part / np.median(fleet.step_ms[before])
            for part, (before, _) in zip(parts, pairs, strict=True)
            if np.isfinite(part)
        ]
        moved[phase] = float(np.median(shares)) if shares else 0.0
    best = max(moved, key=lambda phase: abs(moved[phase]))
    return best if abs(moved[best]) >= LEAST_SHARE / 2 else None


def _title(row: dict[str, Any]) -> str:
    day = datetime.fromtimestamp(row["wall_ns"] / 1e9, timezone.utc).strftime("%Y-%m-%d")
    where = f", most of it in {row['phase']}" if row["phase"] else ""
    causes = [
        f"{each['name'].replace('_', ' ')} {each['before'] or '–'} → {each['after'] or '–'}" for each in row["what"][:3]
    ]
    why = f": {', '.join(causes)}" if causes else "; nothing that is recorded of the runs changed"
    jobs = f"{row['changed_jobs']} of {count_text(row['jobs'], 'job')}"
    return f"{jobs} are {percent_text(abs(row['change_share']))} {row['direction']} since {day}{where}{why}."
