"""GPU hours by cause: of all runs, over time, and by job, team, user and host.  Parts add up to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.fleet.columns import Fleet
from stepscope.fleet.record import CAUSES

__all__ = ["cause_rows", "group_rows", "host_hours_rows", "known_hours", "rounded_hours", "time_rows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DAY_NS = 86_400_000_000_000
MOST_BARS = 60
"""Of a picture over time; with more days, a bar is a week, then a month and so on."""
UNITS = {"day": "D", "week": "", "month": "M", "year": "Y", "decade": "10Y"}
"""By name, as of NumPy; its weeks begin on Thursdays, ours on Mondays."""
MONDAY = 4
"""Days from the epoch, a Thursday, to the first Monday."""
MOST_ROWS = 100
USEFUL = list(CAUSES).index("useful")


def known_hours(fleet: Fleet) -> Floats:
    """By run and cause, 0 where they are not known."""
    return np.nan_to_num(fleet.hours, nan=0.0)


def rounded_hours(hours: float) -> float:
    return round(float(hours), 3)


def by_cause(hours: Floats) -> dict[str, float]:
    return {cause: rounded_hours(part) for cause, part in zip(CAUSES, hours, strict=True)}


def useful_share(hours: Floats) -> float | None:
    total = float(hours.sum())
    return round(float(hours[USEFUL]) / total, 4) if total > 0 else None


def lost(hours: Floats) -> Floats:
    """By row, all hours that were not useful."""
    return np.asarray(hours.sum(axis=-1) - hours[..., USEFUL], np.float64)


def first_ids(fleet: Fleet, runs: Integers, weights: Floats, limit: int) -> list[str]:
    """IDs of these runs, the largest weight first."""
    chosen = runs[np.argsort(-weights, kind="stable")[:limit]]
    return [fleet.ids[run] for run in chosen.tolist()]


def cause_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    hours = known_hours(fleet)
    total = float(hours.sum())
    rows = []
    for at, (cause, name) in enumerate(CAUSES.items()):
        own = np.flatnonzero(hours[:, at] > 0)
        shown = [] if cause == "useful" else first_ids(fleet, own, hours[own, at], limit)
        rows.append(
            {
                "cause": cause,
                "name": name,
                "gpu_hours": rounded_hours(hours[:, at].sum()),
                "share": round(float(hours[:, at].sum()) / total, 6) if total > 0 else None,
                "run_count": len(own),
                "runs": shown,
            }
        )
    return rows


def time_rows(fleet: Fleet, limit: int) -> dict[str, Any]:
    """Bars of a day, week, month, year or decade of the calendar, in UTC.

    The hours of a run belong to the time at which it started.
    """
    if not len(fleet.started_ns):
        return {"unit": "day", "rows": []}
    for unit in UNITS:
        bars = _bar_of(fleet.started_ns, unit)
        if np.ptp(bars) < MOST_BARS:
            break
    hours = known_hours(fleet)
    rows = []
    for at in range(int(bars.min()), int(bars.max()) + 1):
        own = np.flatnonzero(bars == at)
        total = hours[own].sum(axis=0)
        rows.append(
            {
                "begin_wall_ns": _begin_of(at, unit),
                "gpu_hours": rounded_hours(total.sum()),
                "useful_share": useful_share(total),
                "by_cause": by_cause(total),
                "run_count": len(own),
                "runs": first_ids(fleet, own, lost(hours[own]), limit),
            }
        )
    return {"unit": unit, "rows": rows}


def _bar_of(wall_ns: Integers, unit: str) -> Integers:
    """Days, weeks, months … since that of the epoch."""
    if unit == "week":
        return (wall_ns // DAY_NS - MONDAY) // 7
    return wall_ns.astype("datetime64[ns]").astype(f"datetime64[{UNITS[unit]}]").astype(np.int64)


def _begin_of(bar: int, unit: str) -> int:
    if unit == "week":
        return (bar * 7 + MONDAY) * DAY_NS
    return int(np.array([bar]).astype(f"datetime64[{UNITS[unit]}]").astype("datetime64[ns]").astype(np.int64)[0])


def group_rows(fleet: Fleet, column: str, limit: int, *, unnamed: str = "") -> list[dict[str, Any]]:
    """Rows by job, team or user, the one that lost most first."""
    groups: Integers = getattr(fleet, column)
    runs = np.arange(len(groups))
    return _rows(fleet, fleet.names.get(column, ()), groups, runs, known_hours(fleet), limit, unnamed)


def host_hours_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    """Rows by host: the hours of a run are split by the ranks on each."""
    total = np.bincount(fleet.host_run, weights=fleet.host_ranks, minlength=len(fleet.ids))
    share = fleet.host_ranks / np.maximum(total[fleet.host_run], 1) if len(fleet.host_run) else np.zeros(0)
    hours = known_hours(fleet)[fleet.host_run] * share[:, None]
    return _rows(fleet, fleet.names.get("host", ()), fleet.host, fleet.host_run, hours, limit, "")


def _rows(
    fleet: Fleet, names: Sequence[str], groups: Integers, runs: Integers, hours: Floats, limit: int, unnamed: str
) -> list[dict[str, Any]]:
    columns = [np.bincount(groups, weights=part, minlength=len(names)).astype(np.float64) for part in hours.T]
    sums: Floats = np.stack(columns, axis=1)
    order = np.argsort(-lost(sums), kind="stable") if len(names) else np.zeros(0, int)
    by_group = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[by_group], np.arange(len(names) + 1))
    row_lost = lost(hours)
    rows = []
    for group in order[:MOST_ROWS].tolist():
        own = by_group[edges[group] : edges[group + 1]]
        row = _row(names[group], names[group] or unnamed, sums[group], len(own))
        rows.append({**row, "runs": first_ids(fleet, runs[own], row_lost[own], limit)})
    if len(order) > MOST_ROWS:
        rest = order[MOST_ROWS:]
        count = int((edges[rest + 1] - edges[rest]).sum())
        rows.append({**_row("", "others", sums[rest].sum(axis=0), count), "runs": []})
    return rows


def _row(key: str, name: str, hours: Floats, count: int) -> dict[str, Any]:
    return {
        "key": key,
        "name": name,
        "gpu_hours": rounded_hours(hours.sum()),
        "useful_share": useful_share(hours),
        "by_cause": by_cause(hours),
        "run_count": count,
    }
