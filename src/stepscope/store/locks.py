"""Locks between processes of one user, on a file that nobody else can open.

Whoever can open a file or a folder can lock it, even if he may only read it, and would then hold up everybody else for
as long as he likes.  So the lock is a file of its own, closed to others whatever the folder allows, and nobody waits
for it without a limit.

Some file systems have no locks (Lustre without ``-o flock``, NFS without a lock service).  There the lock is a file in
this user's folder in memory: it keeps apart the processes of this machine; those of others are kept away by the lease
(``store/lease.py``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import RingNoSpace
from stepscope.records.places import session_root
from stepscope.ring.folders import make_session

__all__ = ["LOCK", "LOCKS", "LockBusy", "locked", "take_lock"]

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
