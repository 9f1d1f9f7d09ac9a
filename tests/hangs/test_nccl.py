"""Hangs on NCCL, where a rank that waits spins: what the recorder's two looks tell, and what is no hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hang_jobs import LOOP, SCRIPT, SLEEPING, Job, entry, flight, nccl, nccl_entry, others, stack, verdict

from stepscope.records.hang import Frame

IN_SYNCHRONIZE = stack(("torch/cuda/__init__.py", 1040, "synchronize"), ("train.py", 33, "step"), LOOP)
AT_ITEM = stack(("train.py", 34, "step"), LOOP)
IN_LOCK = stack(("train.py", 45, "flush"), LOOP)
LINES = {
    (SCRIPT, 33): "    torch.cuda.synchronize()",
    (SCRIPT, 34): "    print(loss.item())",
    (SCRIPT, 41): "    time.sleep(999)",
    (SCRIPT, 45): "    lock.acquire()",
}
ON_GPU: dict[str, Any] = {"device": "cuda:0", "gpu_util_percent": 100.0}
SPINNING: dict[str, Any] = {**ON_GPU, "process_state": "R", "cpu_share": 2.0}
BEFORE = 40
"""Collectives that all ranks have called and ended."""


def job(ranks: int = 2, silent_s: float = 11.0) -> Job:
    return Job(ranks=ranks, silent_s=silent_s, lines=LINES)


def waits(job: Job, rank: int, *last: dict[str, Any], **fields: Any) -> Job:
    """This rank spins in its device's queue; ``last`` are its calls after those that all have ended."""
    dumps = nccl(*last, ranks=job.ranks, before=BEFORE)
    return job.alone(rank, fields.pop("threads", AT_ITEM), **{**SPINNING, **dumps, **fields})


def elsewhere(job: Job, rank: int, *last: dict[str, Any], **fields: Any) -> Job:
    """This rank is not in a collective; it sleeps unless something else is said."""
    dumps = nccl(*last, ranks=job.ranks, before=BEFORE)
    return job.alone(rank, fields.pop("threads", SLEEPING), **{**ON_GPU, **dumps, **fields})


def call(sequence: int, state: str = "started", **fields: Any) -> dict[str, Any]:
    return nccl_entry(sequence, state=state, **fields)


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("threads", "does", "line"),
    [
        (SLEEPING, "sleeps at train.py:41 (time.sleep(999))", 41),
        (IN_LOCK, "is blocked at train.py:45 (lock.acquire())", 45),
    ],
)
def test_a_rank_that_did_not_enqueue_is_missing(ranks: int, threads: Any, does: str, line: int) -> None:
    """The others are several collectives ahead, burn two cores each, and wait."""
    stopped = job(ranks)
    for rank in (rank for rank in range(ranks) if rank != 1):
        waits(stopped, rank, call(41), *(call(number, "scheduled") for number in range(42, 47)))
    hang = elsewhere(stopped, 1, threads=threads).hang()
    victims = others(ranks, 1)
    assert verdict(hang) == ("hang_missing_collective", [1], victims, False)
    assert hang.title.startswith(f"Rank 1 never called all_reduce number 41 of default_pg: it {does}; rank")
    assert hang.culprits[0].at is not None
    assert hang.culprits[0].at.line == line
    assert hang.ranks[0].waiting_in == hang.collective
    assert hang.ranks[0].at == Frame(file=SCRIPT, line=34, function="step")


@pytest.mark.parametrize(
    ("calls", "waiting", "missing", "kind"),
    [
        ((call(41, "scheduled"), call(42, "scheduled")), {}, {}, "hang_missing_collective"),  # without timing
        ((call(41),), {"gil_held": True}, {}, "hang_missing_collective"),  # a wait that holds the GIL is a wait
        ((call(41),), {}, {"gil_held": True}, "hang_host"),  # a C call elsewhere that holds it is not
    ],
)
def test_rank_1_is_missing(calls: Any, waiting: dict[str, Any], missing: dict[str, Any], kind: str) -> None:
    stopped = elsewhere(waits(job(), 0, *calls, **waiting), 1, **missing)
    assert verdict(stopped.hang()) == (kind, [1], (0,), False)


