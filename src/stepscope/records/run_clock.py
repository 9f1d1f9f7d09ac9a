"""The clock of a run: the time of day when the run began, carried on by the machine's steady clock.

Every process of a run on one machine stamps what it writes with this clock: ranks, agent, hub and launcher.  When
somebody sets the time of day while the run lasts, all stamps still agree with one another: no step ends before it
began, no restart seems to come before what it replaced, and nothing looks a day old that is a second old.

The launcher writes both readings into ``run.json``; agent and hub take the clock from there, ranks from their
environment.  Without either it is the time of day.  Standard library only: training processes load this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from stepscope.records.places import ENV_CLOCK

__all__ = ["clock_of", "follow_environment", "follow_run", "now_of", "wall_ns"]

_LARGEST = 1 << 62
_ahead_ns: int | None = None
"""What this process's run clock is ahead of the monotonic one; None: the time of day counts."""


def wall_ns() -> int:
    """Now, by the clock of the run that this process belongs to."""
    return time.time_ns() if _ahead_ns is None else time.monotonic_ns() + _ahead_ns


def clock_of(meta: Mapping[str, Any], boot: str) -> int | None:
    """What a run's clock is ahead of the monotonic one; None: unknown, or not of this boot of this machine.

    A run without a launcher has none: nobody could tell its ranks.
    """
    if not isinstance(meta.get("launcher"), Mapping):
        return None
    wall, mono, place = meta.get("created_wall_ns"), meta.get("created_mono_ns"), meta.get("place")
    if not (isinstance(wall, int) and isinstance(mono, int) and isinstance(place, Mapping)):
        return None
    return wall - mono if boot and place.get("boot") == boot and 0 <= mono <= wall < _LARGEST else None


def now_of(meta: Mapping[str, Any], boot: str) -> int:
    """Now, by the clock of a run that this process looks at from outside."""
    ahead_ns = clock_of(meta, boot)
    return time.time_ns() if ahead_ns is None else time.monotonic_ns() + ahead_ns


def follow_run(meta: Mapping[str, Any], boot: str) -> None:
    """From now on ``wall_ns`` is that run's clock."""
    global _ahead_ns
    _ahead_ns = clock_of(meta, boot)


def follow_environment() -> None:
    """The same in a process that a launcher started."""
    global _ahead_ns
    said = os.environ.get(ENV_CLOCK, "")
    _ahead_ns = int(said) if said.isascii() and said.isdecimal() and int(said) < _LARGEST else None
