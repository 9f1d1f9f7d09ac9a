"""Asking a process for its stack: only one that listens, only in phases that matter, only within one stretch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.agent import stacks
from stepscope.agent.stacks import (
    CHANGE_QUESTIONS,
    MAX_QUESTIONS,
    ROUND,
    STRETCH_NS,
    SamplingPace,
    StackSampler,
    parse_stack,
    sleeps_in_native_code,
)
from stepscope.records.steps import (
    BACKWARD,
    BUILTIN_PHASES,
    CHECKPOINT,
    COMM,
    EVAL,
    FIRST_USER_SLOT,
    FORWARD,
    H2D,
    INPUT,
    OPTIMIZER,
    OTHER,
    PHASE_SLOTS,
)
from stepscope.ring import RingReader
from stepscope.ring.reader import LivePhase

NUMBER = signal.SIGRTMIN + 12
ASKED = NUMBER - 1
"""Of those that are offered, the one that a handler in Python answers."""

CHILD = textwrap.dedent(
    """
    import ctypes, os, platform, select, signal, sys, threading, time
    from pathlib import Path
    from stepscope.recorder.stacks import StackOffer
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingState
    from stepscope.ring.layout import RUNNING_WORD
    from rings import RingStream
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    stream = RingStream(folder / f"{os.getpid()}.ring", RankIdentity(host="node", pid=os.getpid()))
    stream.ring.set_state(RingState.RUNNING)
    path = folder / f"{os.getpid()}.stacks"
    offer, heard = StackOffer(), []

    def wait_for_word():
        select.select([sys.stdin], [], [])
        return sys.stdin.readline().strip()

    def wait_in_native_code():
        print(0, flush=True)
        os.open(folder / "fifo", os.O_RDONLY)  # until somebody writes: the kernel takes it up again by itself

    def train_on_a_thread():
        offer.open(stream.ring)
        trains.set()
        threading.Event().wait()

    def spin():
        print(0, flush=True)
        while not (folder / "enough").exists():
            sorted(range(200), key=lambda number: -number)

    print("ready", flush=True)
    while word := wait_for_word():
        if word == "offer":
            offer.open(stream.ring)
        elif word == "train elsewhere":
            trains = threading.Event()
            threading.Thread(target=train_on_a_thread, daemon=True).start()
            trains.wait()
        elif word == "pretend":  # announce a signal that nothing catches
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            stream.ring.header[RUNNING_WORD] = number | fd << 8
        elif word == "catch":
            signal.signal(number, lambda *_: heard.append(1))
        elif word == "block":
            signal.pthread_sigmask(signal.SIG_BLOCK, [number, number - 1])
        elif word == "unblock":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number, number - 1])
        elif word == "other file":
            os.dup2(os.open(folder / "other", os.O_WRONLY | os.O_CREAT), stream.ring.header[RUNNING_WORD] >> 8)
        elif word.startswith("enter"):
            stream.clock.advance(1)
            stream.ledger.enter(int(word.split()[1]))
        elif word.startswith("steps"):
            for step in range(8):
                stream.clock.advance(100_000_000)
                stream.ledger.enter(int(word.split()[1]))
                stream.clock.advance(100_000_000)
                stream.ledger.leave(0)
                stream.ledger.end_step(0, step, 0)
        elif word == "open":
            wait_in_native_code()
            stream.clock.advance(time.perf_counter_ns())
            stream.ledger.enter(3)
        elif word == "spin":
            spin()
        elif word == "step":
            stream.clock.advance(1)
            stream.ledger.end_step(0, 6, 0)
        elif word == "sleep in C":
            print(len(heard), flush=True)
            ctypes.CDLL(None).sleep(600)
        elif word == "state":
            stream.ring.set_state(RingState.EXITED)
        print(len(heard), flush=True)
    """
)


class Child:
    """A process with a ring that has been in ``other`` since its clock stopped, long ago."""

    def __init__(self, folder: Path, script: Path | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        program = ("-c", CHILD) if script is None else (str(script),)
        command = [sys.executable, *program, str(folder), str(int(NUMBER))]
        self.process: subprocess.Popen[str] = subprocess.Popen(command, env=environment, **pipes)
        self._hear()
        self.pid = self.process.pid
        self.reader = RingReader(folder / f"{self.pid}.ring")
        self.pidfd = os.pidfd_open(self.pid)

    def say(self, *words: str) -> int:
        """How often a handler of its own was called so far."""
        assert self.process.stdin is not None
        heard = 0
        for word in words:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            heard = int(self._hear())
            stat = Path(f"/proc/{self.pid}/stat")
            while word != "spin" and stat.read_text().rpartition(")")[2].split()[0] != "S":
                time.sleep(0.001)  # until it waits for the next word
        return heard

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def sampler(self, *, sampled: int = 0, **pace: float) -> StackSampler:
        return StackSampler(self.reader, self.pid, sampled=sampled, pace=SamplingPace(**pace))

    def take_sample(self) -> dict[str, Any] | None:
        """By somebody who has not looked before."""
        return self.sampler().sample(self.pidfd)

    def stack(self, sampler: StackSampler | None = None) -> dict[str, Any]:
        sampler = sampler or self.sampler()
        return sample_until(sampler, self.pidfd, lambda found: found is not None)

    def close(self) -> int:
        self.process.communicate()
        self.reader.close()
        os.close(self.pidfd)
        return self.process.returncode


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child(tmp_path)
    yield child
    assert child.close() == 0, "the process did not survive"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that were sent; they are."""
    numbers: list[int] = []
    original = signal.pidfd_send_signal

    def send(pidfd: int, number: int) -> None:
        numbers.append(number)
        original(pidfd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    return numbers


def sample_until(sampler: StackSampler, pidfd: int, done: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 30
    while not done(found := sampler.sample(pidfd)):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def functions(stack: dict[str, Any]) -> list[str]:
    return [frame["function"] for frame in stack["frames"]]


def line_of(code: str) -> int:
    return next(number for number, text in enumerate(CHILD.splitlines(), 1) if code in text)


def test_the_stack_of_a_process_that_offers_it(child: Child, sent: list[int]) -> None:
    child.say("offer", "step")
    sampler = child.sampler()
    stack = child.stack(sampler)
    assert (stack["pid"], stack["step"], stack["phase"]) == (child.pid, 7, "other")
    assert functions(stack) == ["wait_for_word", "<module>"]
    assert [frame["file"] for frame in stack["frames"]] == ["<string>", "<string>"]
    assert stack["frames"][0]["line"] == line_of("select.select")
    assert sampler.sample(child.pidfd) is None  # not again so soon
    assert sent == [ASKED]


def test_one_that_runs_is_asked_where_its_interpreter_lets_it_answer(
    child: Child, sent: list[int], tmp_path: Path
) -> None:
    """faulthandler's handler ended such a process after some hundred questions; also one that had just waited."""
    child.say("offer", "step", "spin")
    sampler = child.sampler(pause_s=0.0, first_pause_s=0.0)
    found = [functions(child.stack(sampler)) for _ in range(MAX_QUESTIONS // 4)]
    (tmp_path / "enough").touch()
    assert {names[-1] for names in found} == {"<module>"}
    assert all("spin" in names for names in found)
    assert set(sent) == {ASKED}


@pytest.mark.parametrize(
    "words",
    [
        ["pretend"],  # nothing catches the signal, which would end the process
        ["offer", "block"],  # another thread would get it, and show where that one is
        ["offer", "other file"],  # its descriptor is another file by now
        ["offer", "state"],  # it says that it is over
    ],
)
def test_nobody_is_asked_who_cannot_answer(child: Child, sent: list[int], tmp_path: Path, words: list[str]) -> None:
    assert child.take_sample() is None  # without an offer
    child.say(*words)
    assert child.take_sample() is None
    assert child.sampler().sample(None) is None  # without a pidfd
    assert sent == []
    assert words[-1] != "other file" or (tmp_path / "other").read_bytes() == b""


def test_nor_by_a_signal_that_a_damaged_header_names(child: Child, sent: list[int]) -> None:
    child.say("offer")
    for word in (9, 15 | 5 << 8, 200 | 5 << 8, (1 << 64) - 1):
        with child.reader.path.open("r+b") as file:
            file.seek(96)
            file.write(word.to_bytes(8, "little"))
        assert child.take_sample() is None
    assert sent == []


def test_nor_in_a_phase_that_is_not_known_to_take_long_or_waits_for_peers(child: Child, sent: list[int]) -> None:
    child.say("offer")
    for phase in (INPUT, FORWARD, BACKWARD, OPTIMIZER, H2D, COMM, FIRST_USER_SLOT):
        child.say(f"enter {phase}")
        assert child.take_sample() is None
    for phase in (H2D, COMM, FIRST_USER_SLOT):
        child.say(f"steps {phase}", f"enter {phase}")
        assert child.take_sample() is None
    assert sent == []


@pytest.mark.parametrize("phase", [INPUT, FORWARD, BACKWARD, OPTIMIZER])
def test_in_a_phase_that_takes_a_good_part_of_the_steps(child: Child, sent: list[int], phase: int) -> None:
    child.say("offer", f"steps {phase}", f"enter {phase}")
    stack = child.stack()
    assert (stack["phase"], stack["step"]) == (BUILTIN_PHASES[phase], 8)
    assert functions(stack)[0] == "wait_for_word"
    assert sent == [ASKED]


def test_a_phase_that_was_found_by_seeking_is_not_always_sampled_at_its_start(child: Child, sent: list[int]) -> None:
    """It takes 100 ms per step; the question comes at 0.618 of that, and in the first half if that was missed."""
    now_ns = [0]
    sampler = StackSampler(child.reader, child.pid, now_ns=lambda: now_ns[0])
    child.say("offer", f"steps {FORWARD}", f"enter {COMM}")
    assert sampler.sample(child.pidfd) is None  # due, and not in that phase
    for wait_ms in (61.8, 11.8):
        child.say(f"enter {COMM}", f"enter {FORWARD}")
        begin_ns = child.reader.live().since_ns
        now_ns[0] = begin_ns + int((wait_ms - 0.1) * 1e6)
        assert sampler.sample(child.pidfd) is None
        assert sampler.seeks
    assert sent == []
    now_ns[0] = begin_ns + int((wait_ms + 0.1) * 1e6)
    assert child.stack(sampler)["phase"] == "forward"
    assert sent == [ASKED]


def test_in_a_long_evaluation_or_checkpoint(child: Child, sent: list[int]) -> None:
    child.say("offer")
    for phase in (EVAL, CHECKPOINT):
        child.say(f"enter {phase}")
        assert child.stack()["phase"] == BUILTIN_PHASES[phase]
    assert sent == [ASKED] * 2


def test_not_in_a_short_stretch(child: Child, sent: list[int]) -> None:
    child.say("offer")
    since_ns = child.reader.live().since_ns
    early, late = (
        StackSampler(child.reader, child.pid, now_ns=lambda lasts=lasts: since_ns + lasts)
        for lasts in (STRETCH_NS - 1, STRETCH_NS)
    )
    assert early.sample(child.pidfd) is None
    assert sent == []
    assert child.stack(late)
    assert sent == [ASKED]


def test_not_in_a_sleep_of_native_code_which_the_signal_would_end(child: Child, sent: list[int]) -> None:
    process = Path(f"/proc/{child.pid}")
    if not (process / "syscall").exists():
        pytest.skip("this kernel does not tell")
    assert not sleeps_in_native_code(process)
    child.say("offer", "sleep in C")
    deadline = time.monotonic() + 30
    while not sleeps_in_native_code(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert child.take_sample() is None
    assert sent == []
    signal.pidfd_send_signal(child.pidfd, NUMBER)  # which ends it
    assert child.process.stdout is not None
    child.process.stdout.readline()


def test_what_was_written_in_another_stretch_is_dropped(child: Child, sent: list[int]) -> None:
    child.say("offer")
    sampler = child.sampler(brief_polls=0)
    assert sampler.sample(child.pidfd) is None
    child.say("enter 3")
    assert sample_until(sampler, child.pidfd, lambda _: not sampler.pending) is None
    assert sent == [ASKED]


def test_a_stack_inside_our_own_hooks_is_dropped(tmp_path: Path, sent: list[int]) -> None:
    script = tmp_path / "stepscope" / "recorder" / "child.py"  # as if the child's code were the recorder's
    script.parent.mkdir(parents=True)
    script.write_text(CHILD)
    child = Child(tmp_path, script)
    child.say("offer")
    sampler = child.sampler()
    assert sample_until(sampler, child.pidfd, lambda _: sent and not sampler.pending) is None
    assert sent == [ASKED]
    assert child.close() == 0


def test_a_late_answer_counts_while_the_stretch_lasts(child: Child, sent: list[int]) -> None:
    child.say("offer")
    assert functions(child.stack(child.sampler(brief_polls=0)))[0] == "wait_for_word"
    assert sent == [ASKED]


def test_who_waits_in_native_code_answers_when_it_comes_back(child: Child, sent: list[int], tmp_path: Path) -> None:
    """… at the line of that call, and that counts although another phase has begun by the time it is read."""
    os.mkfifo(tmp_path / "fifo")
    child.say("offer", "step", "open")
    sampler = child.sampler(patience_s=0.0)
    assert [sampler.sample(child.pidfd) for _ in range(5)] == [None] * 5
    assert sent == [ASKED]
    with (tmp_path / "fifo").open("wb"):
        child._hear()
    stack = child.stack(sampler)
    assert child.reader.live().phase == 3
    assert (stack["step"], stack["phase"]) == (7, "other")
    assert functions(stack) == ["wait_in_native_code", "<module>"]
    assert stack["frames"][0]["line"] == line_of("os.O_RDONLY")
    assert sent == [ASKED]


def test_the_stack_of_another_thread_that_trains(child: Child, sent: list[int]) -> None:
    child.say("offer", "step", "train elsewhere")
    stack = child.stack()
    assert "train_on_a_thread" in functions(stack)
    assert "wait_for_word" not in functions(stack)
    assert (stack["step"], stack["phase"]) == (7, "other")
    assert sent == [ASKED]


@pytest.mark.parametrize("phase", [INPUT, COMM])
def test_the_stack_of_another_thread_is_of_the_phase_in_which_it_was_read(
    child: Child, sent: list[int], phase: int
) -> None:
    """The main thread may get to it when another phase has begun there."""
    child.say("offer", "step", "train elsewhere")
    sampler = child.sampler(brief_polls=0)
    assert sampler.sample(child.pidfd) is None
    assert sampler.seeks
    child.say(f"enter {phase}")  # by its clock, long before the stack was read
    found = sample_until(sampler, child.pidfd, lambda _: not sampler.pending)
    assert (found and (found["phase"], found["step"], found["between"])) == (
        ("input", 7, False) if phase == INPUT else None
    )
    assert sampler._sampled == ({INPUT: 1, OTHER: 0} if phase == INPUT else {OTHER: 1})
    assert sent == [ASKED]


def test_a_long_stop_is_questions_about_at_once(child: Child, sent: list[int]) -> None:
    """An evaluation of half a second, every hundredth step, would seldom be met by a question every two seconds."""
    child.say("offer", "step")
    sampler = child.sampler(pause_s=1000.0, first_pause_s=1000.0)
    for phase in (OTHER, EVAL, CHECKPOINT):
        child.say(f"enter {phase}")
        assert child.stack(sampler)["phase"] == BUILTIN_PHASES[phase]
    assert sent == [ASKED] * 3
    for phase in (EVAL, 3):  # again in the same step, and in one that is not a stop
        child.say(f"enter {phase}")
        assert [sampler.sample(child.pidfd) for _ in range(3)] == [None] * 3
    assert sent == [ASKED] * 3


def test_only_the_first_long_stops_are_questions_about_at_once() -> None:
    sampler = sampler_of(Ring({}))
    asked = []
    for step in range(100):
        live = LivePhase(phase=EVAL, since_ns=1, step=step)
        if sampler._stops_long(live):
            sampler._stops[EVAL].add(step)
            asked.append(step)
    assert asked == list(range(1, 1 + stacks.AT_ONCE))
    assert sampler._stops_long(LivePhase(phase=CHECKPOINT, since_ns=1, step=5))
    assert not sampler._stops_long(LivePhase(phase=CHECKPOINT, since_ns=time.perf_counter_ns(), step=5))
    assert not sampler._stops_long(LivePhase(phase=FORWARD, since_ns=1, step=5))


def test_only_so_often(child: Child, sent: list[int]) -> None:
    child.say("offer")
    sampler = child.sampler(sampled=MAX_QUESTIONS - CHANGE_QUESTIONS - 3, pause_s=0.0)
    for _ in range(3):
        child.stack(sampler)
    assert [sampler.sample(child.pidfd) for _ in range(3)] == [None] * 3
    assert len(sent) == 3
    assert (child.reader.path.with_suffix(".stacks")).stat().st_size < 1000


def test_who_does_not_answer_is_not_asked_again(child: Child, sent: list[int]) -> None:
    """A handler that somebody put there past us: it hears one signal and no more."""
    child.say("pretend", "catch")
    sampler = child.sampler(pause_s=0.0, patience_s=0.05)
    assert sampler.sample(child.pidfd) is None
    child.say("enter 3")
    sample_until(sampler, child.pidfd, lambda _: not sampler.pending)
    child.say(f"enter {OTHER}")
    assert [sampler.sample(child.pidfd) for _ in range(3)] == [None] * 3
    assert sent == [NUMBER]
    assert child.say("how often?") == 1


def test_who_cannot_answer_yet_is_waited_for(child: Child, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    child.say("offer")
    sampler = child.sampler(pause_s=0.0, patience_s=0.0, brief_polls=0)
    send = signal.pidfd_send_signal

    def send_to_one_that_blocks_it(pidfd: int, number: int) -> None:
        child.say("block")
        send(pidfd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", send_to_one_that_blocks_it)
    assert [sampler.sample(child.pidfd) for _ in range(5)] == [None] * 5
    assert sent == [ASKED]
    child.say("enter 3")
    assert [sampler.sample(child.pidfd) for _ in range(5)] == [None] * 5
    child.say("unblock")
    monkeypatch.undo()
    sample_until(sampler, child.pidfd, lambda _: not sampler.pending)
    child.say(f"enter {OTHER}")
    assert child.stack(sampler)["frames"]


def test_a_process_that_is_gone_is_none(tmp_path: Path, sent: list[int]) -> None:
    child = Child(tmp_path)
    child.say("offer")
    child.process.communicate()
    assert child.take_sample() is None
    assert sent == []
    child.close()


# -- which phase is asked about --------------------------------------------------------------------------------------


class Ring:
    """A rank that is in one phase after the other; whoever asks is answered at once."""

    path = Path("none.ring")

    def __init__(self, shares: dict[int, float]) -> None:
        self.shares = shares
        self.took_ms: dict[int, float] = {}
        self.phase = OTHER

    def live(self) -> LivePhase:
        stops = self.phase in (OTHER, EVAL, CHECKPOINT)  # which began a moment ago, other phases long ago
        return LivePhase(phase=self.phase, since_ns=10**18 if stops else 1, step=5)

    def recent_shares(self) -> tuple[float, ...]:
        return tuple(self.shares.get(phase, 0.0) for phase in range(PHASE_SLOTS))

    def latest_phase_ns(self) -> tuple[float, ...]:
        return tuple(self.took_ms.get(phase, 0.0) * 1e6 for phase in range(PHASE_SLOTS)) if self.took_ms else ()


def questions_about(sampler: StackSampler, ring: Ring, order: Sequence[int], rounds: int) -> Counter[int]:
    """By phase, while the rank goes through them again and again."""
    found: Counter[int] = Counter()
    for phase in order * rounds:
        ring.phase = phase
        if sampler._left > 0 and sampler._is_worth_it(ring.live()):
            sampler._note_question(phase)
            sampler._pause()
            found[phase] += 1
    return found


def sampler_of(ring: Ring) -> StackSampler:
    return StackSampler(cast(RingReader, ring), 1)


def test_every_phase_with_a_good_part_of_the_steps_gets_its_questions() -> None:
    ring = Ring({INPUT: 0.05, FORWARD: 0.5, BACKWARD: 0.4, OPTIMIZER: 0.03, COMM: 0.4, EVAL: 0.02})
    found = questions_about(sampler_of(ring), ring, [INPUT, FORWARD, COMM, BACKWARD, OPTIMIZER, EVAL], 100)
    assert found == {INPUT: ROUND, FORWARD: ROUND, BACKWARD: ROUND, OPTIMIZER: ROUND}


def test_what_takes_most_of_the_time_is_questions_about_first() -> None:
    """A slow collate function must have its line in a run that lasts a few seconds."""
    ring = Ring({INPUT: 0.7, FORWARD: 0.1, BACKWARD: 0.1, OPTIMIZER: 0.1})
    found = questions_about(sampler_of(ring), ring, [INPUT, FORWARD, BACKWARD, OPTIMIZER], 3)
    assert found == {INPUT: 3, FORWARD: 1, BACKWARD: 1, OPTIMIZER: 1}


def test_what_takes_most_of_the_time_does_not_wait_for_what_is_seldom_met() -> None:
    ring = Ring({INPUT: 0.75, BACKWARD: 0.05, OTHER: 0.03})
    assert questions_about(sampler_of(ring), ring, [INPUT], 5) == {INPUT: 5}


def test_what_was_sought_in_vain_before_the_steps_is_not_kept_waiting() -> None:
    """Input was all that had been seen while a slow start went on."""
    ring = Ring({INPUT: 1.0})
    sampler = sampler_of(ring)
    assert questions_about(sampler, ring, [COMM], 1000) == {}
    ring.shares = {INPUT: 0.7, OPTIMIZER: 0.3}
    assert questions_about(sampler, ring, [OPTIMIZER, INPUT], 5) == {INPUT: 5, OPTIMIZER: 3}


def test_what_every_step_has_leaves_questions_for_what_comes_later() -> None:
    ring = Ring({INPUT: 0.2, FORWARD: 0.4, BACKWARD: 0.4})
    sampler = sampler_of(ring)
    questions_about(sampler, ring, [INPUT, FORWARD, BACKWARD], 100)
    ring.shares = {INPUT: 0.1, FORWARD: 0.2, BACKWARD: 0.2, OTHER: 0.5}
    found = questions_about(sampler, ring, [OTHER, INPUT, FORWARD, BACKWARD], 100)
    assert found == {OTHER: MAX_QUESTIONS - 3 * ROUND - CHANGE_QUESTIONS}


def test_a_phase_that_takes_notably_more_than_before_is_questions_about_again() -> None:
    ring = Ring({FORWARD: 0.2})
    sampler = sampler_of(ring)
    assert questions_about(sampler, ring, [FORWARD], 100) == {FORWARD: ROUND}
    ring.shares = {FORWARD: 0.25}
    assert questions_about(sampler, ring, [FORWARD], 100) == {}
    ring.shares = {FORWARD: 0.5}
    assert questions_about(sampler, ring, [FORWARD], 100) == {FORWARD: ROUND}


def test_a_phase_that_becomes_longer_per_step_has_questions_left_for_it() -> None:
    """Forward took most of the time before, too, and all other questions were used up long ago."""
    ring = Ring({FORWARD: 0.7, OTHER: 0.3})
    ring.took_ms = {FORWARD: 20.0, OTHER: 8.0}
    sampler = sampler_of(ring)
    order = [FORWARD, OTHER]
    assert questions_about(sampler, ring, order, 1000).total() == MAX_QUESTIONS - CHANGE_QUESTIONS
    ring.took_ms = {FORWARD: 29.0, OTHER: 8.0}  # less than half more
    assert questions_about(sampler, ring, order, 100) == {}
    ring.took_ms = {FORWARD: 20.0, OTHER: 8.0, OPTIMIZER: 1.0}  # not worth it
    assert questions_about(sampler, ring, order, 100) == {}
    ring.took_ms = {FORWARD: 80.0, OTHER: 8.0}
    assert questions_about(sampler, ring, order, 100) == {FORWARD: ROUND}
    ring.took_ms = {FORWARD: 20.0, OTHER: 8.0}  # as before: nothing to learn
    assert questions_about(sampler, ring, order, 100) == {}
    ring.took_ms = {FORWARD: 20.0, OTHER: 60.0}
    assert questions_about(sampler, ring, order, 100) == {OTHER: ROUND}
    ring.took_ms = {FORWARD: 200.0, OTHER: 60.0}
    assert questions_about(sampler, ring, order, 100) == {}  # that was all


def test_a_single_look_at_longer_steps_is_not_a_change() -> None:
    ring = Ring({FORWARD: 0.9})
    ring.took_ms = {FORWARD: 20.0}
    sampler = sampler_of(ring)
    questions_about(sampler, ring, [FORWARD], 100)
    for _ in range(10):
        for took_ms in (80.0, 20.0):
            ring.took_ms = {FORWARD: took_ms}
            assert questions_about(sampler, ring, [FORWARD], 1) == {}


def test_a_phase_that_is_never_met_does_not_hold_the_others_up() -> None:
    ring = Ring({OTHER: 0.03, FORWARD: 0.5})
    assert questions_about(sampler_of(ring), ring, [FORWARD], 1000) == {FORWARD: ROUND}


# -- what faulthandler writes -----------------------------------------------------------------------------------------

HEAD = "Stack (most recent call first):\n"


def test_every_frame_is_read() -> None:
    text = HEAD + '  File "/a b/tr\\xe4in \\u2713.py", line 12 in write_report\n  File "<string>", line 3 in <module>\n'
    assert parse_stack(text) == [
        {"file": "/a b/träin ✓.py", "line": 12, "function": "write_report"},
        {"file": "<string>", "line": 3, "function": "<module>"},
    ]


def test_a_very_deep_stack_is_cut_and_a_line_may_be_unknown() -> None:
    text = HEAD + '  File "a", line ??? in f\n  ...\n'
    assert parse_stack(text) == [{"file": "a", "line": 0, "function": "f"}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        HEAD.strip(),
        HEAD + "  ...\n",
        HEAD + '  File "a", line 1 in f',
        '  File "a", line 1 in f\n',
        HEAD + '  File "a", line 1 in f\nhello\n',
        HEAD + "  <no Python frame>\n",
        HEAD + '  File "a", line -1 in f\n',
        HEAD + '  File "a", line 99999999999 in f\n',
        HEAD + '  File "a", line 1 in f\n' + HEAD + '  File "a", line 1 in f\n',
        HEAD + '  ...\n  File "a", line 1 in f\n',
        "Current thread 0x0001 (most recent call first):\n" + '  File "a", line 1 in f\n',
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_stack(text) == []


PIECES = (HEAD, '  File "', '", line ', "12", " in ", "f", "\n", "\\x", "\\U0010ffff", "  ...\n", "???")


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join))
def test_fuzz_parser(text: str) -> None:
    for frame in parse_stack(text) + parse_stack(HEAD + text) + parse_stack(HEAD + text + "\n"):
        assert set(frame) == {"file", "line", "function"}
        assert 0 <= frame["line"] < 10**9
        assert "\n" not in frame["file"] + frame["function"]


@given(st.binary())
def test_fuzz_bytes(data: bytes) -> None:
    assert parse_stack(data.decode(errors="replace")) == []
