"""Replays: unchanged they are the trace; changed they are what one counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.traces import BACKWARD_THREAD, MadeTrace

from stepscope.errors import TraceError
from stepscope.traces.collective_calls import exchanges_of
from stepscope.traces.model.window import Window, window_of
from stepscope.traces.path.graph import Graph, graph_of
from stepscope.traces.path.rank_path import rank_path
from stepscope.traces.path.whatif import Change, Plan, as_it_was, parse_change, replay, what_if

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
REAL = sorted(SHARED.rglob("*.json.gz"))


def check(window: Window) -> Graph:
    """Unchanged, every step, or all of them on the device, are as long as they were, from whichever step on."""
    graph = graph_of(window)
    steps = window.steps
    for first in range(len(steps)):
        plan = Plan(graph, first, len(steps) - 1)
        replayed = replay(plan, as_it_was(graph))
        if plan.pace_ns is not None:
            assert sum(replayed.steps_ns) == plan.pace_ns[1] - plan.pace_ns[0] >= sum(replayed.limits_ns.values())
            continue
        assert replayed.steps_ns == tuple(step.end_ns - step.start_ns for step in steps[first:])
        assert sum(replayed.limits_ns.values()) <= replayed.steps_ns[-1]
    return graph


def after(made: MadeTrace, text: str) -> list[int]:
    """Microseconds of each step after a change."""
    tried = what_if(check(window_of(made.trace())), parse_change(text))
    assert all(ns % 1000 == 0 for ns in tried.after_ns)
    return [ns // 1000 for ns in tried.after_ns]


def simple() -> MadeTrace:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("aten::mm", 8, 6)
    made.launched("one", at=10, call=2, start=15, dur=20)
    made.launched("two", at=14, call=2, start=36, dur=40)
    made.runtime("cudaDeviceSynchronize", 20, 60)
    return made


def test_faster_kernels_shorten_what_waits_for_them() -> None:
    assert after(simple(), "kernel:two=2x") == [80]
    assert after(simple(), "kernel:*=2x") == [70]
    assert after(simple(), "kernel:nothing=2x") == [100]
    assert after(simple(), "comm=hidden") == [100]


def test_without_kernels_the_host_is_what_is_left() -> None:
    # The synchronization begins at 20 and takes the 4 µs after the device is done; 20 µs come after it.
    assert after(simple(), "kernel:*=0") == [44]


def test_operators_with_what_they_launched() -> None:
    # aten::mm: 6 µs on the host of which the launch at 10 is 2 µs in, and kernel one.
    assert after(simple(), "op:aten::mm=2x") == [88]


def test_no_launches_and_no_gaps() -> None:
    # The host comes to the launch at 10; it takes nothing, nor do the delay and the gap: 10 + 20 + 40 + 4 + 20.
    assert after(simple(), "launch=0") == [94]


def test_no_host_leaves_the_device() -> None:
    assert after(simple(), "host=0") == [60]


def test_another_path_becomes_critical() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.launched("a", at=1, call=1, start=5, dur=70, stream=7)
    made.launched("b", at=3, call=1, start=5, dur=60, stream=8)
    made.runtime("cudaStreamSynchronize", 10, 66, correlation=50)
    made.add("cuda_sync", "Stream Sync", 10, 66, pid=0, tid=7, args={"device": 0, "stream": 7, "correlation": 50})
    made.runtime("cudaStreamSynchronize", 77, 3, correlation=51)
    made.add("cuda_sync", "Stream Sync", 77, 3, pid=0, tid=8, args={"device": 0, "stream": 8, "correlation": 51})
    window = window_of(made.trace())
    tried = what_if(check(window), parse_change("kernel:a=7x"))
    # a is done at 15, the host a microsecond later; then it waits for b until 65, and has 23 µs to go.
    assert tried.after_ns == (88_000,)
    assert next(iter(tried.limits_ns)) == "b"
    assert tried.gain_share == pytest.approx(0.12)


def test_backward_is_on_its_own_thread_and_the_main_one_waits() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.op("MmBackward0", 30, 40, tid=BACKWARD_THREAD)
    made.op("aten::add_", 80, 10)
    assert after(made, "op:MmBackward0=2x") == [80]
    assert after(made, "op:aten::add_=2x") == [95]


def test_what_one_step_leaves_running_is_changed_too() -> None:
    made = MadeTrace()
    made.step(1, 0, 50)
    made.step(2, 50, 50)
    made.step(3, 100, 10)
    made.launched("long", at=40, call=1, start=45, dur=40)
    made.runtime("cudaDeviceSynchronize", 60, 30)
    assert after(made, "kernel:long=2x") == [50, 30]


def test_the_loader() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 30)
    made.op("aten::stack", 15, 10)
    assert after(made, "loader=0") == [70]


def test_a_collective_of_the_host() -> None:
    made = MadeTrace()
    made.step(1, 0, 1000)
    made.op("c10d::allreduce_", 110, 20)
    made.annotation("gloo:all_reduce", 120, 600, tid=77)
    made.op("aten::add_", 730, 100)
    assert after(made, "comm=hidden") == [410]


def test_a_device_without_end_bounds_the_step() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.step(2, 100, 100)
    made.launched("a", at=10, call=1, start=20, dur=70)
    assert after(made, "host=0") == [70]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("kernel:nccl*=2x", {"kind": "kernel", "pattern": "nccl*", "speedup": 2.0}),
        ("op:aten::mm=1.5×", {"kind": "op", "pattern": "aten::mm", "speedup": 1.5}),
        ("kernel:a=b=0", {"kind": "kernel", "pattern": "a=b", "speedup": 0.0}),
        ("comm=hidden", {"kind": "comm"}),
        ("LAUNCH=0", {"kind": "launch"}),
        (" rank:3=peers ", {"kind": "rank", "rank": 3}),
    ],
)
def test_changes_as_people_write_them(text: str, change: dict[str, object]) -> None:
    assert parse_change(text) == Change(text=text.strip(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("faster", "is not a change"),
        ("kernel:x=fast", "neither 0 nor a factor"),
        ("kernel:x=0x", "neither 0 nor a factor"),
        ("kernel:=2x", "names no kernel"),
        ("op=2x", "names no operator"),
        ("comm=2x", "the only valid form is comm=hidden"),
        ("rank:three=peers", "rank:3=peers"),
        ("weather=0", "weather cannot be changed"),
        ("=2x", "nothing cannot be changed"),
    ],
)
def test_changes_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        parse_change(text)


def test_a_rank_alone_cannot_be_like_its_peers() -> None:
    with pytest.raises(TraceError, match="several ranks"):
        what_if(graph_of(window_of(simple().trace())), parse_change("rank:0=peers"))


def test_standard_changes_are_tried_and_sorted() -> None:
    window = window_of(simple().trace())
    path = rank_path(window, exchanges_of(window, 0))
    assert [(each.change.text, each.after_ns) for each in path.what_ifs] == [
        ("host=0", (60_000,)),
        ("kernel:two=2x", (80_000,)),
        ("op:aten::mm=2x", (88_000,)),
        ("kernel:one=2x", (90_000,)),
        ("launch=0", (94_000,)),
    ]
    assert path.tables["what_if"].to_rows()[0] == {
        "change": "host=0",
        "before_ns": 100_000,
        "after_ns": 60_000,
        "gain_share": 0.4,
        "then_mostly": "two",
    }


@pytest.mark.few(6)
@pytest.mark.skipif(not REAL, reason="../shared/data/traces is not here")
@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.name[:12]}")
def test_unchanged_a_replay_is_the_real_trace(path: Path, real_window: Callable[[Path], Window]) -> None:
    graph = check(real_window(path))
    for text in ("kernel:*=2x", "comm=hidden", "launch=0"):
        tried = what_if(graph, parse_change(text))
        assert 0 <= tried.gain_ns <= sum(tried.before_ns)
