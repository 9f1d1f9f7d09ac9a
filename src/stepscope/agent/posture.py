"""What the threads of processes do at this moment: who waits in the kernel, who runs.

It decides how a process may be asked for its stacks.  faulthandler reads the frames of threads as they lie in memory,
and a thread that runs Python may be between two of them (``recorder/stacks.py``), so it must not be asked while one
does; and since a thread that waits may go on at any moment, that is looked at once more when all else is ready.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stepscope.agent.procfs import PROC

__all__ = ["Posture", "postures", "waits_on"]

WATCH_S = 0.1
BUSY_TICKS = 2
"""Of a hundredth of a second each, in that time: a thread that polls now and then is not busy."""
WAITING = ("S", "D")
RUNS = "R"


@dataclass(frozen=True, kw_only=True)
class Posture:
    state: str
    """Of the main thread, the kernel's letter."""
    waits: bool
    """The main thread waits in the kernel, and has all the while."""
    switches: str
    """How often it was made to wait so far."""
    others_run: bool
    """Another thread is at work that may well run Python."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    state: str
    switches: str
    """How often the main thread was made to wait so far."""
    ticks: dict[int, int]
    """CPU time so far of the other threads that were never given a name: torch, NCCL and gloo name theirs."""
    others_run: bool
    """One of them runs at this moment, or would if there were a processor for it."""


def postures(pids: Iterable[int], proc: Path = PROC) -> dict[int, Posture]:
    """By pid, of those that are there; takes a tenth of a second, however many."""
    first = {pid: look for pid in pids if (look := _look(proc / str(pid))) is not None}
    time.sleep(WATCH_S)
    found = {}
    for pid, before in first.items():
        now = _look(proc / str(pid))
        if now is None:
            continue
        waits = before.state in WAITING and now.state in WAITING and before.switches == now.switches
        busy = any(ticks - before.ticks.get(thread, ticks) >= BUSY_TICKS for thread, ticks in now.ticks.items())
        others_run = busy or before.others_run or now.others_run
        found[pid] = Posture(state=now.state, waits=waits, switches=now.switches, others_run=others_run)
    return found


def waits_on(process: Path, posture: Posture, *, all_threads: bool) -> bool:
    """Whether the main thread is in the same wait as it was then, and ``all_threads`` still wait with it.

    ``process`` is its folder in ``/proc``.
    """
    if all_threads and ((now := _look(process)) is None or now.others_run):
        return False
    try:
        state, switches, _ = _main_thread(process)
    except OSError:
        return False
    return posture.waits and state in WAITING and switches == posture.switches


def _main_thread(process: Path) -> tuple[str, str, str]:
    """Its state, how often it was made to wait so far, and its name."""
    lines = (process / "status").read_text(errors="replace").splitlines()
    fields = dict(line.partition(":\t")[::2] for line in lines)
    return fields.get("State", "")[:1], fields.get("voluntary_ctxt_switches", ""), fields.get("Name", "")


def _look(process: Path) -> _Look | None:
    try:
        state, switches, name = _main_thread(process)
        threads = os.listdir(process / "task")  # noqa: PTH208 - names, quickly
    except OSError:
        return None
    ticks, others_run = {}, False
    for thread in threads:
        try:
            stat = (process / "task" / thread / "stat").read_text(errors="replace")
        except OSError:
            continue  # it just ended
        before, _, rest = stat.rpartition(")")
        spent = rest.split()
        if thread != process.name and before.partition("(")[2] == name and len(spent) > 12:
            ticks[int(thread)] = int(spent[11]) + int(spent[12])
            others_run = others_run or spent[0] == RUNS
    return _Look(state=state, switches=switches, ticks=ticks, others_run=others_run)
