"""A run as it lay there when a step had just ended: what a live view would have seen of it.

    run = open_run(path)
    diagnose(cut(run, 40))

Pure: the run given is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.series import RankSeries, RunData

__all__ = ["cut"]


def cut(run: RunData, step: int) -> RunData:
    """All ranks' steps up to and with ``step``, and what was sampled, seen or said until the last of them ended."""
    ranks = tuple(_cut_rank(series, step) for series in run.ranks)
    end_ns = max((_end_wall_ns(series) for series in ranks), default=0)
    return replace(
        run,
        meta={**run.meta, "end": None},
        ranks=ranks,
        samples=_until(run.samples, end_ns),
        events=_until(run.events, end_ns),
        stacks=_until(run.stacks, end_ns),
        errors=tuple(error for error in run.errors if error.wall_ns <= end_ns),
    )


def _cut_rank(series: RankSeries, step: int) -> RankSeries:
    """A rank that goes on after ``step`` is still running then; one that ended before it is as it was."""
    if not len(series.steps) or series.steps["step"][-1] <= step:
        return series
    return replace(
        series,
        state="running",
        ended_wall_ns=None,
        steps=series.steps.part(slice(0, int(np.searchsorted(series.steps["step"], step, "right")))),
        comm=_until_step(series.comm, step),
        collectives=_until_step(series.collectives, step),
    )


def _until_step(rows: NDArray[Any] | None, step: int) -> NDArray[Any] | None:
    return None if rows is None else rows[rows["step"] <= step]


def _end_wall_ns(series: RankSeries) -> int:
    if not len(series.steps):
        return 0
    ended_ns = int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1])
    return ended_ns - series.anchor_mono_ns + series.anchor_wall_ns


def _until(rows: Iterable[dict[str, Any]], end_ns: int) -> tuple[dict[str, Any], ...]:
    return tuple(row for row in rows if row.get("wall_ns", 0) <= end_ns)
