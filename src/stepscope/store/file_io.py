"""Read and write the files of a run: whole documents, JSON lines, and the disk space they use.

Documents are replaced atomically: a reader finds the old bytes or the new ones, never a mix.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from stepscope.records.files import file_mode, open_file

__all__ = [
    "MAX_DISK",
    "MOST_STREAM_BYTES",
    "MOST_STREAM_LINES",
    "NEARLY_FULL",
    "after_hole",
    "append_jsonl",
    "append_lines",
    "blank_line",
    "bounded_lines",
    "disk_limit",
    "file_size",
    "fsync_file",
    "fsync_folder",
    "leftovers",
    "lines_from",
    "lines_in",
    "read_document",
    "read_jsonl",
    "record_in",
    "run_bytes",
    "write_all",
    "write_bytes",
    "write_json",
]


# -- atomic writes ----------------------------------------------------------------------------------------------------

_PARTIAL = ".tmp"


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a temporary file next to ``path`` and rename it over ``path``; ``durable`` also survives a power loss.

    The temporary name cannot be guessed and is never an existing link: the run may come from an untrusted source.
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
    """Return the temporary files that killed writers left behind."""
    return [path for path in folder.glob(f".*{_PARTIAL}") if not path.is_dir()]


def write_json(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def fsync_file(path: Path) -> None:
    """Flush a file to disk.  OSError also for a pipe or a link: opening a pipe would wait for a writer."""
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
# Files are opened by ``open_file`` (``records/files.py``), and read only up to a limit: of bytes, of the length of a
# line, and of the number of lines, which also bounds the time.  A sparse file of terabytes costs its author nothing.

MAX_DOCUMENT_BYTES = 256 << 20
"""Limit for a document, which is read whole.  The largest one we write is the summary of thousands of ranks."""


def read_document(path: Path, *, most: int = MAX_DOCUMENT_BYTES, links: bool = False) -> bytes:
    """Read a whole document; OSError also if it is larger than any that we write.  ``links``: see ``open_file``."""
    with open_file(path, links=links) as file:
        large = os.fstat(file.fileno()).st_size > most
        data = b"" if large else file.read(most + 1)  # it may be growing
    if large or len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data


def after_hole(fd: int, offset: int) -> int:
    """Return the first position from ``offset`` that is not in a hole of the file, or its end."""
    before = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return max(offset, os.fstat(fd).st_size)
        if error.errno == errno.EINVAL:  # the file system has no holes
            return offset
        raise
    finally:
        os.lseek(fd, before, os.SEEK_SET)  # a buffered file does not notice that it moved


# -- JSON lines -------------------------------------------------------------------------------------------------------
# Append-only files with one JSON object per line.  A writer may be killed, or run out of disk space, in the middle of a
# line.  The next writer ends that line first, so only one line is lost.  The reader skips and counts lines that are not
# JSON objects.

LONGEST_LINE = 8 << 20
"""Twice what an agent sends of one line; the longest that we write describes the layers of a model."""
MOST_LINES_BYTES = 512 << 20
MOST_LINES = 4_000_000
"""Of a file that is read whole, such as ``events.jsonl``: about ten times that of the longest runs seen."""
MOST_STREAM_BYTES = 8 << 30
MOST_STREAM_LINES = 100_000_000
"""Of files of which only some lines are taken: layers and samples, which a run of weeks has many of."""


def append_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append all records, or none if the disk refuses (OSError)."""
    append_lines(path, "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode())


def append_lines(path: Path, text: bytes) -> None:
    """Append whole lines, or nothing if the disk refuses (OSError)."""
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
    """Return the records and the number of invalid lines; a missing file counts as empty."""
    records: list[dict[str, Any]] = []
    bad = 0
    try:
        file = open_file(path)
    except FileNotFoundError:
        return records, bad
    with file:
        for line in bounded_lines(file):
            record = record_in(line)
            if record is not None:
                records.append(record)
            elif line.strip():
                bad += 1
    return records, bad


def bounded_lines(
    file: BinaryIO, *, most_bytes: int = MOST_LINES_BYTES, most_lines: int = MOST_LINES
) -> Iterator[bytes]:
    """Yield the lines from the current position; of a line longer than any that we write, only the beginning.

    OSError if there are more bytes or lines than we read.  Holes in the file are skipped.
    """
    size, lines = 0, 0
    while line := file.readline(LONGEST_LINE):
        yield line
        lines += 1
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            size += len(line)
            _skip_hole(file)
            line = file.readline(LONGEST_LINE)
        size += len(line)
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"its lines have more than {most_bytes >> 20:,} MiB", file.name)
        if lines > most_lines:
            raise OSError(errno.EFBIG, f"it has more than {most_lines:,} lines", file.name)


def _skip_hole(file: BinaryIO) -> None:
    """Continue after the hole at the current position, if there is one: it contains no end of a line."""
    file.seek(after_hole(file.fileno(), file.tell()))


def record_in(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None if it is not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def lines_from(path: Path, offset: int, *, most_bytes: int, longest: int) -> tuple[bytes, int]:
    """Return the complete lines from ``offset``, about ``most_bytes`` in all, and how many were too long.

    A line that is longer than ``longest``, or began before ``offset``, is returned as blanks, in pieces of at most that
    length that each end with a newline, so offsets still match the file.  A line that is still being written is left
    for later; a missing file counts as empty.
    """
    try:
        file = open_file(path, buffering=0)
    except FileNotFoundError:
        return b"", 0
    with file:
        return lines_in(file.fileno(), offset, most_bytes=most_bytes, longest=longest)


def lines_in(fd: int, offset: int, *, most_bytes: int, longest: int) -> tuple[bytes, int]:
    """``lines_from`` for an open file."""
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
    """Return a line of that length that contains only blanks."""
    return b" " * (length - 1) + b"\n"


# -- disk use ---------------------------------------------------------------------------------------------------------
# How much disk space a run uses, and how much it may use (``stepscope run --max-disk``).

MAX_DISK = 20 << 30
"""The default limit of a run, in bytes."""
NEARLY_FULL = 0.8
"""From this share of the limit, less is kept."""


def disk_limit(meta: Mapping[str, Any]) -> int:
    """Return the limit in bytes; 0: no limit."""
    limit = meta.get("max_disk")
    return limit if type(limit) is int and limit >= 0 else MAX_DISK


def file_size(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def run_bytes(run_dir: Path) -> int:
    """Return the disk space that a run's files use; holes count as nothing."""
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
