"""The host sampler: CPU, memory, pressure, disk, network, ranks' processes, and out-of-memory kills.

Rates are bytes per second since the previous sample. Most values come from psutil. Pressure, the network, the job's CPU
and what keeps a rank from running (``off_cpu.py``) are read from the kernel directly.

The length of a rank's log is recorded too: printed lines have no times, and this locates a step in the log.

GPUs are sampled through NVML. Without a driver there are no samples and no error.

It runs in a separate thread: NVML can take seconds to start and may never answer when a GPU falls off the bus. Neither
may keep the rings from being drained.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from stepscope.agent.sampling.off_cpu import OffCpu, ProcessStat, cgroup_folders, read_stat, read_status
from stepscope.records import run_clock
from stepscope.records.paths import readable_command
from stepscope.records.redaction import redact_command

__all__ = [
    "BusyProcesses",
    "GpuSampler",
    "HostSampler",
    "JobCpu",
    "NetworkSampler",
    "OomWatch",
    "Pressure",
    "memory_limit_of",
]

# -- CPU of the job ---------------------------------------------------------------------------------------------------
# The CPU time of the job itself: its ranks and everything they started (DataLoader workers, compile workers).
#
# Only processes that are new since the last look are examined for membership, so a look costs one listing of ``/proc``,
# one small read per new process and one per process of the job. The CPU time of a process's last second is lost when it
# ends.

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class JobCpu:
    """Keeps the process tree and the counters of the previous sample."""

    def __init__(self, cores: int, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._cores = cores
        self._proc = proc
        self._now = now
        self._strangers: set[int] = set()
        self._ticks: dict[int, int] = {}
        """CPU time so far of the job's processes, by pid."""
        self._stats: dict[int, ProcessStat] = {}
        """What the previous sample read of them."""
        self._roots: set[int] = set()
        self._sampled_s: float | None = None

    def percent(self, roots: Collection[int]) -> float | None:
        """Return the use of all cores since the previous sample; None at first, without roots or without ``/proc``."""
        self._scan(set(roots))
        now = self._now()
        self._stats = {pid: stat for pid in self._ticks if (stat := read_stat(self._proc, pid)) is not None}
        ticks = {pid: stat.cpu_ticks for pid, stat in self._stats.items()}
        used = sum(spent - self._ticks[pid] for pid, spent in ticks.items())
        earlier_s, self._sampled_s = self._sampled_s, now
        self._ticks = ticks
        if earlier_s is None or now <= earlier_s or not ticks:
            return None
        return round(min(max(100.0 * used / TICKS_PER_S / (now - earlier_s) / self._cores, 0.0), 100.0), 1)

    def children(self) -> dict[int, dict[int, ProcessStat]]:
        """Return what the last sample read of the processes that each rank started, and of those that they started."""
        found: dict[int, dict[int, ProcessStat]] = {}
        for pid, stat in self._stats.items():
            ancestor = stat.parent
            while pid not in self._roots and ancestor in self._stats:
                if ancestor in self._roots:
                    found.setdefault(ancestor, {})[pid] = stat
                    break
                ancestor = self._stats[ancestor].parent
        return found

    def strangers(self) -> set[int]:
        """Return the processes outside the job that were there at the last sample."""
        return self._strangers

    def _scan(self, roots: set[int]) -> None:
        """Update the process tree."""
        try:
            present = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}  # noqa: PTH208 - names, quickly
        except OSError:
            present = set()
        rooted = roots <= self._roots
        self._roots = roots
        # Children of a new root may have been seen, and rejected, before it was known.
        self._strangers = self._strangers & present if rooted else set()
        known = self._ticks.keys() & present
        candidates = present - known - self._strangers
        parents = {pid: parent for pid in candidates if (parent := self._parent(pid)) is not None}
        job = known | (roots & present)
        while children := {pid for pid, parent in parents.items() if parent in job and pid not in job}:
            job |= children
        self._strangers |= parents.keys() - job
        # A process that joined a known tree was born since the last look: all its time is new.
        self._ticks = {pid: self._ticks[pid] if pid in known else 0 if rooted else self._spent(pid) or 0 for pid in job}

    def _parent(self, pid: int) -> int | None:
        stat = read_stat(self._proc, pid)
        return stat.parent if stat else None

    def _spent(self, pid: int) -> int | None:
        stat = read_stat(self._proc, pid)
        return stat.cpu_ticks if stat else None


