"""Phases of steps: what claims which instant, and that they always add up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import BACKWARD_THREAD, MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.model.window import Window, window_of
from stepscope.traces.phases import PHASE_COLUMNS, PHASES, Phases, mean_row, phase_of_label, phases_of, phases_table

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
GRAD = "autograd::engine::evaluate_function: AddmmBackward0"


def made(*, steps: int = 1, long: float = 100) -> MadeTrace:
    trace = MadeTrace()
    for number in range(steps):
        trace.step(number, number * long, long)
    return trace


def host(trace: MadeTrace, step: int = 0) -> dict[str, int]:
    """Microseconds by phase, without those that have none."""
    row = phases_of(window_of(trace.trace())).rows[step]
    assert sum(row.host_ns) == row.wall_ns
    return {phase: ns // 1000 for phase, ns in zip(PHASES, row.host_ns, strict=True) if ns}


def device(trace: MadeTrace, step: int = 0) -> dict[str, int]:
    row = phases_of(window_of(trace.trace())).rows[step]
    assert sum(row.device_ns) + row.device_idle_ns == row.device_span_ns
    parts = {phase: ns // 1000 for phase, ns in zip(PHASES, row.device_ns, strict=True) if ns}
    return {**parts, "idle": row.device_idle_ns // 1000}


def training_step(trace: MadeTrace, tid: int = BACKWARD_THREAD) -> MadeTrace:
    """A step of 100 µs as a plain loop without labels leaves it."""
    trace.annotation(LOADER, 0, 20)
    trace.op("aten::addmm", 30, 10, **{"Sequence number": 7, "Fwd thread id": 0})
    trace.op("aten::mse_loss", 45, 5, **{"Sequence number": 8, "Fwd thread id": 0})
    trace.op(
        "autograd::engine::evaluate_function: MseLossBackward0",
        55,
        3,
        tid,
        **{"Sequence number": 8, "Fwd thread id": 1},
    )
    trace.op(GRAD, 60, 10, tid, **{"Sequence number": 7, "Fwd thread id": 1})
    trace.annotation("Optimizer.step#SGD.step", 80, 15)
    return trace


@pytest.mark.parametrize("tid", [BACKWARD_THREAD, 4000], ids=["autograd's thread", "main thread"])
def test_a_plain_loop(tid: int) -> None:
    """Forward and backward include what is between their operators, and nothing before or after."""
    trace = training_step(made(), tid)
    assert host(trace) == {"input": 20, "forward": 20, "backward": 15, "optimizer": 15, "other": 30}
    assert phases_of(window_of(trace.trace())).sources == ("ranges", "operators")


def test_ranges_by_name_and_the_innermost_counts() -> None:
    trace = made()
    trace.annotation("## forward ##", 10, 30)
    trace.annotation("## wait_sparse_data_dist ##", 20, 5)
    trace.annotation("nccl:all_reduce", 30, 2)
    trace.annotation("## backward ##", 50, 20)
    trace.annotation("epoch", 0, 90)
    assert host(trace) == {"forward": 23, "communication": 7, "backward": 20, "other": 50}


def test_own_ranges_win() -> None:
    trace = made()
    trace.annotation("stepscope.step 340", 0, 100)
    trace.annotation("stepscope.forward", 10, 30)
    trace.annotation("stepscope.layer encoder.optimizer", 12, 20)
    trace.annotation("stepscope.eval", 20, 5)
    trace.annotation("## backward ##", 15, 40)
    trace.annotation("stepscope.backward", 50, 30)
    trace.annotation("stepscope.comm", 60, 10)
    trace.annotation("stepscope.h2d", 80, 4)
    # Evaluation is other, although the user calls the same time backward.
    assert host(trace) == {"input": 4, "forward": 25, "backward": 30, "communication": 10, "other": 31}
    assert phases_of(window_of(trace.trace())).sources == ("stepscope", "ranges")


def test_own_steps_where_the_profiler_marks_none() -> None:
    trace = MadeTrace()
    for number in (340, 341, 342):
        trace.annotation(f"stepscope.step {number}", (number - 340) * 100, 100)
    trace.annotation("stepscope.forward", 110, 30)
    phases = phases_of(window_of(trace.trace()))
    assert [(row.step, row.wall_ns, row.host_ns[1]) for row in phases.rows] == [
        (340, 100_000, 0),
        (341, 100_000, 30_000),
    ]


def test_own_steps_that_are_marks() -> None:
    """In what a script profiles, only the beginning of a step is marked."""
    trace = MadeTrace()
    for number, at in ((340, 0), (341, 100), (342, 200), (400, 700), (401, 800)):
        trace.annotation(f"stepscope.step {number}", at, 0.002)
    trace.annotation("stepscope.forward", 110, 30)
    trace.annotation("stepscope.forward", 820, 100)
    steps = window_of(trace.trace(), keep_last=True).steps
    assert [(step.number, step.start_ns // 1000, step.end_ns // 1000) for step in steps] == [
        (340, 0, 100),
        (341, 100, 200),
        (342, 200, 200),
        (400, 700, 800),
        (401, 800, 920),
    ]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        (LOADER, "input"),
        ("## load_batch ##", "input"),
        ("dataloader_next", "input"),
        ("get_batch", "input"),
        ("DistributedDataParallel.forward", "forward"),
        ("fsdp.pre_forward", "forward"),
        ("model_fwd", "forward"),
        ("Backward", "backward"),
        ("FSDP::post_backward_hook", "backward"),
        ("Optimizer.zero_grad#Adam.zero_grad", "optimizer"),
        ("## optimizer ##", "optimizer"),
        ("optimizer_step", "optimizer"),
        ("gloo:all_reduce", "communication"),
        ("backward_allreduce", "communication"),
        ("forward_backward", None),
        ("straightforward", None),
        ("fwdbwd", None),
        ("adopt", None),
        ("epoch 3", None),
        ("ProfilerStep#3", None),
        ("stepscope.step 3", None),
        ("", None),
    ],
)
def test_names_of_ranges(name: str, phase: str | None) -> None:
    found = phase_of_label(name)
    assert (None if found is None else PHASES[found]) == phase


def test_waiting_for_gloo_is_communication() -> None:
    trace = training_step(made())
    trace.annotation("gloo:all_reduce", 58, 15, tid=99)
    # The engine runs from 60 to 70; before that backward waits, after it the step.
    assert host(trace) == {"input": 20, "forward": 20, "backward": 13, "communication": 5, "optimizer": 15, "other": 27}


def test_copies_to_the_device_are_input() -> None:
    trace = made()
    trace.op("aten::to", 5, 10)
    trace.op("aten::copy_", 6, 8)
    trace.runtime("cudaMemcpyAsync", 7, 2, correlation=901)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 30, 20, category="gpu_memcpy", correlation=901)
    assert host(trace) == {"input": 10, "other": 90}
    assert device(trace) == {"input": 20, "idle": 0}


def test_work_belongs_to_the_phase_that_launched_it() -> None:
    trace = training_step(made(steps=3))
    trace.launched("gemm", at=31, start=40, dur=30)
    trace.launched("gemm_backward", at=61, tid=BACKWARD_THREAD, start=70, dur=30)
    trace.launched("ncclDevKernel_AllReduce", at=62, tid=BACKWARD_THREAD, start=90, dur=40, stream=20)
    trace.launched("adam", at=81, start=140, dur=10)
    trace.launched("fill", at=97, start=150, dur=5)
    # Communication is what nothing hides: from 100 to 130.
    assert device(trace) == {
        "forward": 30, "backward": 30, "communication": 30, "optimizer": 10, "other": 5, "idle": 10
    }  # fmt: skip


def test_concurrent_work_counts_once() -> None:
    trace = made()
    trace.annotation("forward", 0, 10)
    trace.annotation("backward", 10, 10)
    trace.launched("gemm", at=1, start=20, dur=30)
    trace.launched("other_gemm", at=2, start=25, dur=30, stream=8)
    trace.launched("gemm_backward", at=11, start=40, dur=30, stream=9)
    assert device(trace) == {"forward": 35, "backward": 15, "idle": 0}


def test_nothing_names_a_phase() -> None:
    trace = made()
    trace.op("aten::mm", 10, 20)
    phases = phases_of(window_of(trace.trace()))
    assert phases.sources == ()
    assert phases_table(phases) is None
    assert mean_row(phases.rows) is not None
    assert phases_of(window_of(MadeTrace().trace())) == Phases(sources=(), rows=())
    assert mean_row(()) is None


def test_means_add_up() -> None:
    trace = made(steps=4)
    trace.annotation("forward", 0, 0.001)
    trace.annotation("backward", 1, 0.002)
    trace.annotation("optimizer", 101, 0.001)
    mean = mean_row(phases_of(window_of(trace.trace())).rows)
    assert mean is not None
    assert mean.step == 3
    assert mean.wall_ns == 100_000
    assert mean.host_ns == (0, 0, 0, 0, 0, 100_000)


RANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["forward", "backward", "optimizer", LOADER, "nccl:all_reduce", "stepscope.forward", "x", GRAD]
        ),
        st.integers(0, 300),
        st.integers(0, 120),
        st.sampled_from([4000, BACKWARD_THREAD, 99]),
        st.booleans(),
    ),
    max_size=14,
)


@given(RANGES, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 400), st.integers(0, 90)), max_size=8))
@settings(max_examples=examples(200), deadline=None)
def test_the_phases_add_up_to_the_step(ranges: list[tuple[str, int, int, int, bool]], work: list[Any]) -> None:
    """Whatever the ranges, even if they cross; against a reading instant by instant where only ranges decide."""
    trace = made(steps=4)
    for name, start, dur, tid, op in ranges:
        trace.op(name, start, dur, tid) if op else trace.annotation(name, start, dur, tid)
    for at, start, dur in work:
        trace.launched("gemm", at=at, start=start, dur=dur)
    phases = phases_of(window_of(trace.trace()))
    for row in phases.rows:
        assert min(row.host_ns) >= 0
        assert min(row.device_ns) >= 0
        assert row.device_idle_ns >= 0
        assert sum(row.host_ns) == row.wall_ns
        assert sum(row.device_ns) + row.device_idle_ns == row.device_span_ns


def raw_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_a_real_trace_with_ranges(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    """ResNet-50 with ``## forward ##`` …: the durations of these ranges, from the file itself."""
    path = next((shared_data / "traces" / "hta_nccl_data_1of2").glob("*.gz"))
    events = raw_events(path)
    steps = sorted((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    row = phases_of(real_window(path)).rows[0]
    first = steps[0]

    def length(name: str) -> int:
        (found,) = (e for e in events if e["name"] == name and e["cat"] == "user_annotation" and inside(e, first))
        return round(found["dur"] * 1000)

    # The ranges of NCCL are inside these calls.
    calls = [e for e in events if e["name"].startswith("c10d::") and e["tid"] == first["tid"] and inside(e, first)]
    called = sum(round(e["dur"] * 1000) for e in calls)
    by_hand = {
        "forward": length("## forward ##") - called,
        "backward": length("## backward ##"),
        "optimizer": length("## optimizer ##"),
        "communication": called,
    }
    assert row.step == int(first["name"].partition("#")[2])
    got = dict(zip(PHASES, row.host_ns, strict=True))
    zeroed = sum(
        round(e["dur"] * 1000) for e in events if e["name"].startswith("Optimizer.zero_grad") and inside(e, first)
    )
    assert {**by_hand, "optimizer": by_hand["optimizer"] + zeroed} == {name: got[name] for name in by_hand}


def test_a_real_trace_without_ranges(shared_data: Path, real_window: Callable[[Path], Window]) -> None:
    """ResNet-50 in a plain loop, in which forward and backward have no label."""
    path = next((shared_data / "traces" / "kineto_resnet50_w0").glob("*.gz"))
    events = raw_events(path)
    step = min((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    own = [e for e in events if inside(e, step)]
    row = phases_of(real_window(path)).rows[0]
    got = {name: ns // 1000 for name, ns in zip(PHASES, row.host_ns, strict=True)}
    engine = [e for e in own if e.get("cat") == "Operator" and e["tid"] != step["tid"]]
    backward = max(e["ts"] + e["dur"] for e in engine) - min(e["ts"] for e in engine)
    assert got["backward"] == backward
    assert got["optimizer"] == sum(e["dur"] for e in own if e["name"].startswith("Optimizer."))
    loads = sum(e["dur"] for e in own if e["name"].startswith("enumerate(DataLoader)"))
    uploads = {e["args"]["correlation"] for e in events if e["name"].startswith("Memcpy HtoD")}
    calls = [e for e in own if e.get("cat") == "Runtime" and e["args"].get("correlation") in uploads]
    ops = [e for e in own if e.get("cat") == "Operator" and e["tid"] == step["tid"] and "#" not in e["name"]]
    around = [max((e for e in ops if inside(call, e)), key=lambda e: e["dur"]) for call in calls]
    assert got["input"] == loads + sum({e["ts"]: e["dur"] for e in around if not within_loader(e, own)}.values())
    assert got["communication"] == 0
    assert got["other"] < 0.01 * step["dur"]


def inside(event: dict[str, Any], around: dict[str, Any]) -> bool:
    return bool(around["ts"] <= event["ts"] < around["ts"] + around["dur"]) and event is not around


def within_loader(event: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    return any(e["name"].startswith("enumerate(DataLoader)") and inside(event, e) for e in events)


def test_the_table_has_the_same_columns() -> None:
    table = phases_table(phases_of(window_of(training_step(made()).trace())))
    assert table is not None
    assert table.columns == PHASE_COLUMNS
    assert table.rows[0][:8] == (0, 100_000, 20_000, 20_000, 15_000, 15_000, 0, 30_000)
