"""The call tree and whom work belongs to, against the simplest rule written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model.columns import Kind
from stepscope.traces.model.window import Window, calls_of, window_of

PIECES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from([1, 2]), st.sampled_from("opra")), max_size=25
)
CATEGORIES = {"o": "cpu_op", "p": "python_function", "r": "cuda_runtime", "a": "user_annotation"}


def made_of(pieces: list[tuple[int, int, int, str]]) -> Window:
    made = MadeTrace()
    for start, length, tid, kind in pieces:
        made.add(CATEGORIES[kind], f"{kind}{start}", start, length, tid=tid)
    return window_of(made.trace())


def holders(window: Window, row: int) -> list[int]:
    """The innermost first."""
    slices = window.trace.slices
    start, end = slices.start_ns[row], slices.end_ns[row]
    return [
        other
        for other in range(row - 1, -1, -1)
        if slices.thread[other] == slices.thread[row] and slices.end_ns[other] >= end and slices.end_ns[other] > start
    ]


@given(PIECES)
def test_who_holds_whom(pieces: list[tuple[int, int, int, str]]) -> None:
    window = made_of(pieces)
    kinds = window.trace.slices.kind
    is_op = kinds == Kind.OP
    nearest, holder = window.calls.nearest(is_op), window.calls.holder(is_op)
    for row in range(len(window.trace)):
        around = holders(window, row)
        assert window.calls.parents[row] == (around[0] if around else -1)
        chain = [row]
        while window.calls.parents[chain[-1]] >= 0:
            chain.append(int(window.calls.parents[chain[-1]]))
        assert window.calls.depth[row] == len(chain) - 1
        assert holder[row] == next((at for at in chain[1:] if is_op[at]), -1)
        assert nearest[row] == next((at for at in chain if is_op[at]), -1)
        expected = next((at for at in chain if is_op[at]), -1) if kinds[row] == Kind.RUNTIME else -1
        assert window.owner[row] == expected


def test_only_the_rows_asked_for_are_in_the_tree() -> None:
    made = MadeTrace()
    made.op("outer", 0, 10)
    made.python("between", 1, 8)
    made.op("inner", 2, 3)
    trace = made.trace()
    assert calls_of(trace, trace.rows_of((Kind.OP,))).parents.tolist() == [-1, -1, 0]
    assert calls_of(trace, trace.rows_of((Kind.OP,))).depth.tolist() == [0, -1, 1]
    assert calls_of(trace, trace.rows_of((Kind.MEMSET,))).parents.tolist() == [-1, -1, -1]


def owners(made: MadeTrace) -> dict[str, str]:
    window = window_of(made.trace())
    trace = window.trace
    return {trace.name(row): trace.name(int(at)) for row, at in enumerate(window.owner) if at >= 0}


def test_device_work_belongs_to_the_operator_around_its_launch() -> None:
    made = MadeTrace()
    made.op("aten::linear", 0, 20)
    made.op("aten::addmm", 5, 10)
    made.launched("gemm", at=6, start=30, dur=5)
    made.launched("alone", at=25, start=36, dur=5)
    assert owners(made) == {"cudaLaunchKernel": "aten::addmm", "gemm": "aten::addmm"}


def test_external_ids_help_where_no_operator_is_around() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5, **{"External id": 77})
    made.kernel("far", 20, 5, correlation=3, **{"External id": 77})
    made.kernel("stranger", 30, 5, correlation=4, **{"External id": 78})
    made.runtime("cudaLaunchKernel", 10, 1, tid=9, correlation=5, **{"External id": 77})
    made.kernel("by its call", 40, 5, correlation=5)
    assert owners(made) == {"far": "aten::mm", "cudaLaunchKernel": "aten::mm", "by its call": "aten::mm"}


def test_a_correlation_in_place_of_the_external_id_says_nothing() -> None:
    made = MadeTrace()
    made.op("aten::mm", 0, 5, **{"External id": 77})
    made.kernel("chance", 20, 5, correlation=77, **{"External id": 77})
    assert owners(made) == {}


def test_real_traces(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    for path in sorted((shared_data / "traces").rglob("*.json.gz")):
        window = real_window(path)
        slices = window.trace.slices
        owned = np.flatnonzero(window.owner >= 0)
        assert (slices.kind[window.owner[owned]] == Kind.OP).all()
        assert window.counts[window.owner[owned]].all()
        work = window.device_rows
        launched = work[window.launch[work] >= 0]
        assert (window.owner[launched] == window.owner[window.launch[launched]]).all()
        if "resnet50" in str(path):
            # This profiler wrote operators' ids: they agree with the nesting wherever both speak.
            by_id = {int(slices.external[op]): op for op in window.rows_of((Kind.OP,)).tolist()}
            rows = [row for row in work.tolist() if int(slices.external[row]) in by_id]
            assert len(rows) > 4000
            agree = sum(by_id[int(slices.external[row])] == window.owner[row] for row in rows)
            assert agree == len(rows)
