"""Phases that people marked."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.host.operators import INTERNAL, user_annotations
from stepscope.traces.model.columns import Kind
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.reading.files import read_trace

PIECES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from("abc"), st.integers(0, 5)), max_size=15
)


def rows_of(window: Window) -> dict[str, tuple[int, ...]]:
    table = user_annotations(window)
    return {} if table is None else {row[0]: row[1:] for row in table.rows}


def test_phases_and_nested_ones() -> None:
    made = MadeTrace()
    made.step(1, 0, 200)
    made.annotation("forward", 10, 50)
    made.annotation("attention", 20, 10)
    made.launched("kernel", at=12, start=100, dur=5)
    made.launched("attention", at=22, start=110, dur=7)
    made.annotation("optimizer", 70, 20)
    window = window_of(made.trace())
    assert rows_of(window) == {
        "forward": (1, 50_000, 50_000, 12_000, 17_000),
        "attention": (1, 10_000, 10_000, 7_000, 7_000),
        "optimizer": (1, 20_000, 20_000, 0, 0),
    }


def test_backward_has_the_work_of_autograds_thread() -> None:
    made = MadeTrace()
    made.step(1, 0, 200)
    made.op("aten::mm", 5, 5, **{"Sequence number": 1})
    made.annotation("backward", 50, 50)
    made.op("MmBackward0", 60, 10, tid=9, **{"Sequence number": 1, "Fwd thread id": 1})
    made.launched("gemm", at=62, start=120, dur=8, tid=9)
    made.annotation("nccl:all_reduce", 72, 4, tid=9)
    made.op("record_param_comms", 73, 2, tid=9)
    made.launched("ncclDevKernel_AllReduce", at=73, start=130, dur=10, tid=9)
    made.op("other", 75, 10, tid=10)
    made.launched("unrelated", at=76, start=150, dur=3, tid=10)
    found = rows_of(window_of(made.trace()))
    assert found["backward"] == (1, 50_000, 50_000, 18_000, 20_000)
    assert found["nccl:all_reduce"][3] == 10_000


def test_internal_ones_are_left_out() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.annotation("dynamo_data: compile_id=2/1", 10, 1)
    assert user_annotations(window_of(made.trace())) is None
    assert user_annotations(window_of(MadeTrace().trace())) is None


def expected_of(window: Window) -> dict[str, list[int]]:
    """Calls, host time and device time, on the thread of the launch only."""
    trace, slices = window.trace, window.trace.slices
    marks = [
        row
        for row in range(len(trace))
        if slices.kind[row] == Kind.ANNOTATION and window.counts[row] and not INTERNAL.search(trace.name(row))
    ]

    def around(row: int) -> list[int]:
        """The innermost first."""
        out: list[int] = []
        for mark in reversed([mark for mark in marks if mark < row]):
            if (
                slices.thread[mark] == slices.thread[row]
                and slices.end_ns[mark] >= slices.end_ns[row]
                and slices.end_ns[mark] > slices.start_ns[row]
            ):
                out.append(mark)
                row = mark
        return out

    out: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for mark in marks:
        out[trace.name(mark)][0] += 1
        if trace.name(mark) not in {trace.name(each) for each in around(mark)}:
            out[trace.name(mark)][1] += int(slices.dur_ns[mark])
    for row in window.device_rows.tolist():
        if window.launch[row] >= 0:
            for name in {trace.name(each) for each in around(int(window.launch[row]))}:
                out[name][2] += int(slices.dur_ns[row])
    return out


@given(PIECES)
def test_random_annotations(pieces: list[tuple[int, int, str, int]]) -> None:
    made = MadeTrace()
    for start, length, name, work in pieces:
        made.annotation(name, start, length)
        if work:
            made.launched("kernel", at=start, start=50 + start, dur=work, call=1)
    window = window_of(made.trace())
    found = {name: [row[0], row[1], row[3]] for name, row in rows_of(window).items()}
    assert found == expected_of(window)
    assert all(row[4] >= 0 for row in rows_of(window).values())


def test_real_traces(shared_data: Path) -> None:
    path = shared_data / "traces" / "param_dlrm_8rank"
    window = window_of(read_trace(sorted(path.glob("*.gz"))[2]))
    found, expected = rows_of(window), expected_of(window)
    assert found.keys() == expected.keys()
    for name, row in found.items():
        assert [row[0], row[1]] == expected[name][:2]
        assert row[3] >= expected[name][2]
    assert sum(row[3] > expected[name][2] for name, row in found.items()) <= 2, "only what waits for backward"
