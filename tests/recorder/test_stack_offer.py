"""Offering stacks: the script keeps its signals, its system calls and its children."""

from __future__ import annotations

import _thread
import faulthandler
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.flight.stacks import parse_threads
from stepscope.recorder import guard, stacks
from stepscope.recorder.stacks import CANDIDATES, StackOffer
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader, RingWriter
from stepscope.ring.layout import MIN_CAPACITY, RUNNING_WORD, STACKS_WORD, THREADS_WORD, WORKERS_WORD

FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH = (signal.SIGRTMIN + more for more in CANDIDATES)
STATE = (signal.signal, faulthandler.register)


def caught(number: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(mask >> (number - 1) & 1)


@pytest.fixture
def offer() -> Iterator[StackOffer]:
    """Afterwards everything is as it was."""
    failures = guard.failures()
    offer = StackOffer()
    yield offer
    offer.withdraw()
    for number in (FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH):
        assert signal.getsignal(number) is signal.SIG_DFL
        assert not caught(number)
    assert (signal.signal, faulthandler.register) == STATE
    assert guard.failures() == failures


def written(ring: RingWriter, suffix: str = ".stacks") -> list[str]:
    return ring.path.with_suffix(suffix).read_text().splitlines()


def offered(ring: RingWriter) -> tuple[int, ...]:
    """The signals for the main thread while it waits and while it runs, for all threads, for workers; 0: none."""
    return tuple(ring.header[word] & 0xFF for word in (STACKS_WORD, RUNNING_WORD, THREADS_WORD, WORKERS_WORD))


def test_the_header_says_which_signal_and_where_it_writes(ring: RingWriter, offer: StackOffer, tmp_path: Path) -> None:
    offer.open(ring)
    reader = RingReader(ring.path)
    announced = reader.stack_offer()
    assert announced is not None
    number, fd = announced
    assert number == FIRST
    assert Path(f"/proc/self/fd/{fd}").readlink() == tmp_path / "1.stacks"
    assert not os.get_inheritable(fd)
    signal.raise_signal(number)
    assert written(ring)[0] == "Stack (most recent call first):"
    assert "in test_the_header_says_which_signal_and_where_it_writes" in written(ring)[1]
    os.truncate(tmp_path / "1.stacks", 0)
    signal.raise_signal(number)
    assert written(ring)[0] == "Stack (most recent call first):"
    offer.withdraw()
    assert reader.stack_offer() is None
    reader.close()


def test_the_stacks_of_all_threads_by_another_signal(ring: RingWriter, offer: StackOffer, tmp_path: Path) -> None:
    offer.open(ring)
    reader = RingReader(ring.path)
    announced = reader.thread_offer()
    assert announced is not None
    number, fd = announced
    assert number == THIRD
    assert Path(f"/proc/self/fd/{fd}").readlink() == tmp_path / "1.threads"
    assert not os.get_inheritable(fd)
    over = threading.Event()

    def beside() -> None:
        over.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    signal.raise_signal(number)
    over.set()
    thread.join()
    text = "\n".join(written(ring, ".threads"))
    assert text.count("most recent call first") >= 2
    assert "in beside" in text
    assert "in test_the_stacks_of_all_threads_by_another_signal" in text
    assert written(ring) == []
    offer.withdraw()
    assert reader.thread_offer() is None
    reader.close()


def bare(lines: list[str]) -> list[str]:
    """Without the classes of methods and the functions around functions, which faulthandler does not know."""
    return [re.sub(r" in \S+\.", " in ", line) for line in lines]


def test_a_method_comes_with_its_class(ring: RingWriter, offer: StackOffer) -> None:
    class Plot:
        def on_step_end(self) -> None:
            signal.raise_signal(SECOND)

    offer.open(ring)
    Plot().on_step_end()
    name = "Plot.on_step_end" if sys.version_info >= (3, 11) else "on_step_end"
    assert written(ring)[1].endswith(name)


def test_a_stack_reads_the_same_by_either_handler(ring: RingWriter, offer: StackOffer, tmp_path: Path) -> None:
    offer.open(ring)
    code = compile(
        "def é():\n    for number in numbers:\n        signal.raise_signal(number)\n\né()",
        "/tmp/ü\U0001f600.py",
        "exec",
    )
    exec(code, {"signal": signal, "numbers": [FIRST, SECOND]})
    lines = written(ring)
    middle = len(lines) // 2
    assert lines[:middle] == bare(lines[middle:])
    assert lines[1] == '  File "/tmp/\\xfc\\U0001f600.py", line 3 in \\xe9'


def test_however_deep(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)

    def down(depth: int) -> None:
        if depth:
            down(depth - 1)
        else:
            signal.raise_signal(FIRST)
            signal.raise_signal(SECOND)

    down(200)
    lines = written(ring)
    middle = len(lines) // 2
    assert lines[middle - 1] == "  ..."
    assert lines[2:middle] == bare(lines[middle + 2 :])  # but for the line of the question itself


def test_a_signal_that_the_script_uses_is_left_to_it(ring: RingWriter, offer: StackOffer) -> None:
    heard: list[int] = []
    signal.signal(FIRST, lambda number, _: heard.append(number))
    try:
        offer.open(ring)
        assert offered(ring) == (SECOND, THIRD, FOURTH, FIFTH)
        signal.raise_signal(FIRST)
        assert heard == [FIRST]
        offer.withdraw()
        signal.raise_signal(FIRST)
        assert heard == [FIRST, FIRST]
    finally:
        signal.signal(FIRST, signal.SIG_DFL)


def test_so_is_one_that_it_ignores_or_blocks(ring: RingWriter, offer: StackOffer) -> None:
    signal.signal(FIRST, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [SECOND])
    try:
        offer.open(ring)
        assert offered(ring) == (THIRD, FOURTH, FIFTH, SIXTH)
    finally:
        offer.withdraw()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(FIRST, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (FIRST, (0, SECOND, THIRD, FOURTH)),
        (SECOND, (FIRST, 0, THIRD, FOURTH)),
        (THIRD, (FIRST, SECOND, 0, FOURTH)),
        (FOURTH, (FIRST, SECOND, THIRD, 0)),
    ],
)
def test_a_script_that_wants_ours_later_gets_it_as_it_was(
    ring: RingWriter, offer: StackOffer, wanted: int, left: tuple[int, ...]
) -> None:
    offer.open(ring)
    heard: list[int] = []
    try:
        assert signal.signal(FIFTH, signal.SIG_DFL) is signal.SIG_DFL
        assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)
        assert signal.signal(wanted, lambda number, _: heard.append(number)) is signal.SIG_DFL
        assert offered(ring) == left
        signal.raise_signal(wanted)
        assert heard == [wanted]
        assert written(ring) == written(ring, ".threads") == []
    finally:
        signal.signal(wanted, signal.SIG_DFL)


