"""``inbox/NNNNNN.frames``: the frames that a hub accepted, one after the other, as they came.  Writer and reader.

    0    8s   magic  b"STEPINBX"
    8    u32  version
    12   u32  zero
    16   ...  records, each:
         4s   magic  b"RCVD"
         u32  bytes      of the frame
         u64  wall_ns    when it came, by this host's clock
         u32  crc32 of the three before it …
         u32  … and of the frame
         ...  the frame (``wire/frames.py``)

One writer, the run's hub; any number of readers.  A record counts as soon as it is whole: what a kill cut off is passed
by readers and cut away by the next writer.  A journal that is large enough is followed by the next number, so that the
old one can be rewritten (``store/parts.py``) while the hub goes on.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepscope.records.modes import file_mode
from stepscope.store.jsonl import write_all
from stepscope.store.paths import INBOX
from stepscope.store.reading import open_file

__all__ = ["JOURNAL_BYTES", "JournalWriter", "Received", "journal_path", "journals", "read_journal"]

FILE_HEAD = struct.Struct("<8sII")
FILE_MAGIC = b"STEPINBX"
VERSION = 1
RECORD_HEAD = struct.Struct("<4sIQII")
RECORD_MAGIC = b"RCVD"
JOURNAL_BYTES = 64 << 20
"""From this size on the next journal is begun: what rewriting one takes in memory is bounded by it."""
_NAME = re.compile(r"(\d{6,9})\.frames")
_BUFFER = 1 << 20
_SAID = struct.Struct("<4sIQ")
_SUMS = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class Received:
    """One frame in a journal."""

    wall_ns: int
    raw: bytes
    end: int
    """Where in the file the next one begins."""


class JournalWriter:
    """Append frames to one journal.  Cuts off what a kill left unfinished."""

    def __init__(self, path: Path, end: int) -> None:
        """``end``: of the last whole record, 0 for a new file.  OSError when it cannot be written."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, file_mode(path.parent))
        self.end = end

    def append(self, raw: bytes, *, wall_ns: int, durable: bool = False) -> None:
        """All of it or, when the disk refuses (OSError), nothing; ``durable`` also survives the loss of power."""
        said = _SAID.pack(RECORD_MAGIC, len(raw), wall_ns)
        first = b"" if self.end else FILE_HEAD.pack(FILE_MAGIC, VERSION, 0)
        data = b"".join([first, said, _SUMS.pack(zlib.crc32(said), zlib.crc32(raw)), raw])
        try:
            if os.fstat(self._fd).st_size != self.end:
                os.ftruncate(self._fd, self.end)
            write_all(self._fd, data, self.end)
            if durable:
                self.sync()
        except OSError:
            os.ftruncate(self._fd, self.end)
            raise
        self.end += len(data)

    def sync(self) -> None:
        """All that was appended survives the loss of power; OSError when the disk refuses."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def journal_path(run_dir: Path, number: int) -> Path:
    return run_dir / INBOX / f"{number:06d}.frames"


def journals(run_dir: Path, *, after: int) -> list[int]:
    """The numbers of those that are there, in order, but for those up to ``after``, which are sealed."""
    try:
        names = [path.name for path in (run_dir / INBOX).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbers = (int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
    return sorted(number for number in numbers if number > after)


def read_journal(path: Path, start: int = 0) -> Iterator[Received]:
    """Every whole record, one at a time; what lies between two of them is passed.

    ``start``: the ``end`` of the last one that is known.
    """
    with open_file(path, buffering=_BUFFER) as file:
        head = file.read(FILE_HEAD.size)
        if len(head) < FILE_HEAD.size or FILE_HEAD.unpack(head)[:2] != (FILE_MAGIC, VERSION):
            return
        at = max(start, FILE_HEAD.size)
        size = os.fstat(file.fileno()).st_size
        while at <= size - RECORD_HEAD.size:
            file.seek(at)
            head = file.read(RECORD_HEAD.size)
            magic, length, wall_ns, head_crc, crc = RECORD_HEAD.unpack(head)
            raw = b""
            if magic == RECORD_MAGIC and zlib.crc32(head[: _SAID.size]) == head_crc:
                raw = file.read(length)
            end = at + RECORD_HEAD.size + length
            if raw and len(raw) == length and zlib.crc32(raw) == crc:
                yield Received(wall_ns=wall_ns, raw=raw, end=end)
                at = end
                continue
            file.seek(at + 1)
            after = file.read().find(RECORD_MAGIC)
            at = size if after < 0 else at + 1 + after
