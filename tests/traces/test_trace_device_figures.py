"""How well the device was used, and the figures that findings take."""

from __future__ import annotations

import pickle

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.device.figures import DeviceFigures, device_figures
from stepscope.traces.device.work import StreamIdle
from stepscope.traces.model.window import window_of
from stepscope.traces.rank_analysis import device_tables


def figures(made: MadeTrace) -> DeviceFigures:
    return device_figures(window_of(made.trace()))


def test_utilization_is_of_the_steps_and_of_what_they_launched() -> None:
    made = MadeTrace()
    made.kernel("before", 0, 50)
    made.step(1, 100, 100)
    made.launched("kernel", at=110, start=150, dur=100)
    made.step(2, 200, 100)
    made.launched("left out", at=210, start=260, dur=100)
    # From 100 to 250: the last step is left out, but the first one's work runs on into it.
    assert figures(made).utilization == 100 / 150


def test_sm_efficiency_is_never_above_one() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("wide", at=0, start=0, dur=40, **{"blocks per SM": 12.5})
    made.launched("narrow", at=0, start=20, dur=40, stream=8, **{"blocks per SM": 0.25})
    made.launched("silent", at=0, start=60, dur=40)
    assert figures(made).sm_efficiency == pytest.approx((40 + 20 * 0.25) / 100)


def test_occupancy_is_weighted_by_time() -> None:
    made = MadeTrace()
    made.kernel("a", 0, 10, **{"est. achieved occupancy %": 90})
    made.kernel("b", 20, 30, **{"est. achieved occupancy %": 10})
    made.kernel("silent", 60, 100)
    assert figures(made).occupancy == pytest.approx(0.3)


def test_tensor_cores() -> None:
    made = MadeTrace()
    made.kernel("volta_sgemm_128x32_nt", 0, 10)
    made.kernel("ampere_bf16_s16816gemm_bf16_128x128", 20, 20)
    made.kernel("void gemv2T_kernel_val<int, int, float>(int)", 50, 10)
    made.kernel("void at::native::vectorized_elementwise_kernel<4>(int)", 70, 1000)
    found = figures(made)
    assert (found.tensor_core_share, found.eligible_fp32_ns) == (0.5, 10_000)


def test_attention_with_few_warps() -> None:
    made = MadeTrace()
    made.kernel("flash_fwd_kernel", 0, 30, **{"est. achieved occupancy %": 10})
    made.kernel("flash_fwd_kernel", 40, 10, **{"est. achieved occupancy %": 50})
    made.kernel("fmha_cutlassF_f16", 60, 10, **{"est. achieved occupancy %": 60})
    made.kernel("fmha_cutlassB_f16", 80, 10)
    made.kernel("other", 100, 10, **{"est. achieved occupancy %": 1})
    assert figures(made).low_occupancy == (("flash_fwd_kernel", pytest.approx(0.2), 40_000),)


def test_pageable_copies() -> None:
    made = MadeTrace()
    made.kernel("Memcpy HtoD (Pageable -> Device)", 0, 5, category="gpu_memcpy", bytes=100)
    made.kernel("Memcpy DtoH (Device -> Pageable)", 10, 5, category="gpu_memcpy")
    made.kernel("Memcpy HtoD (Pinned -> Device)", 20, 5, category="gpu_memcpy", bytes=100)
    found = figures(made)
    assert (found.pageable_copy_count, found.pageable_copy_bytes, found.pageable_copy_ns) == (2, 100, 10_000)


def test_idle_time_of_the_device_is_when_no_stream_works() -> None:
    made = MadeTrace()
    made.launched("a", at=0, start=10, dur=10)
    made.launched("b", at=1, start=15, dur=15, stream=8)
    made.op("aten::late", 40, 20)
    made.launched("c", at=50, start=60, dur=5)
    made.launched("d", at=51, start=66, dur=5, stream=8)
    found = figures(made)
    assert found.idle == StreamIdle(host_wait_ns=30_000, kernel_wait_ns=1_000, other_ns=0, sync_ns=0)
    assert found.idle_before == (("aten::late", 30_000),)


@pytest.mark.parametrize(("device", "name"), [(1, "B"), (0, "A"), (5, "A")])
def test_the_name_is_that_of_the_device_used(device: int, name: str) -> None:
    made = MadeTrace(header={"deviceProperties": [{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]})
    made.kernel("kernel", 0, 5, device=device)
    assert figures(made).device_name == name


TABLES = (
    "temporal_steps", "kernel_types", "idle", "idle_by_operator", "kernel_classes", "kernels", "launches",
    "short_kernels", "queue", "queue_curve", "copies", "copy_bandwidth", "sequences",
)  # fmt: skip


@pytest.mark.parametrize("host", [False, True])
def test_without_device_work(host: bool) -> None:
    made = MadeTrace()
    if host:
        made.step(1, 0, 100)
        made.op("aten::mm", 10, 20)
    window = window_of(made.trace())
    tables = device_tables(window)
    assert tuple(table.name for table in tables) == TABLES
    assert [len(table.rows) for table in tables] == [int(host), 7, *[0] * 11]
    assert device_figures(window) == DeviceFigures(
        device_name=None,
        utilization=None,
        sm_efficiency=None,
        occupancy=None,
        tensor_core_share=None,
        eligible_fp32_ns=0,
        kernel_count=0,
        short_kernel_count=0,
        short_kernel_ns=0,
        launch_count=0,
        launch_delay_ns_median=None,
        queue_full_ns=0,
        mean_queue=None,
        pageable_copy_ns=0,
        pageable_copy_bytes=0,
        pageable_copy_count=0,
        low_occupancy=(),
        graph_launches=0,
        idle=StreamIdle(host_wait_ns=0, kernel_wait_ns=0, other_ns=0, sync_ns=0),
        idle_before=(),
        dominant=(),
    )


def test_results_are_small_whatever_the_trace() -> None:
    made = MadeTrace()
    for number in range(3000):
        made.launched(f"kernel{number}", at=number, start=number * 2 + 10, dur=1)
        made.kernel(f"Memcpy HtoD (Pinned -> {number % 2})", number, 1, category="gpu_memcpy", bytes=10)
    tables = device_tables(window_of(made.trace()))
    assert all(len(table.rows) <= 1000 for table in tables)
    assert next(table for table in tables if table.name == "kernels").left_out == 2000
    assert len(pickle.dumps(tables)) < 500_000