def test_a_stopped_rank_and_a_dead_one() -> None:
    stopped = waits(job(), 0, call(41)).alone(1, (), process_state="T")
    assert verdict(stopped.hang()) == ("hang_host", [1], (0,), False)
    dead = waits(job(), 0, call(41)).alone(1, (), alive=False, ended="killed by SIGKILL")
    hang = dead.hang()
    assert verdict(hang) == ("rank_crashed", [1], (0,), False)
    assert hang.title == (
        "Rank 1 was killed by SIGKILL in step 7; rank 0 waits for it in all_reduce number 41 of default_pg."
    )


@pytest.mark.parametrize("ended", [False, True])
def test_another_size(ended: bool) -> None:
    """NCCL ends the smaller of the two, whose rank then goes on; both have called what comes after."""
    stopped = waits(
        job(), 0, call(41, "completed" if ended else "started"), call(42, "started" if ended else "scheduled")
    )
    waits(stopped, 1, call(41, sizes=[[1024]]), call(42, "scheduled"), threads=IN_SYNCHRONIZE)
    hang = stopped.hang()
    assert verdict(hang) == ("hang_mismatch", [1], (0,), False)
    assert hang.title == (
        "Rank 1 at train.py:33 (torch.cuda.synchronize()) called all_reduce [1024] Float where rank 0 called "
        "all_reduce [512] Float (number 41 of default_pg); rank 0 waits for it."
    )


def test_another_operation() -> None:
    stopped = waits(job(), 0, call(41), call(42, "scheduled"))
    waits(stopped, 1, call(41, op="nccl:_all_gather_base"), call(42, "scheduled"), threads=IN_SYNCHRONIZE)
    hang = stopped.hang()
    assert verdict(hang) == ("hang_mismatch", [1], (0,), False)
    assert hang.collective is not None
    assert (hang.collective.sequence, hang.collective.op) == (41, "all_reduce")


def long_ago(ranks: int, odd: int, *last: dict[str, Any], silent_s: float = 11.0) -> Job:
    """``odd`` gathered at number 41, which NCCL ended, and nine more; all stand in what comes last."""
    stopped = job(ranks, silent_s)
    for rank in range(ranks):
        unlike = call(41, "completed", op="nccl:all_gather" if rank == odd else "nccl:all_reduce")
        since = [call(number, "completed") for number in range(42, 51)]
        waits(stopped, rank, unlike, *since, *last)
    return stopped


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_another_operation_that_nccl_ended(ranks: int) -> None:
    """Devices wait inside of number 51, which all called alike: what differed before is why."""
    hang = long_ago(ranks, 1, call(51)).hang()
    victims = others(ranks, 1)
    assert verdict(hang) == ("hang_mismatch", [1], victims, False)
    assert hang.culprits[0].at is None
    assert "(number 41 of default_pg)" in hang.title
    assert "called all_gather" in hang.title
    assert "until they hung in all_reduce number 51 of default_pg." in hang.evidence[-1]


def test_what_differed_before_does_not_excuse_who_is_missing_or_a_kernel_without_end() -> None:
    gathered = [call(41, "completed", op="nccl:all_gather"), *(call(n, "completed") for n in range(42, 51))]
    missing = elsewhere(long_ago(2, 1, call(51)), 1, *gathered, process_state="S", cpu_share=0.0)
    assert verdict(missing.hang()) == ("hang_missing_collective", [1], (0,), False)
    busy = long_ago(4, 2, call(51), silent_s=61.0)
    own = [call(number, "completed") for number in range(41, 51)]
    waits(busy, 1, *own, call(51, "scheduled"), threads=IN_SYNCHRONIZE)
    assert verdict(busy.hang()) == ("hang_device", [1], (0, 2, 3), False)


def test_a_skipped_collective_is_told_by_what_usually_follows_it() -> None:
    """Each step has two buckets and a sum; rank 1 left out the sum, and its bucket meets the others' sum."""
    steps = [nccl_entry(number, sizes=[[(100, 200, 512)[number % 3]]]) for number in range(1, 60)]
    stopped = job()
    ours = [*steps[:56], call(57, sizes=[[100]]), call(58, "scheduled", sizes=[[200]]), call(59, "scheduled")]
    theirs = [*steps[:56], call(57, sizes=[[200]]), call(58, "scheduled", sizes=[[512]])]
    for rank, entries in ((0, ours), (1, theirs)):
        stopped.alone(rank, AT_ITEM, **SPINNING, **nccl(*entries))
    hang = stopped.hang()
    assert verdict(hang) == ("hang_missing_collective", [1], (0,), False)
    assert hang.culprits[0].reason == (
        "at train.py:34 (print(loss.item())) left out the call that rank 0 made (all_reduce [100] Float), and called "
        "all_reduce [200] Float"
    )


