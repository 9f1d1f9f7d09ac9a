"""Host, process, GPU and network samples around an onset: what changed most, and small charts of it.  Pure.

For each source (a host, a process, a GPU, a probe) and field the median of the two minutes before the onset is compared
with the median of the two minutes after it.  The difference is measured in robust spreads of the time before (median
absolute deviation), with a floor of a share of the level and of what the field can resolve, so that a field that was
constant does not lead because of a rounding error.  Samples from before the first step are left out: a job that starts
is not a level to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.incidents.inputs import Onset, Source, statement
from stepscope.incidents.onset import hosts_of, samples_file, series_of, step_times, steps_file, wall_of_step
from stepscope.records.series import RunData
from stepscope.records.text import count_text, ns_text
from stepscope.reports.evidence_text import figure_text, key_name

__all__ = ["AROUND_S", "samples_section"]

AROUND_S = 120
"""Seconds before and after the onset."""
FEWEST = 3
"""Samples on each side."""
LEAST_SCORE = 4.0
"""Robust spreads from which a change is listed."""
LEAST_SHARE = 0.1
"""A change of less than this share of the level is not listed, however steady the field was."""
MOST_ROWS = 12
MOST_CHARTS = 4
MOST_POINTS = 80
AROUND_STEPS = 120
_NOT_FIGURES = frozenset(
    {"wall_ns", "mono_ns", "pid", "rank", "index", "span_s", "log_bytes", "mem_total", "cpu_count", "memory_total"}
)
FLOORS = {"percent": 5.0, "load1": 1.0, "bps": 100e3, "ps": 1.0, "bytes": 16 << 20, "pressure": 0.05, "wait": 0.05}
"""What a change of a field must at least be, by the end of its name; a smaller one explains nothing."""
MEMORY_FIELDS = ("rss", "rss_file", "mem_available", "swap_used")


@dataclass(frozen=True, kw_only=True)
class _Change:
    who: str
    kind: str
    name: str
    near: bool
    """Of an affected rank or its host."""
    before: float
    after: float
    score: float
    count: int
    points: tuple[tuple[int, float], ...]


def samples_section(run: RunData, onset: Onset) -> dict[str, Any]:
    """``statements``, ``changes`` (most first, affected sources before others) and ``charts``."""
    charts = [chart for chart in (_step_chart(run, onset),) if chart is not None]
    source = Source(file=samples_file(run))
    if onset.wall_ns is None:
        return {
            "statements": [statement("The time of the onset is unknown, so samples cannot be compared.", source)],
            "changes": [],
            "charts": charts,
        }
    changes, sources, few = _changes(run, onset)
    span = f"{ns_text(AROUND_S * 10**9)} before and after the onset"
    if not sources:
        text = f"No samples were recorded within {span}."
    elif few == sources:
        text = f"There are too few samples within {span} to compare: fewer than {FEWEST} on one side."
    elif not changes:
        text = f"Nothing that was sampled changed much: medians of {span} of {count_text(sources, 'source')}."
    else:
        text = (
            f"What changed most between the medians of {span}, in robust spreads of the time before, "
            f"of {count_text(sources, 'source')}."
        )
    charts += [_chart(run, change, onset) for change in changes[:MOST_CHARTS]]
    return {
        "statements": [statement(text, source)],
        "changes": [_row(run, change) for change in changes[:MOST_ROWS]],
        "charts": charts,
    }


def _changes(run: RunData, onset: Onset) -> tuple[list[_Change], int, int]:
    """The changes, the number of sources, and of how many there are too few samples."""
    assert onset.wall_ns is not None
    hosts = set(hosts_of(run, onset.ranks, onset.attempt))
    starts = [series for series in series_of(run, onset.attempt) if len(series.steps)]
    trained_ns = max((wall_of_step(series, int(series.steps["step"][0])) or 0 for series in starts), default=0)
    first_ns = max(onset.wall_ns - AROUND_S * 10**9, min(trained_ns, onset.wall_ns))
    sources: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        wall_ns = sample.get("wall_ns")
        if type(wall_ns) is int and first_ns <= wall_ns <= onset.wall_ns + AROUND_S * 10**9:
            kind = str(sample.get("kind"))
            near = sample.get("rank") in onset.ranks if kind == "process" else str(sample.get("node")) in hosts
            sources.setdefault((kind, _who(sample), near), []).append(sample)
    found: list[_Change] = []
    few = 0
    for (kind, who, near), samples in sources.items():
        before = [sample for sample in samples if sample["wall_ns"] < onset.wall_ns]
        after = [sample for sample in samples if sample["wall_ns"] >= onset.wall_ns]
        if min(len(before), len(after)) < FEWEST:
            few += 1
            continue
        for name in sorted({name for sample in samples for name in sample} - _NOT_FIGURES):
            change = _change(name, before, after)
            if change is not None:
                level, now, score = change
                points = tuple(
                    (sample["wall_ns"], float(sample[name])) for sample in samples if _is_number(sample, name)
                )
                found.append(
                    _Change(
                        who=who, kind=kind, name=name, near=near, before=level, after=now, score=score,
                        count=len(points), points=points,
                    )
                )  # fmt: skip
    found.sort(key=lambda change: (not change.near, -change.score, change.kind, change.who, change.name))
    return found, len(sources), few


def _who(sample: Mapping[str, Any]) -> str:
    node = str(sample.get("node", ""))[:80]
    kind = sample.get("kind")
    if kind == "process":
        rank = sample.get("rank")
        return f"rank {rank}" if type(rank) is int else f"process {sample.get('pid')} on {node}"
    if kind == "gpu":
        return f"GPU {sample.get('index')} of {node}"
    if kind == "probe":
        return f"{node} to {str(sample.get('peer', ''))[:80]}"
    return f"host {node}"


def _is_number(sample: Mapping[str, Any], name: str) -> bool:
    value = sample.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _change(
    name: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> tuple[float, float, float] | None:
    values = [
        np.array([sample[name] for sample in side if _is_number(sample, name)], float) for side in (before, after)
    ]
    if min(map(len, values)) < FEWEST:
        return None
    level, now = (float(np.median(side)) for side in values)
    spread = 1.4826 * float(np.median(np.abs(values[0] - level)))
    floor = _floor(name)
    moved = abs(now - level)
    score = moved / max(spread, LEAST_SHARE * abs(level) / LEAST_SCORE, floor / LEAST_SCORE, 1e-12)
    if score < LEAST_SCORE or moved < floor or moved < LEAST_SHARE * abs(level):
        return None
    return level, now, score


def _floor(name: str) -> float:
    if name in MEMORY_FIELDS:
        return FLOORS["bytes"]
    return FLOORS.get(name) or FLOORS.get(name.rpartition("_")[2], 0.0)


def _row(run: RunData, change: _Change) -> dict[str, Any]:
    label = key_name(change.name)
    before, after = (_text(change.name, value) for value in (change.before, change.after))
    return {
        "kind": change.kind,
        "who": change.who,
        "field": change.name,
        "label": label,
        "before": _short(change.before),
        "after": _short(change.after),
        "score": round(min(change.score, 1e6), 1),
        "affected": change.near,
        "text": f"{change.who}: {label} {before} → {after}",
        "before_text": before,
        "after_text": after,
        "source": Source(file=samples_file(run), about=f"{change.who}, {count_text(change.count, 'sample')}").to_dict(),
    }


def _text(name: str, value: float) -> str:
    key = f"{name}_bytes" if name in MEMORY_FIELDS else name
    return figure_text(key, value)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# -- charts -----------------------------------------------------------------------------------------------------------


def _chart(run: RunData, change: _Change, onset: Onset) -> dict[str, Any]:
    assert onset.wall_ns is not None
    seconds = [(wall_ns - onset.wall_ns) / 1e9 for wall_ns, _ in change.points]
    xs, (ys,) = _thinned(seconds, [[value for _, value in change.points]])
    return {
        "title": f"{key_name(change.name)}, {change.who}",
        "x": "seconds from the onset",
        "at": xs,
        "series": [{"name": change.who, "values": ys}],
        **_scale(change.name, ys),
        "source": Source(file=samples_file(run), about=f"{change.who}, {change.name}").to_dict(),
    }


def _step_chart(run: RunData, onset: Onset) -> dict[str, Any] | None:
    """The time of the steps around the onset: of the named ranks and of their peers, or of the job."""
    steps, times, others, what = step_times(run, onset)
    if onset.step is None or len(steps) < FEWEST:
        return None
    inside = np.flatnonzero(np.abs(steps - onset.step) <= AROUND_STEPS)
    if len(inside) < FEWEST:
        return None
    lines = [times[inside], *([] if others is None else [others[inside]])]
    xs, values = _thinned([float(step) for step in steps[inside]], [line.tolist() for line in lines])
    names = ["named ranks" if others is not None else "all ranks", "their peers"]
    if others is not None and len(onset.ranks) == 1:
        names[0] = f"rank {onset.ranks[0]}"
    title = "work of a step, without waiting" if what == "work" else "step time"
    return {
        "title": title,
        "x": "step",
        "at": [int(x) for x in xs],
        "onset": onset.step,
        "series": [{"name": name, "values": line} for name, line in zip(names, values, strict=False)],
        **_scale("wall_ns", [value for line in values for value in line]),
        "source": Source(
            file=steps_file(run), about=f"steps {int(steps[inside[0]]):,} to {int(steps[inside[-1]]):,}"
        ).to_dict(),
    }


def _thinned(xs: Sequence[float], lines: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """At most ``MOST_POINTS`` medians of neighbors."""
    width = -(-len(xs) // MOST_POINTS)
    places = range(0, len(xs), max(width, 1))
    short = [round(float(xs[at]), 1) for at in places]
    return short, [[_short(float(np.median(line[at : at + width]))) for at in places] for line in lines]


def _scale(name: str, values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    texts = (ns_text(low), ns_text(high)) if name == "wall_ns" else (_text(name, low), _text(name, high))
    return {"low": low, "high": high, "low_text": texts[0], "high_text": texts[1]}
