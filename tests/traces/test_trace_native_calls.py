"""The nesting of slices in C is the one that numpy finds, for any slices and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model import window
from stepscope.traces.model.native_parts import PURE, native_part


@pytest.fixture(autouse=True, scope="module")
def native() -> Any:
    found = native_part(window.NATIVE)
    if found is None:
        pytest.skip("the part in C was not built: no C compiler")
    return found


SLICES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 12)), max_size=60)


@given(SLICES, st.integers(0, 2**60 - 1))
def test_call_trees_are_the_same(slices: list[tuple[int, int, int]], wanted: int) -> None:
    made = MadeTrace()
    for thread, start, dur in slices:
        made.op("aten::mm", start, dur, tid=thread + 1)
    trace = made.trace()
    rows = trace.host_rows[np.array([wanted >> at & 4 == 0 for at in range(len(trace.host_rows))], bool)]
    which = np.array([wanted >> at & 1 == 1 for at in range(len(trace))], bool)
    found = []
    for pure in ("", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PURE, pure)
            tree = window.calls_of(trace, rows)
            found.append([tree.parents.tolist(), tree.depth.tolist(), tree.nearest(which).tolist()])
    assert found[0] == found[1]


def column(*values: int, kind: type = np.int32) -> bytes:
    return np.array(values, kind).tobytes()


@pytest.mark.parametrize(
    ("function", "columns", "reason"),
    [
        ("nest", (column(0), b"", b""), "columns of different length"),
        ("nest", (b"\0\0\0", b"", b""), "columns of different length"),
        ("nest", (column(-1), column(1, kind=np.int64), column(2, kind=np.int64)), "a thread out of range"),
        ("nest", (column(1 << 24), column(1, kind=np.int64), column(2, kind=np.int64)), "a thread out of range"),
        ("nearest", (column(-1), b""), "columns of different length"),
        ("nearest", (column(0), b"\0"), "a parent that is not before its child"),
        ("nearest", (column(-1, 7), b"\0\0"), "a parent that is not before its child"),
    ],
)
def test_other_columns_are_refused(native: Any, function: str, columns: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        getattr(native, function)(*columns)


def test_empty_columns(native: Any) -> None:
    assert native.nest(b"", b"", b"") == (b"", b"")
    assert native.nearest(b"", b"") == b""
