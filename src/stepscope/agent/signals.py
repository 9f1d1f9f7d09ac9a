"""Whether a process can be asked, by a signal that it offered, to write its stack: checked in the kernel's own words.

A signal that is not caught would end the process, so nothing is sent on the word of a header alone.
"""

from __future__ import annotations

import signal
from pathlib import Path

__all__ = ["awaits_delivery", "listens"]


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


def _masks(process: Path) -> dict[str, int]:
    lines = (line.partition(":\t") for line in (process / "status").read_text(errors="replace").splitlines())
    return {name: int(mask, 16) for name, _, mask in lines if name[:3] in ("Sig", "Shd") and name != "SigQ"}
