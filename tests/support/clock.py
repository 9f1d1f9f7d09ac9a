"""A clock that moves only when told to, for exact assertions on time."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Call it for the time in nanoseconds; ``advance`` moves it."""

    def __init__(self, start_ns: int = 1_000) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds
