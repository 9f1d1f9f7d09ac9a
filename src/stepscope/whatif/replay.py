"""Replay a job from its operations with some of them at normal length, and attribute its time to ranks and stages.

Dependencies come from the order of the template's operations.  Within a worker, operations of one stream follow each
other: computing, each of the four directions of pipeline traffic, and the data-parallel collectives.  Between streams:

- a receive comes before the computing that needs it, and is posted after the previous computing of its direction; a
  send comes after the computing that produced its data;
- the first backward send or receive is posted two forwards before the first backward;
- the gather of a chunk's parameters comes before the chunk's first forward;
- after the last computing: garbage collection, layer-norm and embedding gradients, the reduction of the others (or,
  if that overlaps with backward, of the remaining ones), clipping, the optimizer.

Across workers, the partners of one communication wait for the last of them (a *meeting*): a send and its receive; the
embedding of the first and last stage; clipping, on all stages; a collective of one stage, on all data-parallel ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.judge.replay import Meeting, replay
from stepscope.records.text import Progress, no_progress
from stepscope.whatif.operations import (
    BACKWARD,
    CLIP,
    COMPUTING,
    EMBEDDING,
    FORWARD,
    GATHER,
    GC,
    LAYERNORM,
    OPTIMIZER,
    PIPELINE,
    REDUCE,
    SEPARATE,
    Floats,
    Operation,
    Trace,
)

__all__ = ["Effect", "WhatIf", "analyze", "end_times", "in_order"]


# -- dependencies -----------------------------------------------------------------------------------------------------

CLOCK_S = 5e-5
"""How far apart the clocks of two streams may be."""
TOWARDS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""The neighbor at the other end, in stages."""
PARTNER = {
    "forward-send": "forward-recv",
    "forward-recv": "forward-send",
    "backward-send": "backward-recv",
    "backward-recv": "backward-send",
}


def in_order(operations: Sequence[Operation], *, stages: int) -> tuple[Meeting, ...]:
    """Return every operation once, after all its dependencies; TraceError if they form a cycle."""
    graph = _Graph(operations, stages)
    for stage in range(stages):
        _computing(graph, stage)
        _pipeline(graph, stage)
        _collectives(graph, stage)
        _after_computing(graph, stage)
    _partners(graph)
    return _sorted(graph)


class _Graph:
    """The operations by kind and stage, ordered by start, and the dependencies found so far."""

    def __init__(self, operations: Sequence[Operation], stages: int) -> None:
        self.operations = operations
        self.stages = stages
        self.chunks = 1 + max((op.chunk for op in operations if op.kind in (FORWARD, BACKWARD)), default=0)
        self.overlapped = any(op.kind == SEPARATE for op in operations)
        self.after: list[set[int]] = [set() for _ in operations]
        self.meetings: list[tuple[int, ...]] = []
        self.partners: dict[tuple[str, int], list[int]] = {}
        """Sends and receives that have a real partner, by kind and stage, in order."""
        self._found: dict[tuple[str, int], list[int]] = defaultdict(list)
        order = sorted(range(len(operations)), key=self.place)
        for index in order:
            self._found[operations[index].kind, operations[index].stage].append(index)

    def place(self, index: int) -> tuple[float, int, str]:
        op = self.operations[index]
        return (op.start_s, op.sequence, op.kind)

    def of(self, stage: int, *kinds: str) -> list[int]:
        """Return the operations ordered by start."""
        found = [index for kind in kinds for index in self._found.get((kind, stage), ())]
        return sorted(found, key=self.place)

    def numbered(self, stage: int, kind: str) -> dict[int, int]:
        return {self.operations[index].sequence: index for index in self._found.get((kind, stage), ())}

    def chain(self, indexes: Iterable[int], after: Iterable[int] = ()) -> None:
        """Make each depend on the one before it, and the first on ``after``."""
        before = tuple(after)
        for index in indexes:
            self.after[index].update(before)
            before = (index,)


def _computing(graph: _Graph, stage: int) -> None:
    computing = graph.of(stage, FORWARD, BACKWARD)
    graph.chain(computing)
    kinds = [graph.operations[index].kind for index in computing]
    first = kinds.index(BACKWARD) if BACKWARD in kinds else 0
    if first < 2:
        return
    for kind in ("backward-recv", "backward-send"):
        posted = graph.numbered(stage, kind).get(0)
        if posted is not None:
            graph.after[posted].add(computing[first - 2])


def _pipeline(graph: _Graph, stage: int) -> None:
    for kind in PIPELINE:
        graph.chain(graph.of(stage, kind))
        graph.partners[kind, stage] = []
        computing = graph.numbered(stage, FORWARD if kind.startswith("forward") else BACKWARD)
        for index, number in _matched(graph, stage, kind, list(computing.values())):
            compute = computing.get(number)
            if compute is None:
                raise TraceError(f"stage {stage}: {kind} has no matching computing operation {number}")
            if kind.endswith("send"):
                graph.after[index].add(compute)
            else:
                graph.after[compute].add(index)
                if number - 1 in computing:
                    graph.after[index].add(computing[number - 1])
            if 0 <= _model_chunk(graph, compute) + TOWARDS[kind] < graph.chunks * graph.stages:
                graph.partners[kind, stage].append(index)


