"""Gathering evidence about real processes: asleep, at work, stopped, stuck in C with the GIL, with children."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hang_jobs import nccl, nccl_entry
from hypothesis import given
from hypothesis import strategies as st
from worker_server_stand_in import EMPTY, replaying

from stepscope.agent import stacks as asking
from stepscope.agent.hangs import rank_evidence as gathering
from stepscope.agent.hangs.rank_evidence import Gathered, Subject, gather, parse_pyspy, read_lines
from stepscope.agent.procfs import child_kind, descendants, read_process, spent_between, wait_channel
from stepscope.agent.stacks import StackOffers, StacksQuestion, ThreadActivity, ask_stacks, waits_on, watch_threads
from stepscope.hangs.evidence import Evidence, RankEvidence
from stepscope.hangs.judge import judge
from stepscope.hangs.thresholds import GatherLimits
from stepscope.records.hang import Frame, HangRecord, ThreadStack

NUMBER = signal.SIGRTMIN + 8

CHILD = textwrap.dedent(
    """
    import ctypes, faulthandler, os, signal, sys, threading, time
    ring, number, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    fd, single = os.open(ring + ".threads", flags), os.open(ring + ".stacks", flags)

    def answer(number, frame):
        lines = ["Stack (most recent call first):"]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        os.write(single, ("\\n".join(lines) + "\\n").encode())

    if what != "deaf":
        faulthandler.register(number, file=fd, all_threads=True, chain=False)
        faulthandler.register(number + 1, file=single, all_threads=False, chain=False)
        signal.signal(number + 2, answer)
    fds = f"{fd} {single}"

    def rest():
        time.sleep(600)

    def work():
        while True:
            sum(range(1000))

    def hold_the_gil():
        ctypes.PyDLL(None).sleep(600)

    def spin():
        import hashlib  # in C, without the GIL, as a rank does that waits for its device
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1 << 30)

    def have_worker():
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"pt_data_worker", 0, 0, 0)
            print(fds, flush=True)
            load()
        os.wait()

    def load():
        while True:
            time.sleep(600)

    def wait_for_lock():
        threading.Event().wait()

    def have_busy_thread():
        threading.Thread(target=work, daemon=True).start()
        rest()

    if what != "gil alone":
        threading.Thread(target=wait_for_lock, daemon=True).start()
    if what != "worker":
        print(fds, flush=True)
    parts = {"work": work, "spin": spin, "busy thread": have_busy_thread, "worker": have_worker}
    (hold_the_gil if what.startswith("gil") else parts.get(what, rest))()
    """
)


class Child:
    """A process that offers its stacks and does what it was started for."""

    def __init__(self, folder: Path, rank: int, what: str) -> None:
        self.script = folder / "child.py"
        self.script.write_text(CHILD)
        self.ring = folder / f"{rank}.ring"
        command = [sys.executable, str(self.script), str(folder / str(rank)), str(int(NUMBER)), what]
        self.rank = rank
        self.busy = what in ("work", "spin")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        all_threads, single = map(int, self.process.stdout.readline().split())
        self.offers = StackOffers(
            ring=self.ring,
            threads=(int(NUMBER), all_threads),
            stacks=(int(NUMBER) + 1, single),
            running=(int(NUMBER) + 2, single),
        )
        self.pid = self.process.pid
        self.until_asleep()

    def until_asleep(self) -> None:
        if self.busy:
            return
        deadline = time.monotonic() + 30
        while (reading := read_process(self.pid)) is not None and reading.state == "R":
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def subject(self, server: Path | None = None) -> Subject:
        return Subject(
            evidence=RankEvidence(rank=self.rank, pid=self.pid),
            pidfd=os.pidfd_open(self.pid),
            offers=self.offers,
            server=server,
        )

    def close(self) -> None:
        if self.process.returncode is not None:
            return
        os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def one(what: str) -> Child:
        children.append(Child(tmp_path, len(children), what))
        return children[-1]

    yield one
    for child in children:
        child.close()


def gather_from(*subjects: Subject, earlier: Any = None, **limits: float) -> Gathered:
    return gather(subjects, earlier=earlier, limits=GatherLimits(window_s=0.3, **limits))


def gather_until_busy(rank: int, *subjects: Subject) -> Gathered:
    """On a busy machine a process that computes may get little of a core for a while."""
    for _ in range(100):
        found = gather_from(*subjects)
        if (found.ranks[rank].cpu_share or 0.0) > 0.1:
            break
    return found


def functions(threads: Any) -> list[list[str]]:
    return [[frame.function for frame in thread.frames] for thread in threads]


def test_ranks_asleep_at_work_and_stopped(start: Start) -> None:
    asleep, busy, stopped = start("rest"), start("work"), start("rest")
    os.kill(stopped.pid, signal.SIGSTOP)
    found = gather_until_busy(1, asleep.subject(), busy.subject(), stopped.subject())
    first, second, third = found.ranks
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert first.process_state == "S"
    assert first.cpu_share is not None
    assert first.cpu_share < 0.2
    main = next(thread for thread in first.threads if thread.main)
    assert [frame.function for frame in main.frames] == ["rest", "<module>"]
    assert found.source_lines[main.frames[0].file, main.frames[0].line] == "time.sleep(600)"
    assert functions(first.threads_later) == functions(first.threads)
    assert len(first.threads) == 2
    assert second.process_state == "R"
    assert second.cpu_share is not None
    assert second.cpu_share > 0.1
    assert [names[-2:] for names in functions(second.threads)] == [["work", "<module>"]]  # nobody else is shown
    assert (third.process_state, third.threads, third.threads_later, third.gil_held) == ("T", (), (), None)
    assert set(found.stack_texts) == {0, 1}
    assert found.stack_texts[0].count("most recent call first") == 2


def test_a_held_gil_hides_no_stack_and_its_sleep_goes_on(start: Start) -> None:
    """C's sleep would end with a signal to its thread: another is asked."""
    child = start("gil")
    (rank,) = gather_from(child.subject()).ranks
    assert functions(thread for thread in rank.threads if thread.main) == [["hold_the_gil", "<module>"]]
    assert functions(thread for thread in rank.threads_later if thread.main) == [["hold_the_gil", "<module>"]]
    assert (rank.process_state, child.process.poll()) == ("S", None)
    assert rank.wait_channel == wait_channel(rank.pid)


