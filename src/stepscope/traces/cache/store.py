"""Traces that were read before, kept as Parquet, and what was found in them: a second look costs a fraction.

Where: ``$STEPSCOPE_CACHE/traces``, else ``$XDG_CACHE_HOME/stepscope/traces``, else ``~/.cache/stepscope/traces``, a
folder readable by nobody else.  An entry belongs to one file as it was (path, size, time of change, inode) and to this
version of the code: whatever in ``traces`` changes makes all entries strangers, so nobody has to think of it.  It is
made under another name and then renamed, so several processes may make the same one.  Above ``limit_bytes``
(``$STEPSCOPE_CACHE_GB``, 20 unless told; 0: no cache) those go that were not used for longest.

A cache never stands in the way: where it cannot be written, or what is in it is damaged, the file is read as if there
were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from stepscope.traces.cache.kept import BROKEN, INDEX, load_traces, read_sealed, save_traces, write_sealed
from stepscope.traces.model.columns import Trace

__all__ = ["DEFAULT_LIMIT_BYTES", "Cache", "Entry"]

Found = TypeVar("Found")

DEFAULT_LIMIT_BYTES: Final = 20 * 10**9
LAYOUT: Final = 1
ENTRY: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\Z")
UNFINISHED: Final = re.compile(r"new-[0-9a-z_]+\Z")
ABANDONED_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cache:
    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @classmethod
    def of_environment(cls, environment: dict[str, str] | None = None) -> Cache | None:
        """The user's own; None where they want none or have no home."""
        known = dict(os.environ) if environment is None else environment
        try:
            limit = float(known.get("STEPSCOPE_CACHE_GB") or DEFAULT_LIMIT_BYTES / 1e9)
        except ValueError:
            limit = DEFAULT_LIMIT_BYTES / 1e9
        if known.get("STEPSCOPE_CACHE"):
            base = Path(known["STEPSCOPE_CACHE"])
        elif known.get("XDG_CACHE_HOME"):
            base = Path(known["XDG_CACHE_HOME"]) / "stepscope"
        elif known.get("HOME"):
            base = Path(known["HOME"]) / ".cache" / "stepscope"
        else:
            return None
        return cls(folder=base / "traces", limit_bytes=int(limit * 1e9)) if limit > 0 else None

    def entry(self, path: Path) -> Entry | None:
        """The place for what is known of a file as it is now; None where that is no file."""
        identity = _identity(path)
        return None if identity is None else Entry(self, path, identity)

    def make_room(self) -> None:
        """Delete what was unused for longest, until all fits, and what somebody never finished."""
        entries, total = [], 0
        for folder in _folders(self.folder, ENTRY):
            with contextlib.suppress(OSError):
                size = sum(file.stat().st_size for file in folder.iterdir())
                entries.append((folder.stat().st_mtime_ns, size, folder))
                total += size
        for _, size, folder in sorted(entries):
            if total <= self.limit_bytes:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size
        for folder in _folders(self.folder, UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(folder, ignore_errors=True)


class Entry:
    """All that is kept of one file."""

    def __init__(self, cache: Cache, path: Path, identity: tuple[str, ...]) -> None:
        self._cache, self._path, self._identity = cache, path, identity
        place = _digest(identity[0])
        self.folder = cache.folder / f"{place}-{_digest(*identity, str(LAYOUT), code_version())}"
        self._same_path = re.compile(rf"{place}-[0-9a-f]{{16}}\Z")

    def traces(self, read: Callable[[Path], list[Trace]]) -> list[Trace]:
        """From the cache, or as ``read`` reads them, and kept from then on."""
        kept = self.load()
        if kept is not None:
            return kept
        traces = read(self._path)
        self.save(traces)
        return traces

    def load(self) -> list[Trace] | None:
        if not _is_ours(self._cache.folder):
            return None
        try:
            traces = load_traces(self.folder, str(self._path))
            os.utime(self.folder)
        except BROKEN:
            return None
        return traces

    def save(self, traces: list[Trace]) -> bool:
        """Whether it worked; not if the file was changed meanwhile."""
        try:
            self._cache.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(self._cache.folder) or _identity(self._path) != self._identity:
                return False
            made = Path(tempfile.mkdtemp(prefix="new-", dir=self._cache.folder))
        except OSError:
            return False
        try:
            save_traces(made, traces)
            for old in _folders(self._cache.folder, self._same_path):
                shutil.rmtree(old, ignore_errors=True)
            made.rename(self.folder)
        except (*BROKEN, TypeError, OverflowError):
            # A full disk; what no file can hold; or another process was first, whose entry is as good.
            return (self.folder / INDEX).exists()
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self._cache.make_room()
        return self.folder.exists()

    def results(self, name: str, decode: Callable[[bytes], Found]) -> Found | None:
        """What ``keep`` kept under this name."""
        if not _is_ours(self._cache.folder):
            return None
        try:
            found = decode(read_sealed(self.folder / name))
            os.utime(self.folder)
        except BROKEN:
            return None
        return found

    def keep(self, name: str, data: bytes) -> bool:
        """For ``results``; whether it worked, which it does not where the traces are not kept either."""
        return self.add(name, lambda path: write_sealed(path, data))

    def add(self, name: str, write: Callable[[Path], None]) -> bool:
        """A file beside the traces, made by ``write``; whether it worked."""
        try:
            if not _is_ours(self._cache.folder):
                return False
            with tempfile.TemporaryDirectory(prefix="new-", dir=self._cache.folder) as made:
                new = Path(made) / name
                write(new)
                new.replace(self.folder / name)
        except OSError:
            return False
        return True


@cache
def code_version() -> str:
    """Of all that reads and analyses traces."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(str(source).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> tuple[str, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    numbers = (found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)
    return (str(path.absolute()), *map(str, numbers))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    """Nobody else can put anything there."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _folders(inside: Path, named: re.Pattern[str]) -> Iterator[Path]:
    try:
        found = list(inside.iterdir())
    except OSError:
        return
    yield from (path for path in found if named.match(path.name) and path.is_dir())
