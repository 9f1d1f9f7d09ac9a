"""The wait-for graph of a job: which ranks wait for which, which diverged, and whose device lags. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepscope.flight.alignment import ONE_SIDED, Divergence, Group, difference, find_divergence, groups_of, world_of
from stepscope.flight.dump import HOST_BACKENDS, STARTED, Dump, Operation, with_same_groups
from stepscope.flight.stacks import FailureText, failure_in
from stepscope.records.finding import Frame, ThreadStack

__all__ = ["Case", "Edge", "Place", "build_case", "cycle_in", "ends_of", "place_of", "reaching", "waits_for"]


# -- graph ------------------------------------------------------------------------------------------------------------
# The graph over all groups, its ends and its cycles.
#
# In each group, a rank waits in its oldest pending collective, for every member that has not called it. A rank that
# others wait for and that waits for none blocks the job. If there is no such rank, they wait for each other.


@dataclass(frozen=True, kw_only=True)
class Edge:
    waiter: int
    waited: int
    group: Group
    sequence: int
    operation: Operation | None
    certain: bool = True
    """False: the other rank has no dump, so there is no proof that it did not come."""


def collective_edges(group: Group, dumped: Iterable[int]) -> list[Edge]:
    """Edges of one group from its collectives."""
    have = set(dumped)
    edges = []
    for rank, sequence in group.waiting.items():
        operation = group.progress[rank].operation(sequence)
        late = set(group.missing(sequence))
        edges += [
            Edge(
                waiter=rank,
                waited=other,
                group=group,
                sequence=sequence,
                operation=operation,
                certain=other in have,
            )
            for other in group.members
            if other in late or other not in have
        ]
    return edges


def p2p_edges(group: Group, dumped: Iterable[int]) -> list[Edge]:
    """Edges of one group from sends and recvs: an unmatched call waits for the rank that owes its counterpart.

    Their numbers mean nothing on the other side, and ended calls are not in the dump. But sends to a rank and its recvs
    pair up in order, so the surplus on one side has no partner yet.
    """
    if not group.ordered:
        return []
    have = set(dumped)
    pending: dict[tuple[int, int, bool], list[tuple[int, Operation]]] = {}
    for rank, progress in group.progress.items():
        for one in progress.trace.p2p:
            if max(one.source, one.target) < len(group.members):
                source, target = group.members[one.source], group.members[one.target]
                if rank == (source if one.sending else target):
                    pending.setdefault((source, target, one.sending), []).append((one.sequence, one.operation))
    edges = []
    for (source, target, sending), calls in pending.items():
        waiter, waited = (source, target) if sending else (target, source)
        matched = len(pending.get((source, target, not sending), ()))
        if len(calls) > matched:
            sequence, operation = calls[matched]
            edges.append(
                Edge(
                    waiter=waiter,
                    waited=waited,
                    group=group,
                    sequence=sequence,
                    operation=operation,
                    certain=waited in have,
                )
            )
    return edges


def ends_of(edges: Sequence[Edge]) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for none."""
    waiters = {edge.waiter for edge in edges}
    return tuple(sorted({edge.waited for edge in edges} - waiters))


def waits_for(edges: Iterable[Edge], targets: Iterable[int]) -> dict[int, list[Edge]]:
    """The waits for each of these ranks."""
    found: dict[int, list[Edge]] = {rank: [] for rank in targets}
    for edge in edges:
        if edge.waited in found:
            found[edge.waited].append(edge)
    return found


def reaching(edges: Sequence[Edge], targets: Iterable[int]) -> set[int]:
    """All ranks that wait for one of these, directly or indirectly."""
    waiting_for: dict[int, set[int]] = {}
    for edge in edges:
        waiting_for.setdefault(edge.waited, set()).add(edge.waiter)
    found: set[int] = set()
    todo = list(targets)
    while todo:
        for waiter in waiting_for.get(todo.pop(), ()):
            if waiter not in found:
                found.add(waiter)
                todo.append(waiter)
    return found