def test_a_sleep_of_native_code_is_not_ended_where_there_is_no_other_thread(start: Start) -> None:
    child = start("gil alone")
    (rank,) = gather_from(child.subject()).ranks
    assert (rank.threads, rank.threads_later, rank.process_state, child.process.poll()) == ((), (), "S", None)


def test_the_main_thread_alone_is_asked_while_another_is_at_work(start: Start) -> None:
    """faulthandler must not read the frames of a thread that runs Python."""
    (rank,) = gather_until_busy(0, start("busy thread").subject()).ranks
    assert functions(rank.threads) == [["rest", "have_busy_thread", "<module>"]]
    assert rank.cpu_share is not None
    assert rank.cpu_share > 0.1


def test_where_another_thread_trains_the_handler_in_python_is_asked(start: Start) -> None:
    """faulthandler would show the main thread alone, so that is not offered then."""
    child = start("busy thread")
    child.offers = replace(child.offers, stacks=None)
    (rank,) = gather_from(child.subject()).ranks
    assert functions(rank.threads) == [["rest", "have_busy_thread", "<module>"]]


def test_a_signal_that_is_not_caught_is_never_sent(start: Start) -> None:
    """It would end the process."""
    deaf = start("deaf")
    (rank,) = gather_from(deaf.subject()).ranks
    assert (rank.threads, rank.process_state, deaf.process.poll()) == ((), "S", None)


@pytest.mark.parametrize(("number", "fd"), [(15, 3), (int(NUMBER), 0), (200, 3), (int(NUMBER), 99)])
def test_nor_one_that_a_damaged_offer_names(start: Start, number: int, fd: int) -> None:
    child = start("rest")
    pidfd = os.pidfd_open(child.pid)
    offers = StackOffers(ring=child.ring, threads=(number, fd))
    assert ask_stacks({0: StacksQuestion(pid=child.pid, pidfd=pidfd, offers=offers)}, patience_s=0.1) == {}
    os.close(pidfd)
    assert child.process.poll() is None


