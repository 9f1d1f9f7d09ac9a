"""The critical path of a step: by hand on small traces; its invariants on random and real ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.traces import BACKWARD_THREAD, MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.collective_calls import exchanges_of
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.path.graph import CAUSES, graph_of
from stepscope.traces.path.rank_path import RankPath, path_segments, rank_path
from stepscope.traces.path.walk import Segments
from stepscope.traces.path.whatif import Plan, as_it_was, parse_change, replay, what_if

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
CHANGES = ("kernel:*=2x", "kernel:*=0", "op:*=2x", "comm=hidden", "copy=0", "launch=0", "host=0", "loader=0")
REAL = sorted(SHARED.rglob("*.json.gz"))


def segments(made: MadeTrace) -> list[tuple[float, float, str, str]]:
    """In microseconds, as they were given."""
    trace = made.trace()
    check(window_of(trace))
    shift = trace.meta.origin_ns
    own = path_segments(window_of(trace))
    return [
        ((start + shift) / 1000, (end + shift) / 1000, CAUSES[cause], trace.text(name))
        for start, end, cause, name in zip(
            own.start_ns.tolist(), own.end_ns.tolist(), own.cause.tolist(), own.name.tolist(), strict=True
        )
    ]


def analyzed(window: Window) -> RankPath:
    return rank_path(window, exchanges_of(window, 0))


def check(window: Window) -> RankPath:
    """What must hold of every path."""
    path = analyzed(window)
    own = path_segments(window)
    assert (own.end_ns > own.start_ns).all()
    assert [step.number for step in path.steps] == [step.number for step in window.steps]
    for index, (step, found) in enumerate(zip(window.steps, path.steps, strict=True)):
        mine = own.take(own.node == index)
        assert contiguous(mine, step.start_ns, step.end_ns)
        assert found.length_ns == step.end_ns - step.start_ns == sum(found.causes.values())
        assert found.causes == {
            CAUSES[cause]: int((mine.end_ns - mine.start_ns)[mine.cause == cause].sum())
            for cause in np.unique(mine.cause)
        }
    assert sum(path.causes.values()) == path.length_ns
    routes = path.routes
    assert (routes.causes_ns >= 0).all()
    assert (routes.top_ns.sum(axis=1) <= routes.causes_ns.sum(axis=1)).all()
    for step, end in enumerate(routes.ends.tolist()):
        total, node = 0, end
        while node >= 0:
            assert routes.step[node] == step
            assert routes.on_path[node]
            total, node = total + int(routes.causes_ns[node].sum()), int(routes.parent[node])
        assert total == path.steps[step].length_ns
    assert pickle.loads(pickle.dumps(path)).steps == path.steps
    return path


def contiguous(mine: Segments, start_ns: int, end_ns: int) -> bool:
    if start_ns == end_ns:
        return True
    return bool(
        mine.start_ns[0] == start_ns and mine.end_ns[-1] == end_ns and (mine.start_ns[1:] == mine.end_ns[:-1]).all()
    )


def test_a_step_without_anything_is_python() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    assert segments(made) == [(0, 100, "host_python", "ProfilerStep#1")]


def test_operators_own_time_and_gaps() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("outer", 10, 50)
    made.op("inner", 20, 10)
    assert segments(made) == [
        (0, 10, "host_python", "ProfilerStep#1"),
        (10, 20, "host_operator", "outer"),
        (20, 30, "host_operator", "inner"),
        (30, 60, "host_operator", "outer"),
        (60, 100, "host_python", "ProfilerStep#1"),
    ]


def test_a_synchronization_leads_to_the_kernel_it_waited_for() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("one", at=10, call=2, start=15, dur=20)
    made.launched("two", at=14, call=2, start=36, dur=40)
    made.runtime("cudaDeviceSynchronize", 20, 60)
    assert segments(made) == [
        (0, 10, "host_python", "ProfilerStep#1"),
        (10, 12, "host_runtime", "cudaLaunchKernel"),
        (12, 15, "launch_delay", "one"),
        (15, 35, "compute", "one"),
        (35, 36, "kernel_gap", "two"),
        (36, 76, "compute", "two"),
        (76, 80, "synchronization", "cudaDeviceSynchronize"),
        (80, 100, "host_python", "ProfilerStep#1"),
    ]


def test_a_synchronization_that_had_nothing_to_wait_for_is_its_own_time() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("one", at=10, call=2, start=15, dur=5)
    made.runtime("cudaStreamSynchronize", 30, 4)
    assert segments(made) == [
        (0, 10, "host_python", "ProfilerStep#1"),
        (10, 12, "host_runtime", "cudaLaunchKernel"),
        (12, 30, "host_python", "ProfilerStep#1"),
        (30, 34, "synchronization", "cudaStreamSynchronize"),
        (34, 100, "host_python", "ProfilerStep#1"),
    ]


def test_a_kernel_waits_for_another_stream_as_cupti_says() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("compute", at=5, call=1, start=10, dur=30)
    made.launched("unrelated", at=7, call=1, start=10, dur=31, stream=9)
    made.runtime("cudaEventRecord", 10, 1, correlation=101)
    made.runtime("cudaStreamWaitEvent", 12, 1, correlation=102)
    sync = {
        "device": 0,
        "stream": 20,
        "correlation": 102,
        "wait_on_stream": 7,
        "wait_on_cuda_event_record_corr_id": 101,
    }
    made.add("cuda_sync", "Stream Wait Event", 12, 0, pid=0, tid=20, args=sync)
    made.launched("ncclDevKernel_AllReduce", at=14, call=1, start=42, dur=20, stream=20)
    made.runtime("cudaStreamSynchronize", 16, 50, correlation=103)
    made.add("cuda_sync", "Stream Sync", 16, 50, pid=0, tid=20, args={"device": 0, "stream": 20, "correlation": 103})
    assert segments(made) == [
        (0, 5, "host_python", "ProfilerStep#1"),
        (5, 6, "host_runtime", "cudaLaunchKernel"),
        (6, 10, "launch_delay", "compute"),
        (10, 40, "compute", "compute"),
        (40, 42, "kernel_gap", "ncclDevKernel_AllReduce"),
        (42, 62, "communication", "ncclDevKernel_AllReduce"),
        (62, 66, "synchronization", "cudaStreamSynchronize"),
        (66, 100, "host_python", "ProfilerStep#1"),
    ]


def test_without_cupti_a_wait_call_before_the_launch_tells_that_it_waited() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("compute", at=5, call=1, start=10, dur=30)
    made.runtime("cudaStreamWaitEvent", 12, 1)
    made.launched("ncclDevKernel_AllReduce", at=14, call=1, start=42, dur=20, stream=20)
    made.launched("late", at=16, call=1, start=64, dur=6, stream=20)
    made.runtime("cudaDeviceSynchronize", 18, 53)
    assert [each[2:] for each in segments(made)][3:9] == [
        ("compute", "compute"),
        ("kernel_gap", "ncclDevKernel_AllReduce"),
        ("communication", "ncclDevKernel_AllReduce"),
        ("kernel_gap", "late"),
        ("compute", "late"),
        ("synchronization", "cudaDeviceSynchronize"),
    ]


def test_backward_runs_on_a_thread_of_its_own() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("aten::mm", 10, 10)
    made.op("autograd::engine::evaluate_function: MmBackward0", 30, 20, tid=BACKWARD_THREAD)
    made.op("aten::mm", 35, 10, tid=BACKWARD_THREAD)
    made.op("autograd::engine::evaluate_function: AddBackward0", 55, 20, tid=BACKWARD_THREAD)
    made.op("aten::add_", 80, 10)
    backward = "autograd::engine::evaluate_function: "
    assert segments(made) == [
        (0, 10, "host_python", "ProfilerStep#1"),
        (10, 20, "host_operator", "aten::mm"),
        (20, 30, "host_python", "ProfilerStep#1"),
        (30, 35, "host_operator", backward + "MmBackward0"),
        (35, 45, "host_operator", "aten::mm"),
        (45, 50, "host_operator", backward + "MmBackward0"),
        (50, 55, "host_python", ""),
        (55, 75, "host_operator", backward + "AddBackward0"),
        (75, 80, "host_python", "ProfilerStep#1"),
        (80, 90, "host_operator", "aten::add_"),
        (90, 100, "host_python", "ProfilerStep#1"),
    ]


def test_where_the_host_took_no_time_its_thread_is_the_main_one_all_the_same() -> None:
    """And not the first one there is, which is the stream's and has no line."""
    made = MadeTrace()
    made.kernel("gemm", 0, 10)
    made.op("MmBackward0", 5, 0, tid=BACKWARD_THREAD)
    graph = graph_of(window_of(made.trace()))
    assert (graph.main, list(graph.lines)) == ([1], [1])
    assert segments(made) == [(0, 10, "compute", "gemm")]


