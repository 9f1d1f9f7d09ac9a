"""The step time of many runs of one job, in the order they were started: where it changed, and with which run.

Each run is one point, from its ``summary.json``.  How far runs differ by chance is measured from run to run, so a
change does not count as noise, together with what runs of real jobs usually differ by (``statistics.PRIOR``).

- A run that is unlike the runs before and after it is unusual: it is reported and otherwise left out.
- The runs are split where their levels differ most, as long as that is more than chance explains; each change is
  reported with the first run after it.  The start of a change may be off by a few runs, and the range is given.
- If a straight line explains the runs better than steps do, the change is gradual and has no first run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.comparison.inputs import Input, summary_input
from stepscope.comparison.statistics import CONFIDENCE, PRIOR, Level, assumed_spread, t_quantile
from stepscope.errors import CompareError
from stepscope.records.text import count_text
from stepscope.reports.tables import finite
from stepscope.store.catalog import RunEntry
from stepscope.store.documents import load_summary

__all__ = ["FEWEST_RUNS", "HistoryPoint", "history_document", "history_points", "history_sentences", "same_job"]

Floats = NDArray[np.float64]
Shape = Literal["steady", "steps", "gradual", "cannot_tell"]

SCHEMA = 1
FEWEST_RUNS = 5
"""With fewer, a change cannot be distinguished from the usual difference between runs."""
FEWEST_IN_PART = 2
"""Runs on each side of a change: one run alone may be an exception."""
UNUSUAL = 5.0
"""A run is unusual if it differs by this many spreads from the median of the runs around it."""
AROUND = 3
"""Runs on either side that it is compared with."""
SMALLER = 0.75
"""The spread of runs is taken from the difference of successive runs that so many are smaller than.  A few changes and
unusual runs do not move it; and runs that are either fast or slow, without any order, are not taken for calm ones."""
WORTH = 0.6
"""How much this one difference says about a spread, compared with all values."""
ASSUMPTION = 2.0
"""How far the assumed spread of runs is trusted: as much as so many runs more than one.  Less than in a comparison of
two runs, because a summary says little about the order of its steps."""
MOST_HIDDEN = 0.05
"""Runs that differ so much that a larger change could be hidden are not called the same."""
PLAUSIBLE = 3.84
"""How much worse another start of a change may explain the runs: 95% of chi-squared with one degree of freedom."""


@dataclass(frozen=True, kw_only=True)
class HistoryPoint:
    """One run."""

    id: str
    """The name of its folder."""
    name: str
    path: Path
    created_wall_ns: int
    commit: str = ""
    branch: str = ""
    dirty: bool = False
    tags: tuple[str, ...] = ()
    level: Level
    settings: Mapping[str, Any]
    """As in a comparison: world size, versions, facts."""


def same_job(entries: Sequence[RunEntry]) -> tuple[list[RunEntry], list[RunEntry]]:
    """Split runs into those of the command, with the same number of ranks, that has most of them, and all others.

    Of two that have as many, the one that ran last.  Only runs that are over and have a step time are counted.
    """
    jobs: dict[tuple[Any, ...], list[RunEntry]] = {}
    for entry in sorted(entries, key=lambda entry: -entry.created_wall_ns):
        jobs.setdefault((entry.command, entry.ranks), []).append(entry)
    like = max(jobs.values(), key=lambda job: sum(map(_counts, job)), default=[])
    return like, [entry for entry in entries if entry not in like]


def _counts(entry: RunEntry) -> bool:
    return entry.status not in ("running", "unfinished") and entry.median_step_ms is not None


def history_points(entries: Sequence[RunEntry]) -> tuple[list[HistoryPoint], list[dict[str, str]]]:
    """Read the runs, oldest first, and say which are left out and why."""
    points: list[HistoryPoint] = []
    left_out: list[dict[str, str]] = []
    for entry in sorted(entries, key=lambda entry: entry.created_wall_ns):
        read = _read(entry)
        if isinstance(read, str):
            left_out.append({"run": entry.path.name, "why": read})
        else:
            points.append(read)
    return points, left_out


def _read(entry: RunEntry) -> HistoryPoint | str:
    """The point of a run, or why it has none."""
    summary = load_summary(entry.path)
    if summary is None:
        return "it has no summary yet"
    try:
        found = summary_input(entry.path, summary)
    except CompareError:
        return "it has no step times"
    if found.bad:
        return f"it did not finish: {found.status_text or found.status}"
    return HistoryPoint(
        id=entry.path.name,
        name=entry.name,
        path=entry.path,
        created_wall_ns=entry.created_wall_ns,
        commit=entry.commit,
        branch=entry.branch,
        dirty=entry.dirty,
        tags=entry.labels.tags,
        level=_level(found),
        settings=found.context,
    )


def _level(found: Input) -> Level:
    run = found.on(found.clocks[0]).run
    assert isinstance(run, Level)
    return run


# -- document ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Noise:
    spread: float
    """Of single runs, relative."""
    freedom: float
    seen: float
    """As far as it was measured from run to run."""


@dataclass(frozen=True, kw_only=True)
class _Shift:
    at: int
    """The first point after it."""
    first: int
    last: int
    """Between these it may have started."""
    change: float
    low: float
    high: float


def history_document(points: Sequence[HistoryPoint], left_out: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """The trend of these runs, oldest first, and its changes."""
    levels = np.log([point.level.mean for point in points])
    noise = _noise(points, levels)
    few = len(points) < FEWEST_RUNS  # too few to call one of them unusual
    usual = [at for at in range(len(points)) if few or not _unusual(levels, at, noise.spread)]
    steady = levels[usual]
    shape: Shape = "cannot_tell"
    shifts: list[_Shift] = []
    change = low = high = None
    if len(usual) >= FEWEST_RUNS:
        cuts = _cuts(steady, noise, _threshold(noise, len(steady)))
        if cuts and _gradual(steady, cuts, noise):
            shape = "gradual"
            change, low, high = _slope(steady, noise)
        elif cuts:
            shape = "steps"
            shifts = _shifts(steady, cuts, noise)
            first, last = steady[: cuts[0]], steady[cuts[-1] :]
            change, low, high = _difference(first, last, noise)
        else:
            half = len(steady) // 2
            shape = "steady"
            change, low, high = _difference(steady[:half], steady[half:], noise)
    visible = _visible(noise, len(steady)) if len(usual) >= FEWEST_RUNS else None
    return {
        "schema": SCHEMA,
        "kind": "history",
        "verdict": _verdict(shape, change, visible),
        "shape": shape,
        "change": finite(change, 6),
        "interval": None if change is None else [finite(low, 6), finite(high, 6)],
        "confidence": CONFIDENCE,
        "noise": {"between": finite(noise.spread, 6), "seen": finite(noise.seen, 6), "visible": finite(visible, 6)},
        "changes": [_change_row(shift, [points[at] for at in usual]) for shift in shifts],
        "unusual": [points[at].id for at in range(len(points)) if at not in usual],
        "last": _last(levels, usual, shifts) if len(usual) >= FEWEST_RUNS else None,
        "runs": [_run_row(point) for point in points],
        "left_out": [dict(row) for row in left_out],
        "needed": max(FEWEST_RUNS - len(usual), 0),
    }


def _last(levels: Floats, usual: Sequence[int], shifts: Sequence[_Shift]) -> float | None:
    """By how much an unusual last run differs from the runs since the last change; None: it is not unusual."""
    if len(levels) - 1 in usual:
        return None
    since = [levels[at] for at in usual[shifts[-1].at if shifts else 0 :]]
    return finite(math.expm1(float(levels[-1] - np.mean(since))), 6)


def _verdict(shape: Shape, change: float | None, visible: float | None) -> str:
    """``same`` only if a change that matters would have been seen."""
    if shape == "cannot_tell" or change is None:
        return "cannot_tell"
    if shape == "steady":
        return "same" if visible is not None and visible <= MOST_HIDDEN else "cannot_tell"
    return "slower" if change > 0 else "faster"


def _run_row(point: HistoryPoint) -> dict[str, Any]:
    level = point.level
    half = t_quantile(level.freedom) * level.error
    return {
        "run": point.id,
        "name": point.name,
        "path": str(point.path),
        "created_wall_ns": point.created_wall_ns,
        "commit": point.commit,
        "branch": point.branch,
        "dirty": point.dirty,
        "tags": list(point.tags),
        "steps": level.steps,
        "step_ms": finite(level.mean / 1e6),
        "interval_ms": [finite(level.mean * max(1 - half, 0.0) / 1e6), finite(level.mean * (1 + half) / 1e6)],
    }


def _change_row(shift: _Shift, points: Sequence[HistoryPoint]) -> dict[str, Any]:
    before, after = points[shift.at - 1], points[shift.at]
    names = dict.fromkeys([*before.settings, *after.settings])
    differ = [name for name in names if before.settings.get(name) != after.settings.get(name)]
    return {
        "run": after.id,
        "commit": after.commit,
        "dirty": after.dirty,
        "before": before.id,
        "before_commit": before.commit,
        "first": points[shift.first].id,
        "last": points[shift.last].id,
        "change": finite(math.expm1(shift.change), 6),
        "interval": [finite(math.expm1(shift.low), 6), finite(math.expm1(shift.high), 6)],
        "settings": [
            {"name": name, "before": before.settings.get(name), "after": after.settings.get(name)}
            for name in differ
            if name not in ("git", "commit")
        ],
    }


# -- statistics -------------------------------------------------------------------------------------------------------
# All levels are logarithms, so that differences are relative changes.


def _noise(points: Sequence[HistoryPoint], levels: Floats) -> _Noise:
    """How far runs differ by chance: as assumed from their steps, and as their successive differences show."""
    if not points:
        return _Noise(spread=0.0, freedom=1.0, seen=0.0)
    seen = _seen_spread(np.abs(np.diff(levels))) if len(levels) > 2 else 0.0
    worth = WORTH * max(len(levels) - 1, 0)
    # Steps that differ much within each run, in the same way each time, say nothing about the next run.
    most = max((_times_at_most(worth) * seen) ** 2, PRIOR.floor**2)
    assumed = min(sum(assumed_spread(point.level) ** 2 for point in points) / len(points), most)
    trusted = ASSUMPTION + worth
    both = (ASSUMPTION * assumed + worth * seen**2) / trusted
    if seen**2 > both:
        return _Noise(spread=seen, freedom=max(worth, 2.0), seen=seen)
    return _Noise(spread=math.sqrt(both), freedom=trusted, seen=seen)


def _seen_spread(differences: Floats) -> float:
    """The spread of single runs that makes one difference in the sorted row of all as large as it is."""
    at = round(SMALLER * (len(differences) - 1))
    usual_place = (at + 0.625) / (len(differences) + 0.25)  # of this one in a normal distribution
    return float(np.sort(differences)[at]) / (NormalDist().inv_cdf((1 + usual_place) / 2) * math.sqrt(2))


def _times_at_most(freedom: float) -> float:
    """How many times the measured spread the true one may be, with the confidence of the intervals (chi-squared)."""
    if freedom <= 0:
        return math.inf
    low = 1 - 2 / (9 * freedom) - NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(2 / (9 * freedom))
    return low**-1.5 if low > 0 else math.inf


def _unusual(levels: Floats, at: int, spread: float) -> bool:
    """Whether a run is unlike the runs on both sides of it; at either end, unlike those on the only side."""
    sides = [side for side in (levels[max(at - AROUND, 0) : at], levels[at + 1 : at + 1 + AROUND]) if len(side)]
    off = [float(levels[at] - np.median(side)) for side in sides]
    if not off or min(off) * max(off) <= 0 or min(map(abs, off)) <= UNUSUAL * spread:
        return False
    near = sides[0] if len(sides) == 1 else levels[[at - 1, at + 1]]
    return bool((np.abs(near - levels[at]) > UNUSUAL * spread).all())


def _threshold(noise: _Noise, count: int) -> float:
    """The score above which a split is no chance, for the best of all splits of this many runs."""
    return t_quantile(noise.freedom, 1 - (1 - CONFIDENCE) / max(count - 1, 1))


def _score(levels: Floats, at: int, noise: _Noise) -> float:
    left, right = levels[:at], levels[at:]
    error = noise.spread * math.sqrt(1 / len(left) + 1 / len(right))
    return abs(float(right.mean() - left.mean())) / error if error > 0 else 0.0


def _cuts(levels: Floats, noise: _Noise, threshold: float, offset: int = 0) -> list[int]:
    """Where the level changes: split at the clearest change, then look again on both sides of it."""
    places = range(FEWEST_IN_PART, len(levels) - FEWEST_IN_PART + 1)
    best = max(places, key=lambda at: _score(levels, at, noise), default=0)
    if not best or _score(levels, best, noise) <= threshold:
        return []
    left, right = levels[:best], levels[best:]
    return [
        *_cuts(left, noise, threshold, offset),
        offset + best,
        *_cuts(right, noise, threshold, offset + best),
    ]


def _pieces(levels: Floats, cuts: Sequence[int]) -> list[Floats]:
    return [np.asarray(piece, np.float64) for piece in np.split(levels, list(cuts))]


def _squares(pieces: Sequence[Floats]) -> float:
    return sum(float(((piece - piece.mean()) ** 2).sum()) for piece in pieces)


def _gradual(levels: Floats, cuts: Sequence[int], noise: _Noise) -> bool:
    """Whether a straight line explains the runs better than these steps, each of which costs two numbers."""
    if noise.spread <= 0:
        return False
    at = np.arange(len(levels), dtype=np.float64)
    slope, start = np.polyfit(at, levels, 1)
    rest = float(((levels - slope * at - start) ** 2).sum())
    price = math.log(len(levels)) * noise.spread**2
    return rest + price < _squares(_pieces(levels, cuts)) + 2 * len(cuts) * price


def _slope(levels: Floats, noise: _Noise) -> tuple[float, float, float]:
    """The change from the first run to the last along a straight line."""
    at = np.arange(len(levels), dtype=np.float64)
    slope = float(np.polyfit(at, levels, 1)[0])
    error = noise.spread / math.sqrt(float(((at - at.mean()) ** 2).sum()))
    return _relative(slope * at[-1], error * at[-1], noise)


def _difference(before: Floats, after: Floats, noise: _Noise) -> tuple[float, float, float]:
    error = noise.spread * math.sqrt(1 / len(before) + 1 / len(after))
    return _relative(float(after.mean() - before.mean()), error, noise)


def _relative(change: float, error: float, noise: _Noise) -> tuple[float, float, float]:
    half = t_quantile(noise.freedom) * error
    return math.expm1(change), math.expm1(change - half), math.expm1(change + half)


def _shifts(levels: Floats, cuts: Sequence[int], noise: _Noise) -> list[_Shift]:
    edges = [0, *cuts, len(levels)]
    found = []
    for place, at in enumerate(cuts):
        begin, end = edges[place], edges[place + 2]
        part, own = levels[begin:end], at - begin
        before, after = part[:own], part[own:]
        error = noise.spread * math.sqrt(1 / len(before) + 1 / len(after))
        half = t_quantile(noise.freedom) * error
        change = float(after.mean() - before.mean())
        best = _squares([before, after])
        near = [
            other
            for other in range(1, len(part))
            if _squares([part[:other], part[other:]]) - best <= PLAUSIBLE * noise.spread**2
        ]
        found.append(
            _Shift(
                at=at,
                first=begin + min([own, *near]),
                last=begin + max([own, *near]),
                change=change,
                low=change - half,
                high=change + half,
            )
        )
    return found


def _visible(noise: _Noise, count: int) -> float:
    """The smallest change in the middle of the runs that would be reported."""
    half = max(count // 2, 1)
    error = noise.spread * math.sqrt(1 / half + 1 / max(count - half, 1))
    return math.expm1(_threshold(noise, count) * error)


# -- words ------------------------------------------------------------------------------------------------------------


def history_sentences(document: Mapping[str, Any]) -> list[str]:
    """What the document says, the most important first."""
    count = len(document["runs"]) - len(document["unusual"])
    shape, change = document["shape"], document["change"]
    sentences: list[str] = []
    if shape == "cannot_tell":
        return [f"Cannot tell yet: {count_text(count, 'run')} to compare, and it takes {FEWEST_RUNS} or more."]
    if shape == "steady":
        visible = document["noise"]["visible"]
        sentences.append(f"No change found in {count_text(count, 'run')}; one of {visible:.1%} or more would be found.")
    low, high = document["interval"]
    bounds = f"{low:+.1%} to {high:+.1%}"
    word = "slower" if change > 0 else "faster"
    if shape == "gradual":
        first, last = document["runs"][0]["run"], document["runs"][-1]["run"]
        sentences.append(
            f"Gradually {word}: {change:+.1%} ({bounds}) from {first} to {last}, without a clear first run."
        )
    sentences += [_change_sentence(row) for row in reversed(document["changes"])]
    if len(document["changes"]) > 1:
        sentences.append(f"In all {abs(change):.1%} {word} ({bounds}) than the first runs.")
    odd = list(document["unusual"])
    if document["last"] is not None:
        word = "slower" if document["last"] > 0 else "faster"
        last = f"{odd.pop()}, the last run, is {abs(document['last']):.1%} {word} than the runs before it"
        sentences.insert(0, f"{last}; the next run will show whether that stays.")
    sentences += [f"{run} is unlike the runs around it and was left out." for run in odd]
    return sentences


def _change_sentence(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    word = "Slower" if row["change"] > 0 else "Faster"
    commit = f" (commit {row['commit'][:10]}{', with changes not committed' if row['dirty'] else ''})"
    since = f"since {row['run']}{commit if row['commit'] else ''}"
    range_ = f"; it may have begun anywhere from {row['first']} to {row['last']}" if row["first"] != row["last"] else ""
    return f"{word} {since}: {row['change']:+.1%} ({low:+.1%} to {high:+.1%}){range_}."
