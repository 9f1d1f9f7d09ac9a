"""Append-only files of one JSON object a line: writer and reader side by side.

A writer may be killed, or run out of disk, in the middle of a line.  The next one to write first ends that line, so
that one line is lost and no more; the reader passes lines that are not JSON objects and counts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.records.modes import file_mode
from stepscope.store.reading import open_file

__all__ = ["append_jsonl", "blank", "count_lines", "lines_from", "lines_in", "read_jsonl", "record_in", "write_all"]


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
        return (blank(len(data)), 0) if len(data) == longest else (b"", 0)
    whole = data[: data.rfind(b"\n") + 1]
    return (blank(first) + whole[first:], 1) if torn else (whole, 0)


def blank(length: int) -> bytes:
    """A line of that length without anything in it."""
    return b" " * (length - 1) + b"\n"
