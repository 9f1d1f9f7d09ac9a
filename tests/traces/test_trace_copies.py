"""Copies by direction and memory, and their bandwidth."""

from __future__ import annotations

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.device.kernels import bandwidth_table, bytes_of, copies_table
from stepscope.traces.device.work import work_of
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import window_of


def tables(made: MadeTrace) -> tuple[Table, Table]:
    work = work_of(window_of(made.trace()))
    sizes = bytes_of(work)
    return copies_table(work, sizes), bandwidth_table(work, sizes)


@pytest.mark.parametrize(
    ("name", "direction", "memory"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "HtoD", "Pageable -> Device"),
        ("Memcpy DtoH (Device -> Pinned)", "DtoH", "Device -> Pinned"),
        ("Memcpy DtoD (Device -> Device)", "DtoD", "Device -> Device"),
        ("Memcpy PtoP (Device -> Device)", "PtoP", "Device -> Device"),
        ("Memcpy HtoD (Host -> Device)", "HtoD", "Host -> Device"),
        ("Memset (Device)", "memset", "Device"),
        ("CopyHostToDevice", "HtoD", ""),
        ("CopyDeviceToHost", "DtoH", ""),
        ("Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "HtoD", "MEMORY(Unknown) -> DEVICE"),
        ("Memcpy D2M (DEVICE -> MEMORY)", "DtoH", "DEVICE -> MEMORY"),
        ("something", "other", ""),
    ],
)
def test_directions(name: str, direction: str, memory: str) -> None:
    made = MadeTrace()
    made.kernel(name, 0, 2, category="gpu_memcpy", bytes=3000)
    (row,) = tables(made)[0].rows
    assert row == (direction, memory, 1, 3000, 2000, 1.0, 1.5, 3000, 2000)


def test_sizes_and_times_that_are_not_there() -> None:
    made = MadeTrace()
    made.kernel("Memset (Device)", 0, 1, category="gpu_memset")
    made.kernel("Memcpy DtoD (Device -> Device)", 5, 0, category="gpu_memcpy", bytes=500)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 6, 1, category="gpu_memcpy", bytes=4000)
    made.kernel("Memcpy HtoD (Pinned -> Device)", 8, 3, category="gpu_memcpy")
    copies, curve = tables(made)
    assert copies.rows == (
        ("HtoD", "Pinned -> Device", 2, 4000, 4000, 0.8, 4.0, 4000, 3000),
        ("memset", "Device", 1, 0, 1000, 0.2, None, None, 1000),
        ("DtoD", "Device -> Device", 1, 500, 0, 0.0, None, 500, 0),
    )
    assert {row["direction"] for row in curve.to_rows()} == {"HtoD", "DtoD"}


def test_without_copies() -> None:
    made = MadeTrace()
    made.kernel("kernel", 0, 5)
    assert [table.rows for table in tables(made)] == [(), ()]
    assert [table.rows for table in tables(MadeTrace())] == [(), ()]


COPY = st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 10**10), st.sampled_from(["HtoD", "DtoH"]))


@settings(max_examples=examples(40))
@given(st.lists(COPY, min_size=1, max_size=10))
def test_the_curve_is_what_each_stretch_saw(copies: list[tuple[int, int, int, str]]) -> None:
    made = MadeTrace()
    for start, dur, size, direction in copies:
        made.kernel(f"Memcpy {direction} (a -> b)", start, dur, category="gpu_memcpy", bytes=size)
    _, curve = tables(made)
    origin = min(start for start, _, _, _ in copies)
    last = max(start + dur for start, dur, _, _ in copies)
    assert len(curve.rows) <= 500
    for row in curve.to_rows():
        since, until = row["start_ns"] / 1000 + origin, (row["start_ns"] + row["length_ns"]) / 1000 + origin
        expected = 0.0
        for start, dur, size, direction in copies:
            if direction == row["direction"] and dur:
                expected += size * max(min(until, start + dur) - max(since, start), 0) / dur
            elif direction == row["direction"]:
                expected += size * (since <= start < until or (start == last and until >= last))
        assert row["moved_bytes"] == pytest.approx(expected, abs=2, rel=1e-6)
        assert row["bandwidth_gbps"] == row["moved_bytes"] / row["length_ns"]
