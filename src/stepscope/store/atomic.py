"""Replace a file as a whole: whoever opens it finds the old bytes or the new ones, never some of each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["fsync_file", "fsync_folder", "write_bytes", "write_json"]


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write beside ``path`` and rename over it; ``durable`` also survives the loss of power."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
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


def write_json(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode(), durable=durable)


def fsync_file(path: Path) -> None:
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
