"""Replace a file as a whole: whoever opens it finds the old bytes or the new ones, never some of each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stepscope.records.modes import file_mode

__all__ = ["fsync_file", "fsync_folder", "leftovers", "write_bytes", "write_json"]


_PARTIAL = ".tmp"


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write beside ``path`` and rename over it; ``durable`` also survives the loss of power.

    The name beside it cannot be guessed, and is never a link that somebody put there: a run may come from a stranger.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}{_PARTIAL}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(path.parent))
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed left beside their files."""
    return [path for path in folder.glob(f".*{_PARTIAL}") if not path.is_dir()]


def write_json(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def fsync_file(path: Path) -> None:
    """OSError also when a pipe or a link is in its place: opening a pipe would wait for somebody to write into it."""
    _fsync(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)


def fsync_folder(path: Path) -> None:
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
