"""Evidence of a hang: what a watchdog gathered from every rank, its file, and the Flight Recorders in it.

The file travels to be judged together with the evidence of other hosts. No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stepscope.errors import DumpError
from stepscope.flight.dump import DONE, HOST_BACKENDS, P2P, RECORDERS, STARTED, Dump, GroupKey, Operation, Trace
from stepscope.flight.judge import judge as judge_dumps
from stepscope.flight.verdict import Verdict
from stepscope.records.collectives import ProcessGroup
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.hang import ThreadStack, WaitingIn

__all__ = [
    "EXITED_IN_ORDER",
    "RAISED",
    "Evidence",
    "EvidenceFile",
    "LastCollective",
    "LostHost",
    "RankEvidence",
    "Recorders",
    "WorkerEvidence",
    "evidence_from_dict",
    "evidence_to_dict",
    "read_recorders",
]


# -- evidence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LastCollective:
    """The last collective in a rank's ring (``ring/layout.py``); calls inside DDP's reducer are not recorded there."""

    op: str
    group: ProcessGroup | None
    bytes: int
    called_s: float
    """Seconds since the call."""
    waiting: bool
    """Whether the rank is waiting for it now."""
    peer: int | None = None
    """For a send or recv: the global rank of the peer; None for any."""


@dataclass(frozen=True, kw_only=True)
class WorkerEvidence:
    """A child process of a rank."""

    pid: int
    kind: str
    """``dataloader``, ``compiler`` (of torch.compile or a C compiler) or ``other``."""
    name: str
    """The beginning of its command line, or its name in the kernel."""
    process_state: str
    cpu_share: float | None = None
    threads: tuple[ThreadStack, ...] = ()


EXITED_IN_ORDER = "exited in order"
"""``ended`` of a rank whose script ended; its process may still exist."""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    rank: int
    pid: int
    alive: bool = True
    ended: str = ""
    """For a rank that is gone: how it ended (``killed by SIGKILL``, ``raised ValueError: …``); empty: unknown."""
    step: int | None = None
    """The current step; None before the first."""
    phase: str = "other"
    silent_s: float = 0.0
    """Seconds since the last word in its ring."""
    process_state: str = ""
    """The kernel's state letter of the main thread: R, S, D, T, t, Z; empty: unknown."""
    wait_channel: str = ""
    """Where in the kernel it sleeps, if known."""
    cpu_share: float | None = None
    """Share of one core over the last seconds, all threads, without children."""
    io_bytes_s: float | None = None
    """Bytes read and written per second over the last seconds."""
    gil_held: bool | None = None
    """True: a request that needs the GIL was not answered, but one that does not was. False: answered."""
    threads: tuple[ThreadStack, ...] = ()
    """The stacks at the first sample …"""
    threads_later: tuple[ThreadStack, ...] = ()
    """… and seconds later: what moved in between is working."""
    collective: LastCollective | None = None
    groups: tuple[ProcessGroup, ...] = ()
    device: str = "cpu"
    gpu_util_percent: float | None = None
    workers: tuple[WorkerEvidence, ...] = ()
    flight: bytes = b""
    """The answer of its Flight Recorders as JSON; empty: none."""
    flight_later: bytes = b""
    """… and the pending entries of NCCL's recorder, seconds later; empty: none."""


