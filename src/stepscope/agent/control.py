"""What the launcher says to the agent over its standard input: one JSON object a line, or nothing more (it died)."""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["Control"]

_CHUNK = 1 << 12
_LONGEST_LINE = 1 << 16


class Control:
    """The reading end of the pipe.  ``feed`` when it is readable; then look at ``end`` and ``closed``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.end: dict[str, Any] | None = None
        """How the job ended, once the launcher said so."""
        self.closed = False
        """Nobody holds the other end any more."""
        self._partial = b""

    def feed(self) -> None:
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # no standard input at all: nobody is there
        self.closed = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-_LONGEST_LINE:]
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            word = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(word, dict) and isinstance(word.get("end"), dict):
            self.end = word["end"]
