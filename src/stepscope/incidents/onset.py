"""When an incident began and where: its step and time, the first signs in the steps before it.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.alerts.model import Incident
from stepscope.diagnosis.engine.window import last_attempt
from stepscope.incidents.inputs import Onset, Source, statement
from stepscope.records.series import NOTED, RankSeries, RunData, noted_health
from stepscope.records.text import bytes_text, norm_text, ns_text

__all__ = [
    "first_signs",
    "hosts_of",
    "onset_of",
    "samples_file",
    "series_of",
    "step_times",
    "steps_file",
    "wall_of_step",
]

Floats = NDArray[np.float64]

BASE_STEPS = 200
"""Steps before the onset that are the usual level."""
FEWEST_STEPS = 8
SPREADS = 5.0
"""A step is unusual if it is this many spreads above the usual level …"""
LEAST_SHARE = 0.1
"""… and at least this share of it."""
SUSTAINED = 4
"""This many of six steps must be unusual for a first sign: a single slow step is not one."""


def series_of(run: RunData, attempt: int) -> list[RankSeries]:
    """The ranks of an attempt; of the last one if it is unknown."""
    found = [series for series in run.ranks if series.identity.attempt == attempt]
    return sorted(found or last_attempt(run.ranks), key=lambda series: series.rank)


def hosts_of(run: RunData, ranks: Iterable[int], attempt: int) -> tuple[str, ...]:
    wanted = set(ranks)
    return tuple(sorted({each.identity.host for each in series_of(run, attempt) if each.rank in wanted}))


def wall_of_step(series: RankSeries, step: int) -> int | None:
    """When the rank began a step; for the one after its last, when that ended."""
    steps = series.steps
    if not len(steps):
        return None
    numbers = steps["step"]
    place = int(np.searchsorted(numbers, step))
    to_wall_ns = series.anchor_wall_ns - series.anchor_mono_ns
    if place < len(numbers) and int(numbers[place]) == step:
        return int(steps["start_ns"][place]) + to_wall_ns
    if place == len(numbers) and int(numbers[-1]) == step - 1:
        return int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) + to_wall_ns
    return None


def onset_of(run: RunData, incident: Incident, *, ended_wall_ns: int | None) -> Onset:
    """The start of its first step on the ranks that it names; otherwise the time that was recorded with it."""
    own = series_of(run, incident.attempt)
    named = [series for series in own if series.rank in incident.ranks] or own
    step = incident.since_step
    starts = [] if step is None else [wall for series in named if (wall := wall_of_step(series, step)) is not None]
    recorded = incident.since_wall_ns or incident.opened_wall_ns or None
    # A job that stopped is not in a new step: the time of its last sign is better known than the step's start.
    exact = recorded is not None and incident.topic in ("stopped", "run")
    wall_ns = recorded if exact else min(starts, default=recorded)
    end = incident.resolved_wall_ns if incident.state == "resolved" else None
    return Onset(
        wall_ns=wall_ns,
        step=step,
        ranks=incident.ranks,
        attempt=incident.attempt,
        end_wall_ns=end if end is not None else ended_wall_ns,
        by_step=bool(starts) and not exact,
    )


# -- first signs ------------------------------------------------------------------------------------------------------


def step_times(run: RunData, onset: Onset) -> tuple[NDArray[np.int64], Floats, Floats | None, str]:
    """Steps of the attempt, the time that moved, the same of the peers, and what it is.

    With named ranks: their own work, which is the step without waiting for peers; without, the length of the step.
    """
    own = [series for series in series_of(run, onset.attempt) if len(series.steps)]
    named = [series for series in own if series.rank in onset.ranks]
    if named and len(named) < len(own):
        peers = [series for series in own if series.rank not in onset.ranks]
        steps = _common_steps(own)
        work = np.median([_column(series, steps, work=True) for series in named], axis=0)
        others = np.median([_column(series, steps, work=True) for series in peers[:64]], axis=0)
        return steps, work, others, "work"
    steps = _common_steps(own)
    if not len(steps):
        return steps, np.zeros(0), None, "step time"
    return steps, np.median([_column(series, steps, work=False) for series in own[:64]], axis=0), None, "step time"


def _common_steps(ranks: Sequence[RankSeries]) -> NDArray[np.int64]:
    if not ranks:
        return np.zeros(0, np.int64)
    common = np.asarray(ranks[0].steps["step"], np.int64)
    for series in ranks[1:64]:
        common = np.intersect1d(common, series.steps["step"], assume_unique=True)
    return common


def _column(series: RankSeries, steps: NDArray[np.int64], *, work: bool) -> Floats:
    place = np.searchsorted(series.steps["step"], steps)
    place = np.minimum(place, len(series.steps) - 1)
    wall = np.asarray(series.steps["wall_ns"], np.float64)[place]
    return wall - np.asarray(series.steps.phase("comm"), np.float64)[place] if work else wall


def first_signs(run: RunData, incident: Incident, onset: Onset) -> list[dict[str, Any]]:
    """When what the incident is about began to move, as the steps show it, with the time of each."""
    signs = {
        "speed": _slower,
        "numbers": _numbers,
        "memory": _memory,
        "stopped": _last_steps,
        "run": _last_steps,
    }.get(incident.topic)
    return signs(run, onset) if signs is not None else []


def _slower(run: RunData, onset: Onset) -> list[dict[str, Any]]:
    steps, times, others, what = step_times(run, onset)
    if onset.step is None or len(steps) < 2 * FEWEST_STEPS:
        return []
    excess = times if others is None else times - others
    place = int(np.searchsorted(steps, onset.step))
    begin = max(0, place - BASE_STEPS)
    base = excess[begin : max(begin, place - BASE_STEPS // 10)]
    if len(base) < FEWEST_STEPS:
        return []
    level = float(np.median(base))
    usual = float(np.median(times[begin:place]))
    spread = max(1.4826 * float(np.median(np.abs(base - level))), LEAST_SHARE * usual / SPREADS)
    unusual = excess > level + SPREADS * spread
    first = _first_sustained(unusual, begin)
    if first is None:
        return []
    rank = onset.ranks[0] if what == "work" and onset.ranks else None
    series = next((each for each in series_of(run, onset.attempt) if rank in (None, each.rank)), None)
    whose = f"Rank {rank}'s own work" if rank is not None else "The step time"
    compared = " than its peers'" if others is not None else ""
    more = float(np.median(excess[first : first + 10])) - level
    text = (
        f"{whose} became {ns_text(more)} longer{compared} in step {int(steps[first]):,}: "
        f"from there on {SUSTAINED} of 6 steps are more than {SPREADS:g} robust spreads above the level before."
    )
    about = f"steps {int(steps[begin]):,} to {int(steps[min(place, len(steps) - 1)]):,}"
    found = statement(text, Source(file=steps_file(run), about=about), step=int(steps[first]))
    wall_ns = None if series is None else wall_of_step(series, int(steps[first]))
    return [{**found, "wall_ns": wall_ns}]


def _first_sustained(unusual: NDArray[np.bool_], begin: int) -> int | None:
    for place in range(begin, len(unusual) - 5):
        if unusual[place] and int(unusual[place : place + 6].sum()) >= SUSTAINED:
            return place
    return None


def _numbers(run: RunData, onset: Onset) -> list[dict[str, Any]]:
    """The last finite value of each loss and gradient norm before the onset, and when it began to grow."""
    pids = {series.identity.pid for series in series_of(run, onset.attempt)}
    curves: dict[str, list[tuple[int, int, float]]] = {}
    for event in run.events:
        step, wall_ns = event.get("step"), event.get("wall_ns")
        if event.get("event") not in NOTED or event.get("pid") not in pids:
            continue
        if type(step) is not int or type(wall_ns) is not int or (onset.step is not None and step > onset.step):
            continue
        for name, value in noted_health(event).items():
            if len(curves) < 16 or name in curves:
                curves.setdefault(name, []).append((step, wall_ns, value))
    found = []
    source = Source(file="events.jsonl", about="values noted or seen at steps")
    for name, points in sorted(curves.items()):
        points.sort()
        finite = [point for point in points if np.isfinite(point[2])]
        if not finite:
            continue
        sign = _growth(name, finite)
        if sign is not None:
            found.append(sign)
        step, wall_ns, value = finite[-1]
        text = f"The last finite value of {name} before it is {norm_text(value)}, in step {step:,}."
        found.append(statement(text, source, step=step, wall_ns=wall_ns))
    return found[:8]


def _growth(name: str, points: Sequence[tuple[int, int, float]]) -> dict[str, Any] | None:
    """The first value from which on all are far above the level of the values before."""
    values = np.abs([value for *_, value in points])
    if len(values) < FEWEST_STEPS:
        return None
    level = float(np.median(values[: max(FEWEST_STEPS // 2, len(values) // 2)]))
    large = values > 5 * level
    if level <= 0 or not large[-1]:
        return None
    small = np.flatnonzero(~large)
    place = int(small[-1]) + 1 if len(small) else 0
    step, wall_ns, value = points[place]
    text = f"From step {step:,} on {name} is more than 5 times its level of {norm_text(level)}: {norm_text(value)}."
    return statement(text, Source(file="events.jsonl", about=f"{len(points):,} values"), step=step, wall_ns=wall_ns)


def _memory(run: RunData, onset: Onset) -> list[dict[str, Any]]:
    """How far resident memory of each named rank had grown before the onset, from its first sample on."""
    found = []
    for series in series_of(run, onset.attempt):
        if onset.ranks and series.rank not in onset.ranks:
            continue
        pid = series.identity.pid
        own = [
            (sample["wall_ns"], sample["rss"])
            for sample in run.samples
            if sample.get("kind") == "process"
            and sample.get("pid") == pid
            and type(sample.get("wall_ns")) is int
            and type(sample.get("rss")) in (int, float)
            and (onset.end_wall_ns is None or sample["wall_ns"] <= onset.end_wall_ns)
        ]
        if len(own) < FEWEST_STEPS:
            continue
        (first_ns, first), (last_ns, last) = own[0], own[-1]
        if last <= first:
            continue
        grown = next((wall for wall, rss in own if rss - first > 0.1 * (last - first)), first_ns)
        took = ns_text(last_ns - first_ns, whole=True)
        text = f"Resident memory of rank {series.rank} grew from {bytes_text(first)} to {bytes_text(last)} in {took}."
        found.append(statement(text, Source(file=samples_file(run), about=f"process {pid}"), wall_ns=grown))
        if len(found) >= 4:
            break
    return found


def _last_steps(run: RunData, onset: Onset) -> list[dict[str, Any]]:
    """The last step that the named ranks completed, and the others."""
    own = [series for series in series_of(run, onset.attempt) if len(series.steps)]
    named = [series for series in own if series.rank in onset.ranks][:4] or own[:1]
    found = []
    for series in named:
        steps = series.steps
        last = int(steps["step"][-1])
        wall_ns = wall_of_step(series, last + 1)
        if wall_ns is not None and onset.end_wall_ns is not None and wall_ns > onset.end_wall_ns:
            continue  # it recovered
        text = f"Rank {series.rank} completed its last step, {last:,}."
        found.append(
            statement(text, Source(file=steps_file(run), about=f"rank {series.rank}"), step=last, wall_ns=wall_ns)
        )
    return found


def steps_file(run: RunData) -> str:
    return "steps.parquet" if run.meta.get("sealed") is True else "steps/"


def samples_file(run: RunData) -> str:
    return "samples.parquet" if run.meta.get("sealed") is True else "samples.jsonl"
