"""What keeps a rank from running, from folders like ``/proc`` and ``/sys/fs/cgroup`` and from a real process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClockInSeconds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.agent.sampling.host import JobCpu
from stepscope.agent.sampling.off_cpu import (
    TICKS_PER_S,
    CgroupQuota,
    OffCpu,
    ProcessStatus,
    read_stat,
    read_status,
)


class FakeRoot:
    """A file system with some processes and cgroups."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, pid: int, *, state: str = "S", parent: int = 1, faults: int = 0, ticks: int = 0) -> None:
        fields = [state, str(parent), *["0"] * 7, str(faults), "0", "5", "1", *["0"] * 26, str(ticks), "0"]
        self.write(f"proc/{pid}/stat", f"{pid} (a) S 1 (b) {' '.join(fields)}")

    def waited(self, pid: int, nanoseconds: int) -> None:
        self.write(f"proc/{pid}/schedstat", f"500 {nanoseconds} 7\n")

    def unified(self, group: str, *, quota: str, throttled_us: int) -> None:
        self.write(f"sys/fs/cgroup/{group}/cpu.max", quota)
        counters = f"usage_usec 5\nnr_throttled 3\nthrottled_usec {throttled_us}\n"
        self.write(f"sys/fs/cgroup/{group}/cpu.stat", counters)


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def test_shares_and_rates_are_since_the_previous_sample(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    root.process(7, faults=100)
    root.waited(7, 1_000_000_000)
    waits = OffCpu(root.path, clock)
    waits.watch(7)
    for state in "DDSS":
        root.process(7, state=state, faults=100)
        waits.read_states()
    clock.advance(2_000_000_000)
    root.process(7, state="R", faults=580)
    root.waited(7, 1_500_000_000)
    assert waits.sample(7) == {"cpu_wait": 0.25, "disk_wait": 0.4, "major_faults_ps": 240.0}
    clock.advance(1_000_000_000)
    assert waits.sample(7) == {"cpu_wait": 0.0, "disk_wait": 0.0, "major_faults_ps": 0.0}


def test_where_the_kernel_counts_the_wait_for_the_disk_its_count_is_used(
    root: FakeRoot, clock: FakeClockInSeconds
) -> None:
    root.process(7)
    waits = OffCpu(root.path, clock)
    waits.watch(7)
    clock.advance(1_000_000_000)
    root.process(7, ticks=TICKS_PER_S // 2)
    assert waits.sample(7)["disk_wait"] == 0.5


def test_children_are_reported_beside_their_rank(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    for pid, parent, state in ((7, 1, "S"), (8, 7, "D"), (9, 8, "S"), (20, 1, "D")):
        root.process(pid, parent=parent, state=state, faults=10)
    job = JobCpu(1, root.path / "proc", clock)
    waits = OffCpu(root.path, clock)
    waits.watch(7)
    job.percent([7])
    assert set(job.children()) == {7}
    assert set(job.children()[7]) == {8, 9}
    clock.advance(1_000_000_000)
    values = waits.sample(7, job.children()[7])
    assert (values["children_disk_wait"], values["children_major_faults_ps"]) == (0.5, 0.0)
    root.process(8, parent=7, faults=40)
    clock.advance(1_000_000_000)
    job.percent([7])
    assert waits.sample(7, job.children()[7])["children_major_faults_ps"] == 30.0


def test_a_process_that_is_gone_has_no_values(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    root.process(7)
    waits = OffCpu(root.path, clock)
    waits.watch(7)
    waits.watch(8)
    (root.path / "proc/7/stat").unlink()
    waits.read_states()
    clock.advance(1_000_000_000)
    assert waits.sample(7) == waits.sample(8) == {}
    waits.forget(7)
    root.process(7)
    assert waits.sample(7) == {}


def test_the_smallest_quota_around_a_process_counts(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    root.write("proc/7/cgroup", "0::/pod/job\n")
    root.unified("pod", quota="50000 100000", throttled_us=1_000_000)
    root.unified("pod/job", quota="max 100000", throttled_us=7_000_000)
    quota = CgroupQuota(7, root.path, clock)
    clock.advance(1_000_000_000)
    root.unified("pod", quota="50000 100000", throttled_us=1_300_000)
    assert quota.sample() == {"cpu_quota": 0.5, "throttled": 0.3}


def test_version_1_counts_in_nanoseconds(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    root.write("proc/7/cgroup", "3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n")
    for name, text in (("cfs_quota_us", "150000"), ("cfs_period_us", "100000"), ("stat", "throttled_time 0\n")):
        root.write(f"sys/fs/cgroup/cpu/job/cpu.{name}", text)
    root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    quota = CgroupQuota(7, root.path, clock)
    clock.advance(2_000_000_000)
    root.write("sys/fs/cgroup/cpu/job/cpu.stat", "nr_throttled 9\nthrottled_time 500000000\n")
    assert quota.sample() == {"cpu_quota": 1.5, "throttled": 0.25}


def test_a_quota_that_is_set_later_is_found(root: FakeRoot, clock: FakeClockInSeconds) -> None:
    root.write("proc/7/cgroup", "0::/job\n")
    root.unified("job", quota="max 100000", throttled_us=0)
    quota = CgroupQuota(7, root.path, clock)
    root.unified("job", quota="200000 100000", throttled_us=0)
    clock.advance(1_000_000_000)
    assert quota.sample() == {}
    clock.advance(10_000_000_000)
    assert quota.sample() == {"cpu_quota": 2.0, "throttled": 0.0}


def test_what_a_process_may_use_and_has_in_swap(root: FakeRoot) -> None:
    status = "Name:\tpython\nThreads:\t3\nCpus_allowed:\tff,ffffffff\nRssFile:\t 4 kB\nVmSwap:\t 2048 kB\n"
    root.write("proc/7/status", status)
    expected = ProcessStatus(mapped_bytes=4096, swapped_bytes=2 << 20, processors=40, threads=3)
    assert read_status(root.path / "proc", 7) == expected
    assert read_status(root.path / "proc", 8) == ProcessStatus()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.text())
def test_fuzz_files(tmp_path: Path, stat: str, status: str) -> None:
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(stat, errors="replace")
    (folder / "status").write_text("Cpus_allowed:" + status, errors="replace")
    read_stat(tmp_path / "proc", 7)
    read_status(tmp_path / "proc", 7)


def test_this_process_is_read() -> None:
    stat = read_stat(Path("/proc"), os.getpid())
    assert stat is not None
    assert (stat.state, stat.parent) == ("R", os.getppid())
    waits = OffCpu()
    waits.watch(os.getpid())
    values: dict[str, Any] = waits.sample(os.getpid())
    assert 0 <= values["disk_wait"] <= 1
    assert values["major_faults_ps"] >= 0