# -- Busy processes outside the job -----------------------------------------------------------------------------------
# Which other processes use the CPU, while it is full: pid, share of one core and command.
#
# Reading all processes takes about 15 microseconds each. It is done only on a full machine, and so seldom that it takes
# at most half a percent of a core.

CPU_FULL_PERCENT = 90.0
CPU_FULL_PRESSURE = 0.3
BUSY_PROCESSES = 4
"""The number of processes in a sample."""
BUSY_LEAST_PERCENT = 5.0
"""Of one core."""
BUSY_COST_SHARE = 0.005
COMMAND_CHARACTERS = 120
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa1-\uffff]+")


class BusyProcesses:
    """Keeps the CPU time of all processes outside the job at the previous reading."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._ticks: dict[int, int] = {}
        self._read_s = self._next_s = float("-inf")
        self._commands: dict[int, str] = {}

    def sample(self, host: Mapping[str, Any], strangers: Collection[int]) -> dict[str, list[str]]:
        """Return ``busy_processes``, each ``PID PERCENT COMMAND``; nothing unless the machine is full.

        The first reading on a full machine only counts, so there is nothing to return yet.
        """
        full = host.get("cpu_percent", 0.0) >= CPU_FULL_PERCENT or host.get("cpu_pressure", 0.0) >= CPU_FULL_PRESSURE
        began_s = self._now()
        if not full:
            self._ticks.clear()
            return {}
        if began_s < self._next_s:
            return {}
        ticks = {pid: stat.cpu_ticks for pid in strangers if (stat := read_stat(self._proc, pid)) is not None}
        before, self._ticks = self._ticks, ticks
        seconds, self._read_s = began_s - self._read_s, began_s
        self._next_s = began_s + (self._now() - began_s) / BUSY_COST_SHARE
        if not before or seconds <= 0:
            return {}
        # A process that is new since the last reading has used all of its time since then, unless it is too much.
        most = seconds * TICKS_PER_S * (os.cpu_count() or 1)
        since = {pid: spent - before.get(pid, 0) for pid, spent in ticks.items()}
        used = {pid: 100.0 * spent / TICKS_PER_S / seconds for pid, spent in since.items() if spent <= most}
        busiest = sorted((pid for pid in used if used[pid] >= BUSY_LEAST_PERCENT), key=lambda pid: -used[pid])
        self._commands = {pid: self._command(pid) for pid in busiest[:BUSY_PROCESSES]}
        return {"busy_processes": [f"{pid} {used[pid]:.1f} {command}" for pid, command in self._commands.items()]}

    def _command(self, pid: int) -> str:
        """Return the command without its secrets; of a kernel thread its name in brackets."""
        known = self._commands.get(pid)
        if known is not None:
            return known
        try:
            with (self._proc / str(pid) / "cmdline").open("rb") as file:
                words = file.read(4096).decode(errors="replace").rstrip("\0").split("\0")
            if not words[0]:
                words = [f"[{(self._proc / str(pid) / 'comm').read_text(errors='replace').strip()}]"]
        except OSError:
            return "?"
        text = " ".join(redact_command(readable_command(words)))
        return _UNPRINTABLE.sub(" ", text)[:COMMAND_CHARACTERS].strip() or "?"


# -- Pressure ---------------------------------------------------------------------------------------------------------
# Waiting tasks, from ``/proc/pressure``; from ``/proc/stat`` the number of tasks that are running or runnable right
# now, and how much of the processors' time the hypervisor gave to other machines (steal).
#
# Each read takes a few microseconds. Missing information (no pressure accounting, no such files) is left out.

RESOURCES = ("cpu", "io", "memory")
STEAL = 7
"""Its place in the first line: user, nice, system, idle, iowait, irq, softirq, steal."""


class Pressure:
    """Keeps the totals of the previous sample."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._totals: dict[str, tuple[float, int]] = {}
        self._stolen: tuple[int, int] | None = None
        """Ticks of all processors that were stolen, and all ticks."""
        self.sample()

    def sample(self) -> dict[str, float | int]:
        """Return the shares (0 to 1) of the time since the previous sample, and the number of runnable tasks."""
        values: dict[str, float | int] = {}
        for resource in RESOURCES:
            total_us, now = self._waited_us(resource), self._now()
            if total_us is None:
                self._totals.pop(resource, None)
                continue
            earlier_s, earlier_us = self._totals.get(resource, (now, total_us))
            self._totals[resource] = (now, total_us)
            if now > earlier_s:
                share = (total_us - earlier_us) / 1e6 / (now - earlier_s)
                values[f"{resource}_pressure"] = round(min(max(share, 0.0), 1.0), 4)
        return {**values, **self._from_stat()}

    def _waited_us(self, resource: str) -> int | None:
        """Return the microseconds since boot in which any task waited."""
        try:
            text = (self._proc / "pressure" / resource).read_text()
        except OSError:
            return None
        line = next((line for line in text.splitlines() if line.startswith("some ")), "")
        _, _, total = line.partition(" total=")
        return int(total) if total.isdecimal() else None

    def _from_stat(self) -> dict[str, float | int]:
        try:
            text = (self._proc / "stat").read_text()
        except OSError:
            return {}
        values: dict[str, float | int] = {}
        _, _, rest = text.partition("\nprocs_running ")
        count = rest.partition("\n")[0]
        if count.isdecimal():
            values["procs_running"] = int(count)
        fields = text.partition("\n")[0].split()[1 : STEAL + 2]
        if len(fields) == STEAL + 1 and all(field.isdecimal() for field in fields):
            stolen, total = int(fields[STEAL]), sum(map(int, fields))
            before, self._stolen = self._stolen or (stolen, total), (stolen, total)
            if total > before[1]:
                values["cpu_steal"] = round(min(max((stolen - before[0]) / (total - before[1]), 0.0), 1.0), 4)
        return values


