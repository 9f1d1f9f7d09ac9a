"""Which run the user means."""

from __future__ import annotations

from pathlib import Path

__all__ = ["located"]


def located(path: Path) -> Path:
    """The path itself, or a run of that name in the usual folder."""
    named = Path("runs") / path
    return named if not path.exists() and named.is_dir() else path
