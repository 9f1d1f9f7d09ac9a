"""Host samples: waiting tasks and the job's own CPU, from a ``/proc`` of our making and from the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clock import FakeClockInSeconds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.agent.sampling.host import TICKS_PER_S, BusyProcesses, HostSampler, JobCpu, Pressure
from stepscope.agent.sampling.off_cpu import run_delay_ns
from stepscope.records.paths import helper_command, log_of_rank


class FakeProc:
    """A folder like ``/proc``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "pressure").mkdir(parents=True)

    def pressure(self, resource: str, total_us: int) -> None:
        text = f"some avg10=0.00 avg60=1.00 avg300=2.00 total={total_us}\nfull avg10=0.00 avg60=0.00 total=999999\n"
        (self.path / "pressure" / resource).write_text(text)

    def running(self, count: int) -> None:
        (self.path / "stat").write_text(f"cpu  1 2 3\nintr 7\nprocesses 8\nprocs_running {count}\nprocs_blocked 3\n")

    def process(self, pid: int, parent: int, ticks: int = 0, name: str = "python") -> None:
        (self.path / str(pid)).mkdir(exist_ok=True)
        fields = [f"{pid} ({name}) S {parent}", *["0"] * 9, str(ticks - ticks // 3), str(ticks // 3), *["0"] * 30]
        (self.path / str(pid) / "stat").write_text(" ".join(fields))

    def end(self, pid: int) -> None:
        (self.path / str(pid) / "stat").unlink()
        (self.path / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


def second(clock: FakeClockInSeconds, seconds: float = 1.0) -> None:
    clock.advance(int(seconds * 1e9))


def test_pressure_is_the_share_of_the_time_since(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    for resource in ("cpu", "io", "memory"):
        proc.pressure(resource, 10_000_000)
    proc.running(4)
    pressure = Pressure(proc.path, clock)
    proc.pressure("cpu", 10_250_000)
    proc.pressure("io", 14_000_000)
    second(clock, 2.0)
    proc.running(7)
    sample = {"cpu_pressure": 0.125, "io_pressure": 1.0, "memory_pressure": 0.0, "procs_running": 7}
    assert pressure.sample() == sample


def test_what_the_kernel_does_not_tell_is_left_out(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    proc.pressure("cpu", 5)
    (proc.path / "pressure" / "io").write_text("some avg10=0.00 total=\n")
    pressure = Pressure(proc.path, clock)
    second(clock)
    assert pressure.sample() == {"cpu_pressure": 0.0}
    (proc.path / "pressure" / "cpu").unlink()
    second(clock)
    assert pressure.sample() == {}
    proc.pressure("cpu", 900_000)  # it is back: what passed meanwhile is not of this second
    second(clock)
    assert pressure.sample() == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.text())
def test_fuzz_pressure(tmp_path: Path, some: str, stat: str) -> None:
    proc = tmp_path / "fuzz"
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    (proc / "pressure" / "cpu").write_text("some " + some, errors="replace")
    (proc / "stat").write_text("cpu\nprocs_running " + stat, errors="replace")
    Pressure(proc).sample()


def test_the_job_is_its_ranks_and_all_they_started(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    proc.process(1, 0, 50)
    proc.process(10, 1, 1000, name="a) S 1 (b")
    proc.process(11, 10, 100)
    proc.process(12, 11, 100)
    proc.process(20, 1, 100)
    job = JobCpu(4, proc.path, clock)
    assert job.percent([10]) is None
    for pid, parent, ticks in ((10, 1, 1060), (11, 10, 120), (12, 11, 120), (20, 1, 9999)):
        proc.process(pid, parent, ticks)
    second(clock)
    assert job.percent([10]) == round(100 * 100 / TICKS_PER_S / 4, 1)


def test_children_come_and_go(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    proc.process(10, 1)
    job = JobCpu(1, proc.path, clock)
    job.percent([10])
    second(clock)
    proc.process(30, 10, 40)
    assert job.percent([10]) == round(100 * 40 / TICKS_PER_S, 1)
    second(clock)
    proc.process(30, 10, 50)
    assert job.percent([10]) == round(100 * 10 / TICKS_PER_S, 1)
    proc.end(30)
    second(clock)
    assert job.percent([10]) == 0.0


def test_a_child_that_was_there_before_its_rank_was_known(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    """DataLoader workers may be older than the ring; what they used before counts for nobody."""
    proc.process(10, 1, 500)
    proc.process(40, 1, 500)
    proc.process(41, 40, 500)
    job = JobCpu(1, proc.path, clock)
    job.percent([10])
    second(clock)
    assert job.percent([10, 40]) == 0.0
    proc.process(41, 40, 530)
    second(clock)
    assert job.percent([10, 40]) == round(100 * 30 / TICKS_PER_S, 1)


def test_a_child_whose_parent_ended_is_still_the_jobs(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    proc.process(10, 1)
    proc.process(11, 10)
    proc.process(12, 11)
    job = JobCpu(1, proc.path, clock)
    job.percent([10])
    proc.end(11)
    proc.process(12, 1, 20)
    second(clock)
    assert job.percent([10]) == round(100 * 20 / TICKS_PER_S, 1)


def test_no_proc_no_figure(tmp_path: Path, clock: FakeClockInSeconds) -> None:
    job = JobCpu(1, tmp_path / "none", clock)
    assert job.percent([10]) is None
    second(clock)
    assert job.percent([10]) is None


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that sleeps while its child works."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True)\\nwhile True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    os.killpg(process.pid, 9)
    process.communicate()


def test_a_real_child_counts(busy: int, tmp_path: Path) -> None:
    watched = [(busy, 0, tmp_path / "no.log")]
    sampler = HostSampler("node")
    sampler.watch(busy)
    sampler.sample(watched)
    seen = 0.0
    while not seen:  # its child gets a tick of CPU sooner or later
        seen = sampler.sample(watched)[0].get("own_cpu_percent", 0.0)
    assert 0 < seen <= 100
    assert sampler.sample(watched)[0]["procs_running"] >= 1


def test_the_length_of_a_rank_s_log_is_noted(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    sampler = HostSampler("node")
    sampler.watch(os.getpid())
    assert "log_bytes" not in sampler.sample([(os.getpid(), 0, log)])[1]
    log.write_bytes(b"")
    assert sampler.sample([(os.getpid(), 0, log)])[1]["log_bytes"] == 0
    log.write_bytes("früh\n".encode())
    assert sampler.sample([(os.getpid(), 0, log)])[1]["log_bytes"] == 6


@pytest.mark.parametrize(
    ("rank", "attempt", "there", "found"),
    [
        (0, 0, ("main.log", "rank-0.log"), "rank-0.log"),
        (0, 0, ("main.log",), "main.log"),
        (0, 2, ("main.attempt-2.log", "rank-0.log"), "main.attempt-2.log"),
        (1, 0, ("main.log",), "rank-1.log"),
        (0, 0, (), "rank-0.log"),
    ],
)
def test_where_the_output_of_a_rank_is(
    tmp_path: Path, rank: int, attempt: int, there: tuple[str, ...], found: str
) -> None:
    (tmp_path / "logs").mkdir()
    for name in there:
        (tmp_path / "logs" / name).touch()
    assert log_of_rank(tmp_path, rank=rank, attempt=attempt) == tmp_path / "logs" / found


FULL = {"cpu_percent": 99.0}


def test_on_a_full_machine_the_busiest_processes_outside_the_job_are_named(
    proc: FakeProc, clock: FakeClockInSeconds
) -> None:
    busy = BusyProcesses(proc.path, clock)
    for pid in range(10, 17):
        proc.process(pid, 1, ticks=1000)
    (proc.path / "11" / "cmdline").write_bytes(b"/usr/bin/python\0burn.py\0--api-token\0hunter2\0")
    (proc.path / "12" / "cmdline").write_bytes(b"")
    (proc.path / "12" / "comm").write_text("kswapd0\n")
    helper = helper_command("stepscope.hub", "--port", "7070", python="python")
    (proc.path / "14" / "cmdline").write_bytes("\0".join(helper).encode() + b"\0")
    assert busy.sample(FULL, range(10, 17)) == {}
    second(clock, 2.0)
    proc.process(11, 1, ticks=1000 + 2 * TICKS_PER_S)
    proc.process(12, 1, ticks=1000 + TICKS_PER_S)
    proc.process(13, 1, ticks=1000 + TICKS_PER_S // 50)
    proc.process(14, 1, ticks=1000 + TICKS_PER_S // 2)
    named = ["11 100.0 /usr/bin/python burn.py --api-token [redacted]", "12 50.0 [kswapd0]"]
    named += ["14 25.0 python -m stepscope.hub --port 7070"]
    assert busy.sample(FULL, range(10, 17)) == {"busy_processes": named}


def test_a_machine_with_room_is_not_searched(proc: FakeProc, clock: FakeClockInSeconds) -> None:
    busy = BusyProcesses(proc.path, clock)
    proc.process(11, 1, ticks=0)
    assert busy.sample({"cpu_percent": 40.0, "cpu_pressure": 0.1}, [11]) == {}
    second(clock)
    proc.process(11, 1, ticks=TICKS_PER_S)
    assert busy.sample(FULL, [11]) == {}  # the first reading only counts
    second(clock)
    proc.process(11, 1, ticks=2 * TICKS_PER_S)
    assert busy.sample({"cpu_pressure": 0.9}, [11]) == {"busy_processes": ["11 100.0 ?"]}


def test_a_search_that_takes_long_is_seldom_repeated(proc: FakeProc) -> None:
    """Ten milliseconds of reading: two seconds until the next."""
    times = iter([0.0, 0.010, 1.0, 2.5, 2.510])
    busy = BusyProcesses(proc.path, lambda: next(times))
    proc.process(11, 1, ticks=0)
    assert busy.sample(FULL, [11]) == {}
    assert busy.sample(FULL, [11]) == {}
    proc.process(11, 1, ticks=5 * TICKS_PER_S // 2)
    assert busy.sample(FULL, [11]) == {"busy_processes": ["11 100.0 ?"]}


def test_how_long_a_process_waited_for_a_processor(proc: FakeProc) -> None:
    proc.process(11, 1)
    assert run_delay_ns(11, proc.path) is None
    (proc.path / "11" / "schedstat").write_text("500 123456 7\n")
    assert run_delay_ns(11, proc.path) == 123456