def test_the_thread_of_a_step_that_does_not_count_itself_is_not_the_main_one() -> None:
    """The last step is left out with all that the host began since; here that is the whole step before it."""
    made = MadeTrace()
    made.op("MmBackward0", 0, 5, tid=BACKWARD_THREAD)
    made.step(1, 5, 10)
    made.step(2, 5, 10)
    graph = graph_of(window_of(made.trace()))
    assert [graph.window.trace.threads[thread].tid for thread in (*graph.main, *graph.lines)] == [BACKWARD_THREAD] * 2
    assert segments(made) == [(5, 15, "host_python", "")]


def test_a_kernel_launched_by_backward_leads_back_over_both_threads() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("MmBackward0", 30, 20, tid=BACKWARD_THREAD)
    made.launched("gemm", at=40, call=2, start=45, dur=40, tid=BACKWARD_THREAD)
    made.runtime("cudaDeviceSynchronize", 60, 30)
    assert segments(made) == [
        (0, 30, "host_python", "ProfilerStep#1"),
        (30, 40, "host_operator", "MmBackward0"),
        (40, 42, "host_runtime", "cudaLaunchKernel"),
        (42, 45, "launch_delay", "gemm"),
        (45, 85, "compute", "gemm"),
        (85, 90, "synchronization", "cudaDeviceSynchronize"),
        (90, 100, "host_python", "ProfilerStep#1"),
    ]


