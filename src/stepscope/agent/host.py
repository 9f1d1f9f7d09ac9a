"""Samples of this node and of the ranks' processes.  Rates are bytes per second since the sample before.

By psutil, but for what the kernel says about waiting tasks (``pressure``), the network (``network``) and the CPU of the
job (``jobcpu``).

How long the log of a rank was at that moment is noted, too: what is printed has no times, and so a step still finds
its place in it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from stepscope.agent.jobcpu import JobCpu
from stepscope.agent.mapped import mapped_bytes
from stepscope.agent.network import NetworkSampler
from stepscope.agent.pressure import Pressure
from stepscope.records import run_clock

__all__ = ["HostSampler"]


class HostSampler:
    """Keeps the counters of the sample before; one per agent."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._processes: dict[int, psutil.Process] = {}
        self._counters: dict[str, tuple[float, int]] = {}
        self._pressure = Pressure()
        self._network = NetworkSampler()
        self._job = JobCpu(psutil.cpu_count() or 1)
        psutil.cpu_percent()
        self._counters_of_host()

    def watch(self, pid: int) -> None:
        """Begin to sample a process."""
        try:
            process = psutil.Process(pid)
            process.cpu_percent()
            self._processes[pid] = process
        except psutil.Error:
            return
        self._counters_of_process(process)

    def forget(self, pid: int) -> None:
        self._processes.pop(pid, None)

    def sample(self, ranks: Iterable[tuple[int, int, Path]]) -> list[dict[str, Any]]:
        """One record for the host and one for each (pid, rank, its log) that is watched and alive."""
        common = {"wall_ns": run_clock.wall_ns(), "mono_ns": time.perf_counter_ns(), "node": self._node}
        records = [{**common, "kind": "host", **self._host()}]
        for pid, rank, log in ranks:
            process = self._processes.get(pid)
            if process is not None and (values := self._process(process)):
                records.append({**common, "kind": "process", "pid": pid, "rank": rank, **values, **_length_of(log)})
        return records

    def _host(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # psutil's, in containers without /proc/vmstat
            swap = psutil.swap_memory()
        own = self._job.percent(self._processes)
        return {
            "cpu_percent": psutil.cpu_percent(),
            "cpu_count": psutil.cpu_count() or 1,
            "load1": round(os.getloadavg()[0], 2),
            "mem_total": memory.total,
            "mem_available": memory.available,
            "swap_used": swap.used,
            **self._network.sample(),
            **self._counters_of_host(),
            **self._pressure.sample(),
            **({} if own is None else {"own_cpu_percent": own}),
        }

    def _counters_of_host(self) -> dict[str, Any]:
        disks = psutil.disk_io_counters()
        if disks is None:
            return {}
        return {
            "disk_read_bps": self._rate("disk_read", disks.read_bytes),
            "disk_write_bps": self._rate("disk_write", disks.write_bytes),
        }

    def _process(self, process: psutil.Process) -> dict[str, Any]:
        mapped = mapped_bytes(process.pid)
        try:
            with process.oneshot():
                return {
                    "cpu_percent": process.cpu_percent(),
                    "rss": process.memory_info().rss,
                    **({} if mapped is None else {"rss_file": mapped}),
                    "threads": process.num_threads(),
                    **self._counters_of_process(process),
                }
        except psutil.Error:
            return {}  # it just ended

    def _counters_of_process(self, process: psutil.Process) -> dict[str, Any]:
        try:
            counters = process.io_counters()
        except (psutil.Error, AttributeError):
            return {}  # not told to us, or not by this system
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
        return {}  # nothing was printed, or it is not kept
