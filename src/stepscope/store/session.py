"""A run's session: the folder in memory that holds its rings on this node.

``run.json`` names it, and ``run.json`` may come from a stranger.  So each session holds a file that names its run, and
a folder that does not hold it is neither read nor cleaned up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.records.places import BESIDE_RING, PRINTED_SUFFIX, RING_SUFFIX, SESSION_LOCK, SESSION_RUN
from stepscope.store import atomic

__all__ = ["mark_session", "remove_session", "ring_files", "session_of"]


def mark_session(session: Path, spool: str) -> None:
    """Say whose it is: ``spool`` is the run's own random number."""
    atomic.write_bytes(session / SESSION_RUN, spool.encode())


def session_of(run_dir: Path, meta: Mapping[str, Any]) -> Path | None:
    """None when it is gone, as after a reboot, or is not this run's."""
    said, spool = meta.get("session"), meta.get("spool")
    if not isinstance(said, str) or not said or not isinstance(spool, str) or not spool:
        return None
    session = Path(said)
    if session == run_dir / "rings":
        return session
    try:
        folder = os.open(session, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        mark = os.open(SESSION_RUN, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            about = os.fstat(mark)
            ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.fstat(folder).st_uid == os.geteuid()
            return session if ours and os.read(mark, 256) == spool.encode() else None
        finally:
            os.close(mark)
    except OSError:
        return None
    finally:
        os.close(folder)


def remove_session(session: Path) -> None:
    """Remove a session's folder if no ring is left in it."""
    with suppress(OSError, ValueError):
        if not any(path.suffix == RING_SUFFIX for path in session.iterdir()):
            for left in [path for path in session.iterdir() if path.suffix in (*BESIDE_RING, PRINTED_SUFFIX)]:
                left.unlink(missing_ok=True)
            (session / SESSION_LOCK).unlink(missing_ok=True)
            (session / SESSION_RUN).unlink(missing_ok=True)
            session.rmdir()


def ring_files(run_dir: Path, meta: Mapping[str, Any]) -> list[Path]:
    """All ring files of the run on this machine, in memory or not."""
    session = session_of(run_dir, meta)
    folders = {run_dir / "rings", *(() if session is None else (session,))}
    found: list[Path] = []
    for folder in sorted(folders):
        with suppress(OSError):
            found += sorted(path for path in folder.iterdir() if path.suffix == RING_SUFFIX)
    return found