def test_a_recv_that_nobody_answers() -> None:
    stopped = waits(job(4), 1, nccl_entry(1, "nccl:recv", "scheduled", peers="1<-2"), threads=IN_SYNCHRONIZE)
    for rank in (0, 2, 3):
        waits(stopped, rank, call(41))
    hang = stopped.hang()
    assert verdict(hang) == ("hang_missing_collective", [1], (0, 2, 3), False)
    assert hang.culprits[0].reason == (
        "has not called all_reduce number 41 of default_pg; it waits in recv from rank 2 at train.py:33 "
        "(torch.cuda.synchronize())"
    )


def test_sends_and_recvs_of_a_batch_that_ended_are_not_waited_for() -> None:
    """They stay scheduled for ever, also in the dump of what has not ended; the batch itself says that it ended."""
    batch = [
        nccl_entry(1, "nccl:recv", "scheduled", peers="1<-0"),
        nccl_entry(1, "nccl:send", "scheduled", peers="1->0"),
    ]
    whole = nccl_entry(1, "nccl:coalesced") | {"is_p2p": True, "p2p_seq_id": 1, "collective_seq_id": 0}
    stopped = waits(job(), 0, call(41))
    elsewhere(stopped, 1, *batch, whole)
    assert verdict(stopped.hang()) == ("hang_missing_collective", [1], (0,), False)


# -- what is no hang --------------------------------------------------------------------------------------------------


def test_a_kernel_before_the_collective_may_take_its_time() -> None:
    """Rank 1 has called it and its device has not started it: no rank is missing."""

    def busy(silent_s: float) -> Job:
        stopped = waits(job(4, silent_s), 1, call(41, "scheduled"), call(42, "scheduled"), threads=IN_SYNCHRONIZE)
        for rank in (0, 2, 3):
            waits(stopped, rank, call(41), call(42, "scheduled"))
        return stopped

    excuse = busy(25.0).excuse()
    assert excuse.reason == "Rank 1 waits for its device at train.py:33 (torch.cuda.synchronize())."
    assert excuse.evidence == (
        (
            "Its device has not started all_reduce number 41 of default_pg, which others have: it is still busy with "
            "earlier work, perhaps a slow kernel."
        ),
        "It counts as a hang after 1 min without progress.",
    )
    assert excuse.check_again_s == 10.0
    hang = busy(61.0).hang()
    assert verdict(hang) == ("hang_device", [1], (0, 2, 3), False)
    assert hang.title == (
        "Rank 1: its device has not started all_reduce number 41 of default_pg, which all ranks called, and does not "
        "finish what comes before; ranks 0, 2 and 3 wait for it."
    )
    assert hang.culprits[0].at == Frame(file=SCRIPT, line=33, function="step")


def test_a_kernel_before_the_collective_is_called() -> None:
    def busy(silent_s: float) -> Job:
        stopped = waits(job(2, silent_s), 0, call(41))
        return elsewhere(stopped, 1, threads=IN_SYNCHRONIZE, process_state="R", cpu_share=1.0)

    assert busy(25.0).excuse().reason == "Rank 1 waits for its device at train.py:33 (torch.cuda.synchronize())."
    assert verdict(busy(61.0).hang()) == ("hang_device", [1], (0,), False)


@pytest.mark.parametrize(("state", "sure_s"), [("started", 15.0), ("scheduled", 60.0)])
def test_a_collective_that_all_called_and_nobody_ended_blames_nobody(state: str, sure_s: float) -> None:
    def joined(silent_s: float) -> Job:
        stopped = job(4, silent_s)
        for rank in range(4):
            waits(stopped, rank, call(41, state), call(42, "scheduled"))
        return stopped

    assert joined(sure_s - 1).excuse().reason == (
        "All ranks have called all_reduce number 41 of default_pg, and their devices have not finished it yet."
    )
    hang = joined(sure_s + 1).hang()
    assert verdict(hang) == ("hang_device", [], (0, 1, 2, 3), True)
    assert hang.collective is not None
    assert hang.collective.sequence == 41