# -- Network ----------------------------------------------------------------------------------------------------------
# The kernel's network counters: bytes, errors and drops of interfaces, TCP retransmits, InfiniBand ports.
#
# This takes two small reads of ``/proc`` per second, about a tenth of a millisecond. ``/proc/self/net`` is the network
# namespace of the agent, and so of the job: a container has its own counters. More expensive values are read less
# often: InfiniBand counters come from the adapter's firmware one by one, and for TCP's timeouts the kernel adds up
# about two hundred numbers. Missing values are left out.

NetworkCounts = dict[str, int]

LOOPBACK = "lo"
TCP = {"tcp_out_ps": "OutSegs", "tcp_retrans_ps": "RetransSegs", "tcp_errors_ps": "InErrs"}
TCP_MORE = {"tcp_timeouts_ps": "TCPTimeouts"}
DEV_COLUMNS = {"rx_bps": (0,), "tx_bps": (8,), "errors_ps": (2, 10), "drops_ps": (3, 11)}
"""Columns in a line of ``/proc/net/dev``: received first, then sent."""
IB_COLUMNS = {
    "ib_rx_bps": ("port_rcv_data",),
    "ib_tx_bps": ("port_xmit_data",),
    "ib_errors_ps": ("symbol_error", "port_rcv_errors", "port_xmit_discards", "local_link_integrity_errors"),
    "ib_link_downed_ps": ("link_downed", "link_error_recovery"),
    "ib_xmit_wait_ps": ("port_xmit_wait",),
}
IB_WORDS = ("ib_rx_bps", "ib_tx_bps")
IB_WORD_BYTES = 4
"""A port counts its data in words."""
SELDOM_S = 10.0
"""Interval for link speeds, TCP's timeouts and InfiniBand ports."""
MBIT_BYTES = 125_000


