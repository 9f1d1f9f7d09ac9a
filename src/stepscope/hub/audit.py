"""The audit log: who read and who sent what, one JSON object per line, in a private file of bounded size.

    runs/NAME/audit.jsonl              for the hub of a run
    ~/.config/stepscope/audit.jsonl    for ``stepscope serve``, unless ``--audit-log`` names another
    audit.jsonl.1 … .7                 earlier contents; the oldest is deleted

The first occurrence of an action is logged at once (``AuditLog.note``).  Repetitions within ten minutes are counted
and become one more line, so neither a polling page nor a node that sends twice a second fills a disk.  In ten minutes
each token gets ``LINES`` such lines and all strangers together ``STRANGERS``; everything beyond that is counted in one
line.  Changes are not repetitions: each has a line, up to ``CHANGES``.  A node gets a line when its session begins and
one, with figures, when it ends.

Tokens and query strings are never passed in.  A path that cannot belong to the API is logged as ``other``.

The standard library's RotatingFileHandler would follow a link that another user put in the place of the file, has no
lock against a second hub (``serve`` writes one file for all), and leaves half a line when the disk is full.

``note`` only changes memory, in the hub's event loop; ``keep`` writes once a second, in a thread.  If the file cannot
be written, or is not a regular file owned by the user, the hub continues: this is reported once, and a limited number
of lines is kept for later.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from stepscope.records.files import key_path, open_file
from stepscope.records.text import say
from stepscope.store.file_io import record_in

__all__ = ["AUDIT", "AuditLog", "Via", "audit_path", "read_audit", "route_and_run"]

AUDIT: Final = "audit.jsonl"
Via = Literal["hub token", "named token", "proxy", "node", "unknown"]
"""How a client was identified.  ``unknown``: not at all, and nothing was read or accepted."""

WINDOW_S: Final = 600.0
"""How long repetitions are counted before they are written."""
LINES: Final = 100
STRANGERS: Final = 8
CHANGES: Final = 1000
"""Changes of one reader that get a line each within ``WINDOW_S``."""
OPEN: Final = 1 << 14
"""The limit for distinct actions counted at one time."""
WAITING: Final = 20_000
"""The limit for lines waiting for the disk."""
FILE_BYTES: Final = 4 << 20
FILES: Final = 8
_BATCH: Final = 1000
"""Lines written at once."""
_TICK_S: Final = 1.0
_SHORTEST: Final = 40
_LONGEST: Final = 1 << 15
"""Bytes in a line.  A run may come from a stranger: lines shorter or longer than any the hub writes are skipped."""
_TEXT: Final = 128
"""Characters in a name, an address, a method or a run."""
_RUNS: Final = "/api/v1/runs"
_PLAIN: Final = frozenset(
    {
        "/metrics",
        "/api/v1/compare",
        "/api/v1/fleet",
        "/api/v1/history",
        "/api/v1/sweeps",
        "/api/v1/traces",
        "/api/v1/hello",
        "/api/v1/session",
        "/api/v1/openapi.json",
        _RUNS,
    }
)
_OTHERS: Final = ("/api/v1/sweeps", "/api/v1/traces")
"""With resources below them that belong to no run."""
_BELOW: Final = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.~-]{0,160}){1,6}")


@dataclass(slots=True, kw_only=True)
class _Repeated:
    line: Mapping[str, Any]
    group: tuple[str, str]
    since_s: float
    count: int = 0
    first: str = ""
    """The times of the first and the last repetition counted."""
    last: str = ""
    figures: dict[str, str | int] = field(default_factory=dict)


@dataclass(kw_only=True)
class AuditLog:
    """Call ``note`` in the event loop, run ``keep`` as one of its tasks, and call ``close`` when that has ended."""

    path: Path
    about: Mapping[str, str] = field(default_factory=dict)
    """Additional fields of every line."""
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    file_bytes: int = FILE_BYTES
    files: int = FILES

    def __post_init__(self) -> None:
        self._repeated: dict[tuple[Any, ...], _Repeated] = {}
        self._groups: Counter[tuple[str, str]] = Counter()
        self._changes: Counter[str] = Counter()
        """Changes with a line of their own since ``_changes_since_s``, by reader."""
        self._changes_since_s = self.clock()
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._failed = False
        self._writing = threading.Lock()

    def note(
        self,
        event: Literal["read", "changed", "signed in", "signed out", "joined", "ended", "refused"],
        *,
        via: Via,
        who: str = "",
        address: str = "",
        method: str = "",
        route: str = "",
        run: str = "",
        status: int = 0,
        **figures: str | int,
    ) -> None:
        """Record an action.  Cheap, and never fails.  ``figures``: numbers are added up when lines are merged."""
        who, address, method, run = who[:_TEXT], address[:_TEXT], method[:_TEXT], run[:_TEXT]
        line: dict[str, Any] = {"event": event, "via": via, "who": who, "address": address, "method": method}
        line |= {"route": route, "run": run, "status": status}
        if event == "changed" and self._changes[who] < CHANGES:
            self._changes[who] += 1
            self._queue({"time": self._time(), **line, **figures})
            return
        counted = line
        if via == "unknown":  # strangers choose what they request: log only the first request, count the rest together
            counted = {"event": event, "via": via, "address": address, "status": status}
        key: tuple[Any, ...] = tuple(counted.values())
        seen = self._repeated.get(key)
        if seen is None:
            group = (via, who)
            if self._groups[group] >= (STRANGERS if via == "unknown" else LINES) or len(self._repeated) >= OPEN:
                counted = {"event": event, "via": via, "who": who, "others": True}
                if len(self._repeated) >= OPEN and tuple(counted.values()) not in self._repeated:
                    counted = {"event": event, "via": via, "others": True}
                line, key, figures = counted, tuple(counted.values()), {}
                seen = self._repeated.get(key)
        when = self._time()
        if seen is not None:
            seen.count += 1
            seen.first, seen.last = seen.first or when, when
            for name, value in figures.items():
                before = seen.figures.get(name, 0)
                seen.figures[name] = before + value if isinstance(value, int) and isinstance(before, int) else value
            return
        self._repeated[key] = _Repeated(line=counted, group=group, since_s=self.clock())
        self._groups[group] += 1
        self._queue({"time": when, **line, **figures})

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.gather()
            if self._waiting:
                await asyncio.to_thread(self.write)

    def close(self) -> None:
        """Write everything, including what is still being counted."""
        self.gather(all_of_it=True)
        for _ in range(10):
            if self.write():
                return
            time.sleep(0.02)  # another process has locked the file for a moment

    def gather(self, *, all_of_it: bool = False) -> None:
        """Turn repetitions whose time is over into lines."""
        now_s = self.clock()
        if now_s - self._changes_since_s >= WINDOW_S:
            self._changes.clear()
            self._changes_since_s = now_s
        for key, seen in list(self._repeated.items()):
            if not all_of_it and now_s - seen.since_s < WINDOW_S:
                continue
            if seen.count:
                self._queue({"time": seen.last, **seen.line, **seen.figures, "count": seen.count, "first": seen.first})
                seen.since_s, seen.count, seen.first, seen.figures = now_s, 0, "", {}
            else:
                del self._repeated[key]
                self._groups[seen.group] -= 1
                if not self._groups[seen.group]:
                    del self._groups[seen.group]

    def write(self) -> bool:
        """Return whether the queue is empty or cannot be written.  False: another thread or process is writing."""
        if not self._writing.acquire(blocking=False):
            return False  # when the hub exits, the thread of ``keep`` may still be writing
        try:
            return self._write()
        finally:
            self._writing.release()

    def _write(self) -> bool:
        while self._waiting or self._lost:
            lines = [self._waiting[n] for n in range(min(len(self._waiting), _BATCH))]  # the loop may append meanwhile
            taken, lost = len(lines), 0
            if taken < _BATCH and self._lost:
                lost = self._lost
                lines.append({"time": self._time(), "lost": lost})
            try:
                self._append(b"".join(self._line(line) for line in lines))
            except BlockingIOError:
                return False
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    _tell(f"cannot write the audit log {self.path}: {error.strerror}; everything else continues")
                return True
            if self._failed:
                self._failed = False
                _tell(f"the audit log {self.path} can be written again")
            for _ in range(taken):
                self._waiting.popleft()
            self._lost -= lost
        return True

    def _line(self, line: Mapping[str, Any]) -> bytes:
        return json.dumps({"schema": 1, **line, **self.about}, separators=(",", ":")).encode() + b"\n"

    def _queue(self, line: dict[str, Any]) -> None:
        if len(self._waiting) >= WAITING:
            self._lost += 1
        else:
            self._waiting.append(line)

    def _time(self) -> str:
        when = datetime.fromtimestamp(self.now(), timezone.utc)
        return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _append(self, text: bytes) -> None:
        """Append everything or nothing (OSError); BlockingIOError while another process is writing."""
        fd = self._locked()
        try:
            size = os.lseek(fd, 0, os.SEEK_END)
            if size and size + len(text) > self.file_bytes:
                self._rotate()
                os.close(fd)
                fd, size = -1, 0
                fd = self._locked()
            if size and os.pread(fd, 1, size - 1) != b"\n":
                text = b"\n" + text
            try:
                view = memoryview(text)
                while view:
                    view = view[os.write(fd, view) :]
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            if fd >= 0:
                os.close(fd)

    def _locked(self) -> int:
        """Open or create the file.  Refuse anything but a regular file of this user: others may write to its folder."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_nlink > 1:
                raise OSError(errno.EINVAL, "not a regular file owned by this user")
            if stat.S_IMODE(about.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # a file system without locks
            if not os.path.samestat(self.path.lstat(), about):
                raise BlockingIOError(errno.EAGAIN, "another process just rotated it")
        except OSError:
            os.close(fd)
            raise
        return fd

    def _rotate(self) -> None:
        older = rotated(self.path, self.files)
        for younger, place in zip([*older[-2::-1], self.path], older[::-1], strict=True):
            if younger.exists():
                younger.replace(place)


def _tell(text: str) -> None:
    with suppress(OSError):  # stderr is closed: the hub continues
        say(text)


def rotated(path: Path, files: int = FILES) -> list[Path]:
    """Return the paths of the earlier logs, youngest first."""
    return [path.with_name(f"{path.name}.{number}") for number in range(1, files)]


def audit_path(environ: Mapping[str, str]) -> Path:
    """Return the path for ``stepscope serve``."""
    return key_path(environ).with_name(AUDIT)


def read_audit(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the log's lines, oldest first, without foreign lines.  OSError if one of its files cannot be read.

    A missing log is empty.
    """
    for place in (*reversed(rotated(path)), path):
        try:
            file = open_file(place)
        except FileNotFoundError:
            continue
        with file:
            for line in file.read(FILE_BYTES).splitlines():
                record = record_in(line) if _SHORTEST <= len(line) <= _LONGEST else None
                if record is not None:
                    yield record


def route_and_run(path: str) -> tuple[str, str]:
    """Return the API's route for a path, and its run: ``("/api/v1/runs/{run}/steps", "night")``."""
    if path in _PLAIN:
        return path, ""
    for above in _OTHERS:
        below = path.removeprefix(above)
        if path.startswith(f"{above}/") and _BELOW.fullmatch(below):
            return above + _numbered(below), ""
    run, slash, rest = path.removeprefix(f"{_RUNS}/").partition("/")
    if not path.startswith(f"{_RUNS}/") or not run:
        return "other", ""
    below = slash + rest
    if below and not _BELOW.fullmatch(below):
        return "other", run
    return f"{_RUNS}/{{run}}" + _numbered(below), run


def _numbered(below: str) -> str:
    return re.sub(r"/\d+(?=/|$)", "/{n}", below)
