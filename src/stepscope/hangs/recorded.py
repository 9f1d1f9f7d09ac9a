"""What the Flight Recorders of the ranks say about a hang: who waits for whom, who diverged, whose device lags.

They know sequence numbers, sizes and the calls of DDP and FSDP; gloo's does not know sends and recvs. In each group, a
rank waits in its oldest pending collective, for every member that has not called it.

On NCCL a call only adds work to a queue of the device. The host continues until it needs a result and then spins, so
neither its CPU time nor its stack distinguishes waiting from working. Two samples of NCCL's recorder do
(``DeviceQueue``). Pure, except for the import of the decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from stepscope.errors import DumpError
from stepscope.flight.dump import DONE, HOST_BACKENDS, P2P, STARTED, Dump, GroupKey, Operation, with_same_groups
from stepscope.flight.stacks import FailureText
from stepscope.hangs.alignment import (
    ONE_SIDED,
    Divergence,
    Group,
    difference,
    find_divergence,
    groups_of,
    world_of,
)
from stepscope.hangs.evidence import Evidence, failures_of
from stepscope.hangs.wait_graph import Wait, WaitGraph
from stepscope.records.hang import WaitingIn

__all__ = ["DeviceQueue", "Joined", "Recorded", "read_recorders", "waiting_in"]

NOT_SYMMETRIC = ("broadcast", "reduce", *ONE_SIDED)
"""Operations that may end on one rank before another has called them."""
MOST_PENDING = 64
"""Limit for one rank."""
SIZES_SHOWN = 4
"""Tensors of a call whose sizes are in its text; a coalesced call may have hundreds."""


# -- result -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceQueue:
    """The communication that a rank queued on its device, from two samples of NCCL's recorder."""

    ended: int = 0
    """Number of collectives called or ended between the two samples: it makes progress."""
    stuck: tuple[WaitingIn, ...] = ()
    """Called and not ended in both samples, in order; empty if it makes progress."""
    started: frozenset[WaitingIn] = frozenset()
    """Those that the device is known to have started; torch knows it only with TORCH_NCCL_ENABLE_TIMING."""


class Joined(NamedTuple):
    """A pending collective that all members of its group have called."""

    group: Group
    rank: int
    """One that waits in it."""
    sequence: int

    @property
    def call(self) -> WaitingIn:
        return waiting_in(*self)

    @property
    def on_host(self) -> bool:
        operation = self.group.progress[self.rank].operation(self.sequence)
        return operation is None or operation.backend in ("gloo", "mpi", "")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    dumps: Mapping[int, Dump] = field(default_factory=dict)
    """The dumps of the ranks that have one."""
    world: tuple[int, ...] = ()
    """All ranks that exist, as far as known."""
    groups: tuple[Group, ...] = ()
    divergences: tuple[tuple[Group, Divergence], ...] = ()
    """Where ranks made different calls, if that explains why they hang."""
    lagging: Mapping[int, tuple[Group, int]] = field(default_factory=dict)
    """Ranks whose device has not ended what a peer's has, with an example."""
    graph: WaitGraph = field(default_factory=WaitGraph)
    queues: Mapping[int, DeviceQueue] = field(default_factory=dict)
    """By rank, for ranks that use NCCL and were sampled twice."""
    failures: Mapping[int, FailureText] = field(default_factory=dict)

    @cached_property
    def pending(self) -> dict[int, tuple[WaitingIn, ...]]:
        """By rank: the collectives that were begun and have not ended, in order."""
        return {rank: found for rank, dump in self.dumps.items() if (found := _pending(dump))}

    @cached_property
    def members(self) -> dict[str, frozenset[int]]:
        """The ranks of groups by name: those that a recorder lists, and those whose recorder has the group."""
        members: dict[str, set[int]] = {}
        for rank, dump in self.dumps.items():
            for key in {*dump.groups, *dump.members}:
                members.setdefault(key[0], set()).update((rank, *dump.members.get(key, ())))
        return {name: frozenset(ranks) for name, ranks in members.items()}

    @cached_property
    def waiting(self) -> frozenset[int]:
        """Ranks with a pending call."""
        return frozenset(
            rank
            for group in self.groups
            for rank, progress in group.progress.items()
            if (progress.pending and not progress.failed) or progress.trace.p2p
        )

    def behind(self, rank: int) -> bool:
        """Whether the device of this rank has not started what a peer's has: it is busy with earlier work."""
        queue = self.queues.get(rank)
        if queue is None or not queue.stuck or queue.started or queue.stuck[0].peer is not None:
            return False
        first = _place(queue.stuck[0])
        return any(first in map(_place, other.started) for other in self.queues.values())

    def begun_by_all(self, call: WaitingIn) -> bool:
        """Whether the devices of all members are known to have started that collective."""
        members = self.members.get(call.group, frozenset())
        place = _place(call)
        return bool(members) and all(
            rank in self.queues and place in map(_place, self.queues[rank].started) for rank in members
        )

    @property
    def lagging_decided(self) -> bool:
        """Whether the devices that lag are few enough to be the ones that stopped."""
        return bool(self.lagging) and 2 * len(self.lagging) <= len(self.dumps)

    @cached_property
    def joined(self) -> Joined | None:
        """The pending collective that was called first, if no rank is missing in any."""
        own_failure = any(failure.own for failure in self.failures.values())
        if own_failure or self.lagging or self.divergences or self.graph.waits:
            return None
        stuck = [
            Joined(group, rank, progress.pending[0])
            for group in self.groups
            for rank, progress in group.progress.items()
            if progress.pending and not progress.failed
        ]
        return min(stuck, key=lambda found: found.group.first_called_ns(found.sequence), default=None)

    @property
    def unfinished(self) -> WaitingIn | None:
        """A collective that all ranks called and that their devices do not end; None: no such, or one is to blame."""
        if self.lagging:
            group, sequence = self.lagging[min(self.lagging)]
            return None if self.lagging_decided else waiting_in(group, min(self.lagging), sequence)
        if self.joined is None or self.joined.on_host or len(self.joined.group.members) == 1:
            return None
        return self.joined.call

    @cached_property
    def in_progress(self) -> bool:
        """Whether the waits are those of a running job: no two dumps are taken at the same instant.

        Fewer than half of a group wait, each in one collective only, and all others had reached the previous one.
        """
        for wait in self.graph.waits:
            if wait.group is None:
                return False
            progress = wait.group.progress
            waiters = [rank for rank in wait.group.waiting if not progress[rank].failed]
            ahead = any(len(progress[rank].pending) > 1 for rank in wait.waiters)
            reached = all(
                rank in progress and progress[rank].enqueued == (wait.call.sequence or 0) - 1 for rank in wait.missing
            )
            waited_for = any(rank in progress and progress[rank].pending for rank in wait.missing)
            if ahead or not reached or waited_for or 2 * len(waiters) >= len(wait.group.members):
                return False
        return bool(self.graph.waits)