def test_or_for_its_own_faulthandler(ring: RingWriter, offer: StackOffer, tmp_path: Path) -> None:
    offer.open(ring)
    with (tmp_path / "mine").open("w") as mine:
        faulthandler.register(FIRST, file=mine, all_threads=False)
        try:
            signal.raise_signal(FIRST)
        finally:
            faulthandler.unregister(FIRST)
    assert offered(ring) == (0, SECOND, THIRD, FOURTH)
    assert written(ring) == []
    assert "most recent call first" in (tmp_path / "mine").read_text()


def test_one_that_comes_when_the_interpreter_is_on_its_way_out_does_nothing(
    ring: RingWriter, offer: StackOffer
) -> None:
    """faulthandler gives the signal back before the process is gone; the default would end it."""
    offer.open(ring)
    offer._leave()
    for number in (FIRST, SECOND, THIRD, FOURTH):
        faulthandler.unregister(number)
        signal.raise_signal(number)
    for number in (SECOND, FOURTH):
        signal.signal(number, signal.SIG_DFL)  # this interpreter does not go
    assert written(ring) == written(ring, ".threads") == written(ring, ".workers") == []


def forget_after_fork(offers: list[StackOffer]) -> None:
    """Call ``forget`` in children, as the recorder does, as long as the list has the offer: a hook of os.fork stays."""
    names: dict[str, Any] = {"__name__": "stepscope.recorder.bootstrap", "offers": offers}
    exec("def forget():\n    for offer in offers:\n        offer.forget()", names)
    os.register_at_fork(after_in_child=names["forget"])