def test_work_of_the_step_before_is_on_the_path_from_the_steps_start_on() -> None:
    made = MadeTrace()
    made.step(1, 0, 50)
    made.step(2, 50, 50)
    made.step(3, 100, 10)
    made.launched("long", at=40, start=45, dur=40)
    made.runtime("cudaDeviceSynchronize", 60, 30)
    assert [each for each in segments(made) if each[0] >= 50] == [
        (50, 85, "compute", "long"),
        (85, 90, "synchronization", "cudaDeviceSynchronize"),
        (90, 100, "host_python", "ProfilerStep#2"),
    ]


def test_a_full_queue_holds_the_host_up() -> None:
    made = MadeTrace()
    made.step(1, 0, 4000)
    for number in range(1100):
        made.launched("k", at=number, call=0.5, start=10 + 30 * number, dur=30)
    made.launched("last", at=1100, call=900, start=33_010, dur=3)
    found = segments(made)
    assert found[-1] == (2000, 4000, "host_python", "ProfilerStep#1")
    assert found[-2] == (1990, 2000, "host_runtime", "cudaLaunchKernel")
    assert found[:2] == [(0, 0.5, "host_runtime", "cudaLaunchKernel"), (0.5, 10, "launch_delay", "k")]
    assert {each[2:] for each in found[2:-2]} == {("compute", "k")}


def test_the_loader_is_named() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 30)
    made.op("aten::stack", 15, 10)
    assert check(window_of(made.trace())).causes == {"host_python": 70_000, "data_loading": 30_000}


def test_gloo_is_waited_for_on_the_thread_that_does_nothing_else() -> None:
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.op("aten::mm", 10, 90)
    made.op("c10d::allreduce_", 110, 20)
    made.annotation("gloo:all_reduce", 120, 600, tid=77)
    made.op("aten::add_", 730, 100)
    assert segments(made) == [
        (0, 10, "host_python", "ProfilerStep#1"),
        (10, 100, "host_operator", "aten::mm"),
        (100, 110, "host_python", "ProfilerStep#1"),
        (110, 120, "host_operator", "c10d::allreduce_"),
        (120, 720, "communication", "gloo:all_reduce"),
        (720, 730, "host_python", "ProfilerStep#1"),
        (730, 830, "host_operator", "aten::add_"),
        (830, 1000, "host_python", "ProfilerStep#1"),
    ]


def test_no_host_at_all() -> None:
    made = MadeTrace()
    made.kernel("a", 10, 20)
    made.kernel("b", 35, 20)
    assert segments(made) == [(10, 30, "compute", "a"), (30, 35, "kernel_gap", "b"), (35, 55, "compute", "b")]


def test_nothing_at_all() -> None:
    path = check(window_of(MadeTrace().trace()))
    assert path.steps == ()
    assert path.causes == {}
    assert [table.rows for table in path.tables.values()] == [(), (), (), ()]


def test_operators_have_what_they_launched() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("aten::mm", 10, 10)
    made.launched("gemm", at=12, call=2, start=20, dur=50)
    made.runtime("cudaDeviceSynchronize", 30, 45)
    path = check(window_of(made.trace()))
    assert [(each.name, each.cause, each.time_ns) for each in path.operators] == [
        ("aten::mm", "compute", 60_000),
        ("", "host_python", 40_000),
    ]
    assert [(each.name, each.time_ns, each.count) for each in path.kernels] == [("gemm", 50_000, 1)]
    assert path.tables["path_causes"].to_rows()[0] == {
        "cause": "compute",
        "time_ns": 50_000,
        "time_share": 0.5,
        "mean_step_ns": 50_000,
        "max_step_ns": 50_000,
        "segments": 1,
    }


