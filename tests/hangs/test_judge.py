"""Every kind of hang from hand-made evidence: kind, culprits, victims and the sentence that names them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hang_jobs import IN_ALL_REDUCE, LOOP, SCRIPT, SLEEPING, Job, Stack, entry, flight, others, stack, verdict, worker

from stepscope.flight.wording import ranks_text
from stepscope.hangs.judge import NotAHang, judge
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import Frame, HangRecord, WaitingIn

SIZES = (2, 4, 64, 1000)
IN_LOADER = stack(
    ("torch/utils/data/dataloader.py", 1275, "_try_get_data"),
    ("torch/utils/data/dataloader.py", 732, "__next__"),
    ("train.py", 30, "epoch"),
    LOOP,
)
IN_WORKER = stack(
    ("data.py", 12, "__getitem__"),
    ("torch/utils/data/_utils/fetch.py", 52, "fetch"),
    ("torch/utils/data/_utils/worker.py", 349, "_worker_loop"),
)
INPUT_LINES = {(SCRIPT, 30): "    for batch in loader:", ("/job/data.py", 12): "        time.sleep(1e6)"}
SYNCHRONIZING = stack(("torch/cuda/__init__.py", 1040, "synchronize"), ("train.py", 33, "step"), LOOP)
BACKWARD = stack(
    ("torch/autograd/graph.py", 979, "_engine_run_backward"),
    ("torch/autograd/__init__.py", 395, "backward"),
    ("torch/_tensor.py", 623, "backward"),
    ("train.py", 62, "step"),
    LOOP,
)


def wait(size: int, *odd: int, them: bool = False) -> str:
    rest = others(size, *odd)
    return f"{ranks_text(rest)} {'waits' if len(rest) == 1 else 'wait'} for {'them' if them else 'it'}"


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_sleeps_has_not_called_what_the_others_wait_in(size: int) -> None:
    hang = Job(ranks=size, sequence=7).alone(1).hang()
    assert verdict(hang) == ("hang_missing_collective", [1], others(size, 1), False)
    assert hang.title == (
        "Rank 1 never called all_reduce number 7 of default_pg: it sleeps at train.py:41 (time.sleep(999)); "
        f"{wait(size, 1)}."
    )
    assert hang.culprits[0].reason == (
        "has not called all_reduce number 7 of default_pg; it sleeps at train.py:41 (time.sleep(999))"
    )
    assert hang.culprits[0].at == Frame(file=SCRIPT, line=41, function="next_batch")
    assert hang.collective == WaitingIn(
        group="0", description="default_pg", sequence=7, op="all_reduce", sizes="[512]", dtypes="Float"
    )
    assert [group.ranks for group in hang.stacks] == sorted([(1,), others(size, 1)], key=lambda r: (len(r), r))
    assert (len(hang.ranks), hang.ranks[1].at, hang.ranks[1].pid) == (size, hang.culprits[0].at, 1001)


@pytest.mark.parametrize("size", (4, 64, 1000))
def test_several_that_do_the_same_are_one_sentence(size: int) -> None:
    hang = Job(ranks=size).alone(1).alone(3).hang()
    assert verdict(hang) == ("hang_missing_collective", [1, 3], others(size, 1, 3), False)
    assert hang.title == (
        "Ranks 1 and 3 never called all_reduce of default_pg: each sleeps at train.py:41 (time.sleep(999)); "
        f"{wait(size, 1, 3, them=True)}."
    )


def test_several_that_do_different_things_are_told_apart() -> None:
    lock = stack(("/usr/lib/python3.11/threading.py", 327, "wait"), ("train.py", 44, "flush"), LOOP)
    hang = Job().alone(1).alone(2, lock).hang()
    assert verdict(hang) == ("hang_missing_collective", [1, 2], (0, 3), False)
    assert hang.title == (
        "Ranks 1 and 2 never called all_reduce of default_pg: rank 1 sleeps at train.py:41 (time.sleep(999)); "
        "rank 2 waits for a thread or a lock at train.py:44; ranks 0 and 3 wait for them."
    )


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (("/usr/lib/python3.11/socket.py", 706, "readinto"), "waits for a socket"),
        (("/usr/lib/python3.11/subprocess.py", 1209, "communicate"), "waits for a process that it started"),
        (("/usr/lib/python3.11/queue.py", 171, "get"), "waits in a queue"),
        (("/usr/lib/python3.11/multiprocessing/queues.py", 103, "get"), "waits in a queue between processes"),
        (("train.py", 45, "inner"), "is blocked"),
    ],
)
def test_what_it_waits_for_instead_is_named(frame: tuple[str, int, str], words: str) -> None:
    hang = Job(ranks=2).alone(1, stack(frame, ("train.py", 45, "report"), LOOP)).hang()
    assert hang.culprits[0].reason == f"has not called all_reduce of default_pg; it {words} at train.py:45"


@pytest.mark.few(8)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ("killed by SIGKILL", "was killed by SIGKILL"),
        ("killed by the kernel, which ran out of memory", "was killed by the kernel, which ran out of memory"),
        ("raised ValueError: bad label", "raised ValueError: bad label"),
        ("exited with code 7", "exited with code 7"),
        ("", "is gone"),
    ],
)
def test_a_rank_that_is_gone_while_others_wait(size: int, ended: str, words: str) -> None:
    hang = Job(ranks=size).alone(1, (), alive=False, ended=ended).hang()
    assert verdict(hang) == ("rank_crashed", [1], others(size, 1), False)
    assert hang.title == f"Rank 1 {words} in step 7; {wait(size, 1)} in all_reduce of default_pg."
    assert hang.ranks[1].alive is False


def test_who_only_lost_its_peer_is_not_blamed() -> None:
    job = Job().alone(1, (), alive=False, ended="raised ValueError: bad label")
    hang = job.alone(0, (), alive=False, ended="raised RuntimeError: Connection closed by peer [::1]:4711").hang()
    assert verdict(hang) == ("rank_crashed", [1], (2, 3), False)
    assert hang.evidence == ("After it: rank 0 raised RuntimeError: Connection closed by peer [::1]:4711.",)


def test_a_rank_that_was_done_before_the_others_is_missed_in_their_collective() -> None:
    hang = Job().alone(2, (), alive=False, ended="exited in order").hang()
    assert verdict(hang) == ("hang_missing_collective", [2], (0, 1, 3), False)
    assert hang.title == (
        "Rank 2 never called all_reduce of default_pg: it exited in order in step 7; ranks 0, 1 and 3 wait for it."
    )


def test_ranks_that_are_done_do_not_make_a_hang_of_the_one_that_saves_the_model() -> None:
    saving = stack(("torch/serialization.py", 967, "save"), ("train.py", 90, "main"), LOOP)
    job = Job(ranks=2).alone(0, saving, phase="checkpoint", io_bytes_s=8e7)
    assert job.alone(1, (), alive=False, ended="exited in order").excuse().reason == (
        "Rank 0 writes a checkpoint at train.py:90."
    )


def test_nobody_left_is_no_hang() -> None:
    job = Job(ranks=2).alone(0, (), alive=False).alone(1, (), alive=False)
    assert isinstance(job.judged(), NotAHang)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("state", "words"), [("T", "is stopped (SIGSTOP)"), ("t", "is stopped by a debugger")])
def test_a_stopped_process_is_to_blame_wherever_it_is(size: int, state: str, words: str) -> None:
    hang = Job(ranks=size).at(1, process_state=state, threads=(), threads_later=()).hang()
    assert verdict(hang) == ("hang_host", [1], others(size, 1), False)
    assert hang.title == f"Rank 1 {words}; {wait(size, 1)} in all_reduce of default_pg."


@pytest.mark.parametrize("size", SIZES)
def test_a_c_call_that_holds_the_gil(size: int) -> None:
    job = Job(ranks=size, lines={(SCRIPT, 50): "    libc.sleep(1000)"})
    hang = job.alone(1, stack(("train.py", 50, "step"), LOOP), gil_held=True).hang()
    assert verdict(hang) == ("hang_host", [1], others(size, 1), False)
    assert hang.title == (
        f"Rank 1 is in a C call that holds the GIL at train.py:50 (libc.sleep(1000)); "
        f"{wait(size, 1)} in all_reduce of default_pg."
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_waits_for_a_disk(size: int) -> None:
    hang = Job(ranks=size, lines={}).alone(1, process_state="D").hang()
    assert verdict(hang) == ("hang_host", [1], others(size, 1), False)
    assert hang.title == f"Rank 1 waits for a disk at train.py:41; {wait(size, 1)} in all_reduce of default_pg."


@pytest.mark.parametrize("size", SIZES)
def test_a_worker_process_that_sleeps(size: int) -> None:
    workers = (worker(5000), worker(5001, threads=IN_WORKER))
    hang = Job(ranks=size, lines=INPUT_LINES).alone(1, IN_LOADER, phase="input", workers=workers).hang()
    assert verdict(hang) == ("hang_input", [1], others(size, 1), False)
    assert hang.title == (
        "Rank 1 waits for its next batch at train.py:30 (for batch in loader:); its DataLoader worker 5001 sleeps at "
        f"data.py:12 (time.sleep(1e6)); {wait(size, 1)} in all_reduce of default_pg."
    )
    assert hang.culprits[0].at == Frame(file="/job/data.py", line=12, function="__getitem__")
    assert hang.stacks[-1].workers_of
    assert hang.ranks[1].workers[1]["at"] == "data.py:12 (time.sleep(1e6))"


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ((worker(1), worker(2, process_state="T")), "; its DataLoader worker 2 is stopped (SIGSTOP)"),
        ((worker(1), worker(2, process_state="Z")), "; its DataLoader worker 2 died"),
        ((worker(1, process_state="D"),), "; its DataLoader worker 1 waits for a disk"),
        ((worker(1, kind="other"),), "; its DataLoader workers are gone"),
        ((worker(1),), ""),
    ],
)
def test_what_is_wrong_with_the_worker(workers: tuple[object, ...], words: str) -> None:
    hang = Job(ranks=2).alone(1, IN_LOADER, phase="input", workers=workers).hang()
    assert (hang.kind, hang.culprits[0].reason) == ("hang_input", f"waits for its next batch at train.py:30{words}")


def test_a_dataset_that_blocks_in_the_rank_itself() -> None:
    reading = stack(
        ("data.py", 12, "__iter__"),
        ("torch/utils/data/_utils/fetch.py", 34, "fetch"),
        ("torch/utils/data/dataloader.py", 788, "_next_data"),
        ("train.py", 30, "epoch"),
        LOOP,
    )
    hang = Job(ranks=2, lines=INPUT_LINES).alone(1, reading, phase="input").hang()
    assert verdict(hang) == ("hang_input", [1], (0,), False)
    assert hang.culprits[0].reason == "waits for its next batch at data.py:12 (time.sleep(1e6))"


@pytest.mark.parametrize(
    ("threads", "fields", "kind", "title"),
    [
        (SLEEPING, {}, "hang_host", "The process sleeps at train.py:41 (time.sleep(999))."),
        (
            IN_LOADER,
            {"phase": "input", "workers": (worker(9, process_state="Z"),)},
            "hang_input",
            "The process waits for its next batch at train.py:30; its DataLoader worker 9 died.",
        ),
        (
            SLEEPING,
            {"process_state": "T"},
            "hang_host",
            "The process is stopped (SIGSTOP) at train.py:41 (time.sleep(999)).",
        ),
        (
            SLEEPING,
            {"process_state": "D"},
            "hang_host",
            "The process waits for a disk at train.py:41 (time.sleep(999)).",
        ),
        (
            SYNCHRONIZING,
            {"device": "cuda:0", "gpu_util_percent": 100.0, "cpu_share": 1.0, "process_state": "R"},
            "hang_device",
            "The process waits for its device at train.py:33, and the device does not finish.",
        ),
    ],
)
def test_a_job_of_one_process(threads: Stack, fields: dict[str, object], kind: str, title: str) -> None:
    job = Job(ranks=1, silent_s=61.0 if kind == "hang_device" else 11.0)  # a kernel may take its time
    hang = job.alone(0, threads, **fields).hang()
    assert verdict(hang) == (kind, [0], (), False)
    assert hang.title == title


def mesh(job: Job, size: int) -> Job:
    """Two by two: ranks 0 and 3 of each four take the data dimension first, ranks 1 and 2 the tensor dimension."""
    for first in range(0, size, 4):
        for number, (a, b, c, d) in {"dp": (0, 2, 1, 3), "tp": (0, 1, 2, 3)}.items():
            for pair in ((a, b), (c, d)):
                ranks = tuple(first + rank for rank in pair)
                name = f"{number}{ranks[0]}"
                group = ProcessGroup(slot=1, name=name, description=f"mesh_{number}", size=2, ranks=ranks)
                for rank in pair:
                    if (rank in (0, 3)) == (number == "dp"):
                        job.at(first + rank, collective=job.waits(group=group))
    return job


@pytest.mark.parametrize("size", (4, 64))
def test_a_deadlock_over_two_groups(size: int) -> None:
    hang = mesh(Job(ranks=size), size).hang()
    victims = others(size, 0, 1, 2, 3)
    assert verdict(hang) == ("hang_deadlock", [0, 1, 2, 3], victims, False)
    who = "All 4 ranks" if size == 4 else "Ranks 0–3"
    assert hang.title == (
        f"{who} wait for each other: ranks 0 and 3 in all_reduce of mesh_dp and ranks 1 and 2 in all_reduce of mesh_tp."
    )
    assert hang.cycle == (
        "rank 0 waits for rank 2 in mesh_dp (all_reduce)",
        "rank 2 waits for rank 3 in mesh_tp (all_reduce)",
        "rank 3 waits for rank 1 in mesh_dp (all_reduce)",
        "rank 1 waits for rank 0 in mesh_tp (all_reduce)",
    )


@pytest.mark.parametrize("size", SIZES)
def test_two_groups_of_the_same_ranks_in_another_order(size: int) -> None:
    job = Job(ranks=size)
    second = ProcessGroup(slot=1, name="1", description="second", size=size, ranks=tuple(range(size)))
    for rank in range(size // 2, size):
        job.at(rank, collective=job.waits(group=second))
    hang = job.hang()
    assert verdict(hang) == ("hang_deadlock", list(range(size)), (), False)
    half = size // 2
    assert hang.cycle == (
        f"rank 0 waits for rank {half} in default_pg (all_reduce)",
        f"rank {half} waits for rank 0 in second (all_reduce)",
    )


def test_two_recvs_that_face_each_other() -> None:
    job = Job()
    job.at(1, collective=job.waits("recv", peer=2)).at(2, collective=job.waits("recv", peer=1))
    job.alone(0).at(0, collective=job.waits("recv", peer=1), threads=IN_ALL_REDUCE)
    job.at(3, collective=job.waits("recv", peer=0))
    hang = job.hang()
    assert verdict(hang) == ("hang_deadlock", [1, 2], (0, 3), False)
    assert hang.cycle == ("rank 1 waits for rank 2 (recv)", "rank 2 waits for rank 1 (recv)")


def test_a_recv_from_a_rank_that_is_in_a_collective() -> None:
    """The job of sendrecv_4: rank 1 waits for rank 3, which waits for all; rank 0 sends to rank 1."""
    job = Job(lines={})
    job.at(0, collective=job.waits("send", peer=1)).at(1, collective=job.waits("recv", peer=3))
    hang = job.hang()
    assert verdict(hang) == ("hang_missing_collective", [0, 1], (2, 3), False)
    assert hang.title == (
        "Ranks 0 and 1 never called all_reduce of default_pg: rank 0 waits in send to rank 1 at train.py:59; "
        "rank 1 waits in recv from rank 3 at train.py:59, which waits in all_reduce of default_pg at train.py:59."
    )


def test_an_unmatched_recv_between_two() -> None:
    job = Job(ranks=2, lines={})
    hang = job.at(1, collective=job.waits("recv", peer=0)).hang()
    assert verdict(hang) == ("hang_missing_collective", [1], (0,), False)
    assert hang.title == (
        "Rank 1 never called all_reduce of default_pg: it waits in recv from rank 0 at train.py:59, which waits in "
        "all_reduce of default_pg at train.py:59."
    )


def test_a_recv_from_a_rank_that_sleeps() -> None:
    job = Job(ranks=2)
    hang = job.at(0, collective=job.waits("recv", peer=1)).alone(1).hang()
    assert verdict(hang) == ("hang_missing_collective", [1], (0,), False)
    assert hang.title == (
        "Rank 1 never called send to rank 0: it sleeps at train.py:41 (time.sleep(999)); rank 0 waits for it."
    )


@pytest.mark.parametrize("size", (4, 64, 1000))
@pytest.mark.parametrize(
    ("fields", "expected_calls"),
    [
        ({"op": "all_gather"}, ("called all_reduce", "called all_gather")),
        ({"bytes": 4096}, ("called all_reduce with 2,048 bytes", "called all_reduce with 4,096 bytes")),
    ],
)
def test_another_call_by_the_words_alone(size: int, fields: dict[str, object], expected_calls: tuple[str, str]) -> None:
    job = Job(ranks=size)
    hang = job.at(1, collective=job.waits(**fields)).hang()
    assert verdict(hang) == ("hang_mismatch", [1], others(size, 1), False)
    assert hang.title == (
        "The ranks of default_pg are not in the same call: "
        f"{ranks_text(others(size, 1))} {expected_calls[0]} and rank 1 {expected_calls[1]}."
    )


@pytest.mark.parametrize("size", (2, 8, 1000))
def test_ranks_that_wait_for_another_host(size: int) -> None:
    hang = Job(ranks=size, world_size=2 * size).hang()
    assert verdict(hang) == ("rank_lost", [], tuple(range(size)), True)
    assert hang.title == (
        f"All {size:,} ranks on node0 wait in all_reduce of default_pg for {ranks_text(range(size, 2 * size))} "
        "on other hosts: which of them is blocking the job cannot be determined here."
    )


def test_devices_that_never_finish() -> None:
    job = Job(silent_s=61.0)
    for rank in range(4):
        job.alone(rank, SYNCHRONIZING, device="cuda:0", gpu_util_percent=100.0)
    hang = job.hang()
    assert verdict(hang) == ("hang_device", [], (0, 1, 2, 3), True)
    assert hang.title == "All 4 ranks: each waits for its device at train.py:33, and the device does not finish."


def test_a_collective_that_all_called_and_whose_device_does_not_get_there() -> None:
    """gloo waits for the devices, too: the host thread of the one that is behind spins."""
    job = Job(ranks=2, sequence=26).at(0, device="cuda", cpu_share=0.01).at(1, device="cuda", cpu_share=1.0)
    hang = job.hang()
    assert verdict(hang) == ("hang_device", [1], (0,), False)
    assert hang.title == (
        "Rank 1: its device has not finished what comes before all_reduce number 26 of default_pg, "
        "which all ranks called."
    )
    assert verdict(job.at(1, cpu_share=0.5).hang()) == ("hang_device", [], (0, 1), True)


def test_a_value_read_from_a_busy_device() -> None:
    job = Job(ranks=1, lines={(SCRIPT, 34): "    print(loss.item())"})
    busy = {"device": "cuda:0", "gpu_util_percent": 100.0, "cpu_share": 1.0, "process_state": "R"}
    reading = job.alone(0, stack(("train.py", 34, "step"), LOOP), **busy)
    assert reading.excuse().reason == "The process waits for its device at train.py:34 (print(loss.item()))."
    reading.silent_s = 61.0
    assert reading.hang().kind == "hang_device"


@pytest.mark.parametrize("size", SIZES)
def test_where_nothing_tells_nobody_is_blamed(size: int) -> None:
    hang = Job(ranks=size).hang()
    assert verdict(hang) == ("hang_unknown", [], tuple(range(size)), True)
    assert hang.title == (
        f"The job hangs for an unknown reason: {ranks_text(range(size))} wait in all_reduce of default_pg."
    )


def test_a_rank_of_which_nothing_is_known_is_named_but_not_blamed() -> None:
    hang = Job().alone(1, ()).hang()
    assert verdict(hang) == ("hang_unknown", [], (0, 2, 3), True)
    assert hang.title == (
        "The job hangs for an unknown reason: ranks 0, 2 and 3 wait in all_reduce of default_pg and what "
        "rank 1 does is unknown."
    )
    assert hang.evidence == ("No stack trace is available for rank 1.",)


def test_what_ddp_waits_in_is_known_from_the_flight_recorder() -> None:
    job = Job(ranks=2)
    waiting = flight(entry(19, sizes=[[16448]]), entry(20))
    job.alone(0, BACKWARD, phase="backward", flight=waiting).alone(1, flight=flight(entry(18, retired=True)))
    hang = job.hang()
    assert verdict(hang) == ("hang_missing_collective", [1], (0,), False)
    assert hang.collective == WaitingIn(
        group="0", description="default_pg", sequence=19, op="all_reduce", sizes="[16448]", dtypes="Float"
    )


def test_of_two_processes_with_one_rank_the_living_one_counts() -> None:
    evidence = Job(ranks=2).evidence()
    dead = replace(evidence.ranks[1], alive=False, pid=77)
    twice = replace(evidence, ranks=(*evidence.ranks, dead))
    hang = judge(twice, number=2, declared_wall_ns=2, stopped_wall_ns=1)
    assert isinstance(hang, HangRecord)
    assert [rank.pid for rank in hang.ranks] == [1000, 1001]
    assert (hang.number, hang.declared_wall_ns, hang.stopped_wall_ns) == (2, 2, 1)


@pytest.mark.parametrize("size", (4, 64))
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (entry(7, "gloo:all_gather"), "all_gather [512] Float"),
        (entry(7, "gloo:barrier", sizes=()), "barrier"),
        (entry(7, sizes=[[1000]]), "all_reduce [1000] Float"),
        (entry(7, dtype="Double"), "all_reduce [512] Double"),
    ],
    ids=["operation", "skipped", "size", "dtype"],
)
def test_another_call_by_the_flight_recorders(size: int, odd: dict[str, object], message: str) -> None:
    hang = Job(ranks=size, sequence=7).at(1, flight=flight(odd)).hang()
    assert verdict(hang) == ("hang_mismatch", [1], others(size, 1), False)
    assert hang.title.startswith(f"Rank 1 called {message}")
    assert hang.title.endswith(f"(number 7 of default_pg); {wait(size, 1)}.")
    assert hang.culprits[0].at == Frame(file=SCRIPT, line=59, function="step")
    assert hang.flight["culprits"] == [1]
    assert (hang.collective or WaitingIn(group="")).sequence == 7


@pytest.mark.parametrize("size", (64, 1000))
def test_the_odd_one_of_many_in_a_circle(size: int) -> None:
    job = Job(ranks=size)
    second = ProcessGroup(slot=1, name="1", description="second", size=size, ranks=tuple(range(size)))
    hang = job.at(5, collective=job.waits(group=second)).hang()
    assert verdict(hang) == ("hang_deadlock", [5], others(size, 5), False)


def all_at(ranks: int = 4, **fields: object) -> Job:
    job = Job(ranks=ranks)
    for rank in range(ranks):
        job.at(rank, **fields)
    return job


def with_broadcasts() -> Job:
    """Receivers of a broadcast may pass other sizes than the sender."""
    job = Job()
    for rank in range(4):
        job.at(rank, collective=job.waits("broadcast", bytes=rank * 8))
    return job


def ended_by_gloo() -> Job:
    """gloo ends ranks that were sent more than they asked for: the one that sent it is to blame."""
    ended = "raised RuntimeError: [enforce fail at pair.cc:466] op.preamble.length <= op.nbytes. 4096 vs 4000"
    job = Job(sequence=7).at(1, flight=flight(entry(7, sizes=[[1000]])))
    for rank in (0, 2):
        job.alone(rank, ended=ended, flight=flight(entry(7, retired=True)))
    return job


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job().alone(1, ended="raised ValueError: bad label"), ("rank_crashed", [1], (0, 2, 3), False)),
        (all_at(gil_held=True), ("hang_unknown", [], (0, 1, 2, 3), True)),
        (Job(ranks=2).at(1, collective=Job(ranks=2).waits("all_gather")), ("hang_mismatch", [0, 1], (), True)),
        (with_broadcasts(), ("hang_unknown", [], (0, 1, 2, 3), True)),
        (Job(ranks=4, world_size=8).alone(2), ("hang_missing_collective", [2], (0, 1, 3), False)),
        (Job(ranks=2).alone(1).at(0, flight=b"no such handler"), ("hang_missing_collective", [1], (0,), False)),
        (
            Job(sequence=7).alone(1, (), flight=flight(entry(6, retired=True))),
            ("hang_missing_collective", [1], (0, 2, 3), False),
        ),
        (Job(sequence=7).at(1, flight=b""), ("hang_unknown", [], (0, 1, 2, 3), True)),
        (ended_by_gloo(), ("hang_mismatch", [1], (3,), False)),
    ],
    ids=[
        "failed, and its process is still there",
        "all hold the GIL in the same call",
        "two that disagree",
        "other sizes of a broadcast",
        "a culprit here, and other hosts",
        "an answer that is not a dump",
        "no stack, and behind according to its recorder",
        "no answer of its recorder",
        "ended by gloo for another size",
    ],
)
def test_verdicts(job: Job, expected: object) -> None:
    assert verdict(job.hang()) == expected
