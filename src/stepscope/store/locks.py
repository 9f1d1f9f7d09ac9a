"""Change a run safely: locks between processes, write permission, and atomic replacement of several files.

Locks work between the processes of one user.  Anyone who can open a file or a folder can lock it, even with read
permission only, and could then block everyone else indefinitely.  The lock is therefore a separate file that others
cannot open, whatever the folder allows, and every wait for it has a limit.

Some file systems have no locks (Lustre without ``-o flock``, NFS without a lock service).  There the lock is a file in
this user's folder in memory.  It excludes other processes on this machine; the lease (``store/liveness.py``) excludes
processes on other machines.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stepscope.errors import RingNoSpace, RunUnwritable
from stepscope.records.files import file_mode, folder_mode, make_session
from stepscope.records.paths import session_root
from stepscope.store import file_io
from stepscope.store.paths import ARCHIVED, HUB_EVENTS, META

__all__ = [
    "STAGE",
    "LockBusy",
    "append_requests",
    "commit_stage",
    "file_locked",
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
"""The folder in memory, next to the sessions, for locks that the run's file system does not support."""
WAIT_S = 120.0
"""Sealing the largest runs takes about a minute."""
_PAUSE_S = 0.05


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockBusy(OSError):
    """Another process holds the lock."""


def take_lock(folder: Path) -> int:
    """Lock ``folder`` until the returned descriptor is closed; LockBusy if another process holds the lock."""
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
        raise LockBusy(f"another process holds the lock on {folder}") from None
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def locked(folder: Path, *, wait_s: float = WAIT_S, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Hold the lock of ``folder``; wait up to ``wait_s`` for another holder, then raise LockBusy."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fd = take_lock(folder)
            break
        except LockBusy:
            if time.monotonic() >= deadline_s:
                raise LockBusy(f"another process has held the lock on {folder} for more than {wait_s:.0f} s") from None
        sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def file_locked(path: Path, mode: int) -> Iterator[None]:
    """Hold a lock on a file, which is created if necessary; it is given up when this process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def append_requests(run_dir: Path, path: Path, requests: Sequence[Mapping[str, Any]], *, most_bytes: int) -> None:
    """Append lines to a file of requests that several processes write, in a folder of the run, which is made.

    RunUnwritable if that is not possible, or the file has more than ``most_bytes`` already.
    """
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(mode=folder_mode(run_dir))
        if path.parent.is_symlink():
            raise RunUnwritable(f"{path.parent} is a link, which a run does not contain")
        with file_locked(path, file_mode(run_dir)):
            if path.stat().st_size > most_bytes:
                raise RunUnwritable(f"{path} has too many requests")
            file_io.append_jsonl(path, [{"schema": 1, **request} for request in requests])
    except OSError as error:
        raise RunUnwritable(f"{path} cannot be written: {error.strerror or type(error).__name__}") from None


# -- write permission -------------------------------------------------------------------------------------------------
# We write only into a run directory that is ours and contains no links.  A run may come from anyone: a colleague, or
# an archive.  A link in it would make us overwrite its target.  Such a run is only read.


def writing_barred(run_dir: Path, *, made_here: bool = False) -> str | None:
    """Return why nothing may be written to a run; None if writing is allowed.

    ``made_here``: this process made the folder.  A file server may still have given it to another user.
    """
    try:
        if os.path.lexists(run_dir / ARCHIVED):
            return "it is a copy of an archived run"
        about = run_dir.stat()
        if about.st_uid != os.geteuid() and not made_here:
            return "it belongs to another user"
        odd = next(_irregular_files(run_dir), None)
    except OSError as error:
        return f"it cannot be searched ({error.strerror})"
    return None if odd is None else f"{odd.relative_to(run_dir)} in it is not a regular file or folder"


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
# Replace several files of a run at once: all of them or none, even after a kill.  New files are collected in a folder.
# Renaming that folder commits them; any process that finds it under its new name moves the files into place
# (``finish_stage``).  ``run.json`` is moved last: until then an open run is read from its old files, which still exist.

STAGE = ".sealing"
_COMMITTED = ".sealed"


def new_stage(run_dir: Path) -> Path:
    stage = run_dir / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    return stage


def commit_stage(run_dir: Path) -> None:
    """Commit the staged files."""
    for path in (run_dir / STAGE).iterdir():
        file_io.fsync_file(path)
    file_io.fsync_folder(run_dir / STAGE)
    (run_dir / STAGE).rename(run_dir / _COMMITTED)
    file_io.fsync_folder(run_dir)


def is_stage_committed(run_dir: Path) -> bool:
    return (run_dir / _COMMITTED).is_dir()


def finish_stage(run_dir: Path) -> None:
    """Move committed files into place, if there are any.  The caller holds the lock."""
    stage = run_dir / _COMMITTED
    if not stage.is_dir():
        return
    for path in sorted(stage.iterdir(), key=lambda path: path.name == META):
        path.replace(run_dir / path.name)
    file_io.fsync_folder(run_dir)
    (run_dir / HUB_EVENTS).unlink(missing_ok=True)  # they are among the events now
    stage.rmdir()
