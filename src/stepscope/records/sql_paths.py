"""Paths in the words of DuckDB, which takes ``*``, ``?`` and ``[`` in a path that it reads for a pattern."""

from __future__ import annotations

from pathlib import Path

__all__ = ["quoted", "unglobbed"]

_GLOB = str.maketrans({"*": "[*]", "?": "[?]", "[": "[[]"})


def quoted(path: Path | str) -> str:
    """A path to write to."""
    return "'" + str(path).replace("'", "''") + "'"


def unglobbed(path: Path | str) -> str:
    """A path to read from: this file and no other."""
    return quoted(str(path).translate(_GLOB))
