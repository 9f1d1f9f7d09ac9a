"""Gaps by cause, one case each; all of it is recomputed in test_trace_device_recomputed.py."""

from __future__ import annotations

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.device.work import StreamIdle, gaps_of, idle_by_operator, idle_of, idle_table, work_of
from stepscope.traces.model.window import window_of


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
