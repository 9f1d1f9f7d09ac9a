"""Operators against sweeps instant by instant, on made and on real traces."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.host.operators import operator_times, operators_by_shape, operators_by_source, operators_table
from stepscope.traces.model.columns import Kind
from stepscope.traces.model.window import LABEL, Window, window_of

PIECES = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 12), st.sampled_from([1, 2]), st.sampled_from("abc"), st.integers(0, 5)
    ),
    max_size=20,
)


def table_of(window: Window) -> dict[str, dict[str, Any]]:
    found = operators_table(window, operator_times(window)).to_rows()
    return {row["operator"]: row for row in found}


def made_of(pieces: list[tuple[int, int, int, str, int]]) -> Window:
    """Each an operator; those with work have a launch at their start."""
    made = MadeTrace()
    for start, length, tid, name, work in pieces:
        made.op(name, start, length, tid=tid)
        if work:
            made.launched("kernel", at=start, start=100 + start, dur=work, call=0, tid=tid)
    return window_of(made.trace())


def chains(window: Window) -> list[list[int]]:
    """For each row the operators around it, the innermost first."""
    trace, slices = window.trace, window.trace.slices
    threads, starts, ends = slices.thread.tolist(), slices.start_ns.tolist(), slices.end_ns.tolist()
    earlier: dict[int, list[int]] = defaultdict(list)
    out: list[list[int]] = []
    for row, thread in enumerate(threads):
        around: list[int] = []
        end = ends[row]
        for other in reversed(earlier[thread]):
            if ends[other] >= end and ends[other] > starts[row]:
                around.append(other)
                end = ends[other]
        out.append(around)
        if slices.kind[row] == Kind.OP and not LABEL.match(trace.name(row)):
            earlier[thread].append(row)
    return out


def expected_of(window: Window) -> dict[str, dict[str, int]]:
    """Totals and device times; self times where operators only nest."""
    trace, slices = window.trace, window.trace.slices
    out: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    lengths, all_around = defaultdict(list), chains(window)
    for row in range(len(trace)):
        if not window.counts[row]:
            continue
        if slices.kind[row] == Kind.OP and not LABEL.match(trace.name(row)):
            name = trace.name(row)
            around = all_around[row]
            lengths[name].append(int(slices.dur_ns[row]))
            out[name]["calls"] += 1
            if name not in {trace.name(each) for each in around}:
                out[name]["host_total_ns"] += int(slices.dur_ns[row])
            out[name]["host_self_ns"] += int(slices.dur_ns[row])
            if around:
                out[trace.name(around[0])]["host_self_ns"] -= int(slices.dur_ns[row])
        elif slices.kind[row] in (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET) and window.launch[row] >= 0:
            around = all_around[int(window.launch[row])]
            if around:
                out[trace.name(around[0])]["device_self_ns"] += int(slices.dur_ns[row])
            for name in {trace.name(each) for each in around}:
                out[name]["device_total_ns"] += int(slices.dur_ns[row])
    for name, values in lengths.items():
        out[name]["host_median_ns"] = statistics.median_low(values)
    return out


@given(PIECES)
def test_random_operators(pieces: list[tuple[int, int, int, str, int]]) -> None:
    window = made_of(pieces)
    found, expected = table_of(window), expected_of(window)
    assert found.keys() == expected.keys()
    for name, row in found.items():
        for column in ("calls", "host_total_ns", "host_median_ns", "device_self_ns", "device_total_ns"):
            assert row[column] == expected[name][column], (name, column)
        assert row["host_self_ns"] >= 0
    covered = {(tid, at) for start, length, tid, _, _ in pieces for at in range(start, start + length)}
    assert sum(row["host_self_ns"] for row in found.values()) == 1000 * len(covered)


@given(PIECES)
def test_every_instant_is_the_latest_starters(pieces: list[tuple[int, int, int, str, int]]) -> None:
    window = made_of(pieces)
    times, slices = operator_times(window), window.trace.slices
    expected = dict.fromkeys(times.rows.tolist(), 0)
    for tid in range(len(window.trace.threads)):
        for at in range(0, 60_000, 1000):
            running = [
                row
                for row in times.rows.tolist()
                if slices.thread[row] == tid and slices.start_ns[row] <= at < slices.end_ns[row]
            ]
            if running:
                expected[max(running)] += 1000
    assert dict(zip(times.rows.tolist(), times.host_self_ns.tolist(), strict=True)) == expected


def test_recursion_counts_once() -> None:
    made = MadeTrace()
    made.op("outer", 0, 100)
    made.op("again", 10, 80)
    made.op("again", 20, 60)
    made.launched("kernel", at=30, start=200, dur=7)
    row = table_of(window_of(made.trace()))["again"]
    assert row == {
        "operator": "again",
        "calls": 2,
        "host_self_ns": 80_000,
        "host_total_ns": 80_000,
        "host_median_ns": 60_000,
        "device_self_ns": 7_000,
        "device_total_ns": 7_000,
    }


def test_the_heaviest_is_first_by_device_time_where_there_is_any() -> None:
    made = MadeTrace()
    made.op("long", 0, 100)
    made.op("heavy", 200, 10)
    window = window_of(made.trace())
    assert [row["operator"] for row in operators_table(window, operator_times(window)).to_rows()] == ["long", "heavy"]
    made.launched("kernel", at=201, start=300, dur=1)
    window = window_of(made.trace())
    assert [row["operator"] for row in operators_table(window, operator_times(window)).to_rows()] == ["heavy", "long"]


def test_annotations_written_as_operators_are_none() -> None:
    made = MadeTrace()
    made.op("ProfilerStep#3", 0, 100)
    made.op("Optimizer.step#SGD.step", 10, 50)
    made.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 70, 10)
    made.op("aten::add_", 20, 5)
    made.launched("stray", at=90, start=95, dur=2)
    window = window_of(made.trace())
    assert list(table_of(window)) == ["aten::add_"]
    assert (window.owner == -1).all()


def test_shapes() -> None:
    made = MadeTrace()
    for at, dims in ((0, [[2, 3], [3, 4]]), (10, [[2, 3], [3, 4]]), (20, [[5, 3], [3, 4]])):
        made.op("aten::mm", at, 5, **{"Input Dims": dims, "Input type": ["float", "float"]})
    made.op("aten::empty", 30, 1)
    window = window_of(made.trace())
    table = operators_by_shape(window, operator_times(window))
    assert table is not None
    assert [row[:5] for row in table.rows] == [
        ("aten::mm", "[[2, 3], [3, 4]]", '["float", "float"]', 2, 10_000),
        ("aten::mm", "[[5, 3], [3, 4]]", '["float", "float"]', 1, 5_000),
        ("aten::empty", "", "", 1, 1_000),
    ]


def test_no_shapes_no_stacks_no_operators() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5)
    window = window_of(made.trace())
    times = operator_times(window)
    assert operators_by_shape(window, times) is None
    assert operators_by_source(window, times) is None
    nothing = window_of(MadeTrace().trace())
    assert operators_table(nothing, operator_times(nothing)).rows == ()


def test_source_lines_and_backward_at_the_line_of_forward() -> None:
    made = MadeTrace()
    library = "/usr/lib/python3/site-packages/torch/nn/linear.py(9): forward"
    made.op("aten::linear", 0, 10, **{"Sequence number": 7, "Call stack": f"{library};net.py(12): forward"})
    made.op("aten::addmm", 2, 6, **{"Sequence number": 8, "Call stack": f"{library};net.py(12): forward"})
    made.op("aten::addmm", 20, 6, **{"Sequence number": 9, "Call stack": "net.py(13): forward;train.py(3): <module>"})
    engine = {"Sequence number": 8, "Fwd thread id": 1}
    made.op("autograd::engine::evaluate_function: AddmmBackward0", 30, 9, tid=77, **engine)
    made.op("AddmmBackward0", 31, 7, tid=77, **engine)
    made.op("aten::mm", 32, 5, tid=77)
    made.launched("gemm", at=33, start=50, dur=4, tid=77)
    window = window_of(made.trace())
    table = operators_by_source(window, operator_times(window))
    assert table is not None
    assert table.rows == (
        ("net.py(12): forward", 2, 19_000, 4_000, "aten::mm"),
        ("net.py(13): forward", 1, 6_000, 0, "aten::addmm"),
    )


def test_python_functions_around_operators_tell_the_line_too() -> None:
    made = MadeTrace()
    made.python("train.py(3): <module>", 0, 100)
    made.python("train.py(31): step", 10, 50)
    made.python("torch/nn/functional.py(9): relu", 12, 20)
    made.python("<built-in method relu of type object at 0x1>", 13, 18)
    made.op("aten::relu", 14, 11)
    made.op("aten::add", 70, 10)
    window = window_of(made.trace())
    table = operators_by_source(window, operator_times(window))
    assert table is not None
    assert [row[:3] for row in table.rows] == [("train.py(31): step", 1, 11_000), ("train.py (<module>)", 1, 10_000)]


def test_real_traces(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    for name in ("param_dlrm_8rank", "hta_cp_alexnet", "hta_cp_event_sync"):
        path = min((shared_data / "traces" / name).glob("*.gz"))
        window = real_window(path)
        found, expected = table_of(window), expected_of(window)
        assert found.keys() == expected.keys()
        for operator, row in found.items():
            for column, value in row.items():
                if column != "operator":
                    assert value == expected[operator][column], (operator, column)


def test_sums_of_real_traces(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    """Sums per thread, from the text of the file: self times cover what operators cover."""
    for name in ("kineto_resnet50_w0", "hta_nccl_data_1of2"):
        path = next((shared_data / "traces" / name).glob("*.gz"))
        window = real_window(path)
        times, slices = operator_times(window), window.trace.slices
        by_thread: dict[int, int] = defaultdict(int)
        for row, self_ns in zip(times.rows.tolist(), times.host_self_ns.tolist(), strict=True):
            by_thread[int(slices.thread[row])] += self_ns
        for thread, total_ns in by_thread.items():
            covered = end = 0
            for row in times.rows[slices.thread[times.rows] == thread].tolist():
                start, stop = int(slices.start_ns[row]), int(slices.end_ns[row])
                covered += max(stop - max(start, end), 0)
                end = max(end, stop)
            assert total_ns == covered
        assert times.device_self_ns.sum() == sum(
            int(slices.dur_ns[row]) for row in window.device_rows.tolist() if window.owner[row] >= 0
        )
        rows = operators_table(window, times).to_rows()
        assert json.loads(json.dumps(rows)) == rows, "plain values"
