"""Lines of threads against a sweep over every instant."""

from __future__ import annotations

import numpy as np
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.model.columns import named
from stepscope.traces.model.window import window_of
from stepscope.traces.path.graph import lines_of

NESTED = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(st.integers(0, 3), inner), max_size=3), max_leaves=12
)
Tree = list[tuple[int, "Tree"]]


def put(made: MadeTrace, tree: Tree, at: int, depth: int, owners: dict[int, str]) -> int:
    """One after the other, each with a microsecond of its own before and after what it holds; where the last ends."""
    for gap, inner in tree:
        start = at + gap
        name = f"op{len(made.events)}"
        args = made.op(name, start, 0)
        event = made.events[-1]
        end = put(made, inner, start + 1, depth + 1, owners) + 1
        event["dur"] = end - start
        args["depth"] = depth
        for instant in range(start, end):
            owners.setdefault(instant, name)
        at = end
    return at


@settings(max_examples=examples(60), deadline=None)
@given(NESTED)
def test_each_instant_is_the_innermost_slices(tree: Tree) -> None:
    made = MadeTrace()
    owners: dict[int, str] = {}
    end = put(made, tree, 0, 0, owners)
    trace = made.trace()
    lines = lines_of(window_of(trace))
    if not made.events:
        assert lines == {}
        return
    (line,) = lines.values()
    assert (np.diff(line.start_ns) > 0).all()
    first = trace.meta.origin_ns // 1000
    for instant in range(first, end + 2):
        row = line.row[line.at(np.array([(instant - first) * 1000]))[0]]
        assert (trace.name(row) if row >= 0 else None) == owners.get(instant)


def test_of_two_that_overlap_the_later_has_the_time() -> None:
    made = MadeTrace()
    made.op("a", 0, 10)
    made.op("b", 5, 10)
    trace = made.trace()
    (line,) = lines_of(window_of(trace)).values()
    assert [(start, trace.name(row) if row >= 0 else "") for start, row in zip(line.start_ns, line.row, strict=True)][
        1:
    ] == [
        (0, "a"),
        (5_000, "b"),
        (15_000, ""),
    ]


def test_names_are_asked_once() -> None:
    made = MadeTrace()
    made.op("a", 0, 10, **{"Input Dims": [[2, 3]]})
    made.op("a", 20, 10)
    made.kernel("b", 5, 10)
    trace = made.trace()
    names: list[str] = []
    rows = np.array([-1, 0, 2], np.int32)
    assert named(trace, rows, lambda name: names.append(name) or True).tolist() == [False, True, True]
    assert sorted(names) == ["a", "b"], "and shapes are no names"
    assert named(trace, rows[:0], bool).tolist() == []