def in_a_child(check: Callable[[], bool]) -> bool:
    """What ``check`` says in a forked child."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            code = int(not check())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


def test_a_forked_child_gives_back_all_but_one_and_the_parent_keeps_them(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)

    def child() -> bool:
        offer.forget()
        given_back = all(not caught(n) and signal.getsignal(n) is signal.SIG_DFL for n in (FIRST, SECOND, FOURTH))
        signal.signal(FIRST, signal.SIG_IGN)  # the child's own doing stays the child's
        return given_back

    assert in_a_child(child)
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)
    signal.raise_signal(FIRST)
    assert "in test_a_forked_child" in written(ring)[1]


def test_a_forked_child_can_be_asked_for_all_its_threads_like_its_parent(ring: RingWriter, offer: StackOffer) -> None:
    """A DataLoader worker that is stuck; it writes to its parent's file, at its end."""
    offer.open(ring)
    signal.raise_signal(THIRD)

    def child() -> bool:
        offer.forget()
        signal.raise_signal(THIRD)
        return caught(THIRD)

    assert in_a_child(child)
    lines = written(ring, ".threads")
    assert sum("in child" in line for line in lines) == 1
    assert sum("in test_a_forked_child_can_be_asked" in line for line in lines) == 2
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)


def test_a_child_may_have_that_one_too_and_the_parent_does_not_notice(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)

    def child() -> bool:
        offer.forget()
        before = signal.signal(THIRD, signal.SIG_IGN)
        return before is signal.SIG_DFL and signal.signal is STATE[0] and not caught(THIRD)

    assert in_a_child(child)
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)
    assert caught(THIRD)


WORKER_START = """
import multiprocessing

class Iterator:
    def __init__(self, work):
        self.process = multiprocessing.get_context("fork").Process(target=work)
        self.process.start()

    def fetch(self, work):
        self.process = multiprocessing.get_context("fork").Process(target=work)
        self.process.start()
"""


@pytest.mark.parametrize(
    ("module", "method", "stored"),
    [
        ("torch.utils.data.dataloader", "__init__", True),
        ("torchdata.stateful_dataloader.stateful_dataloader", "__init__", True),
        ("torch.utils.data.dataloader", "fetch", False),  # a dataset in the rank that forks
        ("train", "__init__", False),
    ],
)
def test_only_a_fork_that_starts_a_dataloader_worker_keeps_the_fourth(
    ring: RingWriter, offer: StackOffer, module: str, method: str, stored: bool
) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(WORKER_START, names)
    offer.open(ring)
    ours: list[StackOffer] = [offer]
    forget_after_fork(ours)

    def work() -> None:
        if caught(FOURTH):
            signal.raise_signal(FOURTH)

    try:
        iterator = names["Iterator"](work) if method == "__init__" else object.__new__(names["Iterator"])
        if method == "fetch":
            iterator.fetch(work)
        iterator.process.join()
    finally:
        ours.clear()
    assert iterator.process.exitcode == 0
    lines = written(ring, ".workers")
    assert ("in test_only_a_fork_that_starts" in "".join(lines)) == stored
    assert bool(lines) == stored
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)


def test_a_worker_that_forks_or_sets_the_signal_keeps_it_no_longer(ring: RingWriter, offer: StackOffer) -> None:
    names: dict[str, Any] = {"__name__": "torch.utils.data.dataloader"}
    exec(WORKER_START, names)
    offer.open(ring)
    ours: list[StackOffer] = [offer]
    forget_after_fork(ours)

    def work() -> None:
        assert caught(FOURTH)
        assert in_a_child(lambda: not caught(FOURTH))
        assert signal.signal(FOURTH, signal.SIG_IGN) is signal.SIG_DFL
        assert not caught(FOURTH)

    try:
        iterator = names["Iterator"](work)
        iterator.process.join()
    finally:
        ours.clear()
    assert iterator.process.exitcode == 0
    assert caught(FOURTH)
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)