def test_one_that_goes_on_at_the_last_moment_is_not_asked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be between two frames when the signal comes."""
    looks: list[int] = []
    monkeypatch.setattr(asking, "waits_on", lambda process, _, **__: looks.append(int(process.name)))
    child = start("rest")
    (rank,) = gather_from(child.subject()).ranks
    assert (rank.threads, rank.threads_later) == ((), ())
    assert looks == [child.pid] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("held", "shown"), [((True, True), 2), ((True, False), 0), ((False,), 1)])
def test_the_gil_of_one_that_runs_is_held_to_the_last_moment(start: Start, held: tuple[bool, ...], shown: int) -> None:
    """… or the signal is not for faulthandler, which shows all threads; the handler in Python shows the main one."""
    child = start("work")
    pidfd = os.pidfd_open(child.pid)
    answers = iter(held)
    question = StacksQuestion(pid=child.pid, pidfd=pidfd, offers=child.offers, gil_held=lambda: next(answers))
    text = ask_stacks({0: question}, patience_s=5.0 if shown else 0.1).get(0, "")
    os.close(pidfd)
    assert list(answers) == []
    assert text.count("most recent call first") == shown


def test_workers_are_asked_one_by_one(start: Start) -> None:
    parent = start("worker")
    (rank,) = gather_from(parent.subject()).ranks
    (worker,) = rank.workers
    assert (worker.kind, worker.process_state) == ("dataloader", "S")
    assert worker.name.startswith(sys.executable)
    assert functions(thread for thread in worker.threads if thread.main) == [["load", "have_worker", "<module>"]]
    assert functions(thread for thread in rank.threads if thread.main) == [["have_worker", "<module>"]]
    assert worker.cpu_share is not None


def handlers(answers: dict[bytes, bytes], release: threading.Event) -> Callable[[socket.socket, bytes], None]:
    """A worker server of which one handler waits for the GIL."""

    def behave(connection: socket.socket, request: bytes) -> None:
        name = request.split()[1].rpartition(b"/")[2]
        if name == b"dump_traceback" and name not in answers:
            release.wait(60)
            return
        if name not in answers:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        body = answers[name]
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    return behave


def test_the_flight_recorder_and_who_holds_the_gil(start: Start, serve: Any) -> None:
    release = threading.Event()
    flight = b'{"version": "2.10", "entries": []}'
    held = serve(handlers({b"fr_trace_json": flight}, release))
    free = serve(handlers({b"fr_trace_json": flight, b"dump_traceback": b"Thread 0x1"}, release))
    children = [start("rest"), start("rest"), start("rest")]
    places = [held.path, free.path, held.path.with_name("nobody.sock")]
    found = gather_from(*(child.subject(place) for child, place in zip(children, places, strict=True)), gil_s=0.2)
    assert [(rank.flight, rank.gil_held) for rank in found.ranks] == [(flight, True), (flight, False), (b"", None)]
    # The server that waits for the GIL is deaf by now: what is known of it stays known, and it is not asked again.
    earlier = {rank.pid: rank for rank in found.ranks}
    (repeated,) = gather_from(children[0].subject(held.path), earlier=earlier, gil_s=0.2, server_s=0.2).ranks
    assert (repeated.flight, repeated.gil_held) == (flight, True)
    release.set()


def test_the_dead_stay_as_they_are_and_the_dying_are_no_error(start: Start) -> None:
    child = start("rest")
    subject = child.subject()
    child.close()
    gone = Subject(evidence=RankEvidence(rank=1, pid=child.pid, alive=False, ended="raised ValueError: x"))
    found = gather_from(subject, gone)
    assert found.ranks[1] == gone.evidence
    assert (found.ranks[0].process_state, found.ranks[0].threads, found.ranks[0].workers) == ("", (), ())
    assert gather_from() == Gathered(ranks=())


def test_the_frames_of_its_parent_are_no_place_of_a_worker() -> None:
    where = (
        ("/x/data.py", "__getitem__"),
        (f"/lib/{gathering.WORKER_LOOP}", "_worker_loop"),
        ("/lib/multiprocessing/process.py", "run"),
        ("/x/train.py", "<module>"),
    )
    frames = tuple(Frame(file=file, line=1, function=function) for file, function in where)
    own = gathering._own_frames((ThreadStack(main=True, frames=frames), ThreadStack(main=False, frames=frames[2:])))
    assert functions(own) == [["__getitem__", "_worker_loop"], ["run", "<module>"]]


# -- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thread", "expected"),
    [("(python) S", False), ("(python) R", True), ("(pt_autograd_0) R", False), ("(python) D", False)],
    ids=["waits", "runs", "native", "reads"],
)
def test_a_thread_that_gets_no_processor_runs_all_the_same(tmp_path: Path, thread: str, expected: bool) -> None:
    """Its CPU time does not grow on a machine that is busy; the kernel's letter says that it would."""
    process = tmp_path / "7"
    for number, words in (("7", "(python) S"), ("8", thread)):
        (process / "task" / number).mkdir(parents=True)
        (process / "task" / number / "stat").write_text(f"{number} {words} " + "0 " * 40)
    (process / "status").write_text("Name:\tpython\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t12\n")
    posture = watch_threads([7], tmp_path)[7]
    assert posture == ThreadActivity(state="S", waits=True, switches="12", others_run=expected)
    assert waits_on(process, posture, all_threads=False)
    assert waits_on(process, posture, all_threads=True) is not expected
    (process / "status").write_text("Name:\tpython\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t13\n")
    assert not waits_on(process, posture, all_threads=False)
    assert not waits_on(tmp_path / "none", posture, all_threads=True)


