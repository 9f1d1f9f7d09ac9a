"""What each process of a run did, in the few numbers that the ledger needs.

``StepSums`` adds up the steps of one process.  The steps of a finished run are added at once; the live hub, which does
not keep old steps, adds them as they come (``SumsByRing`` does that for all its rings) and gets the same numbers.

A *plain* step is one in which nothing was compiled and that is not the first of its process.  Its *own* time is its
duration without evaluation and checkpoints.  A stall is time above the normal step: in each block of ``BLOCK`` plain
steps, the part of a step above the block's median, if the step took more than ``STALL_TIMES`` as long as that.  Waiting
for data counts only if it is that unusual: a loop that always waits for its input trains slowly, which the findings
explain, but it does train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.series import RankSeries, RankState
from stepscope.records.steps import FLAG_COMPILED, FLAG_FIRST
from stepscope.step_table import RankSteps

__all__ = ["BLOCK", "ProcessAccount", "StepSums", "SumsByRing", "process_account", "stall_ns", "sums_of"]

BLOCK = 32
"""Steps that are compared with each other to see which of them stalled: few, because step times drift."""
STALL_TIMES = 3.0
"""A step that takes longer than so many times the median of its block stalled; the recorder calls a step slow from the
same factor on."""
NOT_PLAIN = FLAG_COMPILED | FLAG_FIRST


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """The steps of one process, added up."""

    steps: int = 0
    plain: int = 0
    plain_ns: float = 0.0
    """Own time of plain steps, stalls included."""
    stalled_ns: float = 0.0
    started_ns: float = 0.0
    """Own time of the first step and of those in which something was compiled."""
    eval_ns: float = 0.0
    checkpoint_ns: float = 0.0
    first_ns: int | None = None
    """When the first step began and the last one ended, on the process's monotonic clock."""
    last_ns: int | None = None
    unsaved: int | None = None
    """Steps after the last one that wrote a checkpoint; None: none did."""
    saved_ns: int | None = None
    """When that step ended, on the same clock."""

    @property
    def step_ns(self) -> float:
        """The mean own time of a plain step without stalls: what a step normally takes; 0: unknown."""
        return (self.plain_ns - self.stalled_ns) / self.plain if self.plain else 0.0


def stall_ns(own_ns: NDArray[np.float64]) -> float:
    """The time above the normal step in plain steps: [n], in order."""
    if not len(own_ns):
        return 0.0
    whole = len(own_ns) // BLOCK * BLOCK
    blocks = [own_ns[:whole].reshape(-1, BLOCK), own_ns[whole:].reshape(1, -1)]
    return sum(_stalled(block) for block in blocks if block.size)


def _stalled(blocks: NDArray[np.float64]) -> float:
    """[block, step]."""
    if blocks.max() <= STALL_TIMES * blocks.min():
        return 0.0  # no step can be that much longer than a median: a tenth of the work, and true of most batches
    normal = np.median(blocks, axis=1, keepdims=True)
    return float(np.where(blocks > STALL_TIMES * normal, blocks - normal, 0.0).sum())


def sums_of(steps: RankSteps) -> StepSums:
    if not len(steps):
        return StepSums()
    wall, start = steps["wall_ns"], steps["start_ns"]
    evaluated, saved = steps.phase("eval"), steps.phase("checkpoint")
    own = np.maximum(wall - evaluated - saved, 0.0)
    plain = (steps["flags"] & NOT_PLAIN) == 0
    saves = np.flatnonzero(saved > 0)
    return StepSums(
        steps=len(steps),
        plain=int(plain.sum()),
        plain_ns=float(own[plain].sum()),
        stalled_ns=stall_ns(own[plain]),
        started_ns=float(own[~plain].sum()),
        eval_ns=float(evaluated.sum()),
        checkpoint_ns=float(saved.sum()),
        first_ns=int(start[0]),
        last_ns=int(start[-1]) + int(wall[-1]),
        unsaved=len(steps) - 1 - int(saves[-1]) if len(saves) else None,
        saved_ns=int(start[saves[-1]]) + int(wall[saves[-1]]) if len(saves) else None,
    )


# -- while a run is active --------------------------------------------------------------------------------------------


