"""How much CPU the job itself uses: its ranks and everything they started (DataLoader workers, compile workers).

The tree is found by looking at processes that were not there at the last look, so a look costs one listing of
``/proc``, one small read per new process and one per process of the job.  A process that ends takes the CPU of its last
second with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

__all__ = ["JobCpu"]

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class JobCpu:
    """Keeps the tree and the counters of the sample before."""

    def __init__(self, cores: int, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._cores = cores
        self._proc = proc
        self._now = now
        self._strangers: set[int] = set()
        self._ticks: dict[int, int] = {}
        """CPU time so far, by pid, of the job's processes."""
        self._roots: set[int] = set()
        self._sampled_s: float | None = None

    def percent(self, roots: Collection[int]) -> float | None:
        """Of all cores, since the sample before; None at the first, without a root, and where there is no ``/proc``."""
        self._look(set(roots))
        now = self._now()
        ticks = {pid: spent for pid in self._ticks if (spent := self._spent(pid)) is not None}
        used = sum(spent - self._ticks[pid] for pid, spent in ticks.items())
        earlier_s, self._sampled_s = self._sampled_s, now
        self._ticks = ticks
        if earlier_s is None or now <= earlier_s or not ticks:
            return None
        return round(min(max(100.0 * used / TICKS_PER_S / (now - earlier_s) / self._cores, 0.0), 100.0), 1)

    def _look(self, roots: set[int]) -> None:
        """Bring the tree up to date."""
        try:
            present = {int(name) for name in os.listdir(self._proc) if name.isdecimal()}  # noqa: PTH208 - names, quickly
        except OSError:
            present = set()
        rooted = roots <= self._roots
        self._roots = roots
        # Whom a new root started may have been seen, and passed, before it.
        self._strangers = self._strangers & present if rooted else set()
        known = self._ticks.keys() & present
        candidates = present - known - self._strangers
        parents = {pid: parent for pid in candidates if (parent := self._parent(pid)) is not None}
        job = known | (roots & present)
        while children := {pid for pid, parent in parents.items() if parent in job and pid not in job}:
            job |= children
        self._strangers |= parents.keys() - job
        # What joined a tree that was known was born since the last look: all its time is new.
        self._ticks = {pid: self._ticks[pid] if pid in known else 0 if rooted else self._spent(pid) or 0 for pid in job}

    def _parent(self, pid: int) -> int | None:
        fields = self._stat(pid)
        return int(fields[1]) if fields else None

    def _spent(self, pid: int) -> int | None:
        fields = self._stat(pid)
        return int(fields[11]) + int(fields[12]) if fields else None

    def _stat(self, pid: int) -> list[bytes] | None:
        """The fields behind the command's name: state, parent, …; None when the process is gone."""
        try:
            stat = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            return None
        fields = stat.rpartition(b")")[2].split()
        return fields if len(fields) > 12 else None
