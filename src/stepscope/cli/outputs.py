"""What a command writes beside its text: never over what it reads, and whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.records.replacing import replaced

__all__ = ["spare_inputs", "write_page"]


def spare_inputs(outputs: Iterable[Path | None], inputs: Iterable[Path]) -> None:
    """Refuses an output that is one of the inputs, by whatever name or link."""
    wanted = [path for path in outputs if path is not None]
    if not wanted:
        return
    taken = {_identity(path): path for path in inputs}
    for path in wanted:
        if _identity(path) in taken:
            raise UsageError(f"{path} is one of the files to be read, and would be lost: write to another")


def write_page(path: Path, text: str) -> None:
    try:
        with replaced(path) as spare:
            spare.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _identity(path: Path) -> object:
    """The same for every name that a file has, hard links too."""
    try:
        status = path.stat()
    except OSError:
        return path.absolute()
    return (status.st_dev, status.st_ino)
