"""When the watchdog has a look, what it tells of the verdict, and how it sees that a job comes back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rings import RingStream, write_step, write_steps
from worker_server_stand_in import replaying

from stepscope.agent.drain import RingDrain
from stepscope.agent.hangs import watchdog
from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.agent.hangs.rank_evidence import Gathered
from stepscope.agent.hangs.watchdog import Subjects, Watchdog
from stepscope.agent.journal import Journal
from stepscope.hangs.evidence import Evidence, EvidenceFile
from stepscope.hangs.judge import NotAHang
from stepscope.hangs.thresholds import GAP_S, LOSS_S
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import Culprit, HangRecord, RankThere
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import CHECKPOINT
from stepscope.ring import RingReader, RingState
from stepscope.ring.layout import SERVER_WORD
from stepscope.store.file_io import read_jsonl
from stepscope.store.live.failures import read_evidence, read_hangs


def pid_of(rank: int) -> int:
    """Beyond all that a kernel gives."""
    return 10_000_000 + rank


class Job:
    """Ranks with rings, a watchdog over them, a clock; the judge says what the test wants."""

    def __init__(self, folder: Path, policy: HangPolicy) -> None:
        self.run_dir = folder / "run"
        self.session = folder / "session"
        for place in (self.run_dir / "steps", self.run_dir / "logs", self.run_dir / "errors", self.session):
            place.mkdir(parents=True)
        self.now_s = 1000.0
        self.captured = False
        self.policy = policy
        self.streams: dict[int, RingStream] = {}
        self.drains: dict[int, RingDrain] = {}
        self.judged: list[Evidence] = []
        self.verdict: Callable[[Evidence, int], HangRecord | NotAHang] = hang
        self.journal = Journal(self.run_dir)
        self.subjects = Subjects({})
        self.dog = self.new_dog()

    def new_dog(self) -> Watchdog:
        return Watchdog(
            self.run_dir,
            self.journal,
            node="node",
            policy=self.policy,
            subjects=self.subjects,
            gather=self._gather,
            judge=self._judge,
            now=lambda: self.now_s,
        )

    def rank(self, number: int, *, world: int = 2, attempt: int = 0) -> RingStream:
        path = self.session / f"{number}-{attempt}.ring"
        who = RankIdentity(host="node", pid=pid_of(number), rank=number, world_size=world, attempt=attempt)
        stream = self.streams[number] = RingStream(path, who)
        stream.ring.set_state(RingState.RUNNING)
        self.drains[number] = RingDrain(RingReader(path), self.run_dir)
        return stream

    def step(self, *ranks: int) -> None:
        for rank in ranks or list(self.streams):
            stream = self.streams[rank]
            stream.clock.advance(1000)
            outer = stream.ledger.enter(3)
            stream.ledger.leave(outer)

    def wait(self, seconds: float, *, every_s: float = 0.2) -> None:
        """Let time pass, with looks; an inquiry that a look begins is over before the next."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = min(self.now_s + every_s, end_s)
            self.check()

    def check(self) -> None:
        self.dog.check(self.drains.values(), captured=self.captured)
        if self.dog._inquiry is not None:
            self.dog._inquiry.thread.join()

    def die(self, rank: int, state: RingState = RingState.RUNNING, *, oom_killed: bool = False) -> None:
        drain = self.drains.pop(rank)
        self.streams[rank].ring.set_state(state)
        drain.header = drain.reader.header()
        self.dog.buried(drain, oom_killed=oom_killed)
        drain.close()
        self.streams.pop(rank).close()
        drain.reader.path.unlink()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        self.journal.flush()
        return [event for event in read_jsonl(self.run_dir / "events.jsonl")[0] if event["event"] in kinds]

    def _gather(self, subjects: Any, *, earlier: Any) -> Gathered:
        for subject in subjects:
            if subject.pidfd is not None:
                os.close(subject.pidfd)
        return Gathered(ranks=tuple(subject.evidence for subject in subjects), stack_texts={0: "Thread 0x1"})

    def _judge(self, evidence: Evidence, *, number: int, **instants: int) -> HangRecord | NotAHang:
        self.judged.append(evidence)
        verdict = self.verdict(evidence, number)
        return replace(verdict, **instants) if isinstance(verdict, HangRecord) else verdict

    def close(self) -> None:
        for drain in self.drains.values():
            drain.close()
        for stream in self.streams.values():
            stream.close()


