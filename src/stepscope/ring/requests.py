"""Tell a running process that something was put next to its ring: the only word of a ring that others write.

The process compares the word with the value that it saw last, about twice a second and only after a step, so a request
costs it no access to files.  Which file was put there, the process finds out itself (``records/paths.py``).
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

from stepscope.errors import RingForeign
from stepscope.ring.layout import HEADER_BYTES, MAGIC, REQUESTS_WORD

__all__ = ["announce_request"]

WRAPS_AT = 1 << 64


def announce_request(ring: Path) -> bool:
    """Count one more request for the process of this ring; put the file there first.

    False: there is no such ring any more, so its process has ended and will not answer.  RingForeign: the file is not
    a ring.  Concurrent callers may count one request instead of two, which is enough: the process reads all files.
    """
    try:
        descriptor = os.open(ring, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size < HEADER_BYTES:
            raise RingForeign(f"{ring} is not a ring")
        # The file is created at its full size and never shrinks, so the mapping stays valid even if it is removed now.
        with mmap.mmap(descriptor, HEADER_BYTES) as mapped, memoryview(mapped) as view:
            if bytes(view[: len(MAGIC)]) != MAGIC:
                raise RingForeign(f"{ring} is not a ring")
            with view.cast("Q") as words:
                words[REQUESTS_WORD] = (words[REQUESTS_WORD] + 1) % WRAPS_AT
    finally:
        os.close(descriptor)
    return True
