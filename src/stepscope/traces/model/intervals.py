"""Sets of instants as sorted, disjoint, half-open intervals of integer nanoseconds; exact, without rounding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["EMPTY", "Spans", "covered", "cut", "difference", "holds", "intersection", "merge", "total", "union"]

Ints = NDArray[np.int64]


class Spans(NamedTuple):
    """Sorted, disjoint, not empty, not touching each other."""

    start_ns: Ints
    end_ns: Ints


EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def merge(start_ns: Ints, end_ns: Ints) -> Spans:
    """Return the union of intervals in any order; empty ones add nothing."""
    there = end_ns > start_ns
    start_ns, end_ns = start_ns[there], end_ns[there]
    if not len(start_ns):
        return EMPTY
    if (start_ns[1:] < start_ns[:-1]).any():
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns = start_ns[order], end_ns[order]
    end_ns = np.maximum.accumulate(end_ns)
    first = np.empty(len(start_ns), bool)
    first[0] = True
    np.greater(start_ns[1:], end_ns[:-1], out=first[1:])
    at = np.flatnonzero(first)
    return Spans(start_ns[at], end_ns[np.append(at[1:], len(start_ns)) - 1])


def total(spans: Spans) -> int:
    """Return the total length."""
    return int((spans.end_ns - spans.start_ns).sum())


def union(*many: Spans) -> Spans:
    return merge(np.concatenate([each.start_ns for each in many]), np.concatenate([each.end_ns for each in many]))


def intersection(spans: Spans, other: Spans) -> Spans:
    return _where(spans, other, weight=1, at_least=2)


def difference(spans: Spans, other: Spans) -> Spans:
    """Return what is in ``spans`` but not in ``other``."""
    return _where(spans, other, weight=-1, at_least=1)


def _where(spans: Spans, other: Spans, *, weight: int, at_least: int) -> Spans:
    """Return the instants at which 1 for ``spans`` plus ``weight`` for ``other`` add up to ``at_least``."""
    if not len(spans.start_ns):
        return EMPTY
    times = np.concatenate([spans.start_ns, spans.end_ns, other.start_ns, other.end_ns])
    steps = np.repeat(
        np.array([1, -1, weight, -weight], np.int64),
        [len(spans.start_ns), len(spans.end_ns), len(other.start_ns), len(other.end_ns)],
    )
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(steps[order])
    inside = (level >= at_least)[:-1]
    return merge(times[:-1][inside], times[1:][inside])


def cut(spans: Spans, start_ns: int, end_ns: int) -> Spans:
    """Return the part between two instants."""
    return intersection(spans, Spans(np.array([start_ns]), np.array([end_ns]))) if end_ns > start_ns else EMPTY


def covered(start_ns: Ints, end_ns: Ints, spans: Spans) -> Ints:
    """Return how much of each interval lies in ``spans``, [n]."""
    return _before(end_ns, spans) - _before(np.minimum(start_ns, end_ns), spans)


def holds(spans: Spans, times: Ints) -> NDArray[np.bool_]:
    """Return whether each instant lies in ``spans``, [n]; the end of a span does not."""
    at = np.searchsorted(spans.start_ns, times, side="right") - 1
    return (at >= 0) & (times < np.append(spans.end_ns, 0)[at])


def _before(times: Ints, spans: Spans) -> Ints:
    """Return how much of ``spans`` lies before each instant, [n]."""
    lengths = np.concatenate([[0], np.cumsum(spans.end_ns - spans.start_ns)])
    index = np.searchsorted(spans.start_ns, times, side="right")
    inside = np.minimum(times, spans.end_ns[index - 1]) - spans.start_ns[index - 1] if len(spans.start_ns) else 0
    return np.where(index > 0, lengths[np.maximum(index - 1, 0)] + inside, 0)
