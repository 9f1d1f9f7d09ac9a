"""What the Flight Recorders of the ranks say, in the terms of a hang.

They know sequence numbers, sizes and what DDP and FSDP call by themselves; of gloo they do not know sends and recvs.
A rank that did not answer is no suspect for that: its server may be missing, which ``flight/`` cannot know.

On NCCL a call only puts work into a queue of the device.  The host goes on until it needs a result and then spins, so
neither its CPU time nor its stack tells a wait from work.  Two looks at NCCL's recorder do (``DeviceQueue``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.errors import DumpError
from stepscope.flight.combine import HOST_BACKENDS
from stepscope.flight.entries import DONE, P2P, STARTED, Dump, GroupKey, Operation, Trace
from stepscope.flight.judge import judge as judge_dumps
from stepscope.flight.verdict import Verdict
from stepscope.hangs.evidence import Evidence
from stepscope.records.hang import WaitingIn

__all__ = ["RAISED", "DeviceQueue", "Recorders", "read_recorders"]

MOST_PENDING = 64
"""Of one rank."""
RAISED = "raised "
TRACEBACK = "Traceback (most recent call last)"
"""How ``flight/`` knows the text of an exception."""


@dataclass(frozen=True, kw_only=True)
class DeviceQueue:
    """What a rank gave its device to communicate, by two looks at the recorder of NCCL."""

    ended: int = 0
    """So many collectives were called or ended between the two looks: it makes progress."""
    stuck: tuple[WaitingIn, ...] = ()
    """Called and not ended at either look, in order; empty where it makes progress."""
    started: frozenset[WaitingIn] = frozenset()
    """Those of them that the device is known to have begun; torch knows that with TORCH_NCCL_ENABLE_TIMING only."""


@dataclass(frozen=True, kw_only=True)
class Recorders:
    verdict: Verdict | None = None
    """That of ``flight/`` on those that answered; None: nobody did."""
    pending: dict[int, tuple[WaitingIn, ...]] = field(default_factory=dict)
    """By rank: the collectives that were begun and have not ended, in order."""
    members: dict[str, frozenset[int]] = field(default_factory=dict)
    """The ranks of groups, by name: those that a recorder tells, and those in whose recorder the group is."""
    answered: frozenset[int] = frozenset()
    queues: Mapping[int, DeviceQueue] = field(default_factory=dict)
    """By rank, of those that use NCCL and were looked at twice."""

    def behind(self, rank: int) -> bool:
        """Whether the device of this rank has not begun what a peer's has: it is busy with what came before."""
        queue = self.queues.get(rank)
        if queue is None or not queue.stuck or queue.started or queue.stuck[0].peer is not None:
            return False
        first = _place(queue.stuck[0])
        return any(first in map(_place, other.started) for other in self.queues.values())

    def begun_by_all(self, waiting: WaitingIn) -> bool:
        """Whether the devices of all members are known to have begun that collective."""
        members = self.members.get(waiting.group, frozenset())
        place = _place(waiting)
        return bool(members) and all(
            rank in self.queues and place in map(_place, self.queues[rank].started) for rank in members
        )

    @property
    def decided(self) -> Verdict | None:
        """The verdict, if it blames somebody, and for what was recorded rather than for what was not."""
        found = self.verdict
        if found is None or found.healthy or found.undecidable or not found.culprits:
            return None
        return found if {one.rank for one in found.culprits} <= self.answered else None


def read_recorders(evidence: Evidence) -> Recorders:
    # It also reads folders of files, by several processes: not for an agent to carry along that sees no hang.
    from stepscope.flight.read import read_dump

    dumps: dict[int, Dump] = {}
    for one in evidence.ranks:
        if one.flight:
            try:
                dumps[one.rank] = read_dump(one.flight, source=f"rank {one.rank}", rank=one.rank)
            except DumpError:
                continue
    members: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for key in {*dump.groups, *dump.members}:
            members.setdefault(key[0], set()).update((rank, *dump.members.get(key, ())))
    stacks = {one.rank: one.threads for one in evidence.ranks if one.threads and one.rank in dumps}
    errors = {
        one.rank: f"{TRACEBACK}\n{one.ended.removeprefix(RAISED)}" for one in evidence.ranks if RAISED in one.ended
    }
    return Recorders(
        verdict=judge_dumps(list(dumps.values()), stacks=stacks, errors=errors, world=evidence.world_size)
        if dumps
        else None,
        pending={rank: found for rank, dump in dumps.items() if (found := _pending(dump))},
        members={name: frozenset(ranks) for name, ranks in members.items()},
        answered=frozenset(dumps),
        queues=_queues(evidence, dumps),
    )


