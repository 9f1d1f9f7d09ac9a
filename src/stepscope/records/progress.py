"""How work that may take long says how far it is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "unheard"]

Progress = Callable[[int, int], None]
"""Called with what is done and all there is, now and then; it never goes back."""


def unheard(done: int, total: int) -> None:
    """Nobody wants to know."""
