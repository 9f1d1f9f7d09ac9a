"""The clock of a run: the time of day when the run began, carried on by the machine's steady clock.

Every process of a run on one machine stamps what it writes with this clock: ranks, agent, hub and launcher.  When
somebody sets the time of day while the run lasts, all stamps still agree with one another: no step ends before it
began, no restart seems to come before what it replaced, and nothing looks a day old that is a second old.

Both readings are in ``run.json``; agent and hub take the clock from there, ranks from their environment, where the
launcher put it, or ``stepscope.init()`` (``recorder/api.py``).  Without either it is the time of day.  Standard
library only: training processes load this.
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
    "wall_ns",
]

_LARGEST = 1 << 62
_ahead_ns: int | None = None
"""What this process's run clock is ahead of the monotonic one; None: the time of day counts."""


def wall_ns() -> int:
    """Now, by the clock of the run that this process belongs to."""
    return time.time_ns() if _ahead_ns is None else time.monotonic_ns() + _ahead_ns


def boot_id() -> str:
    """Which boot of which machine this is; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def begun() -> dict[str, Any]:
    """What ``run.json`` says of the clock of a run that begins: this process's own, and the monotonic one with it."""
    mono_ns = time.monotonic_ns()
    wall_ns = time.time_ns() if _ahead_ns is None else mono_ns + _ahead_ns
    return {"created_wall_ns": wall_ns, "created_mono_ns": mono_ns}


def clock_of(meta: Mapping[str, Any]) -> int | None:
    """What a run's clock is ahead of the monotonic one; None: unknown, or not of this boot of this machine."""
    wall, mono, place = meta.get("created_wall_ns"), meta.get("created_mono_ns"), meta.get("place")
    if not (isinstance(wall, int) and isinstance(mono, int) and isinstance(place, Mapping)):
        return None
    return wall - mono if _is_ours(place.get("boot")) and 0 <= mono <= wall < _LARGEST else None


def now_of(meta: Mapping[str, Any]) -> int:
    """Now, by the clock of a run that this process looks at from outside."""
    ahead_ns = clock_of(meta)
    return time.time_ns() if ahead_ns is None else time.monotonic_ns() + ahead_ns


def follow_run(meta: Mapping[str, Any]) -> None:
    """From now on ``wall_ns`` is that run's clock."""
    global _ahead_ns
    _ahead_ns = clock_of(meta)


def environment_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """The variable by which the ranks of a run follow its clock; none where it has none."""
    ahead_ns = clock_of(meta)
    return {} if ahead_ns is None else {ENV_CLOCK: _said(ahead_ns)}


def clock_now() -> str:
    """What that variable says of a run that begins now."""
    return _said(time.time_ns() - time.monotonic_ns())


def _said(ahead_ns: int) -> str:
    return f"{boot_id()}:{ahead_ns}"


def follow_environment() -> None:
    """The same in a process that a launcher started.

    The variable may come from another machine (``mpirun -x``, ``srun --export``), whose monotonic clock is another.
    """
    global _ahead_ns
    boot, _, said = os.environ.get(ENV_CLOCK, "").rpartition(":")
    known = _is_ours(boot) and said.isascii() and said.isdecimal() and len(said) <= len(str(_LARGEST))
    _ahead_ns = int(said) if known and int(said) < _LARGEST else None


def _is_ours(boot: object) -> bool:
    return bool(boot) and boot == boot_id()
