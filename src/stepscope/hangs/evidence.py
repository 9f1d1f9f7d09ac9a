"""Evidence of a hang, in one form for both sources: what a watchdog gathered from live ranks, or files of a job.

The watchdog's evidence has a file, too, which travels to be judged together with that of other hosts. No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.flight.dump import RECORDERS, Dump
from stepscope.flight.stacks import FailureText, failure_in
from stepscope.hangs.alignment import world_of
from stepscope.records.collectives import ProcessGroup
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.hang import ThreadStack

__all__ = [
    "EXITED_IN_ORDER",
    "RAISED",
    "Evidence",
    "EvidenceFile",
    "LastCollective",
    "LostHost",
    "RankEvidence",
    "WorkerEvidence",
    "evidence_from_dict",
    "evidence_of_files",
    "evidence_to_dict",
    "failures_of",
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


RAISED = "raised "
"""How ``ended`` of a rank with an uncaught exception begins."""
TRACEBACK = "Traceback (most recent call last)"
"""How ``flight/stacks.py`` recognizes the text of an exception."""
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
    from_files: bool = False
    """Whether it comes from files that a job left: one moment of each rank, and nothing about its process."""
    dumps: Mapping[int, Dump] = field(default_factory=dict)
    """From files: the Flight Recorders by rank. Live ranks have them in ``RankEvidence.flight``."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """From files: the text that a rank wrote when it failed."""
    unreadable: frozenset[int] = frozenset()
    """From files: ranks whose dump exists but cannot be read."""


def evidence_of_files(
    dumps: Sequence[Dump],
    *,
    stacks: Mapping[int, tuple[ThreadStack, ...]],
    errors: Mapping[int, str],
    world: int | None,
    unreadable: Collection[int],
) -> Evidence:
    """The evidence in what the ranks of a job left behind."""
    failures = {rank: failure for rank, text in errors.items() if (failure := failure_in(text)) is not None}
    ended = {rank: _raised(failure) for rank, failure in failures.items() if failure.own}
    known = sorted({*(dump.rank for dump in dumps), *stacks, *failures})
    return Evidence(
        host="",
        world_size=len(world_of(dumps, world, (*unreadable, *failures))),
        ranks=tuple(
            RankEvidence(rank=rank, pid=0, ended=ended.get(rank, ""), threads=stacks.get(rank, ())) for rank in known
        ),
        threshold_s=0.0,
        from_files=True,
        dumps={dump.rank: dump for dump in dumps},
        errors=errors,
        unreadable=frozenset(unreadable),
    )


def failures_of(evidence: Evidence) -> dict[int, FailureText]:
    """The exceptions that ended ranks, their own or about a peer."""
    texts = {
        rank.rank: f"{TRACEBACK}\n{rank.ended.removeprefix(RAISED)}" for rank in evidence.ranks if RAISED in rank.ended
    }
    texts |= evidence.errors
    return {rank: failure for rank, text in texts.items() if (failure := failure_in(text)) is not None}


def _raised(failure: FailureText) -> str:
    return f"{RAISED}{failure.type}{': ' if failure.message else ''}{failure.message}"


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


_OF_RANK = (
    *("rank", "pid", "alive", "ended", "step", "phase", "silent_s", "process_state", "wait_channel"),
    *("cpu_share", "io_bytes_s", "gil_held", "device", "gpu_util_percent"),
)


_OF_WORKER = ("pid", "kind", "name", "process_state", "cpu_share")
_OF_CALL = ("op", "bytes", "called_s", "waiting", "peer")
_OF_FILE = ("number", "stopped_wall_ns", "gathered_wall_ns", "over_wall_ns", "excuse")
_OF_EVIDENCE = ("host", "world_size", "threshold_s", "step_s")

_Table = dict[Any, int]
"""Values that are stored once, with their index."""


def _fields(record: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _index(table: _Table, value: Any) -> int:
    return table.setdefault(value, len(table))


def evidence_to_dict(file: EvidenceFile) -> dict[str, Any]:
    """The content of its file (docs/schema.md)."""
    evidence = file.evidence
    ranks = _main_threads(evidence.ranks) if _too_large(evidence.ranks) else evidence.ranks
    stacks: _Table = {}
    groups: _Table = {}
    most = FLIGHT_BYTES // max(1, sum(1 for rank in ranks if rank.flight))
    stored = _File(
        **_fields(file, _OF_FILE),
        **_fields(evidence, _OF_EVIDENCE),
        ranks=tuple(_row(rank, stacks, groups, most) for rank in ranks[:MOST_RANKS]),
        stacks=tuple(_Stack(threads=threads) for threads in stacks),
        groups=tuple(groups),
        source=tuple(
            _Line(file=name, line=number, text=text[:LINE_CHARS])
            for (name, number), text in evidence.source_lines.items()
        ),
    )
    return {"schema": SCHEMA, **encoded(stored)}


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
        **_fields(file, _OF_FILE),
        evidence=Evidence(
            **_fields(file, _OF_EVIDENCE),
            source_lines={(line.file, line.line): line.text for line in file.source},
            ranks=tuple(_rank(row, stacks, file.groups) for row in file.ranks),
        ),
    )


def _row(rank: RankEvidence, stacks: _Table, groups: _Table, most: int) -> _Rank:
    last = rank.collective
    call = None
    if last is not None:
        group = None if last.group is None else _index(groups, last.group)
        call = _Call(group=group, **_fields(last, _OF_CALL))
    return _Rank(
        **_fields(rank, _OF_RANK),
        stack=_index(stacks, rank.threads),
        stack_later=_index(stacks, rank.threads_later),
        collective=call,
        groups=tuple(_index(groups, group) for group in rank.groups),
        workers=tuple(
            _Worker(**_fields(worker, _OF_WORKER), stack=_index(stacks, worker.threads)) for worker in rank.workers
        ),
        flight=_newest(rank.flight, most),
        flight_later=_newest(rank.flight_later, most // 8),
    )


def _rank(row: _Rank, stacks: list[tuple[ThreadStack, ...]], groups: tuple[ProcessGroup, ...]) -> RankEvidence:
    call, last = row.collective, None
    if call is not None:
        group = None if call.group is None else _at(groups, call.group)
        last = LastCollective(group=group, **_fields(call, _OF_CALL))
    return RankEvidence(
        **_fields(row, _OF_RANK),
        threads=_at(stacks, row.stack),
        threads_later=_at(stacks, row.stack_later),
        collective=last,
        groups=tuple(_at(groups, number) for number in row.groups),
        workers=tuple(
            WorkerEvidence(**_fields(worker, _OF_WORKER), threads=_at(stacks, worker.stack)) for worker in row.workers
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
    newest: list[Any] = []
    room = most - len(json.dumps({**dump, "entries": []}))
    for entry in reversed(entries) if isinstance(entries, list) else ():
        room -= len(json.dumps(entry)) + 1
        if room < 0:
            break
        newest.append(entry)
    return {**dump, "entries": newest[::-1]} if newest else None
