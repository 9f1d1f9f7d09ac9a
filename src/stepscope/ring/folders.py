"""The two folders of a run, made by its launcher or by ranks that nobody of ours launched.

The session is the folder of the rings on one node: in memory, and closed to everybody else.  A folder under
``/dev/shm`` or ``/tmp`` may have been made by another user to see, or to change, what we write there; so its base is
used only when it is ours alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stepscope.errors import RingNoSpace
from stepscope.records.modes import PRIVATE
from stepscope.records.naming import numbered

__all__ = ["make_session", "take_folder"]

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def take_folder(root: Path, wanted: str, *, mode: int = PRIVATE) -> Path:
    """Make the first of NAME, NAME-2, NAME-3 … that is free; two that ask at once get two folders.

    ``mode`` is given whatever the umask: what is in there is for its owner alone, unless he says otherwise.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in numbered(wanted):
        folder = root.resolve() / name
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            continue
        if mode != PRIVATE:
            folder.chmod(mode)
        break
    return folder


def make_session(base: Path, name: str, *, exist_ok: bool = False) -> Path:
    """Make ``base/name``; RingNoSpace when ``base`` cannot be made or belongs to others as well."""
    session = base / name
    try:
        # One by one: the parents that ``mkdir(parents=True)`` makes get the umask's mode, not ours.
        base.mkdir(mode=PRIVATE, exist_ok=True)
        found = base.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_MAY_WRITE:
            raise RingNoSpace(f"{base} is not a folder of ours alone")
        if stat.S_IMODE(found.st_mode) != PRIVATE:
            base.chmod(PRIVATE)
        session.mkdir(mode=PRIVATE, exist_ok=exist_ok)
    except OSError as error:
        raise RingNoSpace(f"{base} cannot be used ({error.strerror})") from error
    return session