@pytest.mark.parametrize("silent_s", [11.0, 10_000.0])
def test_collectives_that_end_are_progress_however_silent_the_rings_are(silent_s: float) -> None:
    first, later = (nccl(call(number), before=number - 1) for number in (41, 50))
    moving = job(2, silent_s)
    for rank in range(2):
        moving.alone(rank, AT_ITEM, **SPINNING, flight=first["flight"], flight_later=later["flight_later"])
    excuse = moving.excuse()
    assert excuse.reason == "Rank 0 makes progress in its collectives."
    assert excuse.evidence == ("18 were called or ended between two reads of its Flight Recorder.",)
    assert 10.0 <= excuse.check_again_s <= 60.0


@pytest.mark.parametrize(
    ("threads", "fields", "reason"),
    [
        (
            stack(("torch/serialization.py", 967, "save"), ("train.py", 90, "main"), LOOP),
            {"io_bytes_s": 8e7},
            "Rank 0 writes a checkpoint at train.py:90.",
        ),
        (
            stack(("train.py", 70, "evaluate"), LOOP),
            {"process_state": "R", "cpu_share": 1.0},
            "Rank 0 evaluates at train.py:70.",
        ),
        (
            stack(("train.py", 71, "draw"), LOOP),
            {"process_state": "R", "cpu_share": 1.0, "gpu_util_percent": 0.0},
            "Rank 0 computes at train.py:71.",
        ),
    ],
)
def test_others_wait_in_a_barrier_for_a_rank_at_work(threads: Any, fields: dict[str, Any], reason: str) -> None:
    working = waits(job(silent_s=25.0), 1, call(41, op="nccl:all_reduce_barrier"))
    assert elsewhere(working, 0, threads=threads, **fields).excuse().reason == reason


def test_one_look_alone_says_nothing_of_progress() -> None:
    """Then a rank in a call that reads from its device is at work, for a while."""
    working = waits(job(), 0, call(41), flight_later=b"")
    assert elsewhere(working, 1).excuse().reason == "Rank 0 waits for its device at train.py:34 (print(loss.item()))."


# -- two recorders ----------------------------------------------------------------------------------------------------


def test_gloo_and_nccl_number_the_calls_of_one_group_each_for_itself() -> None:
    """Rank 1 is in gloo's barrier number 3, rank 0 in NCCL's all_reduce number 41, both of the default group."""

    def both(rank: int, *last: dict[str, Any], gloo: bytes) -> dict[str, bytes]:
        own = nccl(*last, before=BEFORE)
        return {**own, "flight": b'{"recorders":[%b,%b]}' % (own["flight"], gloo)}

    behind, there = flight(entry(2, "gloo:barrier", retired=True)), flight(entry(3, "gloo:barrier"))
    stopped = job().alone(0, AT_ITEM, **SPINNING, **both(0, call(41), gloo=behind))
    barrier = stack(("torch/distributed/distributed_c10d.py", 5000, "barrier"), ("train.py", 60, "save"), LOOP)
    stopped.alone(1, barrier, **ON_GPU, **both(1, gloo=there))
    hang = stopped.hang()
    assert hang.ranks[0].waiting_in is not None
    assert hang.ranks[1].waiting_in is not None
    assert (hang.ranks[0].waiting_in.op, hang.ranks[0].waiting_in.sequence) == ("all_reduce", 41)
    assert (hang.ranks[1].waiting_in.op, hang.ranks[1].waiting_in.sequence) == ("barrier", 3)
    assert hang.ranks[1].waiting_in.description == "default_pg (gloo)"
    assert {group["description"] for group in hang.flight["groups"]} == {"default_pg (gloo)", "default_pg"}
    assert hang.kind == "hang_deadlock"


def test_damaged_dumps_are_passed_over() -> None:
    for later in (b"", b"{", b"[]", b'{"recorders":[]}', b'{"recorders":[{}]}', json.dumps({"entries": 3}).encode()):
        stopped = waits(job(), 0, call(41), flight_later=later)
        assert elsewhere(stopped, 1).judged() is not None
