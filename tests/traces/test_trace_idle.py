"""Gaps by cause, one case each; all of it is recomputed in test_trace_device_recomputed.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.device.figures import device_figures
from stepscope.traces.device.work import (
    StreamIdle,
    gaps_of,
    idle_by_operator,
    idle_of,
    idle_table,
    temporal_of,
    work_of,
)
from stepscope.traces.model.window import Window, window_of


def idle(made: MadeTrace) -> dict[str, StreamIdle]:
    return idle_of(window_of(made.trace()))


def waits(host: float = 0, kernel: float = 0, other: float = 0, sync: float = 0) -> StreamIdle:
    """In microseconds."""
    host_ns, kernel_ns, other_ns, sync_ns = (round(value * 1000) for value in (host, kernel, other, sync))
    return StreamIdle(host_wait_ns=host_ns, kernel_wait_ns=kernel_ns, other_ns=other_ns, sync_ns=sync_ns)


def after_one(at: float, start: float) -> MadeTrace:
    """A kernel that ends at 100, then one launched at ``at`` that begins at ``start``."""
    made = MadeTrace()
    made.launched("first", at=0, start=10, dur=90)
    made.launched("second", at=at, start=start, dur=5)
    return made


@pytest.mark.parametrize(
    ("at", "start", "expected"),
    [
        (100.001, 150, waits(host=50)),
        (100, 150, waits(other=50)),
        (100, 129.999, waits(kernel=29.999)),
        (100, 130, waits(other=30)),
        (50, 101, waits(kernel=1)),
        (120, 121, waits(host=21)),
        (50, 100, waits()),
        (50, 60, waits()),
    ],
)
def test_causes(at: float, start: float, expected: StreamIdle) -> None:
    assert idle(after_one(at, start)) == {"7": expected}


def test_without_a_launch_there_is_no_host_wait() -> None:
    made = after_one(50, 101)
    made.kernel("orphan", 156, 5)
    assert idle(made) == {"7": waits(kernel=1, other=50)}


def test_copies_and_memsets_are_work_but_waits_and_annotations_are_not() -> None:
    made = MadeTrace()
    made.kernel("kernel", 0, 10)
    made.kernel("Memcpy DtoD (Device -> Device)", 12, 10, category="gpu_memcpy")
    made.kernel("Memset (Device)", 25, 10, category="gpu_memset")
    made.kernel("Stream Sync", 35, 100, category="cuda_sync")
    made.kernel("forward", 35, 100, category="gpu_user_annotation")
    assert idle(made) == {"7": waits(kernel=5)}


def test_a_gap_begins_where_all_before_it_has_ended() -> None:
    made = MadeTrace()
    made.kernel("long", 0, 100)
    made.kernel("inside", 10, 5)
    made.kernel("after", 103, 5)
    assert idle(made) == {"7": waits(kernel=3)}


def test_streams_of_several_devices_are_told_apart() -> None:
    made = MadeTrace()
    for device in (0, 1):
        made.kernel("kernel", 0, 10, device=device)
        made.kernel("kernel", 11 + device, 10, device=device)
    assert idle(made) == {"0:7": waits(kernel=1), "1:7": waits(kernel=2)}


def test_the_host_waited_for_the_device() -> None:
    made = MadeTrace()
    made.launched("first", at=0, start=10, dur=90)
    made.runtime("cudaStreamSynchronize", 20, 100)
    made.runtime("cudaEventSynchronize", 110, 15)
    made.runtime("cudaEventQuery", 130, 15)
    made.runtime("cudaDeviceSynchronize", 100, 100, tid=4001)
    made.launched("second", at=150, start=160, dur=5)
    assert idle(made) == {"7": waits(host=60, sync=25)}


@pytest.mark.parametrize(("memory", "sync"), [("Device -> Pageable", 20), ("Device -> Pinned", 0)])
def test_a_copy_to_pageable_memory_holds_the_host_up(memory: str, sync: float) -> None:
    made = MadeTrace()
    made.runtime("cudaMemcpyAsync", 0, 120, correlation=77)
    made.kernel(f"Memcpy DtoH ({memory})", 10, 90, category="gpu_memcpy", correlation=77)
    made.launched("second", at=140, start=150, dur=5)
    assert idle(made) == {"7": waits(host=50, sync=sync)}


def test_waiting_after_the_launch_is_not_why_it_was_late() -> None:
    made = after_one(120, 150)
    made.runtime("cudaStreamSynchronize", 122, 50)
    assert idle(made) == {"7": waits(host=50)}


def test_nothing() -> None:
    assert idle(MadeTrace()) == {}
    single = MadeTrace()
    single.kernel("kernel", 5, 5)
    assert idle(single) == {"7": waits()}


def test_tables() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5)
    made.launched("first", at=1, start=10, dur=90)
    made.op("aten::item", 105, 40)
    made.runtime("cudaStreamSynchronize", 95, 20)
    made.launched("second", at=120, start=150, dur=5)
    made.launched("third", at=160, start=170, dur=10)
    work = work_of(window_of(made.trace()))
    gaps = gaps_of(work)
    assert idle_table(work, gaps).to_rows() == [
        {
            "stream": "7",
            "work": 3,
            "span_ns": 170_000,
            "busy_ns": 105_000,
            "gaps": 2,
            "idle_ns": 65_000,
            "idle_share": 65 / 170,
            "host_wait_ns": 65_000,
            "kernel_wait_ns": 0,
            "other_ns": 0,
            "sync_ns": 15_000,
        }
    ]
    assert [tuple(row) for row in idle_by_operator(work, gaps).rows] == [
        ("7", "aten::item", 1, 50_000, 15_000, 50_000),
        ("7", "cudaLaunchKernel", 1, 15_000, 0, 15_000),
    ]


# -- The idle time of a device as a whole, by cause: against a sweep over every nanosecond of small traces ------------


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
