"""How much of a process's resident memory are pages of files that it has mapped (``/proc/PID/status``).

A data set that is memory-mapped (Arrow, ``numpy.memmap``) fills the resident memory as it is read; the kernel takes
such pages back whenever it needs them, so they are no sign of a leak.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["mapped_bytes"]

PROC = Path("/proc")


def mapped_bytes(pid: int, proc: Path = PROC) -> int | None:
    """None where it is not told: another system, a kernel before 4.5, a process that is gone."""
    try:
        status = (proc / str(pid) / "status").read_bytes()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(b"RssFile:"):
            words = line.split()
            return int(words[1]) * 1024 if len(words) > 1 and words[1].isdigit() else None
    return None
