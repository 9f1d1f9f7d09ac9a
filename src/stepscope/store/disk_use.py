"""What a run takes on disk, and what it may take (``stepscope run --max-disk``)."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MAX_DISK", "NEARLY", "disk_limit", "run_bytes"]

MAX_DISK = 20 << 30
"""Of a run of which nobody said more."""
NEARLY = 0.8
"""From this share of the limit on, less is kept."""


def disk_limit(meta: Mapping[str, Any]) -> int:
    """In bytes; 0: there is none."""
    limit = meta.get("max_disk")
    return limit if type(limit) is int and limit >= 0 else MAX_DISK


def run_bytes(run_dir: Path) -> int:
    """What the files of a run take on disk; a hole takes nothing."""
    total = 0
    folders = [run_dir]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(Path(entry.path))
                    else:
                        total += about.st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total
