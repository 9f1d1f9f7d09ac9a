"""Keep a copy of what a process prints, without standing between it and its terminal.

Below ``sys.stdout`` and ``sys.stderr`` goes a raw stream that writes to the same descriptor as before and then to the
log.  The streams themselves stay the same objects, with their buffering, encoding and ``isatty``, whoever holds them;
if the log cannot be written the copy stops and the script never knows.  (What native code prints past Python goes to
the terminal only.)
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["keep_output"]

LONGEST_LINE = 1 << 13


def keep_output(log: Path) -> None:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        copy = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return
    for stream in (sys.stdout, sys.stderr):
        _put_copy_below(stream, copy)


class _TeeRaw(io.RawIOBase):
    """Writes to ``raw``, then to the log: whole lines, so that nothing comes between a line and its end."""

    def __init__(self, raw: io.FileIO, copy: int) -> None:
        self._raw = raw
        self._copy = copy
        self._begun = b""
        self.name = raw.name
        self.mode = raw.mode
        atexit.register(self._keep)
        os.register_at_fork(after_in_child=self._lose)

    def write(self, data: Any) -> int | None:
        written = self._raw.write(data)
        if written and self._copy >= 0:
            self._begun += memoryview(data)[:written]
            # Unbuffered, ``print`` writes a line and its newline one after the other, and so do the other ranks to the
            # same terminal: the longer we are in between, the more often their lines run into each other.
            if self._begun.endswith(b"\n") or len(self._begun) >= LONGEST_LINE:
                self._keep()
        return written

    def copy_to(self, copy: int) -> None:
        """From now on to another log: in a forked child, which has a name of its own."""
        self._copy, self._begun = copy, b""

    def _lose(self) -> None:
        """In a forked child: the line that was begun is its parent's, who will end it."""
        self._begun = b""

    def _keep(self) -> None:
        begun, self._begun = self._begun, b""
        try:
            os.write(self._copy, begun)
        except OSError:
            self._copy = -1

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()


def _put_copy_below(stream: Any, copy: int) -> None:
    """A stream that is no plain file stream (a notebook's, a test's) is left alone."""
    if type(stream) is not io.TextIOWrapper:
        return
    buffer = stream.buffer
    for raw in (getattr(buffer, "raw", None), buffer):
        if isinstance(raw, _TeeRaw):
            raw.copy_to(copy)
            return
    # In place: a logging handler that was made before has the same stream as ``print`` and shares its buffer.
    if type(buffer) is io.BufferedWriter and isinstance(buffer.raw, io.FileIO):
        stream.flush()
        raw = buffer.raw
        buffer.__init__(_TeeRaw(raw, copy), getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE))  # type: ignore[misc]
    elif isinstance(buffer, io.FileIO):  # ``python -u``
        kept = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
        stream.__init__(_TeeRaw(buffer, copy), newline="\n", write_through=True, **kept)  # type: ignore[misc]
