"""Which samples of a long run are read into memory.  Pure.

Agents write one a second for every host, process and GPU, which is hundreds of thousands in a night; those of earlier
hours are thinned on disk, and stand for more than a second (``coarse_samples.py``).  Rules and curves need a fraction.
Where there are more than ``MOST``, some of each source are taken that are about equally far apart in time, so that
shares and medians stay what they are and the last hours do not outweigh the days before; of those that are farther
apart on disk, all.  Besides the last of each are taken: the end of a run is what is asked about.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar

__all__ = ["MOST", "SOURCE", "Thinner", "newest_of", "source_of", "span_of", "strides", "thinned"]

MOST = 50_000
"""At full rate three hours of a job with one GPU, or 50 minutes of one with eight."""
NEWEST = 120
"""Of each source, the last so many are all taken …"""
LEAST_NEWEST = 8
"""… or, where there are very many sources, so many at the least."""
SOURCE = ("node", "kind", "pid", "index", "peer")
"""What tells one host, process, GPU or probe from another."""

Item = TypeVar("Item")


def strides(counts: Mapping[int, int], most: int | None = None) -> dict[int, int]:
    """Every how many-th is taken, by how many seconds a sample stands for (0: one, as it was taken).

    ``counts``: how many there are of each.  ``most``: about so many are taken, ``MOST`` unless told.
    """
    most = MOST if most is None else most
    low, high = 1, max(1, sum(counts.values())) * max(1, *counts, 1)
    while low < high:  # the smallest distance that leaves few enough, or all that are as coarse as that
        middle = (low + high) // 2
        if sum(-(-count // every) for count, every in _at(counts, middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return dict(zip(counts, (every for _, every in _at(counts, low)), strict=True))


def _at(counts: Mapping[int, int], apart_s: int) -> list[tuple[int, int]]:
    """How many there are, and every how many-th is as far from the next."""
    return [(count, max(1, apart_s // max(1, span_s))) for span_s, count in counts.items()]


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


def span_of(sample: Mapping[str, Any]) -> int:
    """How many seconds a sample stands for; 0: it is as it was taken."""
    span_s = sample.get("span_s")
    return span_s if type(span_s) is int and span_s > 0 else 0


class Thinner(Generic[Item]):
    """Takes samples one by one, in order, and gives those that are to be kept."""

    def __init__(self, every: Mapping[int, int]) -> None:
        """``every``: as ``strides`` gives it."""
        self._every = every
        self._numbers: dict[Hashable, int] = {}
        self._places: dict[tuple[Hashable, int], int] = {}
        self._count = 0
        self._kept: list[tuple[int, Item]] = []
        self._last: dict[Hashable, deque[tuple[int, int, Item]]] = {}

    def add(self, source: Hashable, span_s: int, item: Item) -> None:
        number = self._numbers.get(source, 0)
        self._numbers[source] = number + 1
        place = self._places.get((source, span_s), 0)
        self._places[source, span_s] = place + 1
        if place % self._every.get(span_s, 1) == 0:
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


def thinned(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are to be kept."""
    if len(samples) <= MOST:
        return list(samples)
    thinner: Thinner[dict[str, Any]] = Thinner(strides(Counter(map(span_of, samples))))
    for sample in samples:
        thinner.add(source_of(sample), span_of(sample), sample)
    return thinner.kept()
