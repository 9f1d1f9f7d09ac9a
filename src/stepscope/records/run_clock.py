"""The clock of a run: the time of day when the run began, continued by the machine's steady clock.

Every process of a run on one machine uses this clock for its timestamps: ranks, agent, hub and launcher.  If the time
of day is set during the run, all timestamps still agree: no step ends before it began, no restart seems to come before
what it replaced, and nothing looks a day old that is a second old.

Both readings are in ``run.json``; agent and hub take the clock from there, ranks from their environment, where the
launcher or ``stepscope.init()`` (``recorder/api.py``) put it.  Without either it is the time of day.  Standard library
only: training processes load this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.records.paths import ENV_CLOCK

__all__ = [
    "begun",
    "boot_id",
    "clock_now",
    "clock_of",
    "environment_of",
    "follow_environment",
    "follow_run",
    "now_of",
    "process_start_ticks",
    "wall_ns",
]

_LARGEST = 1 << 62
_ahead_ns: int | None = None
"""Offset of this process's run clock from the monotonic clock; None: use the time of day."""


def wall_ns() -> int:
    """Now, by the clock of the run that this process belongs to."""
    return time.time_ns() if _ahead_ns is None else time.monotonic_ns() + _ahead_ns


def boot_id() -> str:
    """The current boot of this machine; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot; 0 where the system does not provide it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The command name may contain spaces and parentheses; what follows its last ')' does not.
    return int(stat.rpartition(b")")[2].split()[19])


def begun() -> dict[str, Any]:
    """The clock of a run that begins, for ``run.json``: this process's own, and the monotonic one at the same time."""
    mono_ns = time.monotonic_ns()
    wall_ns = time.time_ns() if _ahead_ns is None else mono_ns + _ahead_ns
    return {"created_wall_ns": wall_ns, "created_mono_ns": mono_ns}


def clock_of(meta: Mapping[str, Any]) -> int | None:
    """Offset of a run's clock from the monotonic clock; None: unknown, or from another boot or machine."""
    wall, mono, place = meta.get("created_wall_ns"), meta.get("created_mono_ns"), meta.get("place")
    if not (isinstance(wall, int) and isinstance(mono, int) and isinstance(place, Mapping)):
        return None
    return wall - mono if _is_ours(place.get("boot")) and 0 <= mono <= wall < _LARGEST else None


def now_of(meta: Mapping[str, Any]) -> int:
    """Now, by the clock of a run that this process observes from outside."""
    ahead_ns = clock_of(meta)
    return time.time_ns() if ahead_ns is None else time.monotonic_ns() + ahead_ns


def follow_run(meta: Mapping[str, Any]) -> None:
    """Make ``wall_ns`` use that run's clock from now on."""
    global _ahead_ns
    _ahead_ns = clock_of(meta)


def environment_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """The variable that makes the ranks of a run follow its clock; empty if it has no clock."""
    ahead_ns = clock_of(meta)
    return {} if ahead_ns is None else {ENV_CLOCK: _clock_text(ahead_ns)}


def clock_now() -> str:
    """The value of that variable for a run that begins now."""
    return _clock_text(time.time_ns() - time.monotonic_ns())


def _clock_text(ahead_ns: int) -> str:
    return f"{boot_id()}:{ahead_ns}"


def follow_environment() -> None:
    """Follow the run's clock in a process that a launcher started.

    The variable may come from another machine (``mpirun -x``, ``srun --export``), which has another monotonic clock.
    """
    global _ahead_ns
    boot, _, text = os.environ.get(ENV_CLOCK, "").rpartition(":")
    known = _is_ours(boot) and text.isascii() and text.isdecimal() and len(text) <= len(str(_LARGEST))
    _ahead_ns = int(text) if known and int(text) < _LARGEST else None


def _is_ours(boot: object) -> bool:
    return bool(boot) and boot == boot_id()
