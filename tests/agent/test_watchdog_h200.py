"""Hangs of an H200 from the rings and the worker servers to the record: only the processes are stand-ins."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from h200_hangs import answers_of, recorded_evidence, write_nccl_dumps
from rings import RingStream
from worker_server_stand_in import Behave, WorkerServer

from stepscope.agent.drain import RingDrain
from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.agent.hangs.rank_evidence import Subject, gather
from stepscope.agent.hangs.watchdog import Subjects, Watchdog, World
from stepscope.agent.journal import Journal
from stepscope.hangs.thresholds import GatherLimits
from stepscope.records.hang import HangRecord
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader, RingState
from stepscope.store.file_io import read_jsonl
from stepscope.store.live.failures import read_hangs

ASLEEP = "import time; time.sleep(600)"
SPINNING = "while True: pass"
AS_OFTEN_S = 0.2


class Recorded(Subjects):
    """What the rings said then, with servers that answer now."""

    def __init__(self, subjects: list[Subject]) -> None:
        super().__init__({})
        self._subjects = subjects

    def of(self, world: World, now_s: float) -> list[Subject]:
        return self._subjects


class Replay:
    def __init__(self, folder: Path, case: str, serve: Callable[[Behave], WorkerServer]) -> None:
        self.run_dir = folder / "run"
        for name in ("steps", "logs", "errors"):
            (self.run_dir / name).mkdir(parents=True)
        self.known = recorded_evidence(case).evidence
        self.processes: list[subprocess.Popen[bytes]] = []
        self.streams: list[RingStream] = []
        self.drains: list[RingDrain] = []
        subjects = []
        for rank in self.known.ranks:
            code = SPINNING if rank.process_state == "R" else ASLEEP
            self.processes.append(subprocess.Popen([sys.executable, "-IS", "-c", code]))
            pid = self.processes[-1].pid
            ours = replace(rank, pid=pid, flight=b"", flight_later=b"", threads=(), threads_later=(), cpu_share=None)
            subjects.append(Subject(evidence=ours, server=serve(answers_of(rank)).path))
            path = folder / f"{rank.rank}.ring"
            who = RankIdentity(host="node0", pid=pid, rank=rank.rank, world_size=self.known.world_size)
            self.streams.append(RingStream(path, who))
            self.streams[-1].ring.set_state(RingState.RUNNING)
            self.drains.append(RingDrain(RingReader(path), self.run_dir))
        self.now_s = 1000.0
        self.journal = Journal(self.run_dir)
        self.subjects = Recorded(subjects)

    def watch(self, seconds: float, *, after_s: float = 10.0) -> Watchdog:
        dog = Watchdog(
            self.run_dir,
            self.journal,
            node="node0",
            policy=HangPolicy(after_s=after_s),
            subjects=self.subjects,
            gather=partial(gather, limits=GatherLimits(window_s=0.3)),
            now=lambda: self.now_s,
        )
        self.wait(dog, seconds)
        return dog

    def wait(self, dog: Watchdog, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            dog.check(self.drains)
            if dog._inquiry is not None:
                dog._inquiry.thread.join()
            self.now_s += AS_OFTEN_S

    def save(self) -> None:
        """One word in the ring of rank 0, as each ``torch.save`` writes."""
        stream = self.streams[0]
        stream.clock.advance(1000)
        stream.ledger.leave(stream.ledger.enter(3))

    def events(self) -> list[dict[str, Any]]:
        self.journal.flush()
        path = self.run_dir / "events.jsonl"
        return read_jsonl(path)[0] if path.exists() else []

    def hang(self) -> HangRecord:
        ((record,), _) = read_hangs(self.run_dir)
        return record

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for drain in self.drains:
            drain.close()
        for stream in self.streams:
            stream.close()


@pytest.fixture
def replay(tmp_path: Path, serve: Any) -> Iterator[Callable[[str], Replay]]:
    jobs: list[Replay] = []

    def start(case: str) -> Replay:
        jobs.append(Replay(tmp_path, case, serve))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.mark.parametrize(
    ("case", "kind", "culprits", "lines"),
    [
        ("sleep_4", "hang_missing_collective", [2], [157]),
        ("skipped", "hang_missing_collective", [1], [116]),
        ("other_op", "hang_mismatch", [1], [None]),
    ],
)
def test_told_by_the_servers(
    replay: Callable[[str], Replay], case: str, kind: str, culprits: list[int], lines: list[int | None]
) -> None:
    job = replay(case)
    job.watch(12.0)
    found = job.hang()
    assert (found.kind, [culprit.rank for culprit in found.culprits]) == (kind, culprits)
    assert [culprit.at.line if culprit.at is not None else None for culprit in found.culprits] == lines
    assert found.victims == tuple(rank for rank in range(job.known.world_size) if rank not in culprits)
    assert sorted(path.name for path in (job.run_dir / "flight").glob("rank_*")) == [
        f"rank_{rank}.json" for rank in range(job.known.world_size)
    ]


def test_a_long_kernel_is_let_run(replay: Callable[[str], Replay]) -> None:
    job = replay("long_kernel")
    job.watch(12.0)
    assert read_hangs(job.run_dir) == ((), ())
    assert [event["reason"] for event in job.events()] == ["Rank 0 makes progress in its collectives."]


def test_checkpoints_that_write_words_are_never_looked_into(replay: Callable[[str], Replay]) -> None:
    """25 s of ``torch.save`` on rank 0 while rank 1 waits in a barrier."""
    job = replay("sleep")
    dog = job.watch(1.0)
    for _ in range(25):
        job.save()
        job.wait(dog, 1.0)
    assert job.events() == []


def test_nccls_watchdog_is_reason_enough(replay: Callable[[str], Replay]) -> None:
    """It gave up after 15 s, where ours was told to wait for 100, and takes a minute to abort: time for a verdict."""
    job = replay("sleep")
    dog = job.watch(15.0, after_s=100.0)
    assert read_hangs(job.run_dir) == ((), ())
    write_nccl_dumps("nccl_timeout", job.run_dir / "flight")
    began_s = job.now_s
    while not read_hangs(job.run_dir)[0]:
        job.wait(dog, AS_OFTEN_S)
        assert job.now_s - began_s < 5.0
    found = job.hang()
    assert found.title == (
        "Rank 1 never called all_reduce number 82 of default_pg: it is blocked at hang_job.py:157; rank 0 waits for it."
    )
    assert found.evidence[-1] == "NCCL's watchdog timed out too: it had already written the dumps of ranks 0 and 1."
    assert time.time_ns() - found.declared_wall_ns < 60e9
