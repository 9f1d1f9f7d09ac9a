"""What a host's watchdog knew of a standstill, as a file that travels: to be judged together with other hosts'.

Bounded: stacks and groups that several ranks share stand once, and of Flight Recorders the newest entries, as many as
there is room for.  What is read is of another hand: every value is checked, and what would make a judge work for ever
(a world of 10¹⁸ ranks) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from stepscope.flight.combine import RECORDERS
from stepscope.hangs.evidence import Evidence, LastCollective, RankEvidence, WorkerEvidence
from stepscope.records.collectives import ProcessGroup
from stepscope.records.decode import decoded, encoded
from stepscope.records.hang import ThreadStack

__all__ = ["KeptEvidence", "evidence_from_dict", "evidence_to_dict"]

SCHEMA = 1
FLIGHT_BYTES = 4 << 20
"""Of all Flight Recorders of a host."""
STACK_BYTES = 2 << 20
"""Of all stacks; beyond, only main threads are kept (the record of the hang has all)."""
LARGEST_WORLD = 1 << 22
MOST_RANKS = 4096
"""Of one host."""
LINE_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class KeptEvidence:
    number: int
    """That of the hang's record; of what was none, the next one."""
    stopped_wall_ns: int
    gathered_wall_ns: int
    evidence: Evidence
    over_wall_ns: int | None = None
    """When it went on, if it did before it was called a hang."""
    excuse: str = ""
    """Why it was no hang to this host; empty: it was one."""


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
    """``RankEvidence``, with stacks and groups by their numbers."""

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
    """Values that are kept once, by their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> tuple[Any, ...]:
        return tuple(self._numbers)


def evidence_to_dict(kept: KeptEvidence) -> dict[str, Any]:
    """The form of its file (docs/schema.md)."""
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


def evidence_from_dict(raw: object) -> KeptEvidence:
    """ValueError for anything but what ``evidence_to_dict`` gave; keys not known are passed."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError("not the evidence of a standstill")
    file = decoded(_File, raw)
    if not 0 <= file.world_size <= LARGEST_WORLD or len(file.ranks) > MOST_RANKS or file.number < 1:
        raise ValueError("evidence of a world that cannot be")
    if any(not 0 <= rank.rank < LARGEST_WORLD or rank.pid < 0 for rank in file.ranks):
        raise ValueError("evidence of a rank that cannot be")
    if any(not 0 <= group.size <= LARGEST_WORLD for group in file.groups):
        raise ValueError("evidence of a group that cannot be")
    stacks = [stack.threads for stack in file.stacks]
    return KeptEvidence(
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
        raise ValueError(f"evidence without its part {number}")
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
    """As it is, or without its oldest entries; empty when it is none that could be read."""
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
    """With the newest entries, as many as there is room for; None when there is room for none."""
    entries = dump.get("entries")
    kept: list[Any] = []
    room = most - len(json.dumps({**dump, "entries": []}))
    for entry in reversed(entries) if isinstance(entries, list) else ():
        room -= len(json.dumps(entry)) + 1
        if room < 0:
            break
        kept.append(entry)
    return {**dump, "entries": kept[::-1]} if kept else None
