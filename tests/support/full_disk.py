"""Fill a small file system to its last byte."""

from __future__ import annotations

from pathlib import Path

__all__ = ["fill_disk"]


def fill_disk(folder: Path) -> Path:
    """Write until nothing fits any more; returns the file whose removal makes room again."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path
