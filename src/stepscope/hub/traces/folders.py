"""The trace folders that a hub serves besides its runs: which there are, and their files.

A folder counts if it directly contains a trace of torch.profiler or an Nsight Systems export. It is the served folder
itself, or at most two levels below it; runs and hidden folders are passed over. Whoever can write there may put
anything there: only regular files of bounded number are considered, links are not followed, and a file without a
telling name is judged by the beginning of its content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.store.paths import META

__all__ = ["MOST_FILES", "TraceFile", "TraceFolder", "files_of", "trace_folder", "trace_folders", "traces_in"]

MOST_FOLDERS = 200
MOST_FILES = 1024
"""Of one folder: as many ranks as the page draws."""
MOST_ENTRIES = 10_000
"""Of one folder that are considered."""
MOST_OPENED = 16
"""Files without a telling name in one folder of which the beginning is read."""
DEPTH = 2
SURE = (".pt.trace.json", ".pt.trace.json.gz", ".pt.trace.json.zst")
BETWEEN = "~"
"""Between the names in the ID of a folder two levels below."""


@dataclass(frozen=True, kw_only=True, order=True)
class TraceFile:
    path: Path
    size_bytes: int
    changed_ns: int
    inode: int


@dataclass(frozen=True, kw_only=True)
class TraceFolder:
    id: str
    path: Path
    files: tuple[TraceFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def changed_ns(self) -> int:
        return max(file.changed_ns for file in self.files)


def trace_folders(root: Path) -> list[TraceFolder]:
    """All trace folders of a served folder, the newest first."""
    found = [folder for id_, path in _places(root) if (folder := _folder(id_, path)) is not None]
    return sorted(found, key=lambda folder: (-folder.changed_ns, folder.id))


def trace_folder(root: Path, id_: str) -> TraceFolder | None:
    """The folder with that ID, or None."""
    path = next((path for known, path in _places(root) if known == id_), None)
    return None if path is None else _folder(id_, path)


def traces_in(folder: Path) -> tuple[TraceFile, ...]:
    """The traces directly in a folder, by name."""
    from stepscope.traces.reading.files import ENDINGS, may_be_trace

    found: list[Path] = []
    opened = 0
    for entry in _entries(folder):
        if not entry.name.endswith(ENDINGS) or not _is_regular(entry):
            continue
        path = Path(entry.path)
        if not entry.name.endswith(SURE):
            opened += 1
            if opened > MOST_OPENED or not may_be_trace(path):
                continue
        found.append(path)
        if len(found) == MOST_FILES:
            break
    return files_of(found)


def files_of(paths: Iterable[Path]) -> tuple[TraceFile, ...]:
    """The regular files among these, in order."""
    found = []
    for path in paths:
        try:
            about = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(about.st_mode):
            size, changed_ns = about.st_size, about.st_mtime_ns
            found.append(TraceFile(path=path, size_bytes=size, changed_ns=changed_ns, inode=about.st_ino))
    return tuple(sorted(found))


def _is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def _folder(id_: str, path: Path) -> TraceFolder | None:
    files = traces_in(path)
    return TraceFolder(id=id_, path=path, files=files) if files else None


def _places(root: Path) -> Iterator[tuple[str, Path]]:
    """Folders that may have traces, each with its ID."""
    root = root.absolute()
    level: Sequence[tuple[tuple[str, ...], Path]] = [((), root)]
    count = 0
    for _ in range(DEPTH + 1):
        below: list[tuple[tuple[str, ...], Path]] = []
        for names, path in level:
            if (path / META).exists():
                continue
            yield BETWEEN.join(names) or f"{BETWEEN}{root.name}", path
            count += 1
            if count >= MOST_FOLDERS:
                return
            if len(names) < DEPTH:
                below += [((*names, entry.name), Path(entry.path)) for entry in _folders(path)]
        level = below


def _folders(path: Path) -> list[os.DirEntry[str]]:
    found = []
    for entry in _entries(path):
        try:
            if not entry.name.startswith(".") and entry.name.isprintable() and entry.is_dir(follow_symlinks=False):
                found.append(entry)
        except OSError:
            continue
    return sorted(found, key=lambda entry: entry.name)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for _, entry in zip(range(MOST_ENTRIES), entries, strict=False)]
    except OSError:
        return []
