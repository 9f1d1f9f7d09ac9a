"""Garbage collections and holes of the main thread."""

from __future__ import annotations

from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.host.stalls import Pause, holes_table, pauses_of
from stepscope.traces.model.window import Window, window_of


def test_collections_that_were_asked_for_or_not() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5)
    made.python("<built-in function collect>", 10, 50)
    made.python("Python GC", 11, 48)
    made.python("Python GC", 100, 20)
    made.op("gc (dynamo_timed)", 200, 20)
    assert pauses_of(window_of(made.trace())) == (
        Pause(kind="gc", start_ns=10_000, dur_ns=50_000),
        Pause(kind="gc", start_ns=100_000, dur_ns=20_000),
    )
    assert pauses_of(window_of(MadeTrace().trace())) == ()


def found_in(window: Window) -> list[tuple[object, ...]]:
    table = holes_table(window)
    return [] if table is None else list(table.rows)


def test_holes_with_what_is_around_them() -> None:
    made = MadeTrace()
    made.step(1, 0, 40_000)
    made.python("train.py(31): augment", 1_500, 9_000)
    made.op("aten::add", 0, 1_000)
    made.op("aten::mul", 11_000, 1_000)
    made.runtime("cudaLaunchKernel", 16_000, 1_000)
    made.annotation("evaluate", 17_000, 22_000)
    made.op("aten::sum", 30_000, 9_000)
    assert found_in(window_of(made.trace())) == [
        (1, 17_000_000, 13_000_000, "evaluate", None, "cudaLaunchKernel", "aten::sum"),
        (1, 1_000_000, 10_000_000, "train.py(31): augment", "train.py(31): augment", "aten::add", "aten::mul"),
    ]


def test_waiting_for_backward_is_no_hole() -> None:
    made = MadeTrace()
    made.step(1, 0, 40_000)
    made.op("aten::mm", 0, 1_000, **{"Sequence number": 3})
    made.op("MmBackward0", 1_000, 38_000, tid=9, **{"Sequence number": 3, "Fwd thread id": 1})
    assert found_in(window_of(made.trace())) == []


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), max_size=8))
def test_random_holes(pieces: list[tuple[int, int]]) -> None:
    """In milliseconds; two steps that touch, a third that is left out."""
    made = MadeTrace()
    for number in range(3):
        made.step(number, number * 40_000, 40_000)
    for start, length in pieces:
        made.op("aten::mm", start * 1000, length * 1000)
    window = window_of(made.trace())
    ran = [(start, start + length) for start, length in pieces if start < 80]
    expected = []
    for number in range(2) if ran else ():
        free = [all(not start <= at < end for start, end in ran) for at in range(number * 40, number * 40 + 40)]
        length = 0
        for at, is_free in enumerate([*free, False]):
            if is_free:
                length += 1
            elif length:
                expected.append((number, (number * 40 + at - length) * 1_000_000, length * 1_000_000))
                length = 0
    found = sorted(row[:3] for row in found_in(window))  # type: ignore[type-var]
    assert found == [each for each in expected if each[2] > 5_000_000]
