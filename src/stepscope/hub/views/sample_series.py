"""Samples as curves: one per host, process or GPU, each figure in bins of time, so that they lie beside the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.store.coarse_samples import OVER
from stepscope.store.thinning import span_of

__all__ = ["WHO", "Statistic", "sample_series"]

Statistic = Literal["mean", "max", "min", "last"]
WHO: Mapping[str, tuple[str, ...]] = {
    "host": ("node",),
    "process": ("node", "rank", "pid"),
    "gpu": ("node", "index"),
    "probe": ("node", "peer"),
}
"""By kind, what a curve is of; of another kind: of its node."""
_NO_FIGURE = ("wall_ns", "mono_ns", "pid", "rank", "index", "kind", "node", "host", "span_s", "over")
_NAMES = ("host", "uuid", "name")


def sample_series(
    lines: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    fields: Sequence[str],
    span_ns: tuple[int | None, int | None],
    bins: int,
    statistic: Statistic,
    most: int,
) -> dict[str, Any]:
    """At most ``most`` curves; ``left_out`` says how many more there are.  Without ``fields``, all that are figures."""
    curves: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    who = WHO.get(kind, ("node",))
    for line in lines:
        at = line.get("wall_ns")
        within = type(at) is int and (span_ns[0] or 0) <= at and (span_ns[1] is None or at <= span_ns[1])
        if line.get("kind") == kind and within:
            curves.setdefault(tuple(_plain(line.get(name)) for name in who), []).append(line)
    keys = sorted(curves, key=_order)[:most]
    walls = [line["wall_ns"] for key in keys for line in curves[key]]
    first, last = (span_ns[0] or min(walls), max(walls)) if walls else (0, 0)
    width = max(1, -(-(last - first + 1) // bins))
    count = (last - first) // width + 1 if walls else 0
    rows = []
    for key in keys:
        own = curves[key]
        place = np.array([(line["wall_ns"] - first) // width for line in own], np.intp)
        figures = fields or sorted({name for line in own for name in line if name not in _NO_FIGURE})
        weights = _weights(own)
        values = {name: _binned(own, name, place, count, statistic, weights) for name in figures}
        about = {name: own[-1][name] for name in _NAMES if isinstance(own[-1].get(name), str)}
        known = {name: column for name, column in values.items() if column is not None}
        rows.append({**dict(zip(who, key, strict=True)), **about, "values": known})
    starts = [first + width * at for at in range(count)]
    return {"kind": kind, "stat": statistic, "wall_ns": starts, "bin_ns": width, "series": rows} | {
        "left_out": len(curves) - len(keys)
    }


def _weights(lines: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """How many seconds each stands for: those of earlier hours are thinned, and say so; the others, as they lie."""
    spans_s = np.array([span_of(line) for line in lines], np.float64)
    if not spans_s.any():
        return np.ones(len(lines))
    fine = np.array([line["wall_ns"] for line in lines], np.float64)[spans_s == 0]
    apart_s = float(np.median(np.diff(fine))) / 1e9 if len(fine) > 1 else 1.0
    return np.where(spans_s > 0, spans_s, max(apart_s, 1e-3))


def _binned(
    lines: Sequence[Mapping[str, Any]],
    name: str,
    place: NDArray[np.intp],
    count: int,
    statistic: Statistic,
    weights: NDArray[np.float64],
) -> list[float | None] | None:
    """None when it is no figure."""
    values = np.array([_figure(_of(line, name, statistic)) for line in lines], np.float64)
    known = np.isfinite(values)
    if not known.any():
        return None
    at, values, weights = place[known], values[known], weights[known]
    found = np.full(count, np.nan)
    if statistic == "mean":
        total, weight = np.bincount(at, values * weights, count), np.bincount(at, weights, count)
        found = np.where(weight > 0, total / np.where(weight > 0, weight, 1), np.nan)
    elif statistic == "last":
        found[at] = values
    else:
        fill = -np.inf if statistic == "max" else np.inf
        found[:] = fill
        (np.maximum if statistic == "max" else np.minimum).at(found, at, values)
        found[found == fill] = np.nan
    return [None if value != value else value for value in found.tolist()]


def _of(line: Mapping[str, Any], name: str, statistic: Statistic) -> Any:
    """The figure of a sample; of one that stands for many, what it says of all of them."""
    over = line.get(OVER)
    kept = over.get(statistic) if isinstance(over, dict) else None
    found = kept.get(name) if isinstance(kept, dict) else None
    return line.get(name) if found is None else found


def _figure(value: Any) -> float:
    """A list is one where there is anything in it: the mean of ``throttle_reasons`` is the share of the time."""
    if isinstance(value, list):
        return float(bool(value))
    return value if type(value) in (int, float) else np.nan


def _plain(value: Any) -> Any:
    """What can be a key; anything else a stranger put there is its text."""
    return value if isinstance(value, str | int | float | None) else str(value)


def _order(key: tuple[Any, ...]) -> tuple[tuple[bool, float, str], ...]:
    return tuple((isinstance(part, str), part if isinstance(part, int | float) else 0, str(part)) for part in key)