def _matched(graph: _Graph, stage: int, kind: str, computing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield a stage's real sends or receives, and the number of the computing operation that each belongs to.

    Profilers record some that never happened: receives after the last computing began, sends before the first one
    ended.
    """
    if not computing:
        return
    receives = kind.endswith("recv")
    last_start_s = max(graph.operations[index].start_s for index in computing)
    first_end_s = min(graph.operations[index].end_s for index in computing)
    real = [
        index
        for index in graph.of(stage, kind)
        if (
            graph.operations[index].start_s <= last_start_s + CLOCK_S
            if receives
            else graph.operations[index].end_s >= first_end_s - CLOCK_S
        )
    ]
    missing = len(computing) - len(real)
    if not real:
        return
    if missing and (missing != 1 or 0 < stage < graph.stages - 1):
        raise TraceError(f"stage {stage} has {len(real)} {kind} for {len(computing)} computing operations")
    # Only the first receive or the last send may be missing: both are at an end of the model.
    yield from zip(real, range(missing if receives else 0, len(computing)), strict=False)


def _model_chunk(graph: _Graph, index: int) -> int:
    op = graph.operations[index]
    return op.model_chunk if op.model_chunk >= 0 else op.chunk * graph.stages + op.stage


def _collectives(graph: _Graph, stage: int) -> None:
    graph.chain(graph.of(stage, GATHER, REDUCE))
    gathers = sorted(graph.of(stage, GATHER), key=lambda index: graph.operations[index].sequence)
    last_gather = {graph.operations[index].chunk: index for index in gathers}
    for chunk, gather in last_gather.items():
        forwards = [index for index in graph.of(stage, FORWARD) if graph.operations[index].chunk == chunk]
        if forwards:
            graph.after[forwards[0]].add(gather)
    if not graph.overlapped:
        return
    reductions = sorted(graph.of(stage, REDUCE), key=lambda index: graph.operations[index].sequence)
    first_reduction = {graph.operations[index].chunk: index for index in reversed(reductions)}
    for chunk, reduction in first_reduction.items():
        backwards = [index for index in graph.of(stage, BACKWARD) if graph.operations[index].chunk == chunk]
        if backwards:
            graph.after[reduction].add(max(backwards, key=lambda index: graph.operations[index].end_s))


def _after_computing(graph: _Graph, stage: int) -> None:
    computing = graph.of(stage, FORWARD, BACKWARD)
    last = [max(computing, key=lambda index: graph.operations[index].end_s)] if computing else []
    collected = graph.of(stage, GC)
    graph.chain(collected, last)
    ready = collected[-1:] or last
    reductions = sorted(graph.of(stage, REDUCE), key=lambda index: graph.operations[index].sequence)
    if graph.overlapped:
        ready = [*reductions[-1:], *ready]
        reductions = graph.of(stage, SEPARATE)
    ending = [*graph.of(stage, LAYERNORM), *graph.of(stage, EMBEDDING), *reductions]
    graph.chain([*ending, *graph.of(stage, CLIP), *graph.of(stage, OPTIMIZER)], ready)


def _partners(graph: _Graph) -> None:
    for (kind, stage), own in graph.partners.items():
        other = graph.partners[PARTNER[kind], (stage + TOWARDS[kind]) % graph.stages]
        if len(own) != len(other):
            raise TraceError(f"stage {stage} has {len(own)} {kind}, the stage at their other end {len(other)}")
        if kind.endswith("send"):
            graph.meetings += zip(own, other, strict=True)
    for kind, stages in ((EMBEDDING, {0, graph.stages - 1}), (CLIP, set(range(graph.stages)))):
        by_number: dict[int, list[int]] = defaultdict(list)
        for stage in sorted(stages):
            for number, index in graph.numbered(stage, kind).items():
                by_number[number].append(index)
        graph.meetings += [tuple(indexes) for indexes in by_number.values()]


def _sorted(graph: _Graph) -> tuple[Meeting, ...]:
    together = {index: members for members in graph.meetings for index in members}
    groups = list(dict.fromkeys(together.get(index, (index,)) for index in range(len(graph.operations))))
    group_of = {index: number for number, members in enumerate(groups) for index in members}
    after = [set().union(*(graph.after[index] for index in members)) for members in groups]
    followers: list[set[int]] = [set() for _ in groups]
    for number, earlier in enumerate(after):
        for index in earlier:
            followers[group_of[index]].add(number)
    open_ends = [len({group_of[index] for index in earlier}) for earlier in after]
    ready = deque(number for number, count in enumerate(open_ends) if not count)
    meetings: list[Meeting] = []
    while ready:
        number = ready.popleft()
        meetings.append(_meeting(graph, groups[number], after[number]))
        for follower in followers[number]:
            open_ends[follower] -= 1
            if not open_ends[follower]:
                ready.append(follower)
    if len(meetings) != len(groups):
        raise TraceError("the operations of the trace wait for each other in a circle")
    return tuple(meetings)


def _meeting(graph: _Graph, members: tuple[int, ...], after: set[int]) -> Meeting:
    return Meeting(
        members=members,
        after=tuple(sorted(after)),
        from_start=any(not graph.after[index] for index in members),
        all_lanes=graph.operations[members[0]].kind in (GATHER, REDUCE, SEPARATE, CLIP),
    )


# -- replay -----------------------------------------------------------------------------------------------------------
# Run each operation as early as its dependencies allow, for given lengths.
#
# The *length* of an operation excludes waiting: for computing it is the duration; for communication, the time from the
# arrival of the last partner to the operation's end, since the waiting before that will change.

SKEW_S = 0.01
"""A partner that arrived this long after the end cannot have been one: its clock is off, and the length is 0."""


def lengths(trace: Trace, meetings: Sequence[Meeting]) -> Floats:
    """Return the length of each operation, ``[operation, step, lane]``."""
    found: Floats = trace.duration_s.copy()
    for meeting in meetings:
        if _communicates(trace.operations[meeting.members[0]], trace.stages):
            members = list(meeting.members)
            start_s, duration_s = trace.start_s[members], trace.duration_s[members]
            came_s = start_s.max(axis=(0, 2) if meeting.all_lanes else 0, keepdims=True)
            rest_s = start_s + duration_s - came_s
            found[members] = np.where(rest_s <= -SKEW_S, 0.0, rest_s)
    return found


def _communicates(op: Operation, stages: int) -> bool:
    """Whether the time of an operation counts from the arrival of the last partner, not from its own."""
    embedding = op.kind == EMBEDDING and op.stage in (0, stages - 1)
    return embedding or op.kind in (*PIPELINE, GATHER, REDUCE, SEPARATE, CLIP)


def end_times(meetings: Sequence[Meeting], length_s: Floats) -> Floats:
    """Return when each operation ends; its step begins at 0."""
    nothing = np.zeros(length_s.shape[1:])

    def begins(before: list[Floats], meeting: Meeting) -> Floats:
        begin_s = nothing if not before else before[0] if len(before) == 1 else np.maximum.reduce(before)
        if meeting.from_start and before:
            begin_s = np.maximum(begin_s, 0.0)
        return begin_s.max(axis=-1, keepdims=True) if meeting.all_lanes else begin_s

    found: Floats = replay(meetings, length_s, np.empty_like(length_s), begins)
    return found


# -- attribution ------------------------------------------------------------------------------------------------------
# What makes a job slow: replays with all, some or none of its operations at their usual length.  Pure.
#
# In the *ideal* job every operation has the usual length of its kind: the mean for computing, the median for
# communication, over all steps and workers.

WORST_PERCENT = 3
"""Percentage of workers, rounded up, that count as "a few bad workers"."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The contribution of some operations to the slowdown: mean step times with and without them."""

    original_s: float
    ideal_s: float
    removed_s: float
    """The original job with these operations at their usual length."""
    added_s: float
    """The ideal job with these operations at their original length."""

    @property
    def share_removed(self) -> float | None:
        """The share of the lost time that is recovered without them; None if no time is lost."""
        return self._share(self.original_s - self.removed_s)

    @property
    def share_added(self) -> float | None:
        """The share of the lost time that they cause alone; None if no time is lost."""
        return self._share(self.added_s - self.ideal_s)

    def _share(self, part_s: float) -> float | None:
        lost_s = self.original_s - self.ideal_s
        return part_s / lost_s if lost_s else None


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Slowdowns: mean step time relative to the ideal job, with everything or only the named part at original length.

    Worst first.
    """

    slowdown: float
    by_worker: dict[int, float]
    """By rank: the smaller of the slowdowns of its data-parallel rank and its stage."""
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    by_operation: dict[str, float]
    worst_workers: tuple[int, ...]
    """The ranks that ``mw`` covers."""
    mw: Effect
    """Effect of the worst workers."""
    ms: Effect
    """Effect of the last pipeline stage, which often also computes the loss."""
    place: dict[int, tuple[int, int]]
    """Data-parallel rank and stage, by rank."""
    steps: int
    notes: tuple[str, ...]


def analyze(trace: Trace, *, progress: Progress = no_progress) -> WhatIf:
    """Analyze a trace; ``progress`` counts replays."""
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
        end_s = end_times(meetings, length_s)
        done += 1
        progress(done, total)
        if until is not None and until.any():
            end_s = end_s[until]
        return float(end_s.max(axis=(0, 2)).mean())

    original_s, ideal_s = step_s(original), step_s(ideal)
    ideal_end_s = step_s(ideal, last)
    if not ideal_end_s > 0:
        # Nothing takes any time, so nothing is slow.
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
    """Return the group of an operation; a send and its receive belong together."""
    return f"{op.kind.split('-')[0]}-pp-comm" if op.kind in PIPELINE else op.kind


def _worst_first(slowdowns: dict[Any, float]) -> dict[Any, float]:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))
