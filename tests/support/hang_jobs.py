"""Hand-made jobs that stand still: ranks in a collective, and what the odd ones among them do.

Job(ranks=4).alone(1).hang().title
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.hangs.evidence import Evidence, LastCollective, RankEvidence, WorkerEvidence
from stepscope.hangs.judge import NotAHang, judge
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import Frame, HangRecord, ThreadStack

__all__ = [
    "IN_ALL_REDUCE",
    "LOOP",
    "SCRIPT",
    "SLEEPING",
    "TORCH",
    "Job",
    "entry",
    "flight",
    "nccl",
    "nccl_entry",
    "others",
    "stack",
    "verdict",
    "worker",
]

TORCH = "/venv/lib/python3.11/site-packages/torch"
SCRIPT = "/job/train.py"
SECOND_NS = 10**9

Stack = tuple[ThreadStack, ...]


def stack(*frames: tuple[str, int, str]) -> Stack:
    """A main thread, innermost frame first; files in ``torch/`` are torch's, those without a folder the user's."""
    return (ThreadStack(main=True, frames=tuple(Frame(file=_path(file), line=n, function=f) for file, n, f in frames)),)


def _path(file: str) -> str:
    if file.startswith("torch/"):
        return TORCH + file.removeprefix("torch")
    return file if "/" in file or file.startswith("<") else f"/job/{file}"


LOOP = ("train.py", 80, "<module>")
IN_ALL_REDUCE = stack(
    ("torch/distributed/distributed_c10d.py", 3252, "all_reduce"),
    ("torch/distributed/c10d_logger.py", 83, "wrapper"),
    ("train.py", 59, "step"),
    LOOP,
)
SLEEPING = stack(("train.py", 41, "next_batch"), LOOP)
LINES = {(SCRIPT, 41): "        time.sleep(999)", (SCRIPT, 59): "    dist.all_reduce(loss)"}


@dataclass
class Job:
    """``ranks`` ranks wait in ``all_reduce`` of the default group, but for those that something else is said of."""

    ranks: int = 4
    world_size: int | None = None
    silent_s: float = 11.0
    lines: Mapping[tuple[str, int], str] = field(default_factory=lambda: dict(LINES))
    odd: dict[int, dict[str, Any]] = field(default_factory=dict)
    step: int = 7
    """In which they hang."""
    sequence: int | None = None
    """With a number the ranks have Flight Recorders that answer."""

    def __post_init__(self) -> None:
        size = self.world_size or self.ranks
        self.world = ProcessGroup(slot=0, name="0", description="default_pg", size=size, ranks=tuple(range(size)))

    def at(self, rank: int, **fields: Any) -> Job:
        self.odd[rank] = {**self.odd.get(rank, {}), **fields}
        return self

    def alone(self, rank: int, threads: Stack = SLEEPING, **fields: Any) -> Job:
        """This rank is in no collective."""
        return self.at(rank, threads=threads, threads_later=threads, collective=None, **fields)

    def waits(self, op: str = "all_reduce", group: ProcessGroup | None = None, **fields: Any) -> LastCollective:
        fields = {"bytes": 2048, "called_s": self.silent_s, "waiting": True, **fields}
        return LastCollective(op=op, group=group or self.world, **fields)

    def evidence(self) -> Evidence:
        return Evidence(
            host="node0",
            world_size=self.world_size or self.ranks,
            ranks=tuple(self._rank(rank) for rank in range(self.ranks)),
            threshold_s=10.0,
            step_s=0.25,
            source_lines=dict(self.lines),
        )

    def _rank(self, rank: int) -> RankEvidence:
        odd = self.odd.get(rank, {})
        usual = RankEvidence(
            rank=rank,
            pid=1000 + rank,
            step=self.step,
            silent_s=self.silent_s,
            process_state="S",
            cpu_share=0.0,
            gil_held=False,
            threads=IN_ALL_REDUCE,
            threads_later=IN_ALL_REDUCE,
            collective=self.waits(),
            groups=(self.world,),
        )
        if self.sequence is not None and "flight" not in odd:
            behind = "collective" in odd and odd["collective"] is None
            usual = replace(usual, flight=flight(entry(self.sequence, retired=behind)))
        return replace(usual, **odd)

    def judged(self) -> HangRecord | NotAHang:
        return judge(self.evidence(), number=1, declared_wall_ns=112 * SECOND_NS, stopped_wall_ns=100 * SECOND_NS)

    def hang(self) -> HangRecord:
        found = self.judged()
        if isinstance(found, NotAHang):
            raise AssertionError(f"no hang: {found.reason}")  # noqa: TRY004  # not a matter of types to the test
        return found

    def excuse(self) -> NotAHang:
        found = self.judged()
        if isinstance(found, HangRecord):
            raise AssertionError(f"a hang: {found.title}")  # noqa: TRY004
        return found


def entry(
    sequence: int,
    op: str = "gloo:all_reduce",
    *,
    retired: bool = False,
    sizes: Iterable[Iterable[int]] = ((512,),),
    dtype: str = "Float",
    group: tuple[str, str] = ("0", "default_pg"),
) -> dict[str, Any]:
    """One row of a Flight Recorder, as torch 2.13 has them of gloo."""
    return {
        "record_id": sequence - 1,
        "pg_id": int(group[0]),
        "process_group": list(group),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": op,
        "time_created_ns": 10**18 + sequence,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": [dtype],
        "output_sizes": [list(size) for size in sizes],
        "output_dtypes": [dtype],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": retired,
        "timeout_ms": 1800000,
        "is_p2p": False,
    }


def flight(*last: dict[str, Any], size: int = 0) -> bytes:
    """What a worker server answers: those entries, and before the first of them its like, all ended."""
    first = last[0]["collective_seq_id"] if last else 1
    entries = [*(entry(number, retired=True) for number in range(1, first)), *last]
    status: dict[str, dict[str, int]] = {}
    for row in entries:
        own = status.setdefault(str(row["pg_id"]), {"last_enqueued_collective": -1, "last_completed_collective": -1})
        own["last_enqueued_collective"] = row["collective_seq_id"]
        own["last_started_collective"] = -1
        if row["retired"]:
            own["last_completed_collective"] = row["collective_seq_id"]
    return json.dumps(
        {
            "version": "2.10",
            "pg_config": {"": {"name": "", "desc": "", "ranks": str(list(range(size)))}},
            "pg_status": status,
            "entries": entries,
        }
    ).encode()


def nccl_entry(sequence: int, op: str = "nccl:all_reduce", state: str = "completed", **fields: Any) -> dict[str, Any]:
    """One row of NCCL's recorder, as torch 2.11 has them on an H200; ``peers`` (``0->1``) makes it a send or recv."""
    peers = fields.pop("peers", "")
    row = entry(sequence, f"{op} {peers}".strip(), retired=state == "completed", **fields)
    at_ns = row["time_created_ns"]
    row |= {"state": state, "thread_id": "139731311325504", "thread_name": "python", "timeout_ms": 600000}
    if state != "scheduled":
        row["time_discovered_started_ns"] = at_ns + 100
    if state == "completed":
        row |= {"time_discovered_completed_ns": at_ns + 200, "duration_ms": 0.5}
    if peers:
        row |= {"is_p2p": True, "p2p_seq_id": sequence, "collective_seq_id": 0}
    return row


