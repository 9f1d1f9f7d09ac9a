"""How often something may happen: a bucket of tokens that fills at a steady rate.  Pure arithmetic; time is given."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Bucket", "Buckets"]

Key = TypeVar("Key", bound=Hashable)


class Bucket:
    """Lets ``burst`` through at once and ``rate`` a second in the long run."""

    __slots__ = ("_at_s", "_left", "burst", "rate")

    def __init__(self, *, rate: float, burst: float, now_s: float) -> None:
        self.rate, self.burst = rate, burst
        self._left = burst
        self._at_s = now_s

    def take(self, amount: float, now_s: float) -> float:
        """0 when it may pass (and it is taken), else how many seconds to wait before it may.

        What is more than the bucket ever holds passes when the bucket is full, and leaves it in debt.
        """
        self._left = min(self.burst, self._left + (now_s - self._at_s) * self.rate)
        self._at_s = now_s
        needed = min(amount, self.burst)
        if self._left >= needed:
            self._left -= amount
            return 0.0
        return (needed - self._left) / self.rate

    def full(self, now_s: float) -> bool:
        return self._left + (now_s - self._at_s) * self.rate >= self.burst


class Buckets(Generic[Key]):
    """One bucket each for a bounded number of sources; those that are full again are forgotten first."""

    def __init__(self, *, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: dict[Key, Bucket] = {}

    def take(self, key: Key, now_s: float) -> float:
        """As ``Bucket.take(1)``; when there is no room for another source, that source has to wait."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most:
                self._buckets = {known: kept for known, kept in self._buckets.items() if not kept.full(now_s)}
                if len(self._buckets) >= self._most:
                    return self._burst / self._rate
            bucket = self._buckets[key] = Bucket(rate=self._rate, burst=self._burst, now_s=now_s)
        return bucket.take(1, now_s)
