"""What keeps a rank off the processor: run queue, its cgroup's quota, the disk, pages that are read back from it.

Everything comes from files that any user may read. They differ in what they count:

- ``/proc/PID/schedstat``: how long the main thread was ready to run but had no processor. That includes the time in
  which its cgroup had used up its quota.
- ``cpu.stat`` of the cgroup and those around it, version 1 or 2: how long they had used up their quota, as a sum over
  processors.
- ``/proc/PID/stat``: major page faults of all threads, and whether the main thread sleeps on the disk (state D) at
  that moment. The kernel counts that wait only if delay accounting is on (``task_delayacct``), which is not the default
  since Linux 5.14; so the agent reads the state five times a second, which takes 12 microseconds each time, and the
  share of those readings is what a sample has. Of child processes (DataLoader workers) it is read once a second, from
  the file that is read for their CPU time anyway.
- ``/proc/PID/status``: memory in swap, and how many processors the process may use.

The same in bytes per second for a whole cgroup (``io.pressure``) would not tell ranks apart that share a cgroup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CgroupQuota",
    "OffCpu",
    "ProcessStat",
    "ProcessStatus",
    "cgroup_folders",
    "read_stat",
    "read_status",
    "run_delay_ns",
]

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROOT = Path("/")
UNINTERRUPTIBLE = "D"
LARGEST_FILE = 16384
"""Bytes read of any of these files."""


# -- files of a process -----------------------------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """Of ``/proc/PID/stat``."""

    state: str
    parent: int
    major_faults: int
    cpu_ticks: int
    disk_ticks: int
    """Time that it waited for block I/O; 0 without delay accounting."""


def read_stat(proc: Path, pid: int) -> ProcessStat | None:
    """Return None if the process is gone."""
    fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    try:
        return ProcessStat(
            state=fields[0].decode(),
            parent=int(fields[1]),
            major_faults=int(fields[9]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            disk_ticks=int(fields[39]) if len(fields) > 39 else 0,
        )
    except (IndexError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """Of ``/proc/PID/status``; None: unknown (another system, an old kernel, or the process is gone)."""

    mapped_bytes: int | None = None
    """Resident pages of mapped files."""
    swapped_bytes: int | None = None
    processors: int | None = None
    """How many it may use."""
    threads: int | None = None


def read_status(proc: Path, pid: int) -> ProcessStatus:
    found: dict[bytes, bytes] = {}
    for line in _read(f"{proc}/{pid}/status").splitlines():
        name, _, value = line.partition(b":")
        found[name] = value
    return ProcessStatus(
        mapped_bytes=_kilobytes(found.get(b"RssFile", b"")),
        swapped_bytes=_kilobytes(found.get(b"VmSwap", b"")),
        processors=_count_of_mask(found.get(b"Cpus_allowed", b"")),
        threads=int(threads) if (threads := found.get(b"Threads", b"").strip()).isdigit() else None,
    )


def _kilobytes(value: bytes) -> int | None:
    words = value.split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _count_of_mask(value: bytes) -> int | None:
    """``ff,ffffffff`` is 40 processors."""
    try:
        return int(value.strip().replace(b",", b""), 16).bit_count() or None
    except ValueError:
        return None


def run_delay_ns(pid: int, proc: Path = ROOT / "proc") -> int | None:
    """Return how long the main thread was ready to run but had no processor, since its start; None if unknown."""
    fields = _read(f"{proc}/{pid}/schedstat").split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None


def _read(path: str) -> bytes:
    """Return the file's content; nothing if it cannot be read. ``open`` takes three times as long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, LARGEST_FILE)
    except OSError:
        return b""
    finally:
        os.close(fd)


# -- cgroups ----------------------------------------------------------------------------------------------------------

CPU_FOLDERS = ("cpu", "cpu,cpuacct")
QUOTA_SELDOM_S = 10.0
"""A quota may be set, and a process moved, while the job runs."""


def cgroup_folders(pid: int, root: Path, controller: str, mounts: tuple[str, ...] = ()) -> Iterator[tuple[Path, bool]]:
    """Yield the cgroups around a process that this controller may limit, from the outermost on, and whether each is of
    version 2. ``mounts``: folders of the controller in version 1, by default one of its name."""
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        folders = [top / name for name in mounts or (controller,)]
        unified = not controllers
        if unified:
            folders = [top]
        elif controller not in controllers.split(","):
            continue
        # Inside a container the path may be the host's; the limit is then at the top.
        inside = [part for part in path.split("/") if part not in ("", "..")]
        for folder in folders:
            for depth in range(len(inside) + 1):
                yield folder.joinpath(*inside[:depth]), unified


@dataclass(frozen=True, kw_only=True)
class _Quota:
    stat: str
    """The file that counts."""
    unit_ns: int
    processors: float