def waiting_in(group: Group, rank: int, sequence: int) -> WaitingIn:
    """The call of that number as the rank made it."""
    operation = group.progress[rank].operation(sequence) if rank in group.progress else None
    return _waiting(group.key, operation, sequence=sequence)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_recorders(evidence: Evidence) -> Recorded:
    """Compare the dumps of all ranks: those of files, or the answers of live ranks."""
    # Imported late: it also reads folders with several processes, which an agent without a hang does not need.
    from stepscope.flight.read import read_dump

    def read(data: bytes, rank: int) -> Dump | None:
        try:
            return read_dump(data, source=f"rank {rank}", rank=rank) if data else None
        except DumpError:
            return None

    answers = {rank.rank: dump for rank in evidence.ranks if (dump := read(rank.flight, rank.rank)) is not None}
    later = {
        rank.rank: dump
        for rank in evidence.ranks
        if rank.rank in answers and (dump := read(rank.flight_later, rank.rank)) is not None
    }
    failures = failures_of(evidence)
    dumps = with_same_groups(list({**answers, **evidence.dumps}.values()))
    if not dumps:
        return Recorded(failures=failures)
    queues = {rank: _queue(answers[rank], dump) for rank, dump in later.items() if dump.groups or dump.members}
    return replace(_compared(evidence, dumps, failures), queues=queues)


def _compared(evidence: Evidence, dumps: Sequence[Dump], failures: Mapping[int, FailureText]) -> Recorded:
    world = world_of(dumps, evidence.world_size, (*evidence.unreadable, *failures))
    groups = groups_of(dumps, world, failed=failures.keys())
    have = {dump.rank for dump in dumps}
    waits = [wait for group in groups for wait in (*_collective_waits(group, have), *_p2p_waits(group))]
    divergences = tuple(
        (group, left) for group in groups if (left := _divergence(group)) is not None and _explains(group, left, waits)
    )
    for group, left in divergences:
        waits = _waiting_for_diverged(waits, group, left)
    # A device that waits for data of a call that its peer made differently has not stopped.
    unlike = [group.key for group, left in divergences if left.differs != "call site"]
    lagging = _lagging([group for group in groups if group.key not in unlike])
    return Recorded(
        dumps={dump.rank: dump for dump in dumps},
        world=world,
        groups=groups,
        divergences=divergences,
        lagging=lagging,
        graph=WaitGraph(_without_waiters(waits, lagging)),
        failures=failures,
    )


