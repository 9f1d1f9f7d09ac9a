"""What is to be seen besides the stream of news: the rows in sight, a rank, what was printed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Wanted"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    order: str = "work"
    start: int = 0
    limit: int = 10
    rank: int | None = None
    output: bool = False
    """What that rank printed, or the job."""