@dataclass(frozen=True, kw_only=True)
class LostHost:
    """A host that the hub no longer hears from."""

    host: str
    ranks: tuple[int, ...]
    silent_s: float
    """Seconds without contact when the others were found to hang."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    host: str
    world_size: int
    ranks: tuple[RankEvidence, ...]
    """The ranks of this host, dead or alive; with several hosts, those of all."""
    threshold_s: float
    step_s: float | None = None
    """The recent length of a step; None before there were any."""
    source_lines: dict[tuple[str, int], str] = field(default_factory=dict)
    """The text of lines of user code, by file and line, if readable."""
    hosts: dict[int, str] = field(default_factory=dict)
    """With several hosts (``hangs/multi_host.py``), the host of each rank; else empty."""
    lost: tuple[LostHost, ...] = ()


# -- evidence file ----------------------------------------------------------------------------------------------------
# What a host's watchdog knew about a hang, to be judged together with the files of other hosts.
#
# The size is bounded: stacks and groups that several ranks share are stored once, and of Flight Recorders the newest
# entries that fit. The input is untrusted: every value is checked, and values that would keep a judge busy forever (a
# world of 10¹⁸ ranks) are rejected.

SCHEMA = 1
FLIGHT_BYTES = 4 << 20
"""Limit for all Flight Recorders of a host."""
STACK_BYTES = 2 << 20
"""Limit for all stacks; beyond it only main threads are kept (the hang's record has all)."""
LARGEST_WORLD = 1 << 22
MOST_RANKS = 4096
"""Limit for one host."""
LINE_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class EvidenceFile:
    number: int
    """The number of the hang's record; if it was not a hang, the next one."""
    stopped_wall_ns: int
    gathered_wall_ns: int
    evidence: Evidence
    over_wall_ns: int | None = None
    """When the job resumed, if it did so before a hang was declared."""
    excuse: str = ""
    """Why this host did not consider it a hang; empty: it did."""


@dataclass(frozen=True, kw_only=True)
class _Stack:
    threads: tuple[ThreadStack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Line:
    file: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class _Call:
    op: str
    group: int | None
    bytes: int
    called_s: float
    waiting: bool
    peer: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Worker:
    pid: int
    kind: str
    name: str
    process_state: str
    cpu_share: float | None
    stack: int


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """``RankEvidence``, with stacks and groups as indexes."""

    rank: int
    pid: int
    alive: bool
    ended: str
    step: int | None
    phase: str
    silent_s: float
    process_state: str
    wait_channel: str
    cpu_share: float | None
    io_bytes_s: float | None
    gil_held: bool | None
    stack: int
    stack_later: int
    collective: _Call | None
    groups: tuple[int, ...]
    device: str
    gpu_util_percent: float | None
    workers: tuple[_Worker, ...]
    flight: str
    flight_later: str = ""


@dataclass(frozen=True, kw_only=True)
class _File:
    number: int
    stopped_wall_ns: int
    gathered_wall_ns: int
    over_wall_ns: int | None
    excuse: str
    host: str
    world_size: int
    threshold_s: float
    step_s: float | None
    stacks: tuple[_Stack, ...]
    groups: tuple[ProcessGroup, ...]
    source: tuple[_Line, ...]
    ranks: tuple[_Rank, ...]


_PLAIN = (
    *("rank", "pid", "alive", "ended", "step", "phase", "silent_s", "process_state", "wait_channel"),
    *("cpu_share", "io_bytes_s", "gil_held", "device", "gpu_util_percent"),
)


class _Table:
    """Values that are stored once, by index."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> tuple[Any, ...]:
        return tuple(self._numbers)


def evidence_to_dict(kept: EvidenceFile) -> dict[str, Any]:
    """The content of its file (docs/schema.md)."""
    evidence = kept.evidence
    ranks = _main_threads(evidence.ranks) if _too_large(evidence.ranks) else evidence.ranks
    stacks, groups = _Table(), _Table()
    most = FLIGHT_BYTES // max(1, sum(1 for rank in ranks if rank.flight))
    rows = tuple(_row(rank, stacks, groups, most) for rank in ranks[:MOST_RANKS])
    file = _File(
        number=kept.number,
        stopped_wall_ns=kept.stopped_wall_ns,
        gathered_wall_ns=kept.gathered_wall_ns,
        over_wall_ns=kept.over_wall_ns,
        excuse=kept.excuse,
        host=evidence.host,
        world_size=evidence.world_size,
        threshold_s=evidence.threshold_s,
        step_s=evidence.step_s,
        stacks=tuple(_Stack(threads=threads) for threads in stacks.values()),
        groups=groups.values(),
        source=tuple(
            _Line(file=name, line=number, text=text[:LINE_CHARS])
            for (name, number), text in evidence.source_lines.items()
        ),
        ranks=rows,
    )
    return {"schema": SCHEMA, **encoded(file)}


def evidence_from_dict(raw: object) -> EvidenceFile:
    """Decode a file; ValueError for anything but the result of ``evidence_to_dict``. Unknown keys are ignored."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError("not evidence of a hang")
    file = decoded(_File, raw)
    if not 0 <= file.world_size <= LARGEST_WORLD or len(file.ranks) > MOST_RANKS or file.number < 1:
        raise ValueError("evidence with an invalid world size or number")
    if any(not 0 <= rank.rank < LARGEST_WORLD or rank.pid < 0 for rank in file.ranks):
        raise ValueError("evidence with an invalid rank")
    if any(not 0 <= group.size <= LARGEST_WORLD for group in file.groups):
        raise ValueError("evidence with an invalid group size")
    stacks = [stack.threads for stack in file.stacks]
    return EvidenceFile(
        number=file.number,
        stopped_wall_ns=file.stopped_wall_ns,
        gathered_wall_ns=file.gathered_wall_ns,
        over_wall_ns=file.over_wall_ns,
        excuse=file.excuse,
        evidence=Evidence(
            host=file.host,
            world_size=file.world_size,
            threshold_s=file.threshold_s,
            step_s=file.step_s,
            source_lines={(line.file, line.line): line.text for line in file.source},
            ranks=tuple(_rank(row, stacks, file.groups) for row in file.ranks),
        ),
    )


def _row(rank: RankEvidence, stacks: _Table, groups: _Table, most: int) -> _Rank:
    last = rank.collective
    call = None
    if last is not None:
        number = None if last.group is None else groups.number(last.group)
        told = {name: getattr(last, name) for name in ("op", "bytes", "called_s", "waiting", "peer")}
        call = _Call(group=number, **told)
    return _Rank(
        **{name: getattr(rank, name) for name in _PLAIN},
        stack=stacks.number(rank.threads),
        stack_later=stacks.number(rank.threads_later),
        collective=call,
        groups=tuple(groups.number(group) for group in rank.groups),
        workers=tuple(
            _Worker(
                pid=worker.pid,
                kind=worker.kind,
                name=worker.name,
                process_state=worker.process_state,
                cpu_share=worker.cpu_share,
                stack=stacks.number(worker.threads),
            )
            for worker in rank.workers
        ),
        flight=_newest(rank.flight, most),
        flight_later=_newest(rank.flight_later, most // 8),
    )


def _rank(row: _Rank, stacks: list[tuple[ThreadStack, ...]], groups: tuple[ProcessGroup, ...]) -> RankEvidence:
    call = row.collective
    told = {} if call is None else asdict(call) | {"group": None if call.group is None else _at(groups, call.group)}
    return RankEvidence(
        **{name: getattr(row, name) for name in _PLAIN},
        threads=_at(stacks, row.stack),
        threads_later=_at(stacks, row.stack_later),
        collective=None if call is None else LastCollective(**told),
        groups=tuple(_at(groups, number) for number in row.groups),
        workers=tuple(
            WorkerEvidence(
                pid=worker.pid,
                kind=worker.kind,
                name=worker.name,
                process_state=worker.process_state,
                cpu_share=worker.cpu_share,
                threads=_at(stacks, worker.stack),
            )
            for worker in row.workers
        ),
        flight=row.flight.encode(),
        flight_later=row.flight_later.encode(),
    )


def _at(values: Any, number: int) -> Any:
    if not 0 <= number < len(values):
        raise ValueError(f"evidence lacks part {number}")
    return values[number]


def _too_large(ranks: Iterable[RankEvidence]) -> bool:
    alike = {threads for rank in ranks for threads in (rank.threads, rank.threads_later)}
    alike |= {worker.threads for rank in ranks for worker in rank.workers}
    frames = (frame for threads in alike for thread in threads for frame in thread.frames)
    return sum(len(frame.file) + len(frame.function) + 40 for frame in frames) > STACK_BYTES


def _main_threads(ranks: Iterable[RankEvidence]) -> tuple[RankEvidence, ...]:
    def main(threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
        return tuple(thread for thread in threads if thread.main)

    return tuple(
        replace(
            rank,
            threads=main(rank.threads),
            threads_later=main(rank.threads_later),
            workers=tuple(replace(worker, threads=main(worker.threads)) for worker in rank.workers),
        )
        for rank in ranks
    )


def _newest(flight: bytes, most: int) -> str:
    """The dump unchanged, or without its oldest entries; empty if it is unreadable."""
    text = flight.decode("utf-8", "replace")
    if len(flight) <= most:
        return text
    try:
        dump = json.loads(text)
        parts = dump.get(RECORDERS)
        if isinstance(parts, list) and parts:
            cut = [_cut(part, most // len(parts)) for part in parts]
            return json.dumps({RECORDERS: [part for part in cut if part]}, separators=(",", ":")) if any(cut) else ""
        cut = [_cut(dump, most)]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return ""
    return json.dumps(cut[0], separators=(",", ":")) if cut[0] else ""


def _cut(dump: dict[str, Any], most: int) -> dict[str, Any] | None:
    """The dump with the newest entries that fit; None if none fits."""
    entries = dump.get("entries")
    kept: list[Any] = []
    room = most - len(json.dumps({**dump, "entries": []}))
    for entry in reversed(entries) if isinstance(entries, list) else ():
        room -= len(json.dumps(entry)) + 1
        if room < 0:
            break
        kept.append(entry)
    return {**dump, "entries": kept[::-1]} if kept else None


# -- Flight Recorders -------------------------------------------------------------------------------------------------
# What the Flight Recorders of the ranks say about a hang.
#
# They know sequence numbers, sizes and the calls of DDP and FSDP; gloo's does not know sends and recvs. A rank that did
# not answer is not a suspect for that reason: its server may be missing, which ``flight/`` cannot know.
#
# On NCCL a call only adds work to a queue of the device. The host continues until it needs a result and then spins, so
# neither its CPU time nor its stack distinguishes waiting from working. Two samples of NCCL's recorder do
# (``DeviceQueue``).

MOST_PENDING = 64
"""Limit for one rank."""
RAISED = "raised "
TRACEBACK = "Traceback (most recent call last)"
"""How ``flight/`` recognizes the text of an exception."""


@dataclass(frozen=True, kw_only=True)
class DeviceQueue:
    """The communication that a rank queued on its device, from two samples of NCCL's recorder."""

    ended: int = 0
    """Number of collectives called or ended between the two samples: it makes progress."""
    stuck: tuple[WaitingIn, ...] = ()
    """Called and not ended in both samples, in order; empty if it makes progress."""
    started: frozenset[WaitingIn] = frozenset()
    """Those that the device is known to have started; torch knows it only with TORCH_NCCL_ENABLE_TIMING."""


@dataclass(frozen=True, kw_only=True)
class Recorders:
    verdict: Verdict | None = None
    """The verdict of ``flight/`` on the ranks that answered; None: none did."""
    pending: dict[int, tuple[WaitingIn, ...]] = field(default_factory=dict)
    """By rank: the collectives that were begun and have not ended, in order."""
    members: dict[str, frozenset[int]] = field(default_factory=dict)
    """The ranks of groups by name: those that a recorder lists, and those whose recorder has the group."""
    answered: frozenset[int] = frozenset()
    queues: Mapping[int, DeviceQueue] = field(default_factory=dict)
    """By rank, for ranks that use NCCL and were sampled twice."""

    def behind(self, rank: int) -> bool:
        """Whether the device of this rank has not started what a peer's has: it is busy with earlier work."""
        queue = self.queues.get(rank)
        if queue is None or not queue.stuck or queue.started or queue.stuck[0].peer is not None:
            return False
        first = _place(queue.stuck[0])
        return any(first in map(_place, other.started) for other in self.queues.values())

    def begun_by_all(self, waiting: WaitingIn) -> bool:
        """Whether the devices of all members are known to have started that collective."""
        members = self.members.get(waiting.group, frozenset())
        place = _place(waiting)
        return bool(members) and all(
            rank in self.queues and place in map(_place, self.queues[rank].started) for rank in members
        )

    @property
    def decided(self) -> Verdict | None:
        """The verdict, if it blames a rank because of recorded rather than missing data."""
        found = self.verdict
        if found is None or found.healthy or found.undecidable or not found.culprits:
            return None
        return found if {one.rank for one in found.culprits} <= self.answered else None


def read_recorders(evidence: Evidence) -> Recorders:
    # Imported late: it also reads folders with several processes, which an agent without a hang does not need.
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
    """Pending device calls, with creation time and state."""
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
    """Convert the ranks of a send or recv, which are positions in the group."""
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