TRACEBACK = b"""Current thread 0x0000ffff9ca391a0 (most recent call first):
  <no Python frame>

Thread 0x0000ffffbbdb8020 (most recent call first):
  File "/job/train.py", line 15 in step
  File "/job/train.py", line 17 in <module>
"""


def test_a_rank_that_spins_in_nccl_waits_for_the_one_that_sleeps(start: Start, serve: Any) -> None:
    """From the processes and their servers to the verdict; the dumps have the form of those of an H200."""
    waiting = nccl(nccl_entry(41, state="started"), nccl_entry(42, state="scheduled"), before=40)["flight"]
    asleep = nccl(before=40)["flight"]
    spinning = serve(
        replaying({"fr_trace_json": EMPTY, "dump_nccl_trace_json": waiting, "dump_traceback": TRACEBACK}),
    )
    sleeping = serve(replaying({"fr_trace_json": EMPTY, "dump_nccl_trace_json": asleep, "dump_traceback": TRACEBACK}))
    found = gather_from(start("spin").subject(spinning.path), start("rest").subject(sleeping.path))
    first, second = found.ranks
    assert (first.process_state, first.gil_held, second.process_state) == ("R", False, "S")
    assert functions(first.threads) == [[], ["step", "<module>"]]  # no signal is answered: the server shows them
    assert first.threads_later == first.threads
    assert functions(thread for thread in second.threads if thread.main) == [["rest", "<module>"]]
    evidence = Evidence(
        host="node0", world_size=2, ranks=found.ranks, threshold_s=10.0, source_lines=found.source_lines
    )
    hang = judge(evidence, number=1, declared_wall_ns=2, stopped_wall_ns=1)
    assert isinstance(hang, HangRecord)
    assert (hang.kind, [culprit.rank for culprit in hang.culprits], hang.victims) == (
        "hang_missing_collective",
        [1],
        (0,),
    )
    assert hang.title.startswith("Rank 1 never called all_reduce number 41 of default_pg: it sleeps at child.py:")


