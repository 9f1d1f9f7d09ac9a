"""Change a run safely: whether we may, one process at a time, and several files at once.

Locks between processes of one user, on a file that nobody else can open.

Whoever can open a file or a folder can lock it, even if he may only read it, and would then hold up everybody else for
as long as he likes.  So the lock is a file of its own, closed to others whatever the folder allows, and nobody waits
for it without a limit.

Some file systems have no locks (Lustre without ``-o flock``, NFS without a lock service).  There the lock is a file in
this user's folder in memory: it keeps apart the processes of this machine; those of others are kept away by the lease
(``store/liveness.py``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import RingNoSpace
from stepscope.records.files import make_session
from stepscope.records.paths import session_root
from stepscope.store import file_io
from stepscope.store.paths import HUB_EVENTS, META

__all__ = [
    "STAGE",
    "LockBusy",
    "commit_stage",
    "finish_stage",
    "is_stage_committed",
    "locked",
    "new_stage",
    "take_lock",
    "writing_barred",
]


# -- locks ------------------------------------------------------------------------------------------------------------

LOCK = ".lock"
LOCKS = "locks"
"""The folder in memory, beside the sessions, for locks that the file system of the run does not have."""
WAIT_S = 120.0
"""Sealing the largest runs takes about a minute."""
_PAUSE_S = 0.05


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockBusy(OSError):
    """Somebody else has the lock."""


def take_lock(folder: Path) -> int:
    """The lock of ``folder``, held until the descriptor is closed; LockBusy when another process has it."""
    try:
        return _take(folder / LOCK, folder)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    where = folder.stat()
    try:
        locks = make_session(session_root(), LOCKS, exist_ok=True)
    except RingNoSpace as error:
        raise OSError(errno.ENOLCK, f"{folder} cannot be locked, and {error}") from error
    return _take(locks / f"{where.st_dev}-{where.st_ino}", folder)


def _take(path: Path, folder: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LockBusy(f"another process has {folder} locked") from None
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def locked(folder: Path, *, wait_s: float = WAIT_S, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Waits for whoever has the lock, but not for ever: then LockBusy."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fd = take_lock(folder)
            break
        except LockBusy:
            if time.monotonic() >= deadline_s:
                raise LockBusy(f"another process has {folder} locked for more than {wait_s:.0f} s") from None
        sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(fd)


# -- ownership --------------------------------------------------------------------------------------------------------
# Whether we may write into a run directory: only into one that is our own, and that leads nowhere else.
#
# A run directory may come from anybody: a colleague's, one unpacked from an archive.  A link in it would have us
# overwrite whatever it leads to.  Such a run is read, and nothing in it is changed.


def writing_barred(run_dir: Path, *, made_here: bool = False) -> str | None:
    """Why nothing must be written; None: it may be.

    ``made_here``: this process made the folder; a file server may have given it to another user all the same.
    """
    try:
        about = run_dir.stat()
        if about.st_uid != os.geteuid() and not made_here:
            return "it belongs to another user"
        odd = next(_irregular_files(run_dir), None)
    except OSError as error:
        return f"it cannot be looked through ({error.strerror})"
    return None if odd is None else f"{odd.relative_to(run_dir)} in it is not an ordinary file or folder"


def _irregular_files(folder: Path, depth: int = 2) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if depth > 0:
                    yield from _irregular_files(Path(entry.path), depth - 1)
            elif not stat.S_ISREG(mode):
                yield Path(entry.path)


# -- staging ----------------------------------------------------------------------------------------------------------
# Replace several files of a run at once: all of them, or none, whatever happens in between.
#
# New files are gathered in a folder.  Renaming that folder is the moment from which they count; whoever finds it under
# its new name, also after a kill, moves the files in (``finish``).  ``run.json`` comes last, so that a run that was
# open is read from its old files, which are still there, until it is sealed.

STAGE = ".sealing"
_COMMITTED = ".sealed"


def new_stage(run_dir: Path) -> Path:
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    return stage


def commit_stage(run_dir: Path) -> None:
    """What was gathered counts from here on."""
    for path in (run_dir / STAGE).iterdir():
        file_io.fsync_file(path)
    file_io.fsync_folder(run_dir / STAGE)
    (run_dir / STAGE).rename(run_dir / _COMMITTED)
    file_io.fsync_folder(run_dir)


def is_stage_committed(run_dir: Path) -> bool:
    return (run_dir / _COMMITTED).is_dir()


def finish_stage(run_dir: Path) -> None:
    """Move in what counts already, if anything; call it locked (``store/locks.py``)."""
    stage = run_dir / _COMMITTED
    if not stage.is_dir():
        return
    for path in sorted(stage.iterdir(), key=lambda path: path.name == META):
        path.replace(run_dir / path.name)
    file_io.fsync_folder(run_dir)
    (run_dir / HUB_EVENTS).unlink(missing_ok=True)  # they are among the events now
    stage.rmdir()
