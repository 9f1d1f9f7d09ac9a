"""Frequent sequences of kernels against a search window by window."""

from __future__ import annotations

from collections import defaultdict

from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.device.kernels import sequences_table
from stepscope.traces.device.work import work_of
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import window_of


def sequences(streams: list[str], gap: float = 1) -> Table:
    """Kernels named by letters, each as many microseconds long as its place in the alphabet."""
    made = MadeTrace()
    for stream, letters in enumerate(streams):
        at = 0.0
        for letter in letters:
            dur = ord(letter) - ord("a") + 1
            made.kernel(letter, at, dur, stream=stream)
            at += dur + gap
    return sequences_table(work_of(window_of(made.trace())))


def expected(streams: list[str]) -> dict[str, tuple[int, int]]:
    """Count and time of each, found the slow way."""
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for stream, letters in enumerate(streams):
        for length in range(2, 7):
            for at in range(len(letters) - length + 1):
                places[letters[at : at + length]].append((stream, at))
    out = {}
    for word, where in places.items():
        if len(word) < 3 or (len(word) > 3 and len(set(word)) == 1):
            continue
        longer = [other for other in places if len(other) == len(word) + 1 and word in (other[1:], other[:-1])]
        if any(len(places[other]) == len(where) for other in longer):
            continue
        apart: list[tuple[int, int]] = []
        for stream, at in where:
            if not apart or apart[-1][0] != stream or at >= apart[-1][1] + len(word):
                apart.append((stream, at))
        if len(apart) > 1:
            out[word] = (len(apart), len(apart) * sum((ord(letter) - ord("a") + 1) * 1000 for letter in word))
    return out


def found(table: Table) -> dict[str, tuple[int, int]]:
    return {row["kernels"].replace(" → ", ""): (row["count"], row["total_ns"]) for row in table.to_rows()}


@settings(max_examples=examples(150))
@given(st.lists(st.text("abc", max_size=24), min_size=1, max_size=2))
def test_against_the_slow_way(streams: list[str]) -> None:
    table = sequences(streams)
    slow = expected(streams)
    if table.left_out:
        assert len(slow) == len(table.rows) + table.left_out
        assert found(table).items() <= slow.items()
    else:
        assert found(table) == slow
    totals = [row["total_ns"] for row in table.to_rows()]
    assert totals == sorted(totals, reverse=True)


def test_spans_and_shares() -> None:
    table = sequences(["abcdabcdabcd"])
    whole = next(row for row in table.to_rows() if row["kernels"] == "a → b → c → d")
    assert (whole["count"], whole["total_ns"], whole["span_ns"], whole["time_share"]) == (3, 30_000, 39_000, 1.0)


def test_only_kernels_that_compute() -> None:
    made = MadeTrace()
    for at in (0, 100):
        made.kernel("a", at, 5)
        made.kernel("Memset (Device)", at + 10, 5, category="gpu_memset")
        made.kernel("b", at + 20, 5)
        made.kernel("ncclDevKernel_AllReduce", at + 30, 5)
        made.kernel("c", at + 40, 5)
    (row,) = sequences_table(work_of(window_of(made.trace()))).rows
    assert row[:4] == ("a → b → c", 3, 2, 30_000)


def test_nothing() -> None:
    assert sequences([]).rows == sequences(["a"]).rows == sequences(["abc"]).rows == ()