class CgroupQuota:
    """Keeps what the cgroups of a process had counted at the previous sample."""

    def __init__(self, pid: int, root: Path = ROOT, now: Callable[[], float] = time.monotonic) -> None:
        self._pid = pid
        self._root = root
        self._now = now
        self._quotas: list[_Quota] = []
        self._counted_ns: dict[str, int] = {}
        self._at_s = self._found_s = now()
        self._find()
        self._throttled_ns()

    def sample(self) -> dict[str, float]:
        """Return the smallest quota, in processors, and the share (0 to 1) of the time since the previous sample in
        which it was used up; nothing without a quota."""
        now = self._now()
        seconds, self._at_s = now - self._at_s, now
        if now - self._found_s >= QUOTA_SELDOM_S:
            self._found_s = now
            self._find()
        throttled_ns = self._throttled_ns()
        if not self._quotas or seconds <= 0:
            return {}
        return {
            "cpu_quota": round(min(quota.processors for quota in self._quotas), 3),
            "throttled": round(min(throttled_ns / 1e9 / seconds, 1.0), 4),
        }

    def _find(self) -> None:
        self._quotas = [
            quota
            for folder, unified in cgroup_folders(self._pid, self._root, "cpu", CPU_FOLDERS)
            if (quota := _unified_quota(folder) if unified else _split_quota(folder)) is not None
        ]

    def _throttled_ns(self) -> int:
        """Since the previous call, in the cgroup that was throttled most."""
        counted: dict[str, int] = {}
        for quota in self._quotas:
            for line in _read(quota.stat).splitlines():
                name, _, value = line.partition(b" ")
                if name in (b"throttled_usec", b"throttled_time") and value.strip().isdigit():
                    counted[quota.stat] = int(value) * quota.unit_ns
        before, self._counted_ns = self._counted_ns, counted
        return max((max(count - before.get(stat, count), 0) for stat, count in counted.items()), default=0)


def _unified_quota(folder: Path) -> _Quota | None:
    """``cpu.max``: ``50000 100000`` or ``max 100000``."""
    words = _read(f"{folder}/cpu.max").split()
    if len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) <= 0:
        return None
    return _Quota(stat=f"{folder}/cpu.stat", unit_ns=1000, processors=int(words[0]) / int(words[1]))


def _split_quota(folder: Path) -> _Quota | None:
    quota, period = (_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not (quota.isdigit() and period.isdigit()) or int(period) <= 0:
        return None  # -1: no quota
    return _Quota(stat=f"{folder}/cpu.stat", unit_ns=1, processors=int(quota) / int(period))


# -- waits of ranks ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Watched:
    quota: CgroupQuota
    stat: ProcessStat
    at_s: float
    waited_ns: int | None
    readings: int = 0
    """Of its state since the previous sample …"""
    asleep: int = 0
    """… and how many of them saw it sleep on the disk."""
    child_faults: dict[int, int] | None = None


class OffCpu:
    """Keeps the counters of every rank at its previous sample."""

    def __init__(self, root: Path = ROOT, now: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._proc = root / "proc"
        self._now = now
        self._ranks: dict[int, _Watched] = {}

    def watch(self, pid: int) -> None:
        stat = read_stat(self._proc, pid)
        if stat is not None:
            quota = CgroupQuota(pid, self._root, self._now)
            waited_ns = run_delay_ns(pid, self._proc)
            self._ranks[pid] = _Watched(quota=quota, stat=stat, at_s=self._now(), waited_ns=waited_ns)

    def forget(self, pid: int) -> None:
        self._ranks.pop(pid, None)

    def read_states(self) -> None:
        """Read whether the main thread of each rank sleeps on the disk; called several times between samples."""
        for pid, rank in self._ranks.items():
            stat = read_stat(self._proc, pid)
            if stat is not None:
                rank.readings += 1
                rank.asleep += stat.state == UNINTERRUPTIBLE

    def sample(self, pid: int, children: dict[int, ProcessStat] | None = None) -> dict[str, Any]:
        """Return shares and rates since the previous sample; nothing of a process that is gone or not watched.

        ``children``: what was just read of its child processes.
        """
        rank = self._ranks.get(pid)
        stat = read_stat(self._proc, pid)
        now = self._now()
        if rank is None or stat is None or now <= rank.at_s:
            return {}
        seconds, before = now - rank.at_s, rank.stat
        waited_ns = run_delay_ns(pid, self._proc)
        values: dict[str, Any] = {}
        if waited_ns is not None:
            since_ns = waited_ns - (waited_ns if rank.waited_ns is None else rank.waited_ns)
            values["cpu_wait"] = _share(since_ns / 1e9, seconds)
        values |= rank.quota.sample()
        asleep = (rank.asleep + (stat.state == UNINTERRUPTIBLE)) / (rank.readings + 1)
        counted = _share((stat.disk_ticks - before.disk_ticks) / TICKS_PER_S, seconds)
        values["disk_wait"] = round(max(asleep, counted), 4)
        values["major_faults_ps"] = round(max(stat.major_faults - before.major_faults, 0) / seconds, 1)
        if children:
            values |= self._of_children(rank, children, seconds)
        rank.stat, rank.at_s, rank.waited_ns = stat, now, waited_ns
        rank.readings = rank.asleep = 0
        return values

    @staticmethod
    def _of_children(rank: _Watched, children: dict[int, ProcessStat], seconds: float) -> dict[str, float]:
        before = rank.child_faults or {}
        faults = {pid: stat.major_faults for pid, stat in children.items()}
        since = sum(max(count - before.get(pid, count), 0) for pid, count in faults.items())
        rank.child_faults = faults
        asleep = sum(stat.state == UNINTERRUPTIBLE for stat in children.values())
        return {
            "children_disk_wait": round(asleep / len(children), 4),
            "children_major_faults_ps": round(since / seconds, 1),
        }


def _share(part: float, whole: float) -> float:
    return round(min(max(part / whole, 0.0), 1.0), 4)