def test_a_child_that_trains_has_files_of_its_own(ring: RingWriter, offer: StackOffer, tmp_path: Path) -> None:
    offer.open(ring)

    def child() -> bool:
        offer.forget()
        own = RingWriter(tmp_path / "2.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
        offer.open(own)
        signal.raise_signal(THIRD)
        return offered(own) == (FIRST, SECOND, THIRD, FOURTH) and "in child" in "".join(written(own, ".threads"))

    assert in_a_child(child)
    assert written(ring, ".threads") == []


def test_a_fork_of_which_nobody_was_told_does_not_speak_for_the_parent(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)

    def child() -> bool:
        signal.signal(FIRST, signal.SIG_IGN)
        return True

    assert in_a_child(child)
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)


def test_a_child_that_execs_has_the_default(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)
    code = "print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    masks = {
        line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line[:6] in ("SigCgt", "SigIgn")
    }
    for number in (FIRST, SECOND, THIRD, FOURTH):
        assert not (masks["SigCgt:"] | masks["SigIgn:"]) >> (number - 1) & 1


def test_only_the_main_thread_can_offer(ring: RingWriter, offer: StackOffer) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=offer.open, args=(ring,))
        thread.start()
        thread.join()

    elsewhere()
    assert offered(ring) == (0, 0, 0, 0)
    offer.open(ring)
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)
    elsewhere()  # another thread took over: faulthandler would show the main one alone, which tells nothing
    assert offered(ring) == (0, SECOND, THIRD, FOURTH)


def test_a_thread_of_native_code_is_not_made_one_of_pythons(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)
    before, over = threading.enumerate(), threading.Lock()
    over.acquire()

    def train() -> None:
        offer.open(ring)
        over.release()

    _thread.start_new_thread(train, ())
    over.acquire()
    assert threading.enumerate() == before
    assert offered(ring) == (0, 0, THIRD, FOURTH)


def test_another_thread_that_trains_is_shown_by_the_main_one(ring: RingWriter, offer: StackOffer) -> None:
    offer.open(ring)
    trains, over = threading.Event(), threading.Event()

    def train() -> None:
        offer.open(ring)
        trains.set()
        over.wait()

    thread = threading.Thread(target=train)
    thread.start()
    trains.wait()
    before_ns = time.perf_counter_ns()
    signal.raise_signal(SECOND)
    after_ns = time.perf_counter_ns()
    signal.raise_signal(THIRD)
    lines = written(ring)
    assert lines[0] == "Stack (most recent call first):"
    assert any(line.endswith("train") and f'"{__file__}"' in line for line in lines)
    assert not any("test_another_thread" in line and "<locals>" not in line for line in lines[1:])
    word, began_ns, ended_ns = lines[-1].split()
    assert word == "read"
    assert before_ns < int(began_ns) < int(ended_ns) < after_ns
    reader = RingReader(ring.path)
    number = reader.training_thread()
    assert number == thread.ident
    shown = parse_threads("\n".join(written(ring, ".threads")) + "\n", trains=number)
    assert "train" in [frame.function for one in shown if one.main for frame in one.frames]
    assert gc.isenabled()
    over.set()
    thread.join()
    os.truncate(ring.path.with_suffix(".stacks"), 0)
    signal.raise_signal(SECOND)
    assert written(ring) == []  # it has ended
    offer.open(ring)
    assert reader.training_thread() == 0
    signal.raise_signal(SECOND)
    assert "test_another_thread_that_trains_is_shown_by_the_main_one" in written(ring)[1]
    assert "read" not in written(ring)[-1].split()
    reader.close()


def test_switched_off(ring: RingWriter, offer: StackOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_STACKS", "0")
    offer.open(ring)
    assert offered(ring) == (0, 0, 0, 0)
    assert [path.name for path in ring.path.parent.iterdir()] == ["1.ring"]


def test_no_signal_free_no_offer(ring: RingWriter, offer: StackOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "CANDIDATES", (CANDIDATES[0],))
    offer.open(ring)
    assert offered(ring) == (FIRST, 0, 0, 0)


def test_the_recorder_offers_with_its_ring_and_takes_it_back_with_the_hooks(recording: Any) -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ring = recording.recorder.ring
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)
    recording.recorder.forget()  # as in a forked child
    assert [caught(n) for n in (FIRST, SECOND, THIRD, FOURTH)] == [False, False, True, False]
    assert offered(ring) == (FIRST, SECOND, THIRD, FOURTH)


