"""Whether somebody looks at a run on this machine: then its agent writes down what the ranks do at once.

A hub that is asked about a run touches the folder of its rings, and the agent sees when that was.  Nothing is made that
would have to be removed; a ring that comes touches it as well, so the first steps of a job are soon there.  Standard
library only.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["is_watched", "note_watched"]

WATCHED_S = 10.0
"""After somebody last looked; those who follow a run look every five seconds at least."""


def note_watched(session: Path) -> None:
    """Whether it is there or not."""
    with suppress(OSError, ValueError):
        os.utime(session)


def is_watched(session: Path) -> bool:
    try:
        touched_s = session.stat().st_mtime
    except OSError:
        return False
    return abs(time.time() - touched_s) < WATCHED_S
