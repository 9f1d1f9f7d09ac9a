"""Sampling the DataLoader workers of a rank: only those that offer it, one at a time, and only what they work on.

``/proc`` and the signals are fakes here; ``tests/launch/test_slow_workers.py`` has real workers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.agent import stacks
from stepscope.agent.stacks import SamplingPace, WorkerSampler, waits_for_workers

RANK, FIRST, SECOND, THIRD = 100, 201, 202, 203
NUMBER, FD = signal.SIGRTMIN + 9, 17
TORCH = "/venv/lib/python3.11/site-packages/torch/utils/data"
GETITEM = ("/scripts/train.py", 40, "Data.__getitem__")
FETCH = (f"{TORCH}/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
LOOP = (f"{TORCH}/_utils/worker.py", 358, "_worker_loop")
INHERITED = [("/lib/multiprocessing/process.py", 108, "BaseProcess.run"), ("/scripts/train.py", 60, "<module>")]
AT_WORK = [GETITEM, FETCH, LOOP, *INHERITED]
IDLE = [("/lib/multiprocessing/queues.py", 113, "Queue.get"), LOOP, *INHERITED]
STARTING = [("/lib/random.py", 12, "seed"), *INHERITED]

Frames = list[tuple[str, int, str]]


def plain(frames: Frames) -> list[dict[str, Any]]:
    return [{"file": file, "line": line, "function": function} for file, line, function in frames]


def text(frames: Frames) -> str:
    lines = [f'  File "{file}", line {line} in {function}\n' for file, line, function in frames]
    return "Stack (most recent call first):\n" + "".join(lines)


WAITING: dict[str, Any] = {
    "pid": RANK,
    "wall_ns": 5,
    "step": 7,
    "phase": "input",
    "between": False,
    "frames": plain([(f"{TORCH}/dataloader.py", 1300, "_MultiProcessingDataLoaderIter._try_get_data"), *INHERITED]),
}
"""What the rank said."""


class Host:
    """A ``/proc`` with a rank and its children, who answer what ``answers`` has of them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.path = folder / "proc", folder / f"{RANK}.ring"
        self.written = folder / f"{RANK}.workers"
        self.written.touch()
        self.offer: tuple[int, int] | None = (NUMBER, FD)
        self.answers: dict[int, Frames] = {}
        self.sent: list[int] = []
        self.process(RANK, name="python", parent=1)

    def worker_offer(self) -> tuple[int, int] | None:
        return self.offer

    def process(
        self,
        pid: int,
        *,
        name: str = "pt_data_worker",
        parent: int = RANK,
        state: str = "S",
        caught: int = NUMBER,
        blocked: int = 0,
        pending: int = 0,
        file: Path | None = None,
        syscall: str = "7 0x1",
    ) -> None:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} " + "0 " * 40)
        (folder / "cmdline").write_bytes(b"python\0train.py\0" if name == "python" else name.encode())
        masks = {"SigPnd": 0, "ShdPnd": pending, "SigBlk": blocked, "SigCgt": caught}
        bits = {key: f"{1 << (number - 1):016x}" if number else "0" * 16 for key, number in masks.items()}
        (folder / "status").write_text("".join(f"{key}:\t{mask}\n" for key, mask in bits.items()))
        (folder / "syscall").write_text(syscall)
        (folder / "fd" / str(FD)).symlink_to(file or self.written)

    def send(self, pidfd: int, number: int) -> None:
        assert number == NUMBER
        pid = int(Path(f"/proc/self/fd/{pidfd}").readlink().name)
        self.sent.append(pid)
        if pid in self.answers:
            with self.written.open("a") as file:
                file.write(text(self.answers[pid]))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_processes_in: Callable[[Path], None]) -> Host:
    host = Host(tmp_path)
    (tmp_path / "pidfds").mkdir()

    def pidfd_open(pid: int) -> int:
        (tmp_path / "pidfds" / str(pid)).touch()
        return os.open(tmp_path / "pidfds" / str(pid), os.O_RDONLY)

    read_processes_in(host.proc)
    monkeypatch.setattr(os, "pidfd_open", pidfd_open, raising=False)
    monkeypatch.setattr(signal, "pidfd_send_signal", host.send, raising=False)
    return host


@pytest.fixture
def sampler(host: Host) -> WorkerSampler:
    return WorkerSampler(host, RANK, host.proc)  # type: ignore[arg-type]


def test_a_worker_at_work_is_recorded_in_place_of_the_wait_for_it(host: Host, sampler: WorkerSampler) -> None:
    host.process(FIRST)
    host.answers = {FIRST: AT_WORK}
    assert waits_for_workers(WAITING)
    assert sampler.request(WAITING) == {**WAITING, "worker": True, "frames": plain([GETITEM, FETCH])}
    assert not sampler.pending
    assert host.sent == [FIRST]


