"""``stacks.jsonl`` as a run has it: checked, under the ranks that are shown, the same before and after sealing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import write_steps

from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run
from stepscope.store.file_io import append_jsonl
from stepscope.store.live.failures import read_stacks
from stepscope.store.load import open_run
from stepscope.store.sealed import seal

FRAME = {"file": "/a/train.py", "line": 12, "function": "write_report"}
STACK = {"rank": 0, "pid": 77, "wall_ns": 5, "step": 3, "phase": "other", "between": None, "frames": [FRAME]}


def test_stacks_come_in_order_of_time_and_stay_when_sealed(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(0), 3)
    worker = {**STACK, "wall_ns": 7, "worker": True}
    odd = {**STACK, "wall_ns": 2, "new": 1, "worker": "yes"}
    append_jsonl(paths.run_dir / "stacks.jsonl", [STACK, worker, odd])
    end_run(paths.run_dir, exit_code=0, status="finished")
    before = open_run(paths.run_dir).stacks
    assert before == ({**STACK, "wall_ns": 2}, STACK, worker)
    seal.seal(paths.run_dir)
    assert open_run(paths.run_dir).stacks == before


def test_a_stack_belongs_to_the_rank_that_its_process_is_shown_as(paths: RunPaths, rings: Any, drain: Any) -> None:
    first, second = rings(0), rings(0)
    for ring in (first, second):
        write_steps(ring, 3)
        drain(ring, ended=time.time_ns() + 10 * 10**9)  # at the same time: one after the other would be two attempts
    append_jsonl(paths.run_dir / "stacks.jsonl", [{**STACK, "pid": int(second.path.stem)}])
    end_run(paths.run_dir, exit_code=0, status="finished")
    assert [stack["rank"] for stack in open_run(paths.run_dir).stacks] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": None},
        {"pid": "7"},
        {"step": True},
        {"wall_ns": 1.5},
        {"wall_ns": 1 << 63},
        {"phase": 3},
        {"frames": []},
        {"frames": {}},
        {"frames": [FRAME, 3]},
        {"frames": [{**FRAME, "line": "1"}]},
        {"frames": [{**FRAME, "file": None}]},
        {"frames": [{"file": "a", "line": 1}]},
    ],
)
def test_lines_that_are_none_are_passed_and_counted(paths: RunPaths, rings: Any, change: dict[str, Any]) -> None:
    write_steps(rings(0), 3)
    append_jsonl(paths.run_dir / "stacks.jsonl", [{**STACK, **change}, STACK])
    end_run(paths.run_dir, exit_code=0, status="finished")
    data = open_run(paths.run_dir)
    assert data.stacks == (STACK,)
    assert "1 lines of stacks.jsonl could not be read." in data.notices


def test_a_run_without_any(paths: RunPaths) -> None:
    assert read_stacks(paths.run_dir, {}.get) == ((), 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(FRAME)), inner),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(STACK)), VALUES), st.binary(max_size=50))
def test_fuzz_lines(paths: RunPaths, changes: dict[str, Any], rest: bytes) -> None:
    line = json.dumps({**STACK, **changes}).encode()
    (paths.run_dir / "stacks.jsonl").write_bytes(line + b"\n" + rest)
    for stack in read_stacks(paths.run_dir, {}.get)[0]:
        assert set(stack) == set(STACK)
        assert all(set(frame) == set(FRAME) for frame in stack["frames"])