def hang(evidence: Evidence, number: int) -> HangRecord:
    return HangRecord(
        number=number,
        host=evidence.host,
        kind="hang_missing_collective",
        title="Rank 1 never came.",
        declared_wall_ns=0,
        stopped_wall_ns=0,
        threshold_s=evidence.threshold_s,
        culprits=(Culprit(rank=1, reason="sleeps"),),
        victims=(0,),
    )


def excuse(reason: str, again_s: float) -> Callable[[Evidence, int], NotAHang]:
    return lambda evidence, number: NotAHang(reason=reason, evidence=("a sign",), check_again_s=again_s)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, HangPolicy())
    yield job
    job.close()


def two(job: Job, world: int = 2) -> None:
    job.rank(0, world=world)
    job.rank(1, world=world)
    job.check()


def test_a_job_that_goes_on_is_never_looked_into(job: Job) -> None:
    two(job)
    for _ in range(20):
        job.step(0)  # one of them is enough: the other waits for it
        job.wait(9.8)
    assert job.judged == []
    assert job.events("hang", "not_a_hang") == []


def test_ranks_that_write_a_trace_are_waited_for(job: Job) -> None:
    two(job)
    job.captured = True
    job.wait(60)
    assert job.judged == []
    job.captured = False
    job.wait(0.2)
    assert len(job.judged) == 1


def test_words_beyond_the_head_count(job: Job) -> None:
    """Within a long step nothing is announced."""
    two(job)
    head = job.drains[0].reader.head()
    job.wait(9.8)
    job.step(0)
    job.wait(9.8)
    assert job.drains[0].reader.head() == head
    assert job.judged == []


