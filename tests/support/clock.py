"""A clock that moves only when told to, for exact assertions on time."""

from __future__ import annotations

__all__ = ["FakeClock", "FakeClockInSeconds", "SecondsClock"]


class FakeClock:
    """Call it for the time in nanoseconds; ``advance`` moves it."""

    def __init__(self, start_ns: int = 1_000) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


class FakeClockInSeconds(FakeClock):
    """Moved in nanoseconds, read in seconds."""

    def __call__(self) -> float:  # type: ignore[override]
        return self.now_ns / 1e9


class SecondsClock:
    """A clock in seconds that a test sets."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
