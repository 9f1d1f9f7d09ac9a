"""Keep a copy of what a process prints, without standing between it and its terminal.

Below ``sys.stdout`` and ``sys.stderr`` goes a raw stream that writes to the same descriptor as before and then to the
log.  The streams themselves stay the same objects, with their buffering, encoding and ``isatty``, whoever holds them;
if the log cannot be written the copy stops and the script never knows.  (What native code prints past Python goes to
the terminal only.)
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["keep_output"]


def keep_output(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        copy = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    sys.stdout = _teed(sys.stdout, copy)
    sys.stderr = _teed(sys.stderr, copy)


class _TeeRaw(io.RawIOBase):
    def __init__(self, raw: io.FileIO, copy: int) -> None:
        self._raw = raw
        self._copy = copy
        self.name = raw.name
        self.mode = raw.mode

    def write(self, data: Any) -> int | None:
        written = self._raw.write(data)
        if written and self._copy >= 0:
            try:
                os.write(self._copy, memoryview(data)[:written])
            except OSError:
                self._copy = -1
        return written

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()


def _teed(stream: Any, copy: int) -> Any:
    """The stream with its copy; one that is no plain file stream (a notebook's, a test's) is left alone."""
    if type(stream) is not io.TextIOWrapper:
        return stream
    buffer = stream.buffer
    if type(buffer) is io.BufferedWriter and isinstance(buffer.raw, io.FileIO):
        stream.flush()
        # In place: a logging handler that was made before has the same stream as ``print`` and shares its buffer.
        raw = buffer.raw
        buffer.__init__(_TeeRaw(raw, copy), getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE))  # type: ignore[misc]
        return stream
    if isinstance(buffer, io.FileIO):  # ``python -u``: no buffer in which two streams could get out of order
        return io.TextIOWrapper(
            _TeeRaw(buffer, copy),
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=True,
        )
    return stream
