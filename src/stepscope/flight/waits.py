"""Who waits for whom: the graph over all groups, its ends and its cycles.  Pure.

A rank waits in the oldest collective of a group that it called and that has not ended; it waits for every member that
has not called it.  Whoever is waited for and waits for nobody holds the job up; where nobody is at the end, they wait
for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepscope.flight.align import Group
from stepscope.flight.entries import Operation

__all__ = ["Edge", "collective_edges", "cycle_in", "ends_of", "p2p_edges", "reaching", "waits_for"]


@dataclass(frozen=True, kw_only=True)
class Edge:
    waiter: int
    waited: int
    group: Group
    sequence: int
    operation: Operation | None
    certain: bool = True
    """False: there is no dump of the other rank, so nothing says it did not come."""


def collective_edges(group: Group, dumped: Iterable[int]) -> list[Edge]:
    """In one group, by its collectives."""
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
    """In one group, by sends and recvs: those without a counterpart wait for the rank that owes it.

    Their numbers mean nothing on the other side, and what ended is not told; but sends to a rank and its recvs pair up
    in order, so as many of one as there are more than of the other have no partner yet.
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
    """Ranks that are waited for and wait for nobody."""
    waiters = {edge.waiter for edge in edges}
    return tuple(sorted({edge.waited for edge in edges} - waiters))


def waits_for(edges: Iterable[Edge], targets: Iterable[int]) -> dict[int, list[Edge]]:
    """By rank, of these: who waits for it, and where."""
    found: dict[int, list[Edge]] = {rank: [] for rank in targets}
    for edge in edges:
        if edge.waited in found:
            found[edge.waited].append(edge)
    return found


def reaching(edges: Sequence[Edge], targets: Iterable[int]) -> set[int]:
    """All ranks that wait for one of these, directly or through others."""
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
    """A shortest way round from the lowest rank that is on any; nothing when there is none."""
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
