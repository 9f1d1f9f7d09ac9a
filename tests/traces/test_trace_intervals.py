"""Intervals against sets of instants."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model import intervals
from stepscope.traces.model.intervals import EMPTY, Spans

PIECES = st.lists(st.tuples(st.integers(-20, 60), st.integers(-3, 15)), max_size=12)


def spans_of(pieces: list[tuple[int, int]]) -> Spans:
    start = np.array([start for start, _ in pieces], np.int64)
    return intervals.merge(start, start + np.array([length for _, length in pieces], np.int64))


def instants(pieces: list[tuple[int, int]]) -> set[int]:
    return {instant for start, length in pieces for instant in range(start, start + length)}


def instants_of(spans: Spans) -> set[int]:
    for before, after in zip(spans.end_ns[:-1], spans.start_ns[1:], strict=True):
        assert before < after, "sorted, disjoint, not touching"
    assert (spans.end_ns > spans.start_ns).all()
    return instants(list(zip(spans.start_ns.tolist(), (spans.end_ns - spans.start_ns).tolist(), strict=True)))


@given(PIECES)
def test_merging_keeps_every_instant_once(pieces: list[tuple[int, int]]) -> None:
    spans = spans_of(pieces)
    assert instants_of(spans) == instants(pieces)
    assert intervals.total(spans) == len(instants(pieces))


@given(PIECES, PIECES)
def test_sets_of_two(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = spans_of(one), spans_of(other)
    assert instants_of(intervals.union(first, second)) == instants(one) | instants(other)
    assert instants_of(intervals.intersection(first, second)) == instants(one) & instants(other)
    assert instants_of(intervals.difference(first, second)) == instants(one) - instants(other)


@given(PIECES, PIECES)
def test_how_much_of_each_is_covered(some: list[tuple[int, int]], by: list[tuple[int, int]]) -> None:
    start = np.array([start for start, _ in some], np.int64)
    end = start + np.array([length for _, length in some], np.int64)
    expected = [len(instants([piece]) & instants(by)) if piece[1] > 0 else 0 for piece in some]
    assert intervals.covered(start, np.maximum(start, end), spans_of(by)).tolist() == expected


@given(PIECES, st.integers(-30, 70), st.integers(-30, 70))
def test_what_lies_between_two_instants(pieces: list[tuple[int, int]], start: int, end: int) -> None:
    assert instants_of(intervals.cut(spans_of(pieces), start, end)) == instants(pieces) & set(range(start, end))


def test_nothing_is_empty() -> None:
    assert spans_of([]) == EMPTY
    assert intervals.total(EMPTY) == 0
    assert instants_of(intervals.union(EMPTY, EMPTY)) == set()
    assert intervals.covered(np.array([3]), np.array([9]), EMPTY).tolist() == [0]


def test_times_since_1970_in_nanoseconds_are_exact() -> None:
    start = 1_711_964_646_123_456_789
    spans = intervals.merge(np.array([start, start + 1]), np.array([start + 1, start + 3]))
    assert (spans.start_ns.tolist(), spans.end_ns.tolist()) == ([start], [start + 3])
