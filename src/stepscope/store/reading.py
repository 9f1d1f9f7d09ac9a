"""Open the files of a run for reading: ordinary files only, and documents only up to a size.

A run may come from anybody.  A pipe would have us wait for ever, a device never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_file", "read_document"]

MOST_BYTES = 256 << 20
"""Of a document, which is read whole; the largest that we write is the summary of thousands of ranks."""


def open_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """OSError when it is not there or not an ordinary file; a link to one is."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return os.fdopen(fd, "rb", buffering)


def read_document(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """OSError also when it is larger than any that we write."""
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data
