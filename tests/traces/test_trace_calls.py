"""Which slice lies inside which, against the definition asked pair by pair."""

from __future__ import annotations

import numpy as np
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.model.columns import Trace
from stepscope.traces.model.window import calls_of, holders

SLICES = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 1, 2, 3, 5, 9]), st.integers(1, 2)), max_size=14)


def made(slices: list[tuple[int, int, int]]) -> Trace:
    trace = MadeTrace()
    for start, dur, thread in slices:
        trace.op(f"op{start}", start, dur, tid=thread)
    return trace.trace()


def holds(trace: Trace, outer: int, inner: int) -> bool:
    slices = trace.slices
    return bool(
        outer < inner
        and slices.thread[outer] == slices.thread[inner]
        and slices.end_ns[outer] >= slices.end_ns[inner]
        and slices.end_ns[outer] > slices.start_ns[inner]
    )


@settings(max_examples=examples(300), deadline=None)
@given(SLICES)
def test_the_parent_is_the_innermost_that_holds_it_also_where_slices_cross(slices: list[tuple[int, int, int]]) -> None:
    trace = made(slices)
    tree = calls_of(trace, trace.host_rows)
    for row in range(len(trace)):
        parent = max((other for other in range(row) if holds(trace, other, row)), default=-1)
        assert tree.parents[row] == parent
        assert tree.depth[row] == (tree.depth[parent] + 1 if parent >= 0 else 0)


@settings(max_examples=examples(200), deadline=None)
@given(SLICES, st.lists(st.booleans(), min_size=14, max_size=14))
def test_holders_of_some_rows_are_those_of_all(slices: list[tuple[int, int, int]], wanted: list[bool]) -> None:
    trace = made(slices)
    tree = calls_of(trace, trace.host_rows)
    which = np.array(wanted[: len(trace)], bool)
    rows = np.arange(-1, len(trace), dtype=np.int32)
    expected = [-1]
    for row in range(len(trace)):
        at = int(tree.parents[row])
        while at >= 0 and not which[at]:
            at = int(tree.parents[at])
        expected.append(at)
    assert holders(tree, which, rows).tolist() == expected
    assert tree.holder(which).tolist() == expected[1:]
