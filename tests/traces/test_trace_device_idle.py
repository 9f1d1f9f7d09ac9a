"""The idle time of a device as a whole, by cause: against a sweep over every nanosecond of small traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.device.figures import device_figures
from stepscope.traces.device.work import temporal_of
from stepscope.traces.model.window import Window, window_of


def by_hand(work: list[tuple[int, int, int | None]]) -> tuple[int, int, int]:
    """Of (start, end, launched at or None): host, kernel, other, in nanoseconds."""
    sums = {"host": 0, "kernel": 0, "other": 0}
    busy_until: int | None = None
    for start, end, launched in sorted(work, key=lambda each: each[0]):
        if busy_until is not None and start > busy_until:
            gap = start - busy_until
            late = launched is not None and launched > busy_until
            sums["host" if late else "kernel" if gap < 30_000 else "other"] += gap
        busy_until = end if busy_until is None else max(busy_until, end)
    return sums["host"], sums["kernel"], sums["other"]


def parts(window: Window) -> tuple[int, int, int]:
    idle = device_figures(window).idle
    return idle.host_wait_ns, idle.kernel_wait_ns, idle.other_ns


WORK = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 60), st.none() | st.integers(0, 400), st.sampled_from([7, 20])),
    max_size=12,
    # Of several that end a gap at the same instant, it is the first in the file that tells why.
    unique_by=lambda each: each[0],
)


@settings(max_examples=examples(80), deadline=None)
@given(WORK)
def test_gaps_of_all_streams(work: list[tuple[int, int, int | None, int]]) -> None:
    made = MadeTrace()
    for start, dur, launched, stream in work:
        if launched is None:
            made.kernel("kernel", start, dur, stream=stream)
        else:
            made.launched("kernel", at=launched, start=start, dur=dur, call=0, stream=stream)
    if not work:
        made.op("aten::mm", 0, 10)
    window = window_of(made.trace())
    origin = window.trace.meta.origin_ns
    exact = [
        (
            start * 1000 - origin,
            (start + dur) * 1000 - origin,
            None if launched is None else launched * 1000 - origin,
        )
        for start, dur, launched, _ in work
    ]
    assert parts(window) == by_hand(exact)
    assert sum(parts(window)) == temporal_of(window).idle_ns


@pytest.mark.few(2)
@pytest.mark.parametrize("folder", ["param_dlrm_8rank", "hta_nccl_data_1of2", "hta_cp_alexnet", "hta_trace_diff"])
def test_causes_sum_to_the_idle_time(shared_data: Path, folder: str, real_window: Callable[[Path], Window]) -> None:
    for path in sorted((shared_data / "traces" / folder).rglob("*.json.gz")):
        window = real_window(path)
        figures = device_figures(window)
        assert sum(parts(window)) == temporal_of(window).idle_ns
        assert figures.idle.sync_ns <= figures.idle.host_wait_ns
        waits = [wait_ns for _, wait_ns in figures.idle_before]
        assert waits == sorted(waits, reverse=True)
        assert sum(waits) <= figures.idle.host_wait_ns
