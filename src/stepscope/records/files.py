"""Files and folders of a run: who may read them, how they are made, replaced, and quoted in SQL.

Who may read a run: its owner alone, unless ``run --share`` opened it.

The mode of the run directory decides; whatever is made in it gets the same rights.  Standard library only: training
processes ask this, too.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import RingNoSpace
from stepscope.records.text import numbered

__all__ = [
    "PRIVATE",
    "SHARED_WITH",
    "file_mode",
    "folder_mode",
    "is_remote",
    "make_session",
    "replaced",
    "run_umask",
    "sql_input_path",
    "sql_output_path",
    "take_folder",
    "umask_of",
]


# -- modes ------------------------------------------------------------------------------------------------------------

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
def run_umask(run_dir: Path) -> Iterator[None]:
    """What this process makes meanwhile, whoever makes it, gets the run's mode.  Not in a training process."""
    before = os.umask(umask_of(run_dir))
    try:
        yield
    finally:
        os.umask(before)


# -- folders ----------------------------------------------------------------------------------------------------------
# The two folders of a run, made by its launcher or by ranks that nobody of ours launched.
#
# The session is the folder of the rings on one node: in memory, and closed to everybody else.  A folder under
# ``/dev/shm`` or ``/tmp`` may have been made by another user to see, or to change, what we write there; so its base is
# used only when it is ours alone.

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


# -- replacing --------------------------------------------------------------------------------------------------------
# Files that appear whole: written under another name beside their place, then renamed.
#
# So what was there before stays until all of the new is written, whatever happens meanwhile.


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Where to write what shall become ``path``; its name ends as that of ``path``.  Raises OSError.

    A link stays one, and what it leads to is replaced.  What is no file (``/dev/stdout``) is written to directly.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        yield path
        return
    # In a folder of its own that only we can enter: nobody can put a link where we are about to write.
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=".stepscope-"))
    spare = folder / f"new{place.suffix}"
    try:
        yield spare
        spare.replace(place)
    finally:
        spare.unlink(missing_ok=True)
        folder.rmdir()


# -- filesystems ------------------------------------------------------------------------------------------------------
# Whether a folder is on a file system that somebody else serves, and that may therefore stop answering.
#
# Standard library only: training processes load this.

MOUNTS = "/proc/self/mountinfo"
REMOTE_FILE_SYSTEMS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "daos", "fuse", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "virtiofs", "wekafs"),
)
"""By the first part of their names: ``fuse.sshfs`` and all else that runs outside of the kernel are ``fuse``."""


def is_remote(folder: Path) -> bool:
    """False as well where that cannot be seen."""
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - a rank's start waits for this
        number = f"{os.major(device)}:{os.minor(device)}"
        with open(MOUNTS, encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
            for line in mounts:
                about, _, kind = line.partition(" - ")
                if about.split(" ", 3)[2] == number:
                    return kind.split(" ", 1)[0].partition(".")[0] in REMOTE_FILE_SYSTEMS
    except (OSError, IndexError):
        pass
    return False


# -- sql paths --------------------------------------------------------------------------------------------------------
# Paths in the words of DuckDB, which takes ``*``, ``?`` and ``[`` in a path that it reads for a pattern.

_GLOB = str.maketrans({"*": "[*]", "?": "[?]", "[": "[[]"})


def sql_output_path(path: Path | str) -> str:
    """A path to write to."""
    return "'" + str(path).replace("'", "''") + "'"


def sql_input_path(path: Path | str) -> str:
    """A path to read from: this file and no other."""
    return sql_output_path(str(path).translate(_GLOB))