def test_a_hang_is_told_everywhere(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    two(job)
    job.wait(9.6)
    assert job.judged == []
    job.wait(0.6)
    (evidence,) = job.judged
    assert (evidence.host, evidence.world_size, evidence.threshold_s, evidence.step_s) == ("node", 2, 10.0, None)
    assert [(rank.rank, rank.pid, rank.alive, rank.step) for rank in evidence.ranks] == [
        (0, pid_of(0), True, None),
        (1, pid_of(1), True, None),
    ]
    assert all(rank.silent_s >= 10 for rank in evidence.ranks)
    job.wait(60)
    assert len(job.judged) == 1
    (event,) = job.events("hang")
    about = {key: event[key] for key in ("number", "kind", "title", "culprits", "victims", "steps")}
    assert about == {
        "number": 1,
        "kind": "hang_missing_collective",
        "title": "Rank 1 never came.",
        "culprits": [1],
        "victims": [0],
        "steps": None,
    }
    ((record,), bad) = read_hangs(job.run_dir)
    assert (record.number, record.over, bad) == (1, None, ())
    assert 9.9e9 <= record.declared_wall_ns - record.stopped_wall_ns <= 10.9e9
    findings = json.loads((job.run_dir / "findings.json").read_text())["findings"]
    assert [(finding["kind"], finding["ranks"]) for finding in findings] == [("hang_missing_collective", [1])]
    announced = capsys.readouterr().err
    assert "Rank 1 never came." in announced
    assert "  since     no progress for 10 s\n" in announced
    assert (job.run_dir / "flight" / "stacks_0.txt").read_text() == "Thread 0x1"
    job.dog.finish()
    ((record,), _) = read_hangs(job.run_dir)
    assert record.over == "ended"


def test_five_steps_are_waited_for(job: Job) -> None:
    two(job)
    for rank in (0, 1):
        write_steps(job.streams[rank], 5)
        job.drains[rank].drain()
        job.drains[rank].recent_ns.clear()
        job.drains[rank].recent_ns.extend([4_000_000_000] * 3)
    job.check()
    job.wait(19.8)
    assert job.judged == []
    job.wait(0.4)
    (evidence,) = job.judged
    assert (evidence.threshold_s, evidence.step_s) == (20.0, 4.0)
    assert [rank.step for rank in evidence.ranks] == [5, 5]


def test_the_times_of_the_last_steps_come_from_the_drain(job: Job) -> None:
    job.rank(0)
    write_steps(job.streams[0], 500)
    job.drains[0].drain()
    assert len(job.drains[0].recent_ns) == 20
    job.streams[0].clock.advance(7_000_000_000)
    write_step(job.streams[0], 500)
    job.drains[0].drain()
    assert all(5_000_000 < ns < 7_000_000 for ns in job.drains[0].recent_ns)


def test_work_is_looked_at_again_and_told_once(job: Job) -> None:
    two(job)
    job.streams[1].clock.advance(1000)
    job.streams[1].ledger.enter(CHECKPOINT)
    job.verdict = excuse("Rank 1 writes a checkpoint.", 5.0)
    job.wait(30)
    assert [len(job.judged), job.judged[0].ranks[1].phase] == [4, "checkpoint"]
    (event,) = job.events("not_a_hang")
    assert (event["reason"], event["evidence"]) == ("Rank 1 writes a checkpoint.", ["a sign"])
    job.verdict = excuse("Rank 1 compiles.", 5.0)
    job.wait(6)
    assert [event["reason"] for event in job.events("not_a_hang")][1:] == ["Rank 1 compiles."]
    job.verdict = hang
    job.wait(6)
    assert len(job.events("hang")) == 1


def test_another_stretch_is_told_again(job: Job) -> None:
    two(job)
    job.verdict = excuse("Rank 1 compiles.", 5.0)
    for _ in range(2):
        job.wait(11)
        job.step()
        job.wait(1)
    assert len(job.events("not_a_hang")) == 2


def test_a_job_that_comes_back_was_a_stall(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    two(job)
    job.wait(15)
    assert len(job.events("hang")) == 1
    job.step(0)
    job.wait(1)
    assert job.events("hang_over") == []  # one of them may only be failing
    job.step(1)
    job.wait(1)
    (event,) = job.events("hang_over")
    assert (event["number"], event["seconds"]) == (1, 16.2)
    ((record,), _) = read_hangs(job.run_dir)
    assert record.over == "recovered"
    assert record.over_wall_ns is not None
    assert "stepscope: the job resumed after 16 s; it was a stall" in capsys.readouterr().err
    job.wait(15)
    assert [event["number"] for event in job.events("hang")] == [1, 2]
    job.dog.finish()
    assert [record.over for record in read_hangs(job.run_dir)[0]] == ["recovered", "ended"]


def evidence_files(job: Job) -> list[EvidenceFile]:
    found, bad = read_evidence(job.run_dir)
    assert bad == ()
    return [file for _, file in found]


def test_with_ranks_elsewhere_what_was_gathered_is_kept(job: Job) -> None:
    two(job, world=4)
    job.wait(11)
    (record,), (first,) = read_hangs(job.run_dir)[0], evidence_files(job)
    assert (first.number, first.excuse, first.over_wall_ns, first.evidence.host) == (record.number, "", None, "node")
    assert (first.stopped_wall_ns, first.gathered_wall_ns) == (record.stopped_wall_ns, record.declared_wall_ns)
    assert first.evidence == job.judged[0]
    job.step()
    job.wait(1)
    assert read_hangs(job.run_dir)[0][0].over == "recovered"  # which is where that is told
    assert evidence_files(job) == [first]


def test_an_excuse_is_kept_and_that_it_is_over(job: Job) -> None:
    """Other hosts may have called it a hang: there it counts for as long as it lasts."""
    two(job, world=4)
    job.verdict = excuse("Rank 1 compiles.", 5.0)
    job.wait(11)
    (file,) = evidence_files(job)
    assert (file.number, file.excuse, file.over_wall_ns) == (1, "Rank 1 compiles.", None)
    job.step()
    job.wait(1)
    (over,) = evidence_files(job)
    assert over.over_wall_ns is not None
    assert replace(over, over_wall_ns=None) == file
    job.verdict = hang
    job.wait(11)
    assert [(file.number, file.excuse) for file in evidence_files(job)] == [(1, "")]
    job.step()
    job.wait(1)
    job.verdict = excuse("Rank 1 compiles.", 5.0)
    job.wait(11)
    job.dog.finish()
    assert [(file.number, file.over_wall_ns is None) for file in evidence_files(job)] == [(1, True), (2, False)]


def test_one_that_went_on_while_it_was_looked_into_is_over(job: Job) -> None:
    two(job, world=4)

    def late(evidence: Evidence, number: int) -> HangRecord:
        job.step()
        return hang(evidence, number)

    job.verdict = late
    job.wait(11)
    assert read_hangs(job.run_dir)[0] == ()
    assert [file.over_wall_ns is None for file in evidence_files(job)] == [False]


def test_of_a_job_on_one_host_nothing_is_kept(job: Job) -> None:
    two(job)
    job.wait(11)
    assert len(read_hangs(job.run_dir)[0]) == 1
    assert evidence_files(job) == []


def test_a_verdict_on_a_job_that_went_on_is_dropped(job: Job) -> None:
    two(job)

    def late(evidence: Evidence, number: int) -> HangRecord:
        job.step()
        return hang(evidence, number)

    job.verdict = late
    job.wait(11)
    assert len(job.judged) == 1
    assert job.events("hang") == []


def test_who_died_is_asked_about_soon(job: Job) -> None:
    job.rank(0, world=3)
    job.rank(1, world=3)
    job.rank(2, world=3)
    job.check()
    job.wait(1)
    (job.run_dir / "errors" / f"{pid_of(1)}.json").write_text(json.dumps({"type": "ValueError", "message": "no"}))
    job.die(1, RingState.EXCEPTION)
    job.wait(LOSS_S - 0.4)
    assert job.judged == []
    job.wait(0.8)
    (evidence,) = job.judged
    assert [(rank.rank, rank.alive, rank.ended) for rank in evidence.ranks] == [
        (0, True, ""),
        (2, True, ""),
        (1, False, "raised ValueError: no"),
    ]


@pytest.mark.parametrize(
    ("state", "oom_killed", "ended"),
    [
        (RingState.RUNNING, False, ""),
        (RingState.RUNNING, True, "killed by the kernel, which ran out of memory"),
        (RingState.EXCEPTION, False, ""),
    ],
)
def test_how_it_died(job: Job, state: RingState, oom_killed: bool, ended: str) -> None:
    two(job)
    job.die(1, state, oom_killed=oom_killed)
    job.wait(LOSS_S + 0.4)
    assert job.judged[0].ranks[1].ended == ended


def test_one_whose_exception_does_not_end_it_counts_as_lost(job: Job) -> None:
    two(job)
    job.streams[1].ring.set_state(RingState.EXCEPTION)
    (job.run_dir / "errors" / f"{pid_of(1)}.json").write_text(json.dumps({"type": "ValueError", "message": ""}))
    job.wait(LOSS_S + 0.6)
    assert [(rank.alive, rank.ended) for rank in job.judged[0].ranks] == [(True, ""), (True, "raised ValueError")]


def test_who_left_in_order_makes_no_haste(job: Job) -> None:
    two(job)
    job.die(1, RingState.EXITED)
    job.wait(9.5)
    assert job.judged == []
    job.wait(1)
    assert job.judged[0].ranks[1].ended == "exited in order"


def test_a_death_that_nobody_minds_is_forgotten(job: Job) -> None:
    two(job)
    job.die(1)
    for _ in range(40):
        job.step(0)
        job.wait(1)
    job.wait(9)
    assert job.judged == []


def test_a_death_before_the_first_look_is_remembered(job: Job) -> None:
    job.rank(0)
    job.rank(1)
    job.die(1)
    job.wait(LOSS_S + 0.4)
    (evidence,) = job.judged
    assert [(rank.rank, rank.alive) for rank in evidence.ranks] == [(0, True), (1, False)]


def test_the_dead_of_an_earlier_life_are_forgotten(job: Job) -> None:
    two(job)
    job.die(1)
    job.die(0)
    two(job)
    job.wait(11)
    assert [[rank.alive for rank in evidence.ranks] for evidence in job.judged] == [[True, True]]


def test_a_death_during_an_inquiry_begins_another(job: Job) -> None:
    two(job)
    job.verdict = hang
    while not job.judged:
        job.wait(0.2)
    job.die(1)  # before the verdict is told
    job.wait(4)
    assert [len(evidence.ranks) for evidence in job.judged] == [2, 2]
    assert [rank.alive for rank in job.judged[1].ranks] == [True, False]
    assert [event["number"] for event in job.events("hang")] == [1]


def test_restarted_ranks_are_another_world(job: Job) -> None:
    two(job)
    job.die(1)
    job.die(0)
    job.rank(0, attempt=1)
    job.rank(1, attempt=1)
    job.wait(11)
    assert [[rank.alive for rank in evidence.ranks] for evidence in job.judged] == [[True, True]]


def test_a_process_alone_is_its_own(job: Job) -> None:
    job.rank(0, world=1)
    job.rank(5, world=1)
    job.check()
    for _ in range(3):
        job.wait(4)
        job.step(5)
    assert [[rank.rank for rank in evidence.ranks] for evidence in job.judged] == [[0]]


def test_our_own_pause_counts_for_nothing(job: Job) -> None:
    two(job)
    job.wait(9)
    job.now_s += 3600
    job.check()
    job.wait(9.6)
    assert job.judged == []
    job.wait(1)
    assert len(job.judged) == 1
    job.now_s += GAP_S + 1  # neither for a job that came back
    job.wait(1)
    assert job.events("hang_over") == []


def test_a_job_that_was_suspended_with_its_launcher_does_not_hang(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    two(job)
    suspended = [True]
    monkeypatch.setattr(Subjects, "suspended", lambda _: suspended[0])
    job.wait(30)
    assert job.judged == []
    suspended[0] = False
    job.wait(1)
    assert len(job.judged) == 1


def test_suspension_is_what_the_kernel_says() -> None:
    assert not Subjects({"launcher": {"pid": os.getpid()}}).suspended()
    assert not Subjects({"launcher": None}).suspended()


def test_zero_switches_it_off(job: Job) -> None:
    job.policy = HangPolicy(after_s=0)
    job.dog = job.new_dog()
    two(job)
    job.wait(60)
    job.die(1)
    job.wait(60)
    assert job.judged == []


def test_a_judge_that_fails_is_asked_no_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(str(args.exc_value)))

    def fail(evidence: Evidence, number: int) -> HangRecord:
        raise RuntimeError("a defect")

    two(job)
    job.verdict = fail
    job.wait(60)
    assert caught == ["a defect"]
    job.verdict = hang
    job.step()
    job.wait(12)
    assert len(job.events("hang")) == 1


def nccl_gives_up(job: Job, *, age_s: float = 0.0) -> None:
    path = job.run_dir / "flight" / "nccl_trace_rank_0"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"a dump")
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_dump_of_nccls_watchdog_is_looked_into_at_once(job: Job) -> None:
    two(job)
    job.verdict = excuse("Rank 1 computes.", 40.0)
    job.wait(15)
    assert len(job.judged) == 1
    nccl_gives_up(job)
    job.verdict = hang
    job.wait(0.4)
    ((record,), _) = read_hangs(job.run_dir)
    assert record.evidence == ("NCCL's watchdog timed out too: it had already written the dump of rank 0.",)
    assert len(job.judged) == 2


def test_an_excuse_that_holds_in_spite_of_it_is_not_asked_for_all_the_time(job: Job) -> None:
    two(job)
    job.wait(4)
    nccl_gives_up(job)
    job.verdict = excuse("Rank 1 computes.", 40.0)
    job.wait(30)
    assert len(job.judged) == 1


def test_a_dump_from_before_the_last_word_tells_nothing(job: Job) -> None:
    two(job)
    nccl_gives_up(job, age_s=60.0)
    job.wait(9.6)
    assert job.judged == []


def hang_of_all(evidence: Evidence, number: int) -> HangRecord:
    there = tuple(RankThere(rank=rank.rank, pid=rank.pid, step=rank.step) for rank in evidence.ranks)
    return replace(hang(evidence, number), ranks=there)


def next_step(job: Job, *ranks: int) -> None:
    for rank in ranks or list(job.streams):
        write_step(job.streams[rank], job.drains[rank].reader.header().live_step)


def hung_after_steps(job: Job) -> None:
    job.verdict = hang_of_all
    two(job)
    for _ in range(3):
        next_step(job)
    job.wait(15)
    assert [event["number"] for event in job.events("hang")] == [1]


def test_another_agent_counts_on(job: Job) -> None:
    two(job)
    job.wait(11)
    job.dog = job.new_dog()
    job.wait(11)
    assert [event["number"] for event in job.events("hang")] == [1, 2]


def test_another_agent_takes_over_an_open_hang(job: Job) -> None:
    hung_after_steps(job)
    job.dog = job.new_dog()
    job.wait(30)
    assert [event["number"] for event in job.events("hang")] == [1]
    assert len(job.judged) == 1
    next_step(job)
    job.wait(1)
    assert [record.over for record in read_hangs(job.run_dir)[0]] == ["recovered"]
    job.wait(30)
    assert [event["number"] for event in job.events("hang", "hang_over")] == [1, 1, 2]


def test_a_hang_that_ended_while_no_agent_was_there_is_closed(job: Job) -> None:
    hung_after_steps(job)
    next_step(job, 0)
    job.dog = job.new_dog()
    job.wait(1)
    assert [record.over for record in read_hangs(job.run_dir)[0]] == [None]  # rank 1 stands still
    next_step(job, 1)
    job.wait(1)
    assert [record.over for record in read_hangs(job.run_dir)[0]] == ["recovered"]
    assert [event["number"] for event in job.events("hang_over")] == [1]


def test_a_hang_of_dead_processes_is_left_to_the_end_of_the_run(job: Job) -> None:
    hung_after_steps(job)
    job.die(0)
    job.die(1)
    job.dog = job.new_dog()
    job.wait(1)
    assert [record.over for record in read_hangs(job.run_dir)[0]] == [None]
    job.dog.finish()
    assert [record.over for record in read_hangs(job.run_dir)[0]] == ["ended"]


def test_a_full_disk_is_tried_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    two(job)
    write = watchdog.write_hang
    monkeypatch.setattr(watchdog, "write_hang", refuse)
    job.wait(12)
    assert read_hangs(job.run_dir) == ((), ())
    monkeypatch.setattr(watchdog, "write_hang", write)
    job.wait(1)
    assert len(read_hangs(job.run_dir)[0]) == 1


def test_those_left_behind_are_asked_at_once(job: Job, serve: Any) -> None:
    server = serve(replaying({"fr_trace_json": b'{"entries":[]}'}))
    two(job)
    job.streams[0].ring.header[SERVER_WORD] = 1
    server.path.rename(job.session / "0-0.sock")
    server.path = job.session / "0-0.sock"
    job.die(1)
    assert (job.run_dir / "flight" / "rank_0.json").read_bytes() == b'{"entries":[]}'
    assert server.handlers() == ["fr_trace_json", "dump_nccl_trace_json"]


def test_what_the_ring_knows_is_evidence(job: Job) -> None:
    two(job)
    group = ProcessGroup(slot=2, name="7", ranks=(0, 1), size=2)
    job.streams[1].ring.set_groups([group])
    job.wait(11)
    assert job.judged[0].ranks[1].groups == (group,)
    assert job.judged[0].ranks[1].collective is None


@pytest.mark.parametrize(
    ("device", "uuid", "index", "used"),
    [
        ("cuda", "x", 0, 97.0),
        ("cuda", "GPU-x", 0, 97.0),
        ("cuda", "", 3, 97.0),
        ("cuda", "y", 4, None),
        ("cpu", "", 3, None),
    ],
)
def test_a_gpu_as_it_was_last_seen(job: Job, device: str, uuid: str, index: int, used: float | None) -> None:
    two(job)
    who = job.drains[0].header.identity
    job.streams[0].ring.set_identity(replace(who, device=device, device_uuid=uuid, device_index=index))
    job.subjects.saw_gpus([{"index": 3, "uuid": "GPU-x", "util_percent": 97}, {"index": 4}])
    job.wait(11)
    assert job.judged[0].ranks[0].gpu_util_percent == used
