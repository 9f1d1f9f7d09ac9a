"""The timeline on the page: the right step and ranks, everything in it once, and never too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.records.finding import Finding
from stepscope.traces import timeline as module
from stepscope.traces.findings import analyze_job
from stepscope.traces.job import JobAnalysis
from stepscope.traces.rank_analysis import analyze_rank
from stepscope.traces.timeline import CODES, LOOKS, Lane, Timeline, chosen_ranks, timeline_of

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def made(rank: int = 0, *, lengths: tuple[float, ...] = (100, 90, 80, 100), ranks: int = 1) -> MadeTrace:
    """Steps with two nested operators, a kernel, a collective and a copy; the last step does not count."""
    trace = MadeTrace(rank=rank, world_size=ranks)
    at = 0.0
    for number, length in enumerate(lengths):
        trace.step(number, at, length)
        trace.op("aten::linear", at + 5, 30)
        trace.op("aten::mm", at + 10, 20)
        trace.launched("gemm", at=at + 12, start=at + 20, dur=15)
        trace.launched(REDUCE, at=at + 40, start=at + 45, dur=10, stream=20)
        trace.launched("Memcpy HtoD", at=at + 60, start=at + 62, dur=3, stream=9, category="gpu_memcpy")
        trace.op("autograd", at + 50, 10, tid=4001)
        at += length
    return trace


def analyzed(*ranks: MadeTrace) -> JobAnalysis:
    return analyze_job([analyze_rank(made.trace(), rank) for rank, made in enumerate(ranks)])


def drawn(*ranks: MadeTrace, job: JobAnalysis | None = None) -> Timeline:
    job = job or analyzed(*ranks)
    found = timeline_of(job, [(rank, ranks[rank].trace()) for rank in chosen_ranks(job)], keep_last=False)
    assert found is not None
    return found


def events(found: Timeline, lane: Lane) -> list[tuple[str, int, int, int]]:
    """Name, start and length in microseconds, level."""
    columns = (lane.label.tolist(), lane.start_ns.tolist(), lane.dur_ns.tolist(), lane.level.tolist())
    return [
        (found.names[label], start // 1000, dur // 1000, level)
        for label, start, dur, level in zip(*columns, strict=True)
    ]


def test_a_step_of_median_length() -> None:
    found = drawn(made())
    assert (found.about, found.note) == ("step 1 of rank 0, one of median length", "")
    assert (found.length_ns, found.marks) == (90_000, ((0, "step 1"),))
    assert [(lane.name, lane.kind) for lane in found.lanes] == [
        ("critical path", "path"), ("thread 4000", "host"), ("thread 4001", "host"),
        ("stream 7", "compute"), ("stream 20", "comm"), ("stream 9", "copy"),
    ]  # fmt: skip
    path, main, backward, *streams = found.lanes
    assert events(found, main)[:3] == [
        ("ProfilerStep#1", 0, 90, 0), ("aten::linear", 5, 30, 1), ("cudaLaunchKernel", 40, 1, 1),
    ]  # fmt: skip
    assert ("aten::mm", 10, 20, 2) in events(found, main)
    assert ("cudaLaunchKernel", 12, 1, 3) in events(found, main)
    assert main.look.tolist()[:2] == [CODES["annotation"], CODES["op"]]
    assert events(found, backward) == [("autograd", 50, 10, 0)]
    assert [events(found, stream) for stream in streams] == [
        [("gemm", 20, 15, 0)], [(REDUCE, 45, 10, 0)], [("Memcpy HtoD", 62, 3, 0)],
    ]  # fmt: skip
    assert [stream.look.tolist() for stream in streams] == [[CODES["compute"]], [CODES["comm"]], [CODES["copy"]]]
    assert path.start_ns[0] == 0
    assert (path.start_ns[1:] == path.start_ns[:-1] + path.dur_ns[:-1]).all(), "every instant has one cause"
    assert int(path.dur_ns.sum()) == 90_000
    assert any(name.startswith("host operator: aten::mm") for name, *_ in events(found, path))


def test_a_step_that_the_finding_covers() -> None:
    job = analyzed(made())
    only = replace(job, findings=(Finding(kind="x", severity="warning", title="x", steps=(2, 2)),))
    assert drawn(made(), job=only).about == "step 2 of rank 0, one of median length"


def test_without_steps_everything_is_shown() -> None:
    trace = MadeTrace(rank=0)
    trace.op("aten::mm", 10, 20)
    trace.launched("gemm", at=12, start=30, dur=40)
    found = drawn(trace)
    assert (found.about, found.length_ns, found.marks) == ("everything that rank 0 recorded", 60_000, ())


def test_a_device_behind_its_host_is_shown_when_it_works() -> None:
    trace = MadeTrace(rank=0)
    for number in range(5):
        trace.step(number, number * 10, 10)
        trace.launched("gemm", at=number * 10 + 1, start=100 + number * 50, dur=50)
    found = drawn(trace)
    assert found.about == "step 0 of rank 0, one of median length, while its device works on it"
    assert found.length_ns == 50_000
    (stream,) = (lane for lane in found.lanes if lane.kind == "compute")
    assert events(found, stream) == [("gemm", 0, 50, 0)]


def test_ranks_on_one_clock() -> None:
    """Those that findings name come first; others are shown at the same time."""
    job = analyzed(*(made(rank, ranks=5) for rank in range(5)))
    named = replace(job, findings=(Finding(kind="x", severity="warning", title="x", ranks=(3, 4)),))
    assert chosen_ranks(named)[0] == 3
    assert len(chosen_ranks(named)) == module.MOST_RANKS
    found = drawn(*(made(rank, ranks=5) for rank in range(5)), job=named)
    assert {lane.rank for lane in found.lanes} == set(chosen_ranks(named))
    assert [lane.rank for lane in found.lanes if lane.kind == "path"] == [3]
    waits = {lane.rank: events(found, lane) for lane in found.lanes if lane.kind == "collectives"}
    assert {rank: [name for name, *_ in own] for rank, own in waits.items()} == {
        rank: ["all_reduce: transfer"] for rank in chosen_ranks(named)
    }
    starts = {lane.rank: int(lane.start_ns[0]) for lane in found.lanes if lane.kind == "compute"}
    assert set(starts.values()) == {20_000}


def test_who_waits_for_whom() -> None:
    late = MadeTrace(rank=1, world_size=2)
    on_time = MadeTrace(rank=0, world_size=2)
    for trace, arrival in ((on_time, 20), (late, 60)):
        trace.step(0, 0, 100)
        trace.op("record_param_comms", arrival - 15, 10)
        trace.launched(REDUCE, at=arrival - 10, start=arrival, dur=80 - arrival, stream=20)
    found = drawn(on_time, late)
    waits = {lane.rank: events(found, lane) for lane in found.lanes if lane.kind == "collectives"}
    assert waits == {
        0: [("all_reduce: waits for rank 1", 20, 40, 0), ("all_reduce: transfer", 60, 20, 0)],
        1: [("all_reduce: transfer", 60, 20, 0)],
    }


def test_of_python_the_functions_of_the_user_inside_the_step() -> None:
    trace = made()
    trace.python("/job/train.py(3): main", 0, 370)
    trace.python("/job/train.py(9): step", 101, 80)
    trace.python("/usr/lib/python3.12/site-packages/torch/nn/modules/module.py(1): call", 102, 70)
    found = drawn(trace)
    (main,) = (lane for lane in found.lanes if lane.name == "thread 4000")
    python = [
        event for event, look in zip(events(found, main), main.look.tolist(), strict=True) if look == CODES["python"]
    ]
    assert python == [("/job/train.py:9 in step", 1, 80, 1)]


def test_deep_calls_and_idle_lanes_are_left_out() -> None:
    trace = MadeTrace(rank=0)
    for level in range(12):
        trace.op(f"op {level}", level, 100 - 2 * level)
    for thread in range(9):
        trace.op("aten::mm", 5, 1, tid=5000 + thread)
    found = drawn(trace)
    main = next(lane for lane in found.lanes if lane.kind == "host")
    assert [name for name, *_ in events(found, main)] == [f"op {level}" for level in range(module.MOST_LEVELS)]
    assert sum(lane.kind == "host" for lane in found.lanes) == module.MOST_THREADS
    assert found.note == "6 less busy lanes left out."


def test_neighbors_below_the_resolution_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 200)
    trace = MadeTrace(rank=0)
    trace.step(0, 0, 10_000)
    for at in range(900):
        trace.kernel("tiny", 10 * at, 2)
    trace.kernel("long", 9_100, 500)
    found = drawn(trace)
    (stream,) = (lane for lane in found.lanes if lane.kind == "compute")
    assert sum(map(len, found.lanes)) <= 200
    assert int(stream.count.sum()) == 901, "each event is in one of them"
    assert found.note.startswith("Neighbors shorter than ")
    assert [found.names[label] for label in stream.label.tolist() if label >= 0] == ["long"]
    assert (np.diff(stream.start_ns) > 0).all()


def test_document() -> None:
    found = drawn(made())
    document = found.to_dict()
    assert [look for look, _ in document["looks"]] == list(LOOKS)
    for lane, packed in zip(found.lanes, document["lanes"], strict=True):
        assert np.cumsum(packed["start"]).tolist() == lane.start_ns.tolist()
        assert (packed["rank"], packed["dur"], packed["count"]) == (0, lane.dur_ns.tolist(), lane.count.tolist())


@st.composite
def random_trace(draw: st.DrawFn) -> MadeTrace:
    time, length = st.integers(0, 60), st.integers(0, 25)
    trace = MadeTrace(rank=0)
    for number in range(draw(st.integers(0, 3))):
        trace.step(number, 20 * number, draw(st.sampled_from([20, 0])))
    for _ in range(draw(st.integers(0, 6))):
        trace.op("aten::mm", draw(time), draw(length), tid=draw(st.sampled_from([4000, 4001])))
    for _ in range(draw(st.integers(0, 6))):
        trace.launched("gemm", at=draw(time), start=draw(time), dur=draw(length), stream=draw(st.sampled_from([7, 20])))
    return trace


@given(random_trace())
@settings(max_examples=examples(40))
def test_any_trace(trace: MadeTrace) -> None:
    job = analyzed(trace)
    found = timeline_of(job, [(0, trace.trace())], keep_last=False)
    if found is None:
        return
    assert found.length_ns > 0
    for lane in found.lanes:
        inside = (lane.start_ns < found.length_ns) & (lane.start_ns + lane.dur_ns > 0)
        assert inside.all()
        assert (np.diff(lane.level) >= 0).all()
        for level in np.unique(lane.level):
            assert (np.diff(lane.start_ns[lane.level == level]) >= 0).all()
        used: Any = lane.label[lane.count == 1]
        assert (used >= 0).all()
        assert (used < len(found.names)).all()