def _queues(evidence: Evidence, dumps: Mapping[int, Dump]) -> dict[int, DeviceQueue]:
    from stepscope.flight.read import read_dump

    found = {}
    for one in evidence.ranks:
        if one.rank not in dumps or not one.flight_later:
            continue
        try:
            later = read_dump(one.flight_later, source=f"rank {one.rank}", rank=one.rank)
        except DumpError:
            continue
        if later.groups or later.members:
            found[one.rank] = _queue(dumps[one.rank], later)
    return found


def _queue(first: Dump, later: Dump) -> DeviceQueue:
    before, after = _on_device(first), _on_device(later)
    counted = sum(
        abs(now.enqueued - then.enqueued) + abs(now.completed - then.completed)
        for key, trace in later.groups.items()
        if (now := trace.status) is not None and key in first.groups and (then := first.groups[key].status) is not None
    )
    called = sum(1 for created_ns, _ in (after[one] for one in after.keys() - before) if created_ns > first.newest_ns)
    ended = max(counted, len(before.keys() - after) + called)
    if ended:
        return DeviceQueue(ended=ended)
    return DeviceQueue(
        stuck=tuple(sorted(before, key=lambda waiting: before[waiting][0])),
        started=frozenset(waiting for waiting, (_, state) in after.items() if state == STARTED),
    )


def _on_device(dump: Dump) -> dict[WaitingIn, tuple[int, int]]:
    """What devices have not ended: when each was called, and its state."""
    found: dict[WaitingIn, tuple[int, int]] = {}
    for key, trace in dump.groups.items():
        for at, state in enumerate(trace.states):
            operation = dump.operations[trace.operations[at]]
            if state != DONE and operation.backend not in HOST_BACKENDS:
                waiting = _waiting(key, operation, sequence=trace.sequences[at])
                found[waiting] = (trace.created_ns[at], state)
        for one in trace.p2p:
            if one.operation.backend not in HOST_BACKENDS:
                found[_p2p(key, one, dump.members.get(key, ()))] = (one.created_ns, STARTED)
    return found


def _place(waiting: WaitingIn) -> tuple[str, str, int | None]:
    return waiting.group, waiting.description, waiting.sequence


def _pending(dump: Dump) -> tuple[WaitingIn, ...]:
    found: list[tuple[int, WaitingIn]] = []
    for key, trace in dump.groups.items():
        found += _collectives(dump, key, trace)
        found += [(one.created_ns, _p2p(key, one, dump.members.get(key, ()))) for one in trace.p2p[:MOST_PENDING]]
    return tuple(waiting for _, waiting in sorted(found, key=lambda pair: pair[0])[:MOST_PENDING])


def _collectives(dump: Dump, key: GroupKey, trace: Trace) -> list[tuple[int, WaitingIn]]:
    begun = [at for at, state in enumerate(trace.states) if state != DONE][:MOST_PENDING]
    return [
        (
            trace.created_ns[at],
            _waiting(key, dump.operations[trace.operations[at]], sequence=trace.sequences[at]),
        )
        for at in begun
    ]


def _p2p(key: GroupKey, one: P2P, members: Sequence[int]) -> WaitingIn:
    """Ranks of a send or recv count within their group."""
    place = one.target if one.sending else one.source
    peer = members[place] if place < len(members) else place
    return _waiting(key, one.operation, sequence=one.sequence, peer=peer, op="send" if one.sending else "recv")


def _waiting(key: GroupKey, operation: Operation, *, sequence: int, peer: int | None = None, op: str = "") -> WaitingIn:
    name, description = key
    return WaitingIn(
        group=name,
        description=description,
        sequence=sequence,
        op=op or operation.name,
        sizes=" ".join(f"[{', '.join(map(str, size))}]" for size in operation.input_sizes or operation.output_sizes),
        dtypes=" ".join(operation.dtypes),
        peer=peer,
    )
