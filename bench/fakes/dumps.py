"""Flight Recorder dumps of jobs that never ran: programs of collectives in, dumps as torch writes them out.

Each rank has a program, a list of ``Call``; ``FlightJob.run`` lets the ranks go as far as they can.  A collective ends
when every member of its group has called the same thing under the same number, as in a real job, so a program that
leaves one out, adds one or asks for another size hangs by itself, and in the same place.

    job = FlightJob(4)
    programs = {rank: steps(3) for rank in range(4)}
    del programs[1][2]
    job.run(programs)
    job.write(tmp_path)
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "FlightJob", "as_version", "frames_at", "stack_text", "steps"]

START_NS = 1_790_000_000_000_000_000
TICK_NS = 1_000_000

Site = tuple[tuple[str, int, str], ...]


def frames_at(line: int, *, file: str = "/job/train.py", function: str = "step", deep: int = 4) -> Site:
    """A call site as torch captures it: its own wrappers innermost, the line given, ``deep`` more around it."""
    torch = "/venv/lib/python3.11/site-packages/torch/distributed"
    inner = ((f"{torch}/distributed_c10d.py", 3245, "all_reduce"), (f"{torch}/c10d_logger.py", 83, "wrapper"))
    outer = tuple((file, 200 + level, f"level_{level}") for level in range(deep))
    return (*inner, (file, line, function), *outer, (file, 300, "<module>"))


@dataclass(frozen=True, kw_only=True)
class Call:
    op: str = "all_reduce"
    group: str = "0"
    size: int = 1024
    dtype: str = "Float"
    site: Site = field(default_factory=lambda: frames_at(41))
    waits: bool = True
    """Whether the rank goes on only when it has ended."""


def steps(count: int, *, group: str = "0", line: int = 41) -> list[Call]:
    """So many steps of a plain loop: a reduction, a gather, a barrier."""
    one = [
        Call(op="all_reduce", group=group, site=frames_at(line)),
        Call(op="all_gather", group=group, size=256, site=frames_at(line + 1)),
        Call(op="barrier", group=group, size=0, site=frames_at(line + 2)),
    ]
    return one * count


@dataclass(kw_only=True)
class _Entry:
    record: int
    sequence: int
    call: Call
    created_ns: int
    ended_ns: int | None = None


class FlightJob:
    """Ranks, groups and what each rank's recorder holds."""

    def __init__(self, world: int, *, backend: str = "gloo", ring: int = 2000) -> None:
        self.world = world
        self.backend = backend
        self.ring = ring
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", tuple(range(world)))}
        self.entries: dict[int, list[_Entry]] = {rank: [] for rank in range(world)}
        self._now_ns = START_NS

    def add_group(self, name: str, description: str, ranks: Sequence[int]) -> None:
        self.groups[name] = (description, tuple(ranks))

    def run(self, programs: Mapping[int, Sequence[Call]], *, until: Mapping[int, int] | None = None) -> None:
        """As far as it goes; rank r makes at most ``until[r]`` calls, which is how one falls asleep."""
        todo = {rank: list(calls)[: (until or {}).get(rank, len(calls))] for rank, calls in programs.items()}
        moved = True
        while moved:
            moved = False
            for rank, calls in todo.items():
                while calls and self._free(rank):
                    self._call(rank, calls.pop(0))
                    moved = True
            moved = self._finish() or moved

    def document(self, rank: int, *, active_only: bool = False, frames: bool = True) -> dict[str, Any]:
        """The dump of one rank, as plain data, of the latest version."""
        kept = self.entries[rank][-self.ring :]
        shown = [entry for entry in kept if not active_only or entry.ended_ns is None]
        local = {name: number for number, name in enumerate(self._groups_of(rank))}
        config = {
            name: {"name": name, "desc": self.groups[name][0], "ranks": str(list(self.groups[name][1]))}
            for name in local
        }
        if self.backend == "gloo":
            everybody = str(list(range(self.world))) if len(self.groups) == 1 else "[]"
            config = {"": {"name": "", "desc": "", "ranks": everybody}}
        return {
            "version": "2.10",
            "pg_config": config,
            "comm_lib_version": "" if self.backend == "gloo" else "2.28.9",
            "pg_status": {str(number): self._status(rank, name) for name, number in local.items()},
            "entries": [self._row(entry, local, frames) for entry in shown],
        }

    def write(
        self,
        folder: Path,
        *,
        name: str = "rank_{}",
        form: str = "pickle",
        ranks: Sequence[int] | None = None,
        active_only: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world) if ranks is None else ranks:
            document = self.document(rank, active_only=active_only, frames=form == "pickle")
            data = json.dumps(_as_json(document)).encode() if form == "json" else pickle.dumps(document, protocol=2)
            (folder / name.format(rank)).write_bytes(data)

    def _groups_of(self, rank: int) -> list[str]:
        return [name for name, (_, ranks) in self.groups.items() if rank in ranks]

    def _free(self, rank: int) -> bool:
        return not any(entry.ended_ns is None and entry.call.waits for entry in self.entries[rank])

    def _call(self, rank: int, call: Call) -> None:
        mine = self.entries[rank]
        sequence = 1 + sum(1 for entry in mine if entry.call.group == call.group)
        mine.append(_Entry(record=len(mine), sequence=sequence, call=call, created_ns=self._tick()))

    def _finish(self) -> bool:
        """End every collective that all members have called alike; whether any ended."""
        ended = False
        for name, (_, ranks) in self.groups.items():
            open_ones: dict[int, list[_Entry]] = {}
            for rank in ranks:
                for entry in self.entries[rank]:
                    if entry.call.group == name and entry.ended_ns is None:
                        open_ones.setdefault(entry.sequence, []).append(entry)
            for entries in open_ones.values():
                alike = {(e.call.op, e.call.size, e.call.dtype) for e in entries}
                if len(entries) == len(ranks) and len(alike) == 1:
                    now = self._tick()
                    for entry in entries:
                        entry.ended_ns = now
                    ended = True
        return ended

    def _status(self, rank: int, name: str) -> dict[str, int]:
        mine = [entry for entry in self.entries[rank] if entry.call.group == name]
        return {
            "last_enqueued_collective": max((entry.sequence for entry in mine), default=0),
            "last_started_collective": -1,
            "last_completed_collective": max((e.sequence for e in mine if e.ended_ns is not None), default=0),
        }

    def _row(self, entry: _Entry, local: Mapping[str, int], frames: bool) -> dict[str, Any]:
        call, ended = entry.call, entry.ended_ns is not None
        members = len(self.groups[call.group][1])
        sizes = [] if call.op == "barrier" else [[call.size]]
        wide = [[members, call.size]] if call.op == "all_gather" else [list(size) for size in sizes]
        dtypes = [call.dtype] if sizes else []
        gloo = self.backend == "gloo"
        told: dict[str, Any] = {}
        if frames:
            # Each string anew: torch does not remember long ones, so neither must what pickles this.
            told["frames"] = [{"name": n, "filename": f[:1] + f[1:], "line": line} for f, line, n in call.site]
        return told | {
            "record_id": entry.record,
            "pg_id": local[call.group],
            "process_group": (call.group, self.groups[call.group][0]),
            "thread_name": "python",
            "thread_id": "281473376473120",
            "collective_seq_id": entry.sequence,
            "p2p_seq_id": 0,
            "op_id": entry.sequence,
            "profiling_name": f"{self.backend}:{call.op}",
            "time_created_ns": entry.created_ns,
            "input_sizes": sizes,
            "input_dtypes": dtypes,
            "output_sizes": wide,
            "output_dtypes": list(dtypes),
            "state": "completed" if ended and not gloo else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": entry.ended_ns if ended and not gloo else None,
            "retired": ended,
            "timeout_ms": 600000,
            "is_p2p": False,
        }

    def _tick(self) -> int:
        self._now_ns += TICK_NS
        return self._now_ns


