"""Who may read a run: its owner alone, unless ``run --share`` opened it.

The mode of the run directory decides; whatever is made in it gets the same rights.  Standard library only: training
processes ask this, too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PRIVATE", "SHARED_WITH", "file_mode", "folder_mode", "made_as", "umask_of"]

SHARED_WITH = {"group": 0o750, "all": 0o755}
PRIVATE = 0o700


def folder_mode(run_dir: Path) -> int:
    """For a folder in the run directory; nobody else ever writes there."""
    try:
        return PRIVATE | (stat.S_IMODE(run_dir.stat().st_mode) & 0o055)
    except OSError:
        return PRIVATE


def file_mode(run_dir: Path) -> int:
    return folder_mode(run_dir) & 0o644


def umask_of(run_dir: Path) -> int:
    """For a process that writes nothing but this run: the agent, the run's hub."""
    return 0o777 & ~folder_mode(run_dir)


@contextmanager
def made_as(run_dir: Path) -> Iterator[None]:
    """What this process makes meanwhile, whoever makes it, gets the run's mode.  Not in a training process."""
    before = os.umask(umask_of(run_dir))
    try:
        yield
    finally:
        os.umask(before)
