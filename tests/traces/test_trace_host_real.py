"""A trace that torch.profiler makes here, of a training on the CPU, against what torch itself counts."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.traces.host.flops import flops_found
from stepscope.traces.host.operators import memory_of
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.rank_analysis import host_figures, host_tables
from stepscope.traces.reading.files import read_trace

torch = pytest.importorskip("torch")
STEPS = 3
THIS = Path(__file__).name


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))

    def forward(self, images: Any) -> Any:
        features = self.up(self.conv(images)).flatten(2)
        rows = self.body(features.reshape(features.shape[0], 4, 16, 16))
        mixed = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return (mixed @ rows.transpose(2, 3)).sum()


def train(step: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(4 * (STEPS + 2), 3, 16, 16), batch_size=4)
    for images in loader:
        with torch.profiler.record_function("forward"):
            loss = net(images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        gc.collect()
        step()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "trace.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
        # The first step makes ready, the last of the traced is left out by us.
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=STEPS + 1, repeat=1),
    ) as profiler:
        train(profiler.step)
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture
def window(traced: Path) -> Window:
    return window_of(read_trace(traced))


@pytest.fixture
def tables(window: Window) -> dict[str, Table]:
    return {table.name: table for table in host_tables(window)}


def test_flops_are_what_torch_counts(window: Window) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    net = Net()
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(4, 3, 16, 16)).backward()
    assert len(window.steps) == STEPS
    # It has no formula for the CPU's form of fused attention: two products forward, five backward.
    product = 2 * 4 * 4 * 16 * 16 * 16
    assert flops_found(window).total == (counter.get_total_flops() + 7 * product) * STEPS


def test_modules_and_their_backward(tables: dict[str, Table]) -> None:
    rows = {row["module"]: row for row in tables["modules"].to_rows()}
    assert list(rows) == [
        "Net_0",
        "Net_0/Conv2d_0",
        "Net_0/ConvTranspose2d_0",
        "Net_0/Sequential_0",
        "Net_0/Sequential_0/Linear_0",
        "Net_0/Sequential_0/ReLU_0",
        "Net_0/Sequential_0/Linear_1",
    ]
    assert all(row["calls"] == STEPS for row in rows.values())
    assert all(row["backward_host_ns"] > 0 and row["host_ns"] > 0 for row in rows.values())
    inner = [row for path, row in rows.items() if path.count("/") == 1]
    assert sum(row["host_ns"] for row in inner) <= rows["Net_0"]["host_ns"]
    assert sum(row["backward_host_ns"] for row in inner) <= rows["Net_0"]["backward_host_ns"]


def test_every_operator_has_a_line_of_this_file(window: Window, tables: dict[str, Table]) -> None:
    rows = tables["operators_by_source"].rows
    assert {row[0].split("(")[0].strip().rsplit("/", 1)[-1] for row in rows} == {THIS}
    assert {re.split(r"\): | \(", row[0])[1].strip(")") for row in rows} == {"forward", "train"}, "no line of train"
    total = sum(row["host_self_ns"] for row in tables["operators"].to_rows())
    assert sum(row[2] for row in rows) == total


def test_phases_loading_and_collections(window: Window, tables: dict[str, Table]) -> None:
    annotations = {row["annotation"]: row["calls"] for row in tables["annotations"].to_rows()}
    assert annotations["forward"] == STEPS
    figures = host_figures(window)
    assert len(figures.loading_by_step) == STEPS
    assert all(
        0 < spent < step.end_ns - step.start_ns
        for spent, step in zip(figures.loading_by_step, window.steps, strict=True)
    )
    assert len(figures.pauses) >= STEPS
    assert figures.syncs == (), "there is no device to wait for"
    assert figures.peak_allocated_bytes is None, "nor its memory"


def test_memory_is_the_files(traced: Path, window: Window, tables: dict[str, Table]) -> None:
    document = json.loads(traced.read_text())
    curve, last = memory_of(window), window.left_out
    assert curve is not None
    assert last is not None
    until_ns = last.start_ns + window.trace.meta.origin_ns - document["baseTimeNanoseconds"]
    counted = [
        event["args"]["Total Allocated"]
        for event in document["traceEvents"]
        if event["name"] == "[memory]" and round(event["ts"] * 1000) < until_ns
    ]
    assert curve.allocated.max() == max(counted)
    peak = tables["memory_peak"].to_rows()
    assert sum(row["alive_bytes"] for row in peak) == max(counted)
    assert any(row["module"] == "Net_0/Sequential_0/ReLU_0" for row in peak)
