"""Standard streams that are closed, or whose reader is gone: a command continues without them.

A job keeps its exit code and its run whether or not anybody can read what the launcher says about it.  A descriptor
that is closed when the program starts is opened on ``/dev/null``: otherwise the next file or socket would get its
number, and messages would be written into it.  The job itself gets its streams as they were, closed ones as well.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["PatientStream", "closed_at_start", "open_missing_streams"]

_closed: set[int] = set()


def open_missing_streams() -> None:
    """Open what is closed of the three standard descriptors, and the files of ``sys`` above them."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            _closed.add(fd)
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - for the life of the process


def closed_at_start() -> frozenset[int]:
    """The standard descriptors that were closed when this program started."""
    return frozenset(_closed)


class PatientStream:
    """A text stream whose writes never fail: once its reader is gone or its disk is full, the rest is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Let what is in the buffer, and all that follows, go nowhere: at exit it would fail once more."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
