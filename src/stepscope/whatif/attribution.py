"""Who or what makes a job slow: the replay with all, some or none of its operations at their usual length.

A pure function of a trace.  The *ideal* job has every operation at the usual length of its kind: the mean of computing,
the median of communication, over all steps and workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.progress import Progress, unheard
from stepscope.whatif.dependencies import in_order
from stepscope.whatif.kinds import COMPUTING, OPTIMIZER, PIPELINE
from stepscope.whatif.operations import Floats, Operation, Trace
from stepscope.whatif.replay import lengths, replay

__all__ = ["Effect", "WhatIf", "analyse"]

WORST_PERCENT = 3
"""Share of the workers, rounded up, that "a few bad workers" means."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What some operations have to do with the slowdown: mean step times with and without them."""

    original_s: float
    ideal_s: float
    removed_s: float
    """The job as it was, these operations at their usual length."""
    added_s: float
    """The ideal job, these operations as they were."""

    @property
    def share_removed(self) -> float | None:
        """Of the time lost, what comes back without them; None when no time is lost."""
        return self._share(self.original_s - self.removed_s)

    @property
    def share_added(self) -> float | None:
        """Of the time lost, what they alone lose; None when no time is lost."""
        return self._share(self.added_s - self.ideal_s)

    def _share(self, part_s: float) -> float | None:
        lost_s = self.original_s - self.ideal_s
        return part_s / lost_s if lost_s else None


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Slowdowns: mean step time over that of the ideal job, with everything or only the part named as it was.

    Worst first.
    """

    slowdown: float
    by_worker: dict[int, float]
    """By rank: the smaller of what its data-parallel rank and its stage come to."""
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    by_operation: dict[str, float]
    worst_workers: tuple[int, ...]
    """The ranks that ``mw`` is about."""
    mw: Effect
    """Of the worst workers."""
    ms: Effect
    """Of the last pipeline stage, which often has the loss to compute besides."""
    place: dict[int, tuple[int, int]]
    """Data-parallel rank and stage, by rank."""
    steps: int
    notes: tuple[str, ...]


def analyse(trace: Trace, *, progress: Progress = unheard) -> WhatIf:
    """``progress`` is told how many replays are done, of how many."""
    meetings = in_order(trace.operations, stages=trace.stages)
    original = lengths(trace, meetings)
    ideal = _ideal(trace.operations, original)
    stage_of = np.array([op.stage for op in trace.operations])
    group_of = np.array([_group(op) for op in trace.operations])
    last = np.array([op.kind == OPTIMIZER for op in trace.operations])
    lane_of = np.array(trace.lanes)
    groups = sorted(set(group_of.tolist()))
    total = 7 + trace.stages + len(trace.lanes) + len(groups)
    done = 0

    def step_s(length_s: Floats, until: Mask | None = None) -> float:
        nonlocal done
        end_s = replay(meetings, length_s)
        done += 1
        progress(done, total)
        if until is not None and until.any():
            end_s = end_s[until]
        return float(end_s.max(axis=(0, 2)).mean())

    original_s, ideal_s = step_s(original), step_s(ideal)
    ideal_end_s = step_s(ideal, last)
    if not ideal_end_s > 0:
        # Nothing takes any time: then nothing is slow either.
        original_s = ideal_s = ideal_end_s = 1.0

    def only(mask: Mask) -> float:
        return step_s(np.where(mask, original, ideal), last) / ideal_end_s

    def effect(mask: Mask) -> Effect:
        return Effect(
            original_s=original_s,
            ideal_s=ideal_s,
            removed_s=step_s(np.where(mask, ideal, original)),
            added_s=step_s(np.where(mask, original, ideal)),
        )

    by_stage = {stage: only((stage_of == stage)[:, None, None]) for stage in range(trace.stages)}
    by_lane = {lane: only((lane_of == lane)[None, None, :]) for lane in trace.lanes}
    by_group = {group: only((group_of == group)[:, None, None]) for group in groups}
    by_worker = {rank: min(by_lane[lane], by_stage[stage]) for (lane, stage), rank in trace.ranks.items()}
    worst = sorted(by_worker, key=lambda rank: (-by_worker[rank], rank))[: -(-len(by_worker) * WORST_PERCENT // 100)]
    place = {rank: where for where, rank in trace.ranks.items()}
    mask = np.zeros((len(stage_of), 1, len(lane_of)), dtype=bool)
    for lane, stage in (place[rank] for rank in worst):
        mask |= (stage_of == stage)[:, None, None] & (lane_of == lane)[None, None, :]
    return WhatIf(
        slowdown=original_s / ideal_end_s,
        by_worker=_worst_first(by_worker),
        by_stage=_worst_first(by_stage),
        by_dp_rank=_worst_first(by_lane),
        by_operation=_worst_first(by_group),
        worst_workers=tuple(worst),
        mw=effect(mask),
        ms=effect((stage_of == trace.stages - 1)[:, None, None]),
        place=place,
        steps=len(trace.steps),
        notes=trace.notes,
    )


def _ideal(operations: Sequence[Operation], original: Floats) -> Floats:
    ideal = np.empty_like(original)
    kinds = np.array([op.kind for op in operations])
    for kind in set(kinds.tolist()):
        usual = np.mean if kind in COMPUTING else np.median
        ideal[kinds == kind] = usual(original[kinds == kind])
    return ideal


def _group(op: Operation) -> str:
    """A send and its receive are two ends of one thing."""
    return f"{op.kind.split('-')[0]}-pp-comm" if op.kind in PIPELINE else op.kind


def _worst_first(slowdowns: dict[Any, float]) -> dict[Any, float]:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))