# -- waits ------------------------------------------------------------------------------------------------------------


def _collective_waits(group: Group, have: Collection[int]) -> list[Wait]:
    waits = []
    for sequence, waiters in _waiters(group, ()).items():
        late = set(group.missing(sequence))
        missing = tuple(sorted(rank for rank in group.members if rank in late or rank not in have))
        waits.append(_wait(group, sequence, waiters, missing))
    return waits


def _wait(group: Group, sequence: int, waiters: Sequence[int], missing: tuple[int, ...]) -> Wait:
    return Wait(
        waiters=tuple(sorted(waiters)),
        missing=missing,
        call=waiting_in(group, min(waiters), sequence),
        group=group,
        called_ns=group.first_called_ns(sequence),
    )


def _waiters(group: Group, but: Collection[int]) -> dict[int, list[int]]:
    """By sequence number: the ranks that wait in it."""
    found: dict[int, list[int]] = {}
    for rank, sequence in group.waiting.items():
        if rank not in but:
            found.setdefault(sequence, []).append(rank)
    return found


def _p2p_waits(group: Group) -> list[Wait]:
    """Sends and recvs without a counterpart: each waits for the rank that owes it.

    Their numbers mean nothing on the other side, and ended calls are not in the dump. But sends to a rank and its recvs
    pair up in order, so the surplus on one side has no partner yet.
    """
    if not group.ordered:
        return []
    pending: dict[tuple[int, int, bool], list[P2P]] = {}
    for rank, progress in group.progress.items():
        for call in progress.trace.p2p:
            if max(call.source, call.target) < len(group.members):
                source, target = group.members[call.source], group.members[call.target]
                if rank == (source if call.sending else target):
                    pending.setdefault((source, target, call.sending), []).append(call)
    waits = []
    for (source, target, sending), calls in pending.items():
        waiter, missing = (source, target) if sending else (target, source)
        matched = len(pending.get((source, target, not sending), ()))
        if len(calls) > matched:
            unmatched = _p2p(group.key, calls[matched], group.members)
            waits.append(Wait(waiters=(waiter,), missing=(missing,), call=unmatched, group=group))
    return waits


def _without_waiters(waits: Iterable[Wait], ranks: Collection[int]) -> list[Wait]:
    if not ranks:
        return list(waits)
    return [replace(wait, waiters=tuple(rank for rank in wait.waiters if rank not in ranks)) for wait in waits]


def _waiting_for_diverged(waits: Sequence[Wait], group: Group, left: Divergence) -> list[Wait]:
    """The waits without those of the ranks that diverged, and with the other ranks waiting for those."""
    if not left.ranks:
        return list(waits)
    known = {wait.call.sequence: wait.missing for wait in waits if wait.group is group and wait.call.peer is None}
    others = [wait for wait in waits if wait.group is not group or wait.call.peer is not None]
    return [
        *_without_waiters(others, left.ranks),
        *(
            _wait(group, sequence, waiters, tuple(sorted({*known.get(sequence, ()), *left.ranks})))
            for sequence, waiters in _waiters(group, left.ranks).items()
        ),
    ]


# -- divergence and devices -------------------------------------------------------------------------------------------


def _divergence(group: Group) -> Divergence | None:
    """Where a rank diverged, for a group with pending calls."""
    waiting = group.waiting
    return find_divergence(group, max(waiting.values()), stuck=_stuck_inside(group)) if waiting else None


def _explains(group: Group, left: Divergence, waits: Sequence[Wait]) -> bool:
    """Whether the divergence explains why the group hangs.

    Ranks that request different things at the same number cannot continue, or not for long (NCCL). Ranks that request
    the same from different lines did continue, out of step, until one side ran out of calls: then the ranks that
    diverged wait for all others, or all others for them.
    """
    if any(_disagree(group, left.sides, number) for number in set(group.waiting.values())):
        return True
    if left.differs != "call site" and _stuck_inside(group):
        return True
    if not left.ranks:
        return False
    own = WaitGraph(wait for wait in waits if wait.group is group)
    return set(left.ranks) in (own.waiters, own.missing)


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
    known = [operation for operation in operations if operation is not None]
    return any(difference(known[0], other) for other in known[1:])


