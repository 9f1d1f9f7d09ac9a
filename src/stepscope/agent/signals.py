"""Whether a process can be asked, by a signal that it offered, to write its stack: checked in the kernel's own words.

A signal that is not caught would end the process, so nothing is sent on the word of a header alone.  And one that is
caught ends a sleep of native code early, which Python's own sleep goes on with but ``sleep(3)`` does not: such a thread
is left alone, and another is asked where one will do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["awaits_delivery", "listens", "send_to_thread", "sleeps_in_native_code", "waiting_thread"]

SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}
"""Numbers of the system calls nanosleep and clock_nanosleep."""
SERVER_THREAD = "pt_workerserver"
"""The worker server's own threads do nothing else: they are asked before any other."""


def listens(process: Path, number: int, fd: int, answers: Path) -> bool:
    """Whether the main thread catches the signal, has none of it waiting, and its descriptor is the file ``answers``.

    ``process`` is its folder in ``/proc``.  OSError when it is gone, ValueError when what it says makes no sense.
    """
    masks = _masks(process)
    if number < signal.SIGRTMIN or not all(name in masks for name in ("SigCgt", "SigBlk", "SigPnd", "ShdPnd")):
        return False
    bit = 1 << (number - 1)
    if not masks["SigCgt"] & bit or (masks["SigBlk"] | masks["SigPnd"] | masks["ShdPnd"]) & bit:
        return False
    theirs, ours = (process / "fd" / str(fd)).stat(), answers.stat()
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def awaits_delivery(process: Path, number: int) -> bool:
    """Whether a signal that was sent has not reached the process yet."""
    try:
        masks = _masks(process)
    except (OSError, ValueError):
        return False
    return bool((masks.get("SigPnd", 0) | masks.get("ShdPnd", 0)) >> (number - 1) & 1)


def sleeps_in_native_code(process: Path) -> bool:
    """Whether the main thread is in a sleep that a signal would end; False too where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        words = (process / "syscall").read_text().split()
        plain, by_clock = SLEEPS.get(platform.machine(), (-1, -1))
        # Python sleeps until an instant (the flag is 1) or, before 3.11, in select, and takes it up again.
        return words[0] == str(plain) or (words[0] == str(by_clock) and int(words[2], 16) == 0)
    return False


def waiting_thread(process: Path, number: int) -> int | None:
    """A thread, not the main one, that waits for a lock and takes the signal: to it, it waits as if nothing had been.

    None where there is none, or the kernel does not tell what threads wait for.
    """
    found: int | None = None
    try:
        threads = sorted(int(name) for name in os.listdir(process / "task"))  # noqa: PTH208 - names, quickly
    except OSError:
        return None
    for thread in threads:
        folder = process / "task" / str(thread)
        with suppress(OSError, ValueError):
            if str(thread) == process.name or "futex" not in (folder / "wchan").read_text():
                continue
            if _masks(folder).get("SigBlk", -1) >> (number - 1) & 1:
                continue
            if (folder / "comm").read_text().strip() == SERVER_THREAD:
                return thread
            found = found or thread
    return found


def send_to_thread(pid: int, thread: int, number: int) -> bool:
    """Whether it was sent; only to a thread of that process."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    return tgkill is not None and tgkill(pid, thread, number) == 0


def _masks(process: Path) -> dict[str, int]:
    lines = (line.partition(":\t") for line in (process / "status").read_text(errors="replace").splitlines())
    return {name: int(mask, 16) for name, _, mask in lines if name[:3] in ("Sig", "Shd") and name != "SigQ"}
