"""Bound the logs of a run: of each one its beginning and its end stay, and the middle gives its disk space back.

    0 … FIRST        as it was printed; its last bytes are a line that says what was dropped
    FIRST … -LAST    a hole: it takes no room, and reads as zeros
    -LAST …          as it was printed, the error at the end included

Nobody who writes or reads a log has to know: no byte changes its position, the file is never renamed, cut or locked,
and a process goes on appending while the hole is made (``fallocate`` with ``FALLOC_FL_PUNCH_HOLE``).  A file system
that cannot do that (NFS before 4.2, some FUSE ones) keeps logs whole; then ``bound_logs`` says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

__all__ = ["EACH_BYTES", "bound_log", "bound_logs", "data_at", "share_of"]

EACH_BYTES = 64 << 20
"""Of one log, about, where there are not many."""
ALL_BYTES = 4 << 30
"""Of all logs of a run …"""
LEAST_BYTES = 1 << 20
"""… but not less of each than this."""
_FIRST_PART = 16
"""A sixteenth of what is kept is its beginning."""
_ALIGNED = 1 << 16
"""Blocks of file systems are this large at the most; then no zero is left at either end of a hole."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WIDTH = 120


def share_of(logs: int, all_bytes: int = ALL_BYTES) -> int:
    """What each of so many may take."""
    return max(LEAST_BYTES, min(EACH_BYTES, all_bytes // max(1, logs)))


def bound_logs(run_dir: Path, *, all_bytes: int = ALL_BYTES) -> bool:
    """Whether this file system can do it; OSError when something else is wrong."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "logs") if entry.name.endswith(".log")]
    except FileNotFoundError:
        return True
    share = share_of(len(names), all_bytes)
    return all(bound_log(run_dir / "logs" / name, share) for name in sorted(names))


def bound_log(path: Path, share: int) -> bool:
    """As ``bound_logs``.  Nothing is done before a log is a quarter longer than its share."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return True
    # A file with a second name may be somebody else's, too.
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_blocks * 512 < share + share // 4:
        return True
    first = max(_ALIGNED, share // _FIRST_PART // _ALIGNED * _ALIGNED)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        end = (size - (share - first)) // _ALIGNED * _ALIGNED
        if end <= first:
            return True
        if not _punch(fd, first, end - first):
            return False
        if os.fstat(fd).st_size >= size:  # nobody emptied it meanwhile
            os.pwrite(fd, _line(end - first), first - _WIDTH)
        return True
    finally:
        os.close(fd)


def data_at(fd: int, offset: int) -> tuple[int, int]:
    """The first position from ``offset`` on that is in no hole, and where the next hole or the end of the file is."""
    try:
        begin = os.lseek(fd, offset, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return offset, offset


def _line(dropped: int) -> bytes:
    """Always as long: it is written over the one before, and says so once only."""
    text = f"[stepscope: {dropped:,} bytes of output were dropped here to bound the disk space of this log]"
    return b"\n" + text.encode().ljust(_WIDTH - 2)[: _WIDTH - 2] + b"\n"


def _punch(fd: int, offset: int, length: int) -> bool:
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
        return False
    raise OSError(code, os.strerror(code))
