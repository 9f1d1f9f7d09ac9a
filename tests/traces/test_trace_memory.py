"""The memory curve and what is alive at its peak."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.host.operators import (
    BEFORE,
    OUTSIDE,
    POINTS,
    memory_of,
    memory_peak_table,
    memory_table,
    modules_of,
    operator_times,
)
from stepscope.traces.model.columns import Trace
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Window, window_of


def tables_of(window: Window) -> tuple[Table, Table]:
    curve = memory_of(window)
    assert curve is not None
    return memory_table(window, curve), memory_peak_table(window, curve, modules_of(window, operator_times(window)))


def test_what_is_alive_at_the_peak() -> None:
    made = MadeTrace()
    made.python("train.py(9): step", 0, 100)
    made.python("nn.Module: Linear_0", 5, 30)
    made.op("aten::linear", 8, 20)
    made.op("aten::addmm", 10, 10)
    made.memory(12, 100, 1100, 4000, address=1)
    made.memory(13, 300, 1400, 4000, address=2)
    made.memory(14, -300, 1100, 4000, address=2)
    made.op("aten::relu", 40, 10)
    made.memory(41, 50, 1150, 4000, address=2)
    made.memory(60, 7, 1157, 4096, address=3)
    made.memory(61, 500, 1657, 4096, address=4)
    made.memory(62, -500, 1157, 8192, address=4)
    made.op("aten::mul", 70, 5)
    made.memory(71, 400, 1557, 8192, address=5)
    curve, peak = tables_of(window_of(made.trace()))
    assert curve.rows[:2] == ((12_000, 1100, 4000), (13_000, 1400, 4000))
    assert len(curve.rows) == 8
    assert [row[:5] for row in peak.rows] == [
        (BEFORE, None, None, 1000, 0),
        (OUTSIDE, None, "train.py (step)", 507, 2),
        ("aten::addmm", "Linear_0", "train.py (step)", 100, 1),
        ("aten::relu", None, "train.py (step)", 50, 1),
    ]
    assert sum(row[3] for row in peak.rows) == 1657
    assert sum(row[5] for row in peak.rows) == pytest.approx(1)


def test_without_addresses_net_growth_is_told() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 10)
    made.memory(1, 100, 100, 4000)
    made.memory(2, -40, 60, 4000)
    made.op("aten::add", 20, 10)
    made.memory(21, 80, 140, 4000)
    _, peak = tables_of(window_of(made.trace()))
    assert [row[:5] for row in peak.rows] == [("aten::add", None, None, 80, 1), ("aten::mm", None, None, 60, 2)]
    assert "no addresses" in peak.note


def test_the_left_out_step_does_not_count() -> None:
    made = MadeTrace()
    made.step(1, 0, 50)
    made.step(2, 60, 50)
    made.memory(10, 5, 5, 10, address=1)
    made.memory(70, 500, 505, 1000, address=2)
    curve = memory_of(window_of(made.trace()))
    assert curve is not None
    assert curve.allocated.tolist() == [5]
    whole = memory_of(window_of(made.trace(), keep_last=True))
    assert whole is not None
    assert whole.allocated.tolist() == [5, 505]


def test_the_curve_is_bounded_and_keeps_the_peak() -> None:
    chance = random.Random(3)
    made, total = MadeTrace(), 0
    made.op("aten::mm", 0, 1)
    values = []
    for at in range(7000):
        size = chance.randrange(1, 50) if total < 50 or chance.random() < 0.5 else -chance.randrange(1, total)
        total += size
        values.append(total)
        made.memory(at, size, total, 10**6, address=at + 1)
    curve, _ = tables_of(window_of(made.trace()))
    assert len(curve.rows) <= POINTS
    times = [row[0] for row in curve.rows]
    assert times == sorted(set(times))
    assert all(values[time // 1000] == allocated for time, allocated, _ in curve.rows)
    assert max(row[1] for row in curve.rows) == max(values)
    assert min(row[1] for row in curve.rows) == min(values)
    assert times[0] == 0
    assert times[-1] == 6_999_000


def test_several_devices_and_the_hosts_own() -> None:
    made = MadeTrace()
    for at in range(3):
        made.memory(at, 1, at + 1, 10, device=1, address=at + 1)
    made.memory(5, 1, 900, 1000, device=0, address=77)
    curve = memory_of(window_of(made.trace()))
    assert curve is not None
    assert (curve.device_type, curve.device, curve.allocated.tolist()) == (1, 1, [1, 2, 3])
    assert memory_of(window_of(MadeTrace().trace())) is None


def alive_of(trace: Trace, until: int, device: int) -> dict[int, int]:
    alive: dict[int, int] = {}
    events = trace.memory
    for at in range(until + 1):
        if events.device_type[at] == 1 and events.device[at] == device:
            alive.pop(int(events.address[at]), None)
            if events.bytes[at] > 0:
                alive[int(events.address[at])] = int(events.bytes[at])
    return alive


def test_a_real_trace(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    path = next((shared_data / "traces" / "hta_df_index_resolver_1of2").glob("*.gz"))
    window = real_window(path)
    curve = memory_of(window)
    assert curve is not None
    _, peak = tables_of(window)
    alive = alive_of(window.trace, int(curve.at[curve.peak]), curve.device)
    counted = [row for row in peak.rows if row[0] != BEFORE]
    assert sum(row[3] for row in counted) == sum(alive.values())
    assert sum(row[4] for row in counted) == len(alive)
    assert sum(row[3] for row in peak.rows) == max(curve.allocated) == 6_629_508_096


def test_threads_written_as_text_and_as_numbers_are_one(
    shared_data: Path, real_window: Callable[[Path], Window]
) -> None:
    path = next((shared_data / "traces" / "kineto_resnet50_w0").glob("*.gz"))
    window = real_window(path)
    curve, peak = tables_of(window)
    assert all(row[2] is None for row in curve.rows), "nothing is said of what is reserved"
    assert OUTSIDE not in {row[0] for row in peak.rows}