class SumsByRing:
    """``StepSums`` of many rings, which grow batch by batch: less than a kilobyte for each."""

    def __init__(self, most: int = 4096) -> None:
        self._of: dict[int, _GrowingSums] = {}
        self._most = most
        self.full = False
        """Whether there were more rings than are added up; the sums are incomplete then."""

    def add(self, ring: NDArray[np.intp], values: Mapping[str, NDArray[Any]]) -> None:
        """Add rows, those of each ring next to each other and in order.  ``values``: columns by name, as in a batch."""
        if not len(ring):
            return
        nothing = np.zeros(len(ring))
        evaluated = values.get("phase:eval", nothing).astype(np.float64)
        saved = values.get("phase:checkpoint", nothing).astype(np.float64)
        wall, start = values["wall_ns"].astype(np.float64), values["start_ns"].astype(np.int64)
        own = np.maximum(wall - evaluated - saved, 0.0)
        plain = (values["flags"] & NOT_PLAIN) == 0 if "flags" in values else np.ones(len(ring), np.bool_)
        bounds = [0, *(np.flatnonzero(np.diff(ring)) + 1).tolist(), len(ring)]
        for begin, end in pairwise(bounds):
            at, rows = int(ring[begin]), slice(begin, end)
            sums = self._of.get(at)
            if sums is None:
                if len(self._of) >= self._most:
                    self.full = True
                    continue
                sums = self._of[at] = _GrowingSums(int(start[begin]))
            sums.add(own[rows], plain[rows], evaluated[rows], saved[rows], start[rows] + wall[rows].astype(np.int64))

    def of(self, at: int) -> StepSums:
        sums = self._of.get(at)
        return StepSums() if sums is None else sums.whole()

    def saved_ns(self, at: int) -> int | None:
        """When the last step that wrote a checkpoint ended, on the process's clock; None: none did."""
        sums = self._of.get(at)
        return None if sums is None else sums.saved_ns


class _GrowingSums:
    def __init__(self, first_ns: int) -> None:
        self._sums = StepSums(first_ns=first_ns)
        self._block: NDArray[np.float64] = np.zeros(0)
        """Own times of the plain steps of the block that is not complete."""

    def add(
        self,
        own: NDArray[np.float64],
        plain: NDArray[np.bool_],
        evaluated: NDArray[np.float64],
        saved: NDArray[np.float64],
        ended_ns: NDArray[np.int64],
    ) -> None:
        before, saves = self._sums, np.flatnonzero(saved > 0)
        block = np.concatenate([self._block, own[plain]])
        whole = len(block) // BLOCK * BLOCK
        unsaved = None if before.unsaved is None else before.unsaved + len(own)
        self._sums = StepSums(
            steps=before.steps + len(own),
            plain=before.plain + int(plain.sum()),
            plain_ns=before.plain_ns + float(own[plain].sum()),
            stalled_ns=before.stalled_ns + stall_ns(block[:whole]),
            started_ns=before.started_ns + float(own[~plain].sum()),
            eval_ns=before.eval_ns + float(evaluated.sum()),
            checkpoint_ns=before.checkpoint_ns + float(saved.sum()),
            first_ns=before.first_ns,
            last_ns=int(ended_ns[-1]),
            unsaved=len(own) - 1 - int(saves[-1]) if len(saves) else unsaved,
            saved_ns=int(ended_ns[saves[-1]]) if len(saves) else before.saved_ns,
        )
        self._block = block[whole:].copy()

    @property
    def saved_ns(self) -> int | None:
        return self._sums.saved_ns

    def whole(self) -> StepSums:
        return replace(self._sums, stalled_ns=self._sums.stalled_ns + stall_ns(self._block))


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessAccount:
    """One process of a rank, with times on the run's wall clock."""

    rank: int
    attempt: int
    host: str
    state: RankState
    anchor_ns: int
    """When its recording began: at ``init_process_group``, or with the first sign of training."""
    started_ns: int | None
    """When the process began; None: unknown, and so are the next two."""
    imported_ns: int | None
    joined_ns: int | None
    """When ``init_process_group`` had returned."""
    ended_ns: int | None
    first_ns: int | None
    last_ns: int | None
    """Beginning of the first step and end of the last."""
    in_group: bool = False
    """Whether it belongs to a job of several ranks."""
    evaluated_ns: float = 0.0
    """What it evaluated after its last step."""
    live_phase: str = ""
    sums: StepSums = field(default_factory=StepSums)
    counter: Mapping[str, Any] = field(default_factory=dict)
    """The fact ``global_step``: what the script's own counter showed at the first step."""


def process_account(series: RankSeries, sums: StepSums, *, age_s: float | None) -> ProcessAccount:
    """``age_s``: how old the process was when its recording began."""
    ahead_ns = series.anchor_wall_ns - series.anchor_mono_ns

    def wall(mono_ns: int | None) -> int | None:
        return mono_ns + ahead_ns if mono_ns else None

    counter = series.facts.get("global_step")
    known = 0 <= series.live_phase < len(series.phase_names)
    return ProcessAccount(
        rank=series.rank,
        attempt=series.identity.attempt,
        host=series.identity.host,
        state=series.state,
        anchor_ns=series.anchor_wall_ns,
        started_ns=None if age_s is None else series.anchor_wall_ns - round(age_s * 1e9),
        imported_ns=wall(series.identity.imported_ns),
        joined_ns=wall(series.identity.joined_ns),
        ended_ns=series.ended_wall_ns,
        first_ns=wall(sums.first_ns),
        in_group=series.identity.world_size > 1,
        last_ns=wall(sums.last_ns),
        live_phase=series.phase_names[series.live_phase] if known else "",
        sums=sums,
        counter=counter if isinstance(counter, Mapping) else {},
    )