@pytest.fixture
def proc(tmp_path: Path, read_processes_in: Callable[[Path], None]) -> Callable[..., Path]:
    """Make processes in a folder that psutil takes for ``/proc``."""
    read_processes_in(tmp_path)

    def process(
        pid: int, parent: int = 1, *, name: str = "x", command: str = "", ticks: tuple[int, int] = (0, 0)
    ) -> Path:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        spent = " ".join(map(str, ticks))
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} {'0 ' * 9} {spent} " + "0 " * 30)
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        return folder

    return process


def test_children_and_theirs(proc: Callable[..., Path]) -> None:
    for pid, parent in {5: 1, 6: 5, 7: 6, 8: 1, 9: 8}.items():
        proc(pid, parent, name="a b) c")
    assert descendants([5, 8, 4]) == {5: [6, 7], 8: [9], 4: []}


def test_what_was_spent_between_two_readings(proc: Callable[..., Path]) -> None:
    proc(5, ticks=(100, 50))
    first = read_process(5)
    (proc(5, ticks=(110, 60)) / "io").write_text(
        "rchar: 10\nwchar: 20\nsyscr: 1\nsyscw: 1\nread_bytes: 0\nwrite_bytes: 4096\n"
    )
    second = read_process(5)
    assert first is not None
    assert second is not None
    assert (first.cpu_s, first.io_bytes, second.io_bytes) == (1.5, None, 4096)
    assert second.cpu_s == pytest.approx(1.7)
    assert spent_between(first, second).cpu_share is not None
    assert spent_between(first, second).io_bytes_s is None
    assert spent_between(first, None).cpu_share is None
    assert read_process(6) is None


@pytest.mark.parametrize(
    ("name", "command", "kind"),
    [
        ("pt_data_worker", "python train.py", "dataloader"),
        ("python", "python train.py", "dataloader"),
        ("python", "python -c spawn_main", "other"),
        ("python", "/usr/bin/python /x/torch/_inductor/compile_worker/__main__.py --workers=2", "compiler"),
        ("cc1plus", "/usr/libexec/gcc/cc1plus -quiet", "compiler"),
        ("aarch64-linux-g", "/usr/bin/aarch64-linux-gnu-g++-13 -c x.cpp", "compiler"),
        ("ptxas", "ptxas -o x", "compiler"),
        ("sh", "sh -c true", "other"),
        ("nvidia-smi", "", "other"),
    ],
)
def test_what_a_child_is(proc: Callable[..., Path], name: str, command: str, kind: str) -> None:
    proc(5, name="python", command="python train.py")
    proc(6, 5, name=name, command=command)
    assert child_kind(6, 5) == kind
    assert child_kind(7, 5) == "other"


def test_source_lines(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("first\n    second  # ✓\n" + "x" * 1000)
    name = str(source)
    places = [(name, 2), (name, 3), (name, 9), (name, 0), (str(tmp_path / "none.py"), 1), ("<string>", 1), (name, 2)]
    assert read_lines(places, patience_s=30) == {(name, 2): "second  # ✓", (name, 3): "x" * 200}


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)
    assert read_lines([(str(pipe), 1)], patience_s=0.05) == {}
    os.close(os.open(pipe, os.O_WRONLY))  # and it comes back


def test_py_spy_is_asked_for_those_that_do_not_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "py-spy"
    dump = '[{"thread_name": "MainThread", "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]'
    program.write_text(f"#!/bin/sh\n[ \"$1 $2 $3 $4\" = 'dump --nonblocking --json --pid' ] && echo '{dump}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    deaf, good = gather_from(start("deaf").subject(), start("rest").subject()).ranks
    ((thread,), later) = deaf.threads, deaf.threads_later
    assert (thread.main, thread.frames[0].file, thread.frames[0].line, thread.frames[0].function, later) == (
        True,
        "a.py",
        3,
        "f",
        (),
    )
    assert len(good.threads) == 2


def test_a_py_spy_that_hangs_is_ended(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gather_from(start("deaf").subject(), spy_s=0.1).ranks[0].threads == ()


@given(st.binary() | st.sampled_from([b"[{}]", b"{}", b'[{"frames": 3}]', b'[{"frames": [{}]}]', b"[[]]", b"null"]))
def test_fuzz_py_spy(text: bytes) -> None:
    assert parse_pyspy(text) == ()