def cycle_in(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """A shortest cycle through the lowest rank that is on any; empty without cycles."""
    onward: dict[int, list[Edge]] = {}
    for edge in edges:
        onward.setdefault(edge.waiter, []).append(edge)
    for start in sorted(onward):
        way = _way_back(onward, start)
        if way:
            return way
    return ()


def _way_back(onward: Mapping[int, Sequence[Edge]], start: int) -> tuple[Edge, ...]:
    came: dict[int, Edge] = {}
    level = [start]
    while level:
        following = []
        for rank in level:
            for edge in onward.get(rank, ()):
                if edge.waited == start:
                    return _unwound(came, edge, start)
                if edge.waited not in came:
                    came[edge.waited] = edge
                    following.append(edge.waited)
        level = following
    return ()


def _unwound(came: Mapping[int, Edge], last: Edge, start: int) -> tuple[Edge, ...]:
    way = [last]
    while way[-1].waiter != start:
        way.append(came[way[-1].waiter])
    return tuple(reversed(way))


# -- case -------------------------------------------------------------------------------------------------------------

NOT_SYMMETRIC = ("broadcast", "reduce", *ONE_SIDED)
"""Operations that may end on one rank before another has called them."""
INPUT = ("torch/utils/data/", "torchdata/", "webdataset/", "/datasets/", "nvidia/dali")
DISTRIBUTED = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
P2P_CALLS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank's main thread is doing, from its stack."""

    doing: str
    """``p2p``, ``collective``, ``input`` or ``other``."""
    call: str = ""
    """For the first two: the function of torch.distributed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    dumps: Mapping[int, Dump]
    world: tuple[int, ...]
    groups: tuple[Group, ...]
    stacks: Mapping[int, tuple[ThreadStack, ...]]
    failures: Mapping[int, FailureText]
    unreadable: frozenset[int]
    departures: tuple[tuple[Group, Divergence], ...]
    lagging: Mapping[int, tuple[Group, int]]
    """Ranks whose device has not ended what a peer's has, with an example."""
    edges: tuple[Edge, ...]

    @property
    def dumpless(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.world if rank not in self.dumps)

    @property
    def waiting(self) -> set[int]:
        """Ranks with a pending call."""
        own = {rank for group in self.groups for rank, one in group.progress.items() if one.pending and not one.failed}
        return own | {r for group in self.groups for r, one in group.progress.items() if one.trace.p2p}


def build_case(
    dumps: Sequence[Dump],
    *,
    stacks: Mapping[int, tuple[ThreadStack, ...]],
    errors: Mapping[int, str],
    world: int | None,
    unreadable: Collection[int],
) -> Case:
    failures = {rank: failure for rank, text in errors.items() if (failure := failure_in(text)) is not None}
    dumps = with_same_groups(dumps)
    ranks = world_of(dumps, world, (*unreadable, *failures))
    groups = groups_of(dumps, ranks, failed=failures.keys())
    have = [dump.rank for dump in dumps]
    edges = [edge for group in groups for edge in (*collective_edges(group, have), *p2p_edges(group, have))]
    departures = tuple(
        (group, left) for group in groups if (left := _left(group)) is not None and _explains(group, left, edges)
    )
    for group, left in departures:
        edges = _past(edges, group, left)
    # A device that waits for data of a call that its peer made differently has not stopped.
    unlike = [group.key for group, left in departures if left.differs != "call site"]
    lagging = _lagging([group for group in groups if group.key not in unlike])
    return Case(
        dumps={dump.rank: dump for dump in dumps},
        world=ranks,
        groups=groups,
        stacks=stacks,
        failures=failures,
        unreadable=frozenset(unreadable),
        departures=departures,
        lagging=lagging,
        edges=tuple(edge for edge in edges if edge.waiter not in lagging),
    )


def place_of(threads: Sequence[ThreadStack]) -> Place | None:
    """From the main thread, innermost frame first: what torch does for it, or that it is in its own code."""
    main = next((thread for thread in threads if thread.main), None)
    if main is None or not main.frames:
        return None
    call = _distributed_call(main.frames)
    if call:
        return Place(doing="p2p" if call in P2P_CALLS else "collective", call=call)
    reading = any(part in frame.file for frame in main.frames for part in INPUT)
    return Place(doing="input" if reading else "other")


def _distributed_call(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed that the rank is in, from the innermost frames, skipping wrappers."""
    for frame in frames[:4]:
        if frame.file.endswith(DISTRIBUTED):
            return frame.function
        if "torch/" not in frame.file and "<" not in frame.file:
            return ""
    return ""


def _left(group: Group) -> Divergence | None:
    """Where a rank diverged, for a group with pending calls."""
    waiting = group.waiting
    return find_divergence(group, max(waiting.values()), stuck=_stuck_inside(group)) if waiting else None


def _explains(group: Group, left: Divergence, edges: Sequence[Edge]) -> bool:
    """Whether the divergence explains why the group hangs.

    Ranks that request different things at the same number cannot continue, or not for long (NCCL). Ranks that request
    the same from different lines did continue, out of step, until one side ran out of calls: then the ranks that
    diverged wait for all others, or all others for them.
    """
    waiting = group.waiting
    if any(_disagree(group, left.sides, number) for number in set(waiting.values())):
        return True
    if left.differs != "call site" and _stuck_inside(group):
        return True
    if not left.ranks:
        return False
    waiters = {edge.waiter for edge in edges if edge.group is group}
    waited = {edge.waited for edge in edges if edge.group is group}
    return set(left.ranks) in (waiters, waited)


def _stuck_inside(group: Group) -> bool:
    """Whether all ranks called the oldest pending collective and devices have started it: they wait inside NCCL."""
    waiting = group.waiting
    if not waiting or any(rank not in group.progress for rank in group.members):
        return False
    first = min(waiting.values())
    waiters = [rank for rank, number in waiting.items() if number == first]
    operation = group.progress[waiters[0]].operation(first)
    if operation is None or operation.backend in HOST_BACKENDS or group.missing(first):
        return False
    return all(group.progress[rank].state(first) == STARTED for rank in waiters) or bool(_late(group, first))


def _disagree(group: Group, sides: Sequence[Sequence[int]], number: int) -> bool:
    operations = [group.progress[side[0]].operation(number) for side in sides]
    told = [operation for operation in operations if operation is not None]
    return any(difference(told[0], other) for other in told[1:])


def _past(edges: Sequence[Edge], group: Group, left: Divergence) -> list[Edge]:
    """Edges without the waits of the ranks that diverged, and with the other ranks waiting for those."""
    kept = [edge for edge in edges if edge.waiter not in left.ranks]
    waiting = group.waiting
    others = [rank for rank in waiting if rank not in left.ranks]
    return kept + [
        Edge(
            waiter=rank,
            waited=other,
            group=group,
            sequence=waiting[rank],
            operation=group.progress[rank].operation(waiting[rank]),
        )
        for rank in others
        for other in left.ranks
    ]


def _lagging(groups: Sequence[Group]) -> dict[int, tuple[Group, int]]:
    """Ranks that wait for the end of a collective that has ended on a peer, though it needs all ranks."""
    found: dict[int, tuple[Group, int]] = {}
    for group in groups:
        ended = max((one.completed or 0 for one in group.progress.values()), default=0)
        for sequence in {number for number in group.waiting.values() if number <= ended}:
            if _alike(group, sequence):
                found |= {rank: (group, sequence) for rank in _late(group, sequence) if rank not in found}
    return found


def _late(group: Group, sequence: int) -> list[int]:
    """Ranks that wait for the end of that collective although it has ended on a peer.

    Host backends do not count: gloo gives up a failed call and reports that as its end.
    """
    found = []
    ended = [rank for rank, one in group.progress.items() if one.has_ended(sequence)]
    for rank, number in group.waiting.items():
        operation = group.progress[rank].operation(sequence) if number == sequence else None
        if operation is None or operation.backend in HOST_BACKENDS:
            continue
        if operation.name.split("+")[0] not in NOT_SYMMETRIC and any(other != rank for other in ended):
            found.append(rank)
    return found


def _alike(group: Group, sequence: int) -> bool:
    """Whether all requested the same: NCCL ends a call with enough bytes, while another rank waits for the rest."""
    told = [one for progress in group.progress.values() if (one := progress.operation(sequence)) is not None]
    return not any(difference(told[0], other) for other in told[1:])
