"""Whether the kernel ended a process for want of memory: its counters before and after.

The cgroup's own counter is taken where there is one, the machine's otherwise.  They are read once a second and whenever
a rank vanishes; the kernel counts before it kills, so a counter that has grown by then means it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["OomWatch"]

_KEY = "oom_kill "


class OomWatch:
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files: dict[int, Path] = {}
        """By pid: where its kills are counted."""
        self._counts: dict[Path, int] = {}

    def watch(self, pid: int) -> None:
        file = self._file_of(pid)
        self._files[pid] = file
        self._counts.setdefault(file, self._count(file))

    def sample(self) -> None:
        self._counts = {file: self._count(file) for file in set(self._files.values())}

    def killed(self, pid: int) -> bool:
        """Of a process that just vanished: whether the kernel has killed one since the last look.  Forgets it."""
        file = self._files.pop(pid, None)
        if file is None:
            return False
        before, self._counts[file] = self._counts.get(file, 0), self._count(file)
        return self._counts[file] > before

    def _file_of(self, pid: int) -> Path:
        machine = self._root / "proc/vmstat"
        try:
            lines = (self._root / "proc" / str(pid) / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return machine
        folder = self._root / "sys/fs/cgroup"
        for line in lines:
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            inside = path.lstrip("/")
            unified = [folder / inside / "memory.events"] if not controllers else []
            split = [folder / "memory" / inside / "memory.oom_control"] if controllers == "memory" else []
            for file in (*unified, *split):
                if _KEY in _text(file):
                    return file
        return machine

    @staticmethod
    def _count(file: Path) -> int:
        line = next((line for line in _text(file).splitlines() if line.startswith(_KEY)), "")
        count = line.removeprefix(_KEY).strip()
        return int(count) if count.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
