"""Whether a folder is on a file system that somebody else serves, and that may therefore stop answering.

Standard library only: training processes load this.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_remote"]

MOUNTS = "/proc/self/mountinfo"
REMOTE = (
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
                    return kind.split(" ", 1)[0].partition(".")[0] in REMOTE
    except (OSError, IndexError):
        pass
    return False
