"""Where the host waits for the device."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.host.stalls import SyncPlace, syncs_of, syncs_table
from stepscope.traces.model.kernel_names import is_asked_to_wait
from stepscope.traces.model.window import Window, window_of


def test_items_copies_and_plain_synchronizations() -> None:
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.python("train.py(31): step", 5, 500)
    for at in (10, 100):
        made.op("aten::item", at, 50)
        made.op("aten::_local_scalar_dense", at + 1, 48)
        copied = made.launched("Memcpy DtoH (Device -> Pageable)", at=at + 2, start=at + 10, dur=5, call=20)
        made.events[-1]["cat"] = "gpu_memcpy"
        made.events[-2]["name"] = "cudaMemcpyAsync"
        assert copied["correlation"] > 0
        made.runtime("cudaStreamSynchronize", at + 23, 20)
    made.op("aten::to", 200, 50)
    made.op("aten::copy_", 201, 48)
    made.runtime("cudaMemcpyAsync", 202, 10)
    made.runtime("cudaStreamSynchronize", 213, 7)
    made.runtime("cudaDeviceSynchronize", 300, 100)
    made.add("cuda_driver", "cuCtxSynchronize", 301, 98)
    made.op("mylib::fused", 450, 40)
    made.runtime("cudaEventSynchronize", 455, 3)
    made.op("aten::add", 600, 3)
    window = window_of(made.trace())
    source = "train.py(31): step"
    assert syncs_of(window) == (
        SyncPlace(call="cudaDeviceSynchronize", source=source, count=1, wait_ns=100_000),
        SyncPlace(call="aten::item", source=source, count=4, wait_ns=80_000),
        SyncPlace(call="aten::to", source=source, count=1, wait_ns=7_000),
        SyncPlace(call="mylib::fused", source=source, count=1, wait_ns=3_000),
    )
    table = syncs_table(window, syncs_of(window))
    assert table is not None
    assert table.rows[0] == ("cudaDeviceSynchronize", source, 1, 100_000, 0.1)


def test_the_profilers_own_at_the_end_does_not_count() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5)
    made.runtime("cudaDeviceSynchronize", 10, 100)
    window = window_of(made.trace())
    assert syncs_of(window) == ()
    assert syncs_table(window, ()) is None
    made.op("aten::mm", 120, 5)
    assert len(syncs_of(window_of(made.trace()))) == 1
    assert syncs_of(window_of(MadeTrace().trace())) == ()


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaDeviceSynchronize", True),
        ("hipStreamSynchronize", True),
        ("cuStreamSynchronize", True),
        ("cudaMemcpy", True),
        ("hipMemcpyWithStream", True),
        ("cudaMemcpyAsync", False),
        ("cudaStreamWaitEvent", False),
        ("cudaEventQuery", False),
        ("cudaLaunchKernel", False),
    ],
)
def test_names(name: str, waits: bool) -> None:
    assert is_asked_to_wait(name) is waits


def test_a_real_trace(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    """From the events of the file: calls that wait inside of steps, the last step left out."""
    path = next((shared_data / "traces" / "hta_trace_diff" / "test").glob("*.gz"))
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith("ProfilerStep"))[:-1]
    pageable = {e["args"]["correlation"] for e in events if "Device -> Pageable" in e["name"]}
    waits = [
        e
        for e in events
        if (e["name"].endswith("Synchronize") and "cuda" in e["name"])
        or (e["name"] == "cudaMemcpyAsync" and e["args"]["correlation"] in pageable)
    ]
    inside = [e for e in waits if any(start <= e["ts"] < end for start, end in steps)]
    found = syncs_of(real_window(path))
    assert sum(place.count for place in found) == len(inside)
    assert sum(place.wait_ns for place in found) == sum(e["dur"] for e in inside) * 1000
    assert [place.call for place in found] == ["aten::item", "aten::to"]
