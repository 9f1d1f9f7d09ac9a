"""Whether we may write into a run directory: only into one that is our own, and that leads nowhere else.

A run directory may come from anybody: a colleague's, one unpacked from an archive.  A link in it would have us
overwrite whatever it leads to.  Such a run is read, and nothing in it is changed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["writing_barred"]


def writing_barred(run_dir: Path, *, made_here: bool = False) -> str | None:
    """Why nothing must be written; None: it may be.

    ``made_here``: this process made the folder; a file server may have given it to another user all the same.
    """
    try:
        about = run_dir.stat()
        if about.st_uid != os.geteuid() and not made_here:
            return "it belongs to another user"
        odd = next(_odd(run_dir), None)
    except OSError as error:
        return f"it cannot be looked through ({error.strerror})"
    return None if odd is None else f"{odd.relative_to(run_dir)} in it is not an ordinary file or folder"


def _odd(folder: Path, depth: int = 2) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if depth > 0:
                    yield from _odd(Path(entry.path), depth - 1)
            elif not stat.S_ISREG(mode):
                yield Path(entry.path)
