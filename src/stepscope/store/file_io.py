"""Read and write the files of a run: whole documents, lines of JSON, and the disk space they take.

Replace a file as a whole: whoever opens it finds the old bytes or the new ones, never some of each.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stepscope.records.files import file_mode

__all__ = [
    "MAX_DISK",
    "NEARLY_FULL",
    "append_jsonl",
    "blank_line",
    "disk_limit",
    "fsync_file",
    "fsync_folder",
    "leftovers",
    "lines_from",
    "lines_in",
    "open_file",
    "read_document",
    "read_jsonl",
    "record_in",
    "run_bytes",
    "write_all",
    "write_bytes",
    "write_json",
]


# -- atomic -----------------------------------------------------------------------------------------------------------

_PARTIAL = ".tmp"


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write beside ``path`` and rename over it; ``durable`` also survives the loss of power.

    The name beside it cannot be guessed, and is never a link that somebody put there: a run may come from a stranger.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}{_PARTIAL}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(path.parent))
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed left beside their files."""
    return [path for path in folder.glob(f".*{_PARTIAL}") if not path.is_dir()]


def write_json(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def fsync_file(path: Path) -> None:
    """OSError also when a pipe or a link is in its place: opening a pipe would wait for somebody to write into it."""
    _fsync(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)


def fsync_folder(path: Path) -> None:
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- reading ----------------------------------------------------------------------------------------------------------
# Open the files of a run for reading: ordinary files only, and documents only up to a size.
#
# A run may come from anybody.  A pipe would have us wait for ever, a device never ends.

MAX_DOCUMENT_BYTES = 256 << 20
"""Of a document, which is read whole; the largest that we write is the summary of thousands of ranks."""


def open_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """OSError when it is not there or not an ordinary file; a link to one is."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(fd, "rb", buffering)


def read_document(path: Path, *, most: int = MAX_DOCUMENT_BYTES) -> bytes:
    """OSError also when it is larger than any that we write."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data


# -- jsonl ------------------------------------------------------------------------------------------------------------
# Append-only files of one JSON object a line: writer and reader side by side.
#
# A writer may be killed, or run out of disk, in the middle of a line.  The next one to write first ends that line, so
# that one line is lost and no more; the reader passes lines that are not JSON objects and counts them.


def append_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append all records or, when the disk refuses (OSError), none."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()
    if not text:
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(path.parent))
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        if size and os.pread(fd, 1, size - 1) != b"\n":
            text = b"\n" + text
        try:
            write_all(fd, text, size)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """``pwrite`` until everything is written: a short write is not an error to the system, but it is to us."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records, and how many lines were none; a missing file is an empty one."""
    records: list[dict[str, Any]] = []
    bad = 0
    try:
        file = open_file(path)
    except FileNotFoundError:
        return records, bad
    with file:
        for line in file:
            record = record_in(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                bad += 1
    return records, bad


def record_in(line: bytes) -> dict[str, Any] | None:
    """None when it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def count_lines(path: Path) -> int:
    """About how many records there are, without a look at them; a missing file is an empty one."""
    count = 0
    try:
        file = open_file(path)
    except FileNotFoundError:
        return count
    with file:
        while piece := file.read(1 << 20):
            count += piece.count(b"\n")
    return count


def lines_from(path: Path, offset: int, *, most_bytes: int, longest: int) -> tuple[bytes, int]:
    """The whole lines from ``offset`` on, about ``most_bytes`` of them, and how many were too long.

    One that is longer than ``longest``, or began before ``offset``, comes as blanks, in pieces of at most that length,
    each with an end of its own: offsets stay those of the file.  A line that is still being written waits; a missing
    file is an empty one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"", 0
    try:
        return lines_in(fd, offset, most_bytes=most_bytes, longest=longest)
    finally:
        os.close(fd)


def lines_in(fd: int, offset: int, *, most_bytes: int, longest: int) -> tuple[bytes, int]:
    """``lines_from`` of a file that is open."""
    data = os.pread(fd, most_bytes, offset)
    if b"\n" not in data and len(data) == most_bytes < longest:
        data = os.pread(fd, longest, offset)
        data = data[: data.find(b"\n") + 1] or data
    torn = bool(data) and offset > 0 and os.pread(fd, 1, offset - 1) != b"\n"
    first = data.find(b"\n") + 1
    if not first:
        return (blank_line(len(data)), 0) if len(data) == longest else (b"", 0)
    whole = data[: data.rfind(b"\n") + 1]
    return (blank_line(first) + whole[first:], 1) if torn else (whole, 0)


def blank_line(length: int) -> bytes:
    """A line of that length without anything in it."""
    return b" " * (length - 1) + b"\n"


# -- disk use ---------------------------------------------------------------------------------------------------------
# What a run takes on disk, and what it may take (``stepscope run --max-disk``).

MAX_DISK = 20 << 30
"""Of a run of which nobody said more."""
NEARLY_FULL = 0.8
"""From this share of the limit on, less is kept."""


def disk_limit(meta: Mapping[str, Any]) -> int:
    """In bytes; 0: there is none."""
    limit = meta.get("max_disk")
    return limit if type(limit) is int and limit >= 0 else MAX_DISK


def run_bytes(run_dir: Path) -> int:
    """What the files of a run take on disk; a hole takes nothing."""
    total = 0
    folders = [run_dir]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(Path(entry.path))
                    else:
                        total += about.st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total
