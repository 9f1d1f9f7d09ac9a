"""Which operation waits for which: the template's order, taken from where its operations stood.

Within a worker, operations of one stream follow each other: computing, each of the four directions of pipeline
traffic, and the data-parallel collectives.  Between streams:

- a receive comes before the computing that needs it, and is posted after the computing of its direction before that;
  a send comes after the computing that made what it sends;
- the first backward send or receive is posted two forwards before the first backward;
- the gather of a chunk's parameters comes before the chunk's first forward;
- after the last computing: garbage collection, layer-norm and embedding gradients, the reduction of the others (or,
  where that overlaps with backward, of those left over), clipping, the optimizer.

Across workers, the partners of one communication wait for the last of them (a *meeting*): a send and its receive; the
first and last stage's embedding; clipping, on all; a collective of one stage, on all data-parallel ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.errors import TraceError
from stepscope.whatif.kinds import (
    BACKWARD,
    CLIP,
    EMBEDDING,
    FORWARD,
    GATHER,
    GC,
    LAYERNORM,
    OPTIMIZER,
    PIPELINE,
    REDUCE,
    SEPARATE,
)
from stepscope.whatif.operations import Operation

__all__ = ["Meeting", "in_order"]

CLOCK_S = 5e-5
"""How far the clocks of two streams may be apart."""
TOWARDS = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""The neighbour, in stages, at the other end."""
PARTNER = {
    "forward-send": "forward-recv",
    "forward-recv": "forward-send",
    "backward-send": "backward-recv",
    "backward-recv": "backward-send",
}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Operations that begin together, when all that they wait for is done; most are of one."""

    members: tuple[int, ...]
    after: tuple[int, ...]
    """What the members wait for."""
    from_start: bool
    """Some member waits for nothing."""
    communicates: bool
    """The members' time counts from when the last of them came, not from when each of them came."""
    all_lanes: bool
    """The same operation of all data-parallel ranks meets as well."""


def in_order(operations: Sequence[Operation], *, stages: int) -> tuple[Meeting, ...]:
    """Every operation once, none before what it waits for; TraceError when they wait for each other in a circle."""
    graph = _Graph(operations, stages)
    for stage in range(stages):
        _computing(graph, stage)
        _pipeline(graph, stage)
        _collectives(graph, stage)
        _after_computing(graph, stage)
    _partners(graph)
    return _sorted(graph)


class _Graph:
    """The operations by kind and stage, in the order of their start, and what is known of their order so far."""

    def __init__(self, operations: Sequence[Operation], stages: int) -> None:
        self.operations = operations
        self.stages = stages
        self.chunks = 1 + max((op.chunk for op in operations if op.kind in (FORWARD, BACKWARD)), default=0)
        self.overlapped = any(op.kind == SEPARATE for op in operations)
        self.after: list[set[int]] = [set() for _ in operations]
        self.meetings: list[tuple[int, ...]] = []
        self.partners: dict[tuple[str, int], list[int]] = {}
        """Sends and receives that really have a partner, by kind and stage, in order."""
        self._found: dict[tuple[str, int], list[int]] = defaultdict(list)
        order = sorted(range(len(operations)), key=self.place)
        for index in order:
            self._found[operations[index].kind, operations[index].stage].append(index)

    def place(self, index: int) -> tuple[float, int, str]:
        op = self.operations[index]
        return (op.start_s, op.sequence, op.kind)

    def of(self, stage: int, *kinds: str) -> list[int]:
        """In the order of their start."""
        found = [index for kind in kinds for index in self._found.get((kind, stage), ())]
        return sorted(found, key=self.place)

    def numbered(self, stage: int, kind: str) -> dict[int, int]:
        return {self.operations[index].sequence: index for index in self._found.get((kind, stage), ())}

    def chain(self, indexes: Iterable[int], after: Iterable[int] = ()) -> None:
        """Each after the one before it, the first after ``after``."""
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
                raise TraceError(f"stage {stage}: {kind} has no computing number {number} to go with")
            if kind.endswith("send"):
                graph.after[index].add(compute)
            else:
                graph.after[compute].add(index)
                if number - 1 in computing:
                    graph.after[index].add(computing[number - 1])
            if 0 <= _model_chunk(graph, compute) + TOWARDS[kind] < graph.chunks * graph.stages:
                graph.partners[kind, stage].append(index)


def _matched(graph: _Graph, stage: int, kind: str, computing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The sends or receives of a stage that were really made, and the number of the computing each belongs to.

    Profilers note some that never were: receives after the last computing began, sends before the first one ended.
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
    # The one that may be missing is the first receive or the last send: both are at an end of the model.
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
    kind = graph.operations[members[0]].kind
    ends = (0, graph.stages - 1)
    embedding = kind == EMBEDDING and graph.operations[members[0]].stage in ends
    return Meeting(
        members=members,
        after=tuple(sorted(after)),
        from_start=any(not graph.after[index] for index in members),
        communicates=embedding or kind in (*PIPELINE, GATHER, REDUCE, SEPARATE, CLIP),
        all_lanes=kind in (GATHER, REDUCE, SEPARATE, CLIP),
    )
