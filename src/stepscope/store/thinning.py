"""Which samples of a long run are read into memory.  Pure.

Agents write one a second for every host, process and GPU, which is hundreds of thousands in a night: all are kept on
disk, but rules and curves need a fraction.  Where there are more than ``MOST``, every n-th of each source is taken, so
that shares and medians stay what they are, and besides the last of each: the end of a run is what is asked about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, Generic, TypeVar

__all__ = ["MOST", "SOURCE", "Thinner", "newest_of", "source_of", "stride", "thinned"]

MOST = 50_000
"""At full rate three hours of a job with one GPU, or 50 minutes of one with eight."""
NEWEST = 120
"""Of each source, the last so many are all taken …"""
LEAST_NEWEST = 8
"""… or, where there are very many sources, so many at the least."""
SOURCE = ("node", "kind", "pid", "index", "peer")
"""What tells one host, process, GPU or probe from another."""

Item = TypeVar("Item")


def stride(total: int) -> int:
    """Every how many-th of so many samples is taken."""
    return max(1, -(-total // MOST))


def newest_of(sources: int) -> int:
    """How many of the last ones of each of so many sources are."""
    return max(LEAST_NEWEST, min(NEWEST, MOST // (4 * max(1, sources))))


def source_of(sample: Mapping[str, Any]) -> Hashable:
    """Whatever a stranger put there."""
    source = tuple(sample.get(name) for name in SOURCE)
    try:
        hash(source)
    except TypeError:
        return repr(source)
    return source


class Thinner(Generic[Item]):
    """Takes samples one by one, in order, and gives those that are to be kept."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._kept: list[tuple[int, Item]] = []
        self._last: dict[Hashable, deque[tuple[int, int, Item]]] = {}

    def add(self, source: Hashable, item: Item) -> None:
        number = self._numbers.get(source, 0)
        self._numbers[source] = number + 1
        if number % self._every == 0:
            self._kept.append((self._count, item))
        else:
            self._last.setdefault(source, deque(maxlen=NEWEST)).append((number, self._count, item))
        self._count += 1

    def kept(self) -> list[Item]:
        newest = newest_of(len(self._numbers))
        late = [
            (place, item)
            for source, last in self._last.items()
            for number, place, item in last
            if number >= self._numbers[source] - newest
        ]
        return [item for _, item in sorted([*self._kept, *late], key=itemgetter(0))]


def thinned(samples: Iterable[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    """Those that are to be kept of ``total`` samples."""
    every = stride(total)
    if every == 1:
        return list(samples)
    thinner: Thinner[dict[str, Any]] = Thinner(every)
    for sample in samples:
        thinner.add(source_of(sample), sample)
    return thinner.kept()