OFFERS = textwrap.dedent(
    """
    import os, select, signal, socket, sys, threading, time
    from pathlib import Path
    from stepscope.recorder.stacks import StackOffer
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingWriter
    from stepscope.ring.layout import THREADS_WORD
    ring = RingWriter(Path(sys.argv[1]) / "1.ring", RankIdentity(host="node", pid=os.getpid()))
    offer = StackOffer()
    offer.open(ring)
    number = ring.header[int(sys.argv[2])] & 0xFF
    suffix = ".threads" if int(sys.argv[2]) == THREADS_WORD else ".stacks"

    def answers():
        return open(ring.path.with_suffix(suffix)).read().count("in <module>")
    """
)
GOES_ON = OFFERS + textwrap.dedent(
    """
    over = threading.Event()

    def ask():
        while not over.wait(0.01):
            os.kill(os.getpid(), number)  # to the process: the main thread gets it

    asking = threading.Thread(target=ask)
    asking.start()
    begin = time.monotonic()
    time.sleep(0.2)
    assert time.monotonic() - begin >= 0.2
    begin = time.monotonic()
    assert select.select([], [], [], 0.2) == ([], [], [])
    assert time.monotonic() - begin >= 0.2
    one, other = socket.socketpair()
    threading.Timer(0.2, other.send, (b"hello",)).start()
    assert one.recv(10) == b"hello"
    reading, writing = os.pipe()
    threading.Timer(0.2, os.write, (writing, b"x" * 10)).start()
    assert os.read(reading, 100) == b"x" * 10
    poller = select.epoll()
    assert poller.poll(0.2) == []
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.2, lock.release).start()
    assert lock.acquire(timeout=10)
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(0.2)"], os.environ)
    assert os.waitpid(child, 0) == (child, 0)
    over.set()
    asking.join()
    print(answers())
    """
)


@pytest.mark.parametrize("word", [STACKS_WORD, RUNNING_WORD, THREADS_WORD])
def test_sleep_select_recv_and_the_like_go_on(tmp_path: Path, word: int) -> None:
    assert answers_of(GOES_ON, tmp_path, word) > 20


BUSY = OFFERS + textwrap.dedent(
    """
    asked = threading.Event()

    def ask():
        for question in range(20):
            os.kill(os.getpid(), number)
            while answers() <= question:  # a signal that comes before the last one is handled is lost
                asked.wait(0.001)
        asked.set()

    def down(n):
        return n + down(n - 1) if n else sum(i * i for i in range(50))

    threading.Thread(target=ask).start()
    total = rounds = 0
    while not asked.is_set():
        total += down(30)
        rounds += 1
    assert total == rounds * (465 + sum(i * i for i in range(50)))
    print(answers())
    """
)


def test_a_busy_loop_answers_twenty_questions(tmp_path: Path) -> None:
    assert answers_of(BUSY, tmp_path, RUNNING_WORD) == 20


LEAVES = OFFERS + "print(number, flush=True)"


@pytest.mark.parametrize("word", [STACKS_WORD, RUNNING_WORD, THREADS_WORD])
def test_a_process_that_is_asked_until_it_is_gone_ends_in_order(tmp_path: Path, word: int) -> None:
    """Also while its interpreter is being taken down."""
    command = [sys.executable, "-c", LEAVES, str(tmp_path), str(word)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env()) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        pause_s = 0.0002
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(pause_s)
            pause_s *= 1.001  # or a slow machine would do nothing but answer, for ever
    assert process.returncode == 0


def answers_of(program: str, folder: Path, word: int) -> int:
    """How often the program says that it answered."""
    command = [sys.executable, "-c", program, str(folder), str(word)]
    done = subprocess.run(command, capture_output=True, text=True, env=env())
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