def nccl(*last: dict[str, Any], ranks: int = 2, before: int = 0) -> dict[str, bytes]:
    """What the recorder of NCCL answers at both looks: ``before`` all_reduces that have ended, then these."""
    entries = [*(nccl_entry(number) for number in range(1, before + 1)), *last]
    for number, row in enumerate(entries):
        row["record_id"] = number
    collectives = [row for row in entries if not row["is_p2p"]]
    ended = [row["collective_seq_id"] for row in collectives if row["state"] == "completed"]
    status = {
        "last_enqueued_collective": str(max((row["collective_seq_id"] for row in collectives), default=-1)),
        "last_started_collective": str(max(ended, default=-1)),
        "last_completed_collective": str(max(ended, default=-1)),
    }
    head = {
        "comm_lib_version": "2.28.9",
        "nccl_comm_state": {},
        "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": str(list(range(ranks)))}},
        "pg_status": {"0": status},
        "version": "2.10",
    }
    active = [row for row in entries if row["state"] != "completed"]
    later = {**head, "entries": active} if active else head
    return {
        "flight": json.dumps({**head, "entries": entries}).encode(),
        "flight_later": json.dumps(later).encode(),
    }


def worker(pid: int = 5001, kind: str = "dataloader", **fields: Any) -> WorkerEvidence:
    fields = {"name": "pt_data_worker", "process_state": "S", "cpu_share": 0.0, **fields}
    return WorkerEvidence(pid=pid, kind=kind, **fields)


def verdict(hang: HangRecord) -> tuple[str, list[int], tuple[int, ...], bool]:
    return hang.kind, [culprit.rank for culprit in hang.culprits], hang.victims, hang.undecidable


def others(size: int, *odd: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(size) if rank not in odd)
