"""All that is known of a job, and what follows: who waits for whom, who left the path, whose device lags.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stepscope.flight.align import Group, groups_of, world_of
from stepscope.flight.combine import HOST_BACKENDS, with_same_groups
from stepscope.flight.compare import ONE_SIDED, Departure, departure, difference
from stepscope.flight.entries import STARTED, Dump
from stepscope.flight.failures import FailureText, failure_in
from stepscope.flight.waits import Edge, collective_edges, p2p_edges
from stepscope.records.hang import Frame, ThreadStack

__all__ = ["Case", "Place", "build_case", "place_of"]

NOT_SYMMETRIC = ("broadcast", "reduce", *ONE_SIDED)
"""Operations that may end on one rank before another has come."""
INPUT = ("torch/utils/data/", "torchdata/", "webdataset/", "/datasets/", "nvidia/dali")
DISTRIBUTED = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
P2P_CALLS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank's main thread is doing, by its stack."""

    doing: str
    """``p2p``, ``collective``, ``input`` or ``other``."""
    call: str = ""
    """Of the first two: the function of torch.distributed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    dumps: Mapping[int, Dump]
    world: tuple[int, ...]
    groups: tuple[Group, ...]
    stacks: Mapping[int, tuple[ThreadStack, ...]]
    failures: Mapping[int, FailureText]
    unreadable: frozenset[int]
    departures: tuple[tuple[Group, Departure], ...]
    lagging: Mapping[int, tuple[Group, int]]
    """Ranks whose device has not ended what a peer's has, with an example."""
    edges: tuple[Edge, ...]

    @property
    def dumpless(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.world if rank not in self.dumps)

    @property
    def waiting(self) -> set[int]:
        """Ranks with something called that has not ended."""
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
    # A device that waits for the rest of another call than its peer made has not stopped.
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
    """By the main thread, from the inside out: what torch does for it, or that it is in its own code."""
    main = next((thread for thread in threads if thread.main), None)
    if main is None or not main.frames:
        return None
    call = _distributed_call(main.frames)
    if call:
        return Place(doing="p2p" if call in P2P_CALLS else "collective", call=call)
    reading = any(part in frame.file for frame in main.frames for part in INPUT)
    return Place(doing="input" if reading else "other")


def _distributed_call(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed that the rank is in: the innermost frames, wrappers passed over."""
    for frame in frames[:4]:
        if frame.file.endswith(DISTRIBUTED):
            return frame.function
        if "torch/" not in frame.file and "<" not in frame.file:
            return ""
    return ""


def _left(group: Group) -> Departure | None:
    """Where some rank left the others, of a group in which something stands."""
    waiting = group.waiting
    return departure(group, max(waiting.values()), stuck=_stuck_inside(group)) if waiting else None


def _explains(group: Group, left: Departure, edges: Sequence[Edge]) -> bool:
    """Whether leaving the path there is why the group stands.

    Ranks that ask for different things at the same number cannot go on, or not for long (NCCL).  Where they ask for the
    same from different lines, they did go on, out of step, until the numbers ran out on one side: those that left wait
    for all others, or all others for them.
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
    """Whether the oldest collective that stands was called by all, and devices have begun it: they wait inside NCCL."""
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


def _past(edges: Sequence[Edge], group: Group, left: Departure) -> list[Edge]:
    """The graph with what those that left do taken for no waiting, and the others waiting for them."""
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
    """Ranks that wait for the end of a collective that has ended on a peer, which takes all of them."""
    found: dict[int, tuple[Group, int]] = {}
    for group in groups:
        ended = max((one.completed or 0 for one in group.progress.values()), default=0)
        for sequence in {number for number in group.waiting.values() if number <= ended}:
            if _alike(group, sequence):
                found |= {rank: (group, sequence) for rank in _late(group, sequence) if rank not in found}
    return found


def _late(group: Group, sequence: int) -> list[int]:
    """Ranks that wait for the end of that one, where it has ended on a peer.

    On the host it does not count: gloo gives up what failed and calls that the end.
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
    """Whether all asked for the same there: NCCL ends what gets enough bytes, and another rank waits for the rest."""
    told = [one for progress in group.progress.values() if (one := progress.operation(sequence)) is not None]
    return not any(difference(told[0], other) for other in told[1:])
