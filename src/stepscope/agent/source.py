"""The text of lines of source, for people to read in a report.  Bounded, and never waited for.

The file system that holds the source may be the very thing that hangs, so it is read by a thread that is left behind
if it does not come back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

__all__ = ["read_lines"]

MAX_FILES = 64
MAX_FILE_BYTES = 4 << 20
MAX_LINES = 512
LONGEST_LINE = 200

Place = tuple[str, int]


def read_lines(places: Iterable[Place], *, patience_s: float) -> dict[Place, str]:
    """By file and line, without the space around it; those that could be read in time."""
    wanted: dict[str, set[int]] = {}
    for file, line in list(dict.fromkeys(places))[:MAX_LINES]:
        if line > 0 and file.startswith("/") and (file in wanted or len(wanted) < MAX_FILES):
            wanted.setdefault(file, set()).add(line)
    found: dict[Place, str] = {}
    reader = threading.Thread(target=_read, args=(wanted, found), name="source lines", daemon=True)
    reader.start()
    reader.join(patience_s)
    return found.copy()  # it may still be filled


def _read(wanted: dict[str, set[int]], found: dict[Place, str]) -> None:
    for file, lines in wanted.items():
        try:
            with Path(file).open("rb") as source:
                text = source.read(MAX_FILE_BYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line <= len(text):
                found[file, line] = text[line - 1].strip()[:LONGEST_LINE]
