"""Where the time of a whole run went: from its start to its end, in parts that add up to its duration exactly.

Findings are about the training time: the steady steps, evaluation and checkpoints between them included.  This account
also has what comes before and after, and what is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import Window
from stepscope.diagnosis.engine.window import last_attempt
from stepscope.goodput import evaluated_after_ns
from stepscope.records.finding import Finding
from stepscope.records.series import RankSeries, RunData
from stepscope.records.text import duration_text, share_text

__all__ = ["TRAINING_PARTS", "time_account"]

TRAINING_PARTS = ("training", "evaluation", "checkpoints", "stalls")
"""Together they are the training time, of which findings have shares."""
PARTS = ("earlier_attempts", "start_up", "warm_up", *TRAINING_PARTS, "not_recorded", "last_evaluation", "hung", "end")
NAMES = {"start_up": "start-up", "warm_up": "warm-up", "last_evaluation": "evaluation after the last step"}
"""Of parts that are not called like their key."""
PAUSES = {"evaluation": "eval", "checkpoints": "checkpoint"}

Parts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Wall-clock times of the run, in order."""

    created_ns: int
    attempt_ns: int
    """Start of the last attempt: the end of the one before it."""
    hung_ns: int
    """Since when the job made no progress any more; the end if it did until then."""
    ended_ns: int

    def inside(self, wall_ns: int) -> int:
        """A clock may have been set meanwhile."""
        return min(max(wall_ns, self.attempt_ns), self.ended_ns)


def time_account(
    run: RunData, window: Window, findings: Iterable[Finding], *, created_ns: int | None, ended_ns: int | None
) -> dict[str, Any] | None:
    """The mean over the ranks that made most steps, each from the start of the run to its end; None: those are unknown.

    Stalls are what the findings of that kind cost.
    """
    if created_ns is None or ended_ns is None:
        return None
    current = last_attempt(run.ranks)
    trained = [series for series in current if len(series.steps)]
    most = max((len(series.steps) for series in trained), default=0)
    stalled_ns = sum(each.cost.get("seconds", 0.0) for each in findings if each.kind == "stall") * 1e9
    ends = _ends_of(run, window, created_ns, max(ended_ns, created_ns))
    rows = [_of_rank(run, series, window, ends, stalled_ns) for series in trained if len(series.steps) == most]
    rows = rows or [_outside(ends, ends.hung_ns, ends.hung_ns)]
    parts = _rounded({part: sum(row.get(part, 0.0) for row in rows) / len(rows) for part in PARTS})
    began = [max(series.anchor_wall_ns - ends.attempt_ns, 0) / 1e9 for series in current]
    return {
        "seconds": round(sum(parts.values()), 3),
        "training_time_s": round(sum(parts[part] for part in TRAINING_PARTS), 3),
        "until_ranks_s": round(min(sum(began) / len(began), parts["start_up"]), 3) if began else None,
        "parts": parts,
        "text": {part: _texts(part, seconds, sum(parts.values())) for part, seconds in parts.items() if seconds},
    }


def _texts(part: str, seconds: float, of: float) -> list[str]:
    """``start-up`` and ``12.3 s (9%)``."""
    return [NAMES.get(part, part.replace("_", " ")), f"{duration_text(seconds)} ({share_text(seconds / of)})"]


def _ends_of(run: RunData, window: Window, created_ns: int, ended_ns: int) -> _Ends:
    before = [_last_ns(series) for series in run.ranks if series.identity.attempt < window.attempt]
    # A process of the attempt before may have been found dead only when the ranks of this one had begun.
    begun_ns = min((series.anchor_wall_ns for series in last_attempt(run.ranks)), default=ended_ns)
    attempt_ns = min(max(created_ns, min(max([created_ns, *before]), begun_ns)), ended_ns)
    stopped = [hang.stopped_wall_ns for hang in run.hangs if hang.over != "recovered"]
    hung_ns = min([each for each in stopped if each >= attempt_ns], default=ended_ns)
    return _Ends(created_ns=created_ns, attempt_ns=attempt_ns, hung_ns=min(hung_ns, ended_ns), ended_ns=ended_ns)


def _last_ns(series: RankSeries) -> int:
    """When it was last heard of, on the wall clock."""
    steps = series.steps
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else series.anchor_mono_ns
    return max(series.ended_wall_ns or 0, last_ns - series.anchor_mono_ns + series.anchor_wall_ns)


def _outside(ends: _Ends, first_ns: int, last_ns: int) -> Parts:
    """Before the first step and after the last."""
    hung_ns = max(ends.hung_ns, last_ns)
    return {
        "earlier_attempts": ends.attempt_ns - ends.created_ns,
        "start_up": first_ns - ends.attempt_ns,
        "end": hung_ns - last_ns,
        "hung": ends.ended_ns - hung_ns,
    }


def _of_rank(run: RunData, series: RankSeries, window: Window, ends: _Ends, stalled_ns: float) -> Parts:
    steps = series.steps
    to_wall_ns = series.anchor_wall_ns - series.anchor_mono_ns
    first_ns = ends.inside(int(steps["start_ns"][0]) + to_wall_ns)
    last_ns = ends.inside(int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) + to_wall_ns)
    last_ns = max(last_ns, first_ns)
    apart: NDArray[np.bool_] = np.isin(steps["step"], [each.step for each in window.warmup])
    spent = {"warm_up": float(steps["wall_ns"][apart].sum())}
    for part, phase in PAUSES.items():
        spent[part] = float(steps.phase(phase)[~apart].sum())
    own_ns = float(steps["wall_ns"][~apart].sum()) - sum(spent[part] for part in PAUSES)
    spent["stalls"] = min(stalled_ns, own_ns)
    spent["training"] = own_ns - spent["stalls"]
    outside = _outside(ends, first_ns, last_ns)
    outside["last_evaluation"] = min(evaluated_after_ns(run, series, last_ns), outside["end"])
    outside["end"] -= outside["last_evaluation"]
    return {**outside, **_fitted(spent, last_ns - first_ns)}


def _fitted(spent: Parts, between_ns: float) -> Parts:
    """What the steps took, in the time from the first to the last; of that, the rest was not recorded."""
    recorded_ns = sum(spent.values())
    if recorded_ns <= between_ns:
        return {**spent, "not_recorded": between_ns - recorded_ns}
    return {part: took_ns * between_ns / recorded_ns for part, took_ns in spent.items()}


def _rounded(parts: Parts) -> Parts:
    """Seconds with three digits that still add up: their running sum is rounded."""
    out, before, sum_ns = {}, 0, 0.0
    for part, took_ns in parts.items():
        sum_ns += took_ns
        until = round(sum_ns / 1e6)
        out[part] = (until - before) / 1e3
        before = until
    return out
