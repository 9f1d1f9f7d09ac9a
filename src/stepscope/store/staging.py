"""Replace several files of a run at once: all of them, or none, whatever happens in between.

New files are gathered in a folder.  Renaming that folder is the moment from which they count; whoever finds it under
its new name, also after a kill, moves the files in (``finish``).  ``run.json`` comes last, so that a run that was open
is read from its old files, which are still there, until it is sealed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from stepscope.store import atomic
from stepscope.store.paths import HUB_EVENTS, META

__all__ = ["STAGE", "commit", "finish", "is_committed", "new_stage"]

STAGE = ".sealing"
_COMMITTED = ".sealed"


def new_stage(run_dir: Path) -> Path:
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    return stage


def commit(run_dir: Path) -> None:
    """What was gathered counts from here on."""
    for path in (run_dir / STAGE).iterdir():
        atomic.fsync_file(path)
    atomic.fsync_folder(run_dir / STAGE)
    (run_dir / STAGE).rename(run_dir / _COMMITTED)
    atomic.fsync_folder(run_dir)


def is_committed(run_dir: Path) -> bool:
    return (run_dir / _COMMITTED).is_dir()


def finish(run_dir: Path) -> None:
    """Move in what counts already, if anything; call it locked (``store/locks.py``)."""
    stage = run_dir / _COMMITTED
    if not stage.is_dir():
        return
    for path in sorted(stage.iterdir(), key=lambda path: path.name == META):
        path.replace(run_dir / path.name)
    atomic.fsync_folder(run_dir)
    (run_dir / HUB_EVENTS).unlink(missing_ok=True)  # they are among the events now
    stage.rmdir()