@st.composite
def random_traces(draw: st.DrawFn) -> MadeTrace:
    """Anything: overlaps, nothing nested rightly, duplicate correlations, times that cannot be."""
    made = MadeTrace(rank=draw(st.sampled_from([0, None])))
    time, length = st.integers(0, 60), st.integers(0, 25)
    tid = st.sampled_from([4000, 4001, 77])
    for number in range(draw(st.integers(0, 3))):
        made.step(number, draw(time), draw(length))
    names = ["aten::mm", "MmBackward0", "c10d::allreduce_"]
    calls = ["cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaFree"]
    correlation: Any = st.integers(0, 6)
    for _ in range(draw(st.integers(0, 8))):
        made.op(draw(st.sampled_from(names)), draw(time), draw(length), tid=draw(tid))
    for _ in range(draw(st.integers(0, 8))):
        made.runtime(
            draw(st.sampled_from(calls)), draw(time), draw(length), tid=draw(tid), correlation=draw(correlation)
        )
    for _ in range(draw(st.integers(0, 2))):
        made.annotation("gloo:all_reduce", draw(time), draw(length), tid=78)
    works = [
        ("gemm", "kernel"),
        ("ncclDevKernel_AllReduce", "kernel"),
        ("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy"),
    ]
    for _ in range(draw(st.integers(0, 8))):
        name, category = draw(st.sampled_from(works))
        stream = draw(st.sampled_from([7, 20]))
        made.kernel(name, draw(time), draw(length), stream=stream, category=category, correlation=draw(correlation))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["Stream Wait Event", "Stream Sync", "Event Sync", "Context Sync"]))
        args = {"device": 0, "stream": draw(st.sampled_from([7, 20])), "correlation": draw(correlation)}
        args |= {
            "wait_on_stream": draw(st.sampled_from([7, 20])),
            "wait_on_cuda_event_record_corr_id": draw(correlation),
        }
        made.add("cuda_sync", kind, draw(time), draw(length), pid=0, tid=7, args=args)
    return made


@settings(max_examples=examples(80), deadline=None)
@given(random_traces(), st.booleans())
def test_whatever_the_trace_the_path_is_the_step(made: MadeTrace, keep_last: bool) -> None:
    check(window_of(made.trace(), keep_last=keep_last))


@settings(max_examples=examples(80), deadline=None)
@given(random_traces(), st.sampled_from(CHANGES))
def test_whatever_the_trace_a_replay_without_change_is_the_trace(made: MadeTrace, text: str) -> None:
    window = window_of(made.trace(), keep_last=True)
    graph, last = graph_of(window), len(window.steps) - 1
    for first in range(len(window.steps)):
        plan = Plan(graph, first, last)
        replayed = replay(plan, as_it_was(graph))
        if plan.pace_ns is not None:
            # Work that ran before it was launched, or ended with no length as it was, comes later in any replay; and
            # of a call that goes on when its step is over, as none can, the replay sees only what is inside.
            whole = (plan.starts >= plan.launched) & (plan.ends > plan.starts)
            possible = (whole & (plan.launched <= window.steps[last].end_ns))[plan.own].all()
            assert not possible or sum(replayed.steps_ns) == plan.pace_ns[1] - plan.pace_ns[0]
        else:
            assert replayed.steps_ns == tuple(step.end_ns - step.start_ns for step in window.steps[first:])
    if window.steps:
        assert all(ns >= 0 for ns in what_if(graph, parse_change(text)).after_ns)


@pytest.mark.few(6)
@pytest.mark.skipif(not REAL, reason="../shared/data/traces is not here")
@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.name[:12]}")
def test_the_path_is_the_step_on_real_traces(path: Path, real_window: Callable[[Path], Window]) -> None:
    check(real_window(path))


@pytest.mark.skipif(not REAL, reason="../shared/data/traces is not here")
def test_forward_and_backward_threads_are_both_on_the_path(real_window: Callable[[Path], Window]) -> None:
    """HTA finds 101,646 of the 222,442 µs of this step."""
    window = real_window(SHARED / "hta_nccl_data_1of2" / "nccl_data.json.gz")
    path = check(window)
    assert path.steps[0].length_ns == 222_442_191
    own = path_segments(window)
    names = {window.trace.threads[place].name for place in np.unique(own.place).tolist()}
    assert {name.split("(")[-1].strip(") ") for name in names} == {"pt_main_thread", "pt_autograd_0"}