@pytest.mark.parametrize(
    ("change", "waits"),
    [({}, True), ({"phase": "eval"}, False), ({"frames": plain([GETITEM, FETCH, *INHERITED])}, False)],
)
def test_workers_matter_only_to_a_rank_that_waits_for_them(change: dict[str, Any], waits: bool) -> None:
    assert waits_for_workers({**WAITING, **change}) is waits


def test_workers_take_turns_and_idle_ones_are_passed_over(host: Host, sampler: WorkerSampler) -> None:
    for pid in (FIRST, SECOND, THIRD):
        host.process(pid)
    host.answers = {FIRST: AT_WORK, SECOND: IDLE, THIRD: AT_WORK}
    for _ in range(3):
        found = sampler.request(WAITING)
        assert found is not None
        assert found["worker"] is True
    assert host.sent == [FIRST, SECOND, THIRD, FIRST]


@pytest.mark.parametrize("frames", [IDLE, STARTING])
def test_where_no_worker_is_at_work_the_wait_stays(host: Host, sampler: WorkerSampler, frames: Frames) -> None:
    for pid in range(FIRST, FIRST + 8):
        host.process(pid)
    host.answers = dict.fromkeys(range(FIRST, FIRST + 8), frames)
    assert sampler.request(WAITING) == WAITING
    assert host.sent == [*range(FIRST, FIRST + stacks.WORKER_TRIES)]


def test_one_in_native_code_answers_later(host: Host, sampler: WorkerSampler) -> None:
    host.process(FIRST)
    assert sampler.request(WAITING) is None
    assert sampler.pending
    assert sampler.collect() is None
    host.written.write_text(text(AT_WORK))
    found = sampler.collect()
    assert found is not None
    assert found["frames"] == plain([GETITEM, FETCH])
    assert not sampler.pending


def test_one_that_never_answers_is_given_up(host: Host) -> None:
    sampler = WorkerSampler(host, RANK, host.proc, SamplingPace(worker_patience_s=0.0))  # type: ignore[arg-type]
    host.process(FIRST)
    assert sampler.request(WAITING) is None
    assert sampler.collect() == WAITING
    assert not sampler.pending


def test_the_last_of_two_answers_counts(host: Host, sampler: WorkerSampler) -> None:
    """The first worker answers when the second was asked already."""
    host.process(FIRST)
    assert sampler.request(WAITING) is None
    host.written.write_text(text(IDLE) + text(AT_WORK))
    found = sampler.collect()
    assert found is not None
    assert found["worker"] is True


UNSAFE: dict[str, Callable[[Host], None]] = {
    "it catches nothing": lambda host: host.process(FIRST, caught=0),
    "it catches another signal": lambda host: host.process(FIRST, caught=NUMBER + 1),
    "it blocks the signal": lambda host: host.process(FIRST, blocked=NUMBER),
    "one is pending": lambda host: host.process(FIRST, pending=NUMBER),
    "its descriptor is another file": lambda host: host.process(FIRST, file=host.proc / str(RANK) / "stat"),
    "its descriptor is closed": lambda host: host.process(FIRST, file=host.proc / "nothing"),
    "it is stopped": lambda host: host.process(FIRST, state="T"),
    "it is dead": lambda host: host.process(FIRST, state="Z"),
    "it is in a native sleep": lambda host: host.process(FIRST, syscall=f"{stacks.SLEEPS['x86_64'][0]} 0x1 0x0"),
    "it is another program": lambda host: host.process(FIRST, name="ffmpeg"),
    "it is a grandchild": lambda host: (host.process(150, name="ffmpeg"), host.process(FIRST, parent=150))[0],
    "the rank itself": lambda host: None,
}


@pytest.mark.parametrize("unsafe", UNSAFE.values(), ids=UNSAFE)
def test_a_process_that_could_not_answer_is_never_signaled(
    host: Host, sampler: WorkerSampler, monkeypatch: pytest.MonkeyPatch, unsafe: Callable[[Host], None]
) -> None:
    monkeypatch.setattr(stacks.platform, "machine", lambda: "x86_64")
    unsafe(host)
    assert sampler.request(WAITING) == WAITING
    assert host.sent == []


@pytest.mark.parametrize("offer", [None, (signal.SIGTERM, FD), (0, FD)])
def test_nor_without_a_valid_offer(host: Host, sampler: WorkerSampler, offer: tuple[int, int] | None) -> None:
    host.process(FIRST, caught=signal.SIGTERM)
    host.offer = offer
    assert sampler.request(WAITING) == WAITING
    assert host.sent == []


def test_nor_one_that_ended_meanwhile(host: Host, sampler: WorkerSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> int:
        raise ProcessLookupError(pid)

    host.process(FIRST)
    monkeypatch.setattr(os, "pidfd_open", gone)
    assert sampler.request(WAITING) == WAITING
    assert host.sent == []
