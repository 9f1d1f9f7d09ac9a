"""Traces that arrive in a folder: when a file is complete, and which files are one recording of a job.

A file is complete when its size and time are the same in two polls: profilers and copies write in place. The files of
one folder that become complete without a pause of ``settle_s`` between them are one recording. Files that were there at
the start are passed over.

Nothing here sleeps or reads a clock: the caller polls and says what time it is. Memory is bounded by ``MOST_FILES``
names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stepscope.traces.reading.files import ENDINGS

__all__ = ["Arrivals", "Recording"]

MOST_FILES: Final = 100_000
SETTLE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Recording:
    folder: Path
    files: tuple[Path, ...]


State = tuple[int, int, int]
"""Size, modification time, inode."""


@dataclass(kw_only=True)
class _Group:
    files: list[Path] = field(default_factory=list)
    newest_s: float = 0.0


class Arrivals:
    def __init__(self, folder: Path, *, settle_s: float = SETTLE_S) -> None:
        self.folder = folder
        self.settle_s = settle_s
        self._done = dict(self._listed())
        """Files that were there, or were handed out."""
        self._growing: dict[Path, State] = {}
        self._groups: dict[Path, _Group] = {}

    @property
    def passed_over(self) -> int:
        """How many files are not waited for any more."""
        return len(self._done)

    def poll(self, now_s: float) -> list[Recording]:
        """Look at the folder; return the recordings that are complete."""
        listed = dict(self._listed())
        self._done = {path: state for path, state in self._done.items() if path in listed}
        growing: dict[Path, State] = {}
        for path, state in listed.items():
            if self._done.get(path) == state:
                continue
            if self._growing.get(path) == state and state[0]:
                self._done[path] = state
                group = self._groups.setdefault(path.parent, _Group())
                group.files = [*(file for file in group.files if file != path), path]
                group.newest_s = now_s
            else:
                growing[path] = state
        self._growing = growing
        busy = {path.parent for path in growing}
        ready = [
            folder
            for folder, group in self._groups.items()
            if folder not in busy and now_s - group.newest_s >= self.settle_s
        ]
        return [
            Recording(folder=folder, files=tuple(sorted(self._groups.pop(folder).files))) for folder in sorted(ready)
        ]

    def _listed(self) -> Iterator[tuple[Path, State]]:
        """Yield files that may be traces, by their names; links and folders that cannot be read are passed over."""
        left = MOST_FILES
        waiting = [self.folder]
        while waiting and left:
            try:
                entries = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
            except OSError:
                continue
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    elif entry.name.endswith(ENDINGS[:4]) and entry.is_file(follow_symlinks=False) and left:
                        status = entry.stat(follow_symlinks=False)
                        left -= 1
                        yield Path(entry.path), (status.st_size, status.st_mtime_ns, status.st_ino)
                except OSError:
                    continue  # removed or renamed meanwhile
