"""Which rows count, to which step they belong, and what launched them."""

from __future__ import annotations

from fakes.traces import MadeTrace

from stepscope.traces.model.columns import Trace
from stepscope.traces.model.window import Window, window_of


def three_steps() -> MadeTrace:
    made = MadeTrace()
    for number in (7, 8, 9):
        at = (number - 7) * 100
        made.step(number, at, 90)
        made.op(f"op{number}", at + 10, 30)
        made.launched(f"kernel{number}", at=at + 12, start=at + 80, dur=40)
    return made


def counted(window: Window) -> set[str]:
    trace: Trace = window.trace
    return {trace.name(row) for row in range(len(trace)) if window.counts[row]}


def test_the_last_step_is_left_out_with_what_it_launched() -> None:
    window = window_of(three_steps().trace())
    assert [step.number for step in window.steps] == [7, 8]
    assert window.left_out is not None
    assert window.left_out.number == 9
    names = counted(window)
    assert {"kernel7", "kernel8", "op8"} <= names
    assert not {"kernel9", "op9", "ProfilerStep#9"} & names


def test_it_may_be_kept() -> None:
    window = window_of(three_steps().trace(), keep_last=True)
    assert [step.number for step in window.steps] == [7, 8, 9]
    assert window.left_out is None
    assert window.counts.all()


def test_work_that_was_launched_before_the_last_step_but_runs_in_it_counts() -> None:
    made = three_steps()
    made.launched("late", at=150, start=230, dur=5)
    assert "late" in counted(window_of(made.trace()))


def test_work_of_which_the_launch_is_not_in_the_trace_counts() -> None:
    made = three_steps()
    made.kernel("orphan", 240, 5)
    assert "orphan" in counted(window_of(made.trace()))


def test_one_step_is_kept() -> None:
    made = MadeTrace()
    made.step(3, 0, 50)
    made.op("op", 10, 5)
    window = window_of(made.trace())
    assert ([step.number for step in window.steps], window.left_out) == ([3], None)


def test_names_of_steps_on_the_device_are_no_steps() -> None:
    made = three_steps()
    made.add("gpu_user_annotation", "ProfilerStep#10", 280, 20, pid=0, tid=7, args={"device": 0, "stream": 7})
    assert [step.number for step in window_of(made.trace()).steps] == [7, 8]


def test_without_steps_all_is_one() -> None:
    made = MadeTrace()
    made.op("op", 10, 30)
    made.launched("kernel", at=12, start=50, dur=40)
    made.add("Trace", "PyTorch Profiler (0)", 0, 500, pid="Spans", tid="PyTorch Profiler")
    window = window_of(made.trace())
    (step,) = window.steps
    origin = window.trace.meta.origin_ns
    assert (origin + step.start_ns, origin + step.end_ns) == (10_000, 90_000)
    assert "PyTorch Profiler (0)" not in counted(window)


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    made = three_steps()
    made.kernel("orphan", 110, 5)
    window = window_of(made.trace())
    trace = window.trace
    steps = {trace.name(row): int(window.step_of[row]) for row in range(len(trace))}
    assert (steps["kernel7"], steps["kernel8"], steps["kernel9"]) == (0, 1, -1)
    assert (steps["orphan"], steps["op7"], steps["op8"]) == (1, 0, 1)


def test_between_two_steps_is_no_step() -> None:
    made = three_steps()
    made.op("between", 93, 2)
    window = window_of(made.trace())
    at = next(row for row in range(len(window.trace)) if window.trace.name(row) == "between")
    assert window.counts[at]
    assert window.step_of[at] == -1


def test_the_outer_call_launched_it() -> None:
    """A driver's call inside of a runtime's carries the same correlation."""
    made = MadeTrace()
    made.runtime("cudaLaunchKernelExC", 10, 8, correlation=5)
    made.add("cuda_driver", "cuLaunchKernelEx", 11, 5, args={"correlation": 5})
    made.kernel("gemm", 30, 5, correlation=5)
    made.kernel("another", 40, 5, correlation=6)
    made.kernel("none", 50, 5, correlation=0)
    made.runtime("cudaGetDevice", 60, 1, correlation=0)
    window = window_of(made.trace())
    trace = window.trace
    by = {trace.name(row): int(window.launch[row]) for row in range(len(trace))}
    assert trace.name(by["gemm"]) == "cudaLaunchKernelExC"
    assert (by["another"], by["none"]) == (-1, -1)


def test_a_graph_launches_many() -> None:
    made = MadeTrace()
    made.runtime("cudaGraphLaunch", 10, 8, correlation=5)
    for at in (30, 40, 50):
        made.kernel("node", at, 5, correlation=5)
    window = window_of(made.trace())
    rows = window.device_rows
    assert [window.trace.name(launch) for launch in window.launch[rows].tolist()] == ["cudaGraphLaunch"] * 3


def test_an_empty_trace_has_no_steps() -> None:
    window = window_of(MadeTrace().trace())
    assert (window.steps, len(window.device_rows), len(window.step_of)) == ((), 0, 0)
