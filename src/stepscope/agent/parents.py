"""Whether whoever started the ranks may start more of them.

Without a launcher to say that the job is over, the end of all ranks could be the pause between two attempts of an
elastic job.  A parent that was started as part of the run (torchrun, a shell script) and still lives means just that;
an older one is the user's own shell and means nothing.  Under ``stepscope.init()`` the ranks themselves say who it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.ring.writer import process_start_ticks
from stepscope.store.processes import process_alive

__all__ = ["Parents"]


class Parents:
    def __init__(self, meta: dict[str, Any], owner: int | None = None) -> None:
        launcher = meta.get("launcher")
        ticks = launcher.get("start_ticks") if isinstance(launcher, dict) else None
        self._since = ticks if isinstance(ticks, int) and ticks > 0 else None
        self._launcher = launcher.get("pid") if isinstance(launcher, dict) else None
        self._watched: dict[int, int] = {}
        """Start time by pid."""
        if owner is not None:
            self._watched[owner] = process_start_ticks(owner)

    def watch(self, pid: int) -> None:
        """Remember the parent of a rank."""
        parent = _parent(pid)
        ticks = process_start_ticks(parent) if parent else 0
        if self._since is not None and ticks >= self._since and parent != self._launcher:
            self._watched[parent] = ticks

    def alive(self) -> bool:
        self._watched = {pid: ticks for pid, ticks in self._watched.items() if process_alive(pid, ticks)}
        return bool(self._watched)


def _parent(pid: int) -> int:
    """0 when the process is gone or the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])
