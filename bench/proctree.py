"""Look at everything below this process, from outside, through /proc; Linux only.

This process becomes the one that orphans are handed to, so that a daemon which left its parent is still found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Seen", "TreeWatch", "adopt_orphans", "descendants"]

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[int]:
    """Live processes below this one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(folder.name))
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending += below
    return found


@dataclass
class Seen:
    """The last that was seen of one process."""

    peak_mb: float = 0.0
    cpu_s: float = 0.0
    peak_mb_in_training: float = 0.0


@dataclass
class TreeWatch:
    """Peak memory and CPU of every process below this one; call ``look`` now and then."""

    seen: dict[int, Seen] = field(default_factory=dict)
    afterwards: list[dict[int, float]] = field(default_factory=list)
    """At each look after the training: what every process has in memory at that moment, MB."""

    def look(self, *, training: bool) -> set[int]:
        alive = descendants()
        now: dict[int, float] = {}
        for pid in alive:
            with contextlib.suppress(OSError, ValueError, IndexError):
                record = self.seen.setdefault(pid, Seen())
                # Not the maximum of what was seen: between fork and exec a child still has its parent's memory.
                record.peak_mb = _status_mb(pid, "VmHWM")
                now[pid] = _status_mb(pid, "VmRSS")
                record.cpu_s = _cpu_s(pid)
                if training:
                    record.peak_mb_in_training = record.peak_mb
        if not training:
            self.afterwards.append(now)
        return alive

    def reap(self) -> None:
        """Let adopted orphans that have ended go."""
        for pid in self.seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def beside(self, training_pid: int) -> dict[str, float]:
        """Everything but the training process."""
        others = [record for pid, record in self.seen.items() if pid != training_pid]
        return {
            "beside_procs": len(others),
            "beside_mb": sum(record.peak_mb_in_training for record in others),
            "beside_end_mb": max(
                (sum(mb for pid, mb in now.items() if pid != training_pid) for now in self.afterwards), default=0.0
            ),
            "beside_peaks_mb": sum(record.peak_mb for record in others),
            "beside_cpu_s": sum(record.cpu_s for record in others),
        }


def _status_mb(pid: int, key: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
