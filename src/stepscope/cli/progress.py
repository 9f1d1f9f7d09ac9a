"""A bar on the terminal while something long is under way; where nobody looks, there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["Progress", "progress_bar"]

Progress = Callable[[int, int], None]
"""Called with what is done and all there is; equal at the end."""

BAR = 24


def progress_bar(doing: str, amount: Callable[[int], str] = str) -> Progress | None:
    """One line on standard error that is written over and gone at the end; ``amount`` words a number."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        filled = min(done * BAR // max(total, 1), BAR)
        bar = f"{'█' * filled}{'░' * (BAR - filled)}"
        line = "" if done >= total else f"{doing} {bar} {amount(done)}/{amount(total)}"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show