def _lagging(groups: Sequence[Group]) -> dict[int, tuple[Group, int]]:
    """Ranks that wait for the end of a collective that has ended on a peer, though it needs all ranks."""
    found: dict[int, tuple[Group, int]] = {}
    for group in groups:
        ended = max((progress.completed or 0 for progress in group.progress.values()), default=0)
        for sequence in {number for number in group.waiting.values() if number <= ended}:
            # NCCL ends a call with enough bytes, while a rank that asked for more waits for the rest.
            if not _disagree(group, [(rank,) for rank in group.progress], sequence):
                found |= {rank: (group, sequence) for rank in _late(group, sequence) if rank not in found}
    return found


def _late(group: Group, sequence: int) -> list[int]:
    """Ranks that wait for the end of that collective although it has ended on a peer.

    Host backends do not count: gloo gives up a failed call and reports that as its end.
    """
    found = []
    ended = [rank for rank, progress in group.progress.items() if progress.has_ended(sequence)]
    for rank, number in group.waiting.items():
        operation = group.progress[rank].operation(sequence) if number == sequence else None
        if operation is None or operation.backend in HOST_BACKENDS:
            continue
        if operation.name.split("+")[0] not in NOT_SYMMETRIC and any(other != rank for other in ended):
            found.append(rank)
    return found


def _queue(first: Dump, later: Dump) -> DeviceQueue:
    before, after = _on_device(first), _on_device(later)
    counted = sum(
        abs(now.enqueued - then.enqueued) + abs(now.completed - then.completed)
        for key, trace in later.groups.items()
        if (now := trace.status) is not None and key in first.groups and (then := first.groups[key].status) is not None
    )
    called = sum(1 for created_ns, _ in (after[call] for call in after.keys() - before) if created_ns > first.newest_ns)
    ended = max(counted, len(before.keys() - after) + called)
    if ended:
        return DeviceQueue(ended=ended)
    return DeviceQueue(
        stuck=tuple(sorted(before, key=lambda call: before[call][0])),
        started=frozenset(call for call, (_, state) in after.items() if state == STARTED),
    )


# -- pending calls ----------------------------------------------------------------------------------------------------


def _on_device(dump: Dump) -> dict[WaitingIn, tuple[int, int]]:
    """Pending device calls, with creation time and state."""
    found: dict[WaitingIn, tuple[int, int]] = {}
    for key, trace in dump.groups.items():
        for at, state in enumerate(trace.states):
            operation = dump.operations[trace.operations[at]]
            if state != DONE and operation.backend not in HOST_BACKENDS:
                found[_waiting(key, operation, sequence=trace.sequences[at])] = (trace.created_ns[at], state)
        for call in trace.p2p:
            if call.operation.backend not in HOST_BACKENDS:
                found[_p2p(key, call, dump.members.get(key, ()))] = (call.created_ns, STARTED)
    return found


def _pending(dump: Dump) -> tuple[WaitingIn, ...]:
    found: list[tuple[int, WaitingIn]] = []
    for key, trace in dump.groups.items():
        begun = [at for at, state in enumerate(trace.states) if state != DONE][:MOST_PENDING]
        for at in begun:
            operation = dump.operations[trace.operations[at]]
            found.append((trace.created_ns[at], _waiting(key, operation, sequence=trace.sequences[at])))
        found += [(call.created_ns, _p2p(key, call, dump.members.get(key, ()))) for call in trace.p2p[:MOST_PENDING]]
    return tuple(call for _, call in sorted(found, key=lambda pair: pair[0])[:MOST_PENDING])


def _p2p(key: GroupKey, call: P2P, members: Sequence[int]) -> WaitingIn:
    """Convert the ranks of a send or recv, which are positions in the group."""
    place = call.target if call.sending else call.source
    peer = members[place] if place < len(members) else place
    return _waiting(key, call.operation, sequence=call.sequence, peer=peer, op="send" if call.sending else "recv")


def _waiting(
    key: GroupKey, operation: Operation | None, *, sequence: int, peer: int | None = None, op: str = ""
) -> WaitingIn:
    name, description = key
    sizes = (operation.input_sizes or operation.output_sizes) if operation is not None else ()
    return WaitingIn(
        group=name,
        description=description,
        sequence=sequence,
        op=op or (operation.name if operation is not None else ""),
        sizes=" ".join(
            [*(str(list(size)) for size in sizes[:SIZES_SHOWN]), *(["…"] if len(sizes) > SIZES_SHOWN else [])]
        ),
        dtypes=" ".join(operation.dtypes[:SIZES_SHOWN]) if operation is not None else "",
        peer=peer,
    )


def _place(call: WaitingIn) -> tuple[str, str, int | None]:
    return call.group, call.description, call.sequence