def as_version(document: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The same dump as an older torch would have written it, as far as that matters to a reader."""
    major, minor = (int(part) for part in version.split("."))
    told: dict[str, Any] = {**document, "version": version, "nccl_version": document["comm_lib_version"]}
    told["entries"] = [_older(entry, minor, major) for entry in document["entries"]]
    if minor < 10 or major < 2:
        del told["comm_lib_version"]
    if minor < 3 or major < 2:
        del told["pg_status"]
        del told["nccl_version"]
    if major < 2:
        del told["pg_config"]
    return told


def stack_text(*frames: tuple[str, int, str], helper: bool = True) -> str:
    """What faulthandler writes: a helper thread that asked for it, then the main thread."""
    main = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in frames)
    main += '  File "/job/train.py", line 300 in <module>\n'
    other = 'Current thread 0x0000ffff7ccf41a0 (most recent call first):\n  File "/job/watch.py", line 16 in dump\n'
    other += '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
    return f"{other if helper else ''}Thread 0x0000ffffa09e5020 (most recent call first):\n{main}"


def _older(entry: Mapping[str, Any], minor: int, major: int) -> dict[str, Any]:
    row = dict(entry)
    if minor < 5 or major < 2:
        for name in ("thread_name", "thread_id"):
            row.pop(name)
    if minor < 2 or major < 2:
        row.pop("timeout_ms")
    if minor < 1 or major < 2:
        row["seq_id"] = row.pop("collective_seq_id")
        row["process_group"] = row["process_group"][0]
        for name in ("p2p_seq_id", "op_id", "is_p2p", "input_dtypes", "output_dtypes"):
            row.pop(name)
    if major < 2:
        row.pop("process_group")
    return row


def _as_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """As the worker server has it: counters as text, times that are not known as 0, no frames."""
    status = {n: {key: str(value) for key, value in row.items()} for n, row in document["pg_status"].items()}
    times = ("time_discovered_started_ns", "time_discovered_completed_ns")
    rows = [{**row, **{name: row[name] or 0 for name in times}} for row in document["entries"]]
    told = {**document, "pg_status": status}
    if rows:
        told["entries"] = rows
    else:
        del told["entries"]
    return told