class NetworkSampler:
    """Keeps the counters of the previous sample; rates are per second since then."""

    def __init__(
        self,
        proc: Path = Path("/proc/self/net"),
        sysfs: Path = Path("/sys/class"),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._sysfs = sysfs
        self._now = now
        self._devices: dict[str, NetworkCounts] = {}
        self._moved: NetworkCounts = {}
        """Bytes since the start, by device. The device with the most traffic determines the speed."""
        self._tcp: NetworkCounts = {}
        self._tcp_more: NetworkCounts = {}
        self._ports: dict[str, NetworkCounts] = {}
        self._at_s = self._seldom_s = now()
        self._seldom: dict[str, float] = {}
        self.sample()
        self._read_seldom(self._at_s)

    def sample(self) -> dict[str, float]:
        """Return bytes and events per second; link speeds are in bytes per second too."""
        now = self._now()
        seconds, self._at_s = now - self._at_s, now
        if now - self._seldom_s >= SELDOM_S:
            self._read_seldom(now)
        return {
            **{f"net_{name}": _rate(count, seconds) for name, count in self._since_devices().items()},
            **{name: _rate(count, seconds) for name, count in self._since_tcp().items()},
            **self._seldom,
        }

    # -- interfaces -----------------------------------------------------------------------------------------------

    def _since_devices(self) -> NetworkCounts:
        """Sum up over the devices. For a new device, counting starts now."""
        counts = self._read_devices()
        totals = dict.fromkeys(DEV_COLUMNS, 0)
        for device, now in counts.items():
            before = self._devices.get(device, now)
            since = _since(before, now)
            for name, count in since.items():
                totals[name] += count
            self._moved[device] = self._moved.get(device, 0) + since["rx_bps"] + since["tx_bps"]
        self._devices = counts
        return totals

    def _read_devices(self) -> dict[str, NetworkCounts]:
        found = {}
        for line in _read_counter(self._proc / "dev").splitlines()[2:]:
            device, _, rest = line.partition(":")
            device, fields = device.strip(), rest.split()
            if device != LOOPBACK and len(fields) >= 16 and all(field.isdecimal() for field in fields):
                found[device] = {name: sum(int(fields[at]) for at in columns) for name, columns in DEV_COLUMNS.items()}
        return found

    def _speed(self) -> dict[str, float]:
        """Return the speed of the device with the most traffic so far; devices that are down or virtual have none."""
        for device in sorted(self._devices, key=lambda name: -self._moved.get(name, 0)):
            mbit = _read_counter(self._sysfs / "net" / device / "speed").strip()
            if mbit.isdecimal() and int(mbit) > 0:
                return {"net_speed_bps": float(int(mbit) * MBIT_BYTES)}
        return {}

    # -- TCP ------------------------------------------------------------------------------------------------------

    def _since_tcp(self) -> NetworkCounts:
        before, self._tcp = self._tcp, _named_counts(_read_counter(self._proc / "snmp"), "Tcp: ", TCP)
        return _since(before, self._tcp)

    def _since_tcp_more(self) -> NetworkCounts:
        before, self._tcp_more = (
            self._tcp_more,
            _named_counts(_read_counter(self._proc / "netstat"), "TcpExt: ", TCP_MORE),
        )
        return _since(before, self._tcp_more)

    # -- less often -----------------------------------------------------------------------------------------------

    def _read_seldom(self, now_s: float) -> None:
        seconds, self._seldom_s = now_s - self._seldom_s, now_s
        timeouts = {name: _rate(count, seconds) for name, count in self._since_tcp_more().items()}
        self._seldom = {**timeouts, **self._speed(), **self._ports_since(seconds)}

    def _ports_since(self, seconds: float) -> dict[str, float]:
        counts: dict[str, NetworkCounts] = {}
        speeds = []
        for port in sorted((self._sysfs / "infiniband").glob("*/ports/*")):
            files = {file for names in IB_COLUMNS.values() for file in names}
            counters = {file: _read_counter(port / "counters" / file).strip() for file in files}
            counts[str(port)] = {file: int(text) for file, text in counters.items() if text.isdecimal()}
            gbit = _read_counter(port / "rate").partition(" ")[0]
            speeds += [float(gbit) * 1000 * MBIT_BYTES] if gbit.replace(".", "", 1).isdecimal() else []
        before, self._ports = self._ports, counts
        if not any(counts.values()):
            return {}
        rates = dict.fromkeys(IB_COLUMNS, 0.0)
        for port_name, now in counts.items():
            since = _since(before.get(port_name, now), now)
            for name, files_of in IB_COLUMNS.items():
                times = IB_WORD_BYTES if name in IB_WORDS else 1
                rates[name] += _rate(sum(since.get(file, 0) for file in files_of) * times, seconds)
        return {**rates, **({"ib_speed_bps": sum(speeds)} if speeds else {})}


def _read_counter(path: Path) -> str:
    """Read a file; return nothing if it is missing or cannot be read (a link that is down has no speed)."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read() or b"").decode("ascii", errors="replace")
    except OSError:
        return ""


def _named_counts(text: str, prefix: str, wanted: Mapping[str, str]) -> NetworkCounts:
    """Parse a line of names and a line of values, as in ``/proc/net/snmp``."""
    start = text.find(prefix)
    if start < 0:
        return {}
    names, _, rest = text[start:].partition("\n")
    values = rest.partition("\n")[0]
    if not values.startswith(prefix):
        return {}
    fields = dict(zip(names.split(), values.split(), strict=False))
    return {name: int(fields[key]) for name, key in wanted.items() if fields.get(key, "").isdecimal()}


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> NetworkCounts:
    """Return the increase of each counter; 0 for a counter that was reset, because the rest is unknown."""
    return {name: max(count - before.get(name, count), 0) for name, count in now.items()}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if seconds > 0 else 0.0


# -- Host -------------------------------------------------------------------------------------------------------------


PROC = Path("/proc")


class HostSampler:
    """Keeps the counters of the previous sample; one per agent."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._processes: dict[int, psutil.Process] = {}
        self._counters: dict[str, tuple[float, int]] = {}
        self._pressure = Pressure()
        self._network = NetworkSampler()
        self._job = JobCpu(psutil.cpu_count() or 1)
        self._busy = BusyProcesses()
        self._off_cpu = OffCpu()
        psutil.cpu_percent()
        self._counters_of_host()

    def watch(self, pid: int) -> None:
        """Start to sample a process."""
        try:
            process = psutil.Process(pid)
            process.cpu_percent()
            self._processes[pid] = process
        except psutil.Error:
            return
        self._counters_of_process(process)
        self._off_cpu.watch(pid)

    def forget(self, pid: int) -> None:
        self._processes.pop(pid, None)
        self._off_cpu.forget(pid)

    def read_states(self) -> None:
        """Read what the ranks are doing at this moment; called several times between samples."""
        self._off_cpu.read_states()

    def sample(self, ranks: Iterable[tuple[int, int, Path]]) -> list[dict[str, Any]]:
        """Return one record for the host and one for each (pid, rank, log) that is watched and alive."""
        common = {"wall_ns": run_clock.wall_ns(), "mono_ns": time.perf_counter_ns(), "node": self._node}
        records = [{**common, "kind": "host", **self._host()}]
        children = self._job.children()
        for pid, rank, log in ranks:
            process = self._processes.get(pid)
            if process is not None and (values := self._process(process, children.get(pid))):
                records.append({**common, "kind": "process", "pid": pid, "rank": rank, **values, **_length_of(log)})
        return records

    def _host(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # from psutil, in containers without /proc/vmstat
            swap = psutil.swap_memory()
        own = self._job.percent(self._processes)
        used = {"cpu_percent": psutil.cpu_percent(), **self._pressure.sample()}
        return {
            **used,
            "cpu_count": psutil.cpu_count() or 1,
            "load1": round(os.getloadavg()[0], 2),
            "mem_total": memory.total,
            "mem_available": memory.available,
            "swap_used": swap.used,
            **self._network.sample(),
            **self._counters_of_host(),
            **({} if own is None else {"own_cpu_percent": own}),
            **self._busy.sample(used, self._job.strangers()),
        }

    def _counters_of_host(self) -> dict[str, Any]:
        disks = psutil.disk_io_counters()
        if disks is None:
            return {}
        return {
            "disk_read_bps": self._rate("disk_read", disks.read_bytes),
            "disk_write_bps": self._rate("disk_write", disks.write_bytes),
        }

    def _process(self, process: psutil.Process, children: dict[int, ProcessStat] | None) -> dict[str, Any]:
        status = read_status(PROC, process.pid)
        known = {"rss_file": status.mapped_bytes, "swapped": status.swapped_bytes, "processors": status.processors}
        try:
            with process.oneshot():
                return {
                    "cpu_percent": process.cpu_percent(),
                    "rss": process.memory_info().rss,
                    "threads": process.num_threads() if status.threads is None else status.threads,
                    **{name: value for name, value in known.items() if value is not None},
                    **self._off_cpu.sample(process.pid, children),
                    **self._counters_of_process(process),
                }
        except psutil.Error:
            return {}  # it just ended

    def _counters_of_process(self, process: psutil.Process) -> dict[str, Any]:
        try:
            counters = process.io_counters()
        except (psutil.Error, AttributeError):
            return {}  # no permission, or not on this system
        return {
            "io_read_bps": self._rate(f"{process.pid} read", counters.read_bytes),
            "io_write_bps": self._rate(f"{process.pid} write", counters.write_bytes),
        }

    def _rate(self, name: str, count: int) -> float:
        now = time.monotonic()
        earlier_s, earlier = self._counters.get(name, (now, count))
        self._counters[name] = (now, count)
        return round(max(0, count - earlier) / (now - earlier_s), 1) if now > earlier_s else 0.0


def _length_of(log: Path) -> dict[str, int]:
    try:
        return {"log_bytes": log.stat().st_size}
    except OSError:
        return {}  # nothing was printed, or the log is not kept


# -- Memory limit -----------------------------------------------------------------------------------------------------
# How much memory a process may use: all of the machine's, or less if a cgroup limits it.


def memory_limit_of(pid: int, root: Path = Path("/"), machine: int | None = None) -> int:
    """Return the limit in bytes. The limits of all cgroups around the process count."""
    total = psutil.virtual_memory().total if machine is None else machine
    return min((total, *_cgroup_memory_limits(pid, root)))


def _cgroup_memory_limits(pid: int, root: Path) -> Iterator[int]:
    for folder, unified in cgroup_folders(pid, root, "memory"):
        try:
            text = (folder / ("memory.max" if unified else "memory.limit_in_bytes")).read_text(errors="replace").strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)


# -- Out-of-memory kills ----------------------------------------------------------------------------------------------
# Whether the kernel killed a process because memory ran out, from its counters before and after.
#
# The cgroup's counter is used if there is one, otherwise the machine's. They are read once a second and whenever a rank
# vanishes. The kernel counts before it kills, so a counter that has grown by then shows a kill.

_OOM_KEY = "oom_kill "


class OomWatch:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files: dict[int, Path] = {}
        """The file that counts its kills, by pid."""
        self._counts: dict[Path, int] = {}

    def watch(self, pid: int) -> None:
        file = self._file_of(pid)
        self._files[pid] = file
        self._counts.setdefault(file, self._count(file))

    def sample(self) -> None:
        self._counts = {file: self._count(file) for file in set(self._files.values())}

    def killed(self, pid: int) -> bool:
        """Return whether the kernel killed any process since the last look, and forget this one, which vanished."""
        file = self._files.pop(pid, None)
        if file is None:
            return False
        before, self._counts[file] = self._counts.get(file, 0), self._count(file)
        return self._counts[file] > before

    def _file_of(self, pid: int) -> Path:
        machine = self._root / "proc/vmstat"
        try:
            lines = (self._root / "proc" / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return machine
        folder = self._root / "sys/fs/cgroup"
        for line in lines:
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            inside = path.lstrip("/")
            unified = [folder / inside / "memory.events"] if not controllers else []
            split = [folder / "memory" / inside / "memory.oom_control"] if controllers == "memory" else []
            for file in (*unified, *split):
                if _OOM_KEY in _text_of(file):
                    return file
        return machine

    @staticmethod
    def _count(file: Path) -> int:
        line = next((line for line in _text_of(file).splitlines() if line.startswith(_OOM_KEY)), "")
        count = line.removeprefix(_OOM_KEY).strip()
        return int(count) if count.isdecimal() else 0


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


# -- GPUs -------------------------------------------------------------------------------------------------------------

THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""NVML bits for reduced clocks; being idle is not one of them."""
SILENCE_S = 30.0


class GpuSampler:
    """Ask with ``request``; ``collect`` returns what has arrived since."""

    def __init__(self, node: str, *, silence_s: float = SILENCE_S) -> None:
        """``silence_s``: how long an answer may take."""
        self._node = node
        self._silence_s = silence_s
        self._requested = threading.Event()
        self._found: queue.SimpleQueue[list[dict[str, Any]]] = queue.SimpleQueue()
        self._requested_s: float | None = None
        threading.Thread(target=self._work, name="gpu samples", daemon=True).start()

    def request(self) -> None:
        if self._requested_s is None:
            self._requested_s = time.monotonic()
            self._requested.set()

    def collect(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while not self._found.empty():
            records += self._found.get()
            self._requested_s = None
        return records

    @property
    def pending(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._requested_s is not None

    def silent(self) -> bool:
        """Return whether a request has been pending for too long."""
        return self._requested_s is not None and time.monotonic() - self._requested_s > self._silence_s

    def _work(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            handles = [
                (index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())
            ]
            fixed = {index: _identity(pynvml, handle) for index, handle in handles}
        except pynvml.NVMLError:
            handles, fixed = [], {}
        handles = [(index, handle) for index, handle in handles if _visible(index, fixed[index].get("uuid", ""))]
        while True:
            self._requested.wait()
            self._requested.clear()
            common = {
                "wall_ns": run_clock.wall_ns(),
                "mono_ns": time.perf_counter_ns(),
                "node": self._node,
                "kind": "gpu",
            }
            self._found.put(
                [{**common, "index": index, **fixed[index], **_measure(pynvml, handle)} for index, handle in handles]
            )


def _visible(index: int, uuid: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES gives the GPU to the job; a list in an unknown format hides nothing."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return True
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdecimal() or word.startswith("GPU-") for word in words):
        return True
    return any(word == str(index) or (word.startswith("GPU-") and uuid.startswith(word)) for word in words)


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    return _answers(
        nvml,
        lambda: {"uuid": _text(nvml.nvmlDeviceGetUUID(handle))},
        lambda: {"name": _text(nvml.nvmlDeviceGetName(handle))},
    )


def _measure(nvml: Any, handle: Any) -> dict[str, Any]:
    return _answers(
        nvml,
        lambda: _utilization(nvml.nvmlDeviceGetUtilizationRates(handle)),
        lambda: _memory(nvml.nvmlDeviceGetMemoryInfo(handle)),
        lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)},
        lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000},
        lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000},
        lambda: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)},
        lambda: {"mem_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)},
        lambda: {"throttle_reasons": _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))},
    )


def _answers(nvml: Any, *questions: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Collect the values that this GPU and driver provide; leave out the rest."""
    answers: dict[str, Any] = {}
    for ask in questions:
        try:
            answers |= ask()
        except nvml.NVMLError:
            continue
    return answers


def _utilization(rates: Any) -> dict[str, Any]:
    return {"util_percent": rates.gpu, "mem_util_percent": rates.memory}


def _memory(info: Any) -> dict[str, Any]:
    return {"mem_used": info.used, "mem_total": info.total}


def _reasons(mask: int) -> list[str]:
    return [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
