"""Launches and queues, case by case; all of it is recomputed in test_trace_device_recomputed.py."""

from __future__ import annotations

from fakes.traces import MadeTrace

from stepscope.traces.device.figures import (
    DeviceFigures,
    Queue,
    device_figures,
    launches_in,
    launches_table,
    queue_curve,
    queue_table,
    queues_of,
    short_kernels_table,
)
from stepscope.traces.device.work import Work, work_of
from stepscope.traces.model.window import window_of


def worked(made: MadeTrace) -> Work:
    return work_of(window_of(made.trace()))


def queues(made: MadeTrace) -> list[Queue]:
    work = worked(made)
    return queues_of(work, launches_in(work))


def figures(made: MadeTrace) -> DeviceFigures:
    return device_figures(window_of(made.trace()))


def test_any_call_that_started_work_is_a_launch() -> None:
    made = MadeTrace()
    names = ("cudaLaunchKernelExC", "cuLaunchKernelEx", "hipExtModuleLaunchKernel", "urEnqueueKernelLaunch")
    for number, name in enumerate(names, 1):
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        made.add(category, name, number * 10, 2, args={"correlation": number})
        made.kernel("kernel", number * 10 + 5, 3, correlation=number)
    made.runtime("cudaLaunchKernel", 90, 2, correlation=99)
    work = worked(made)
    table = launches_table(work, launches_in(work))
    assert sorted(row["call"] for row in table.to_rows()) == sorted(names)
    assert {row["delay_median_ns"] for row in table.to_rows()} == {5000}


def test_a_graph_is_launched_once() -> None:
    made = MadeTrace()
    made.runtime("cudaGraphLaunch", 0, 10, correlation=5)
    for start in (20, 30, 40):
        made.kernel("kernel", start, 5, correlation=5)
    made.kernel("elsewhere", 22, 5, correlation=5, stream=8)
    (queue,) = queues(made)
    assert (queue.launches, queue.most, queue.queued_ns, queue.span_ns) == (1, 1, 20_000, 20_000)
    found = figures(made)
    assert (found.graph_launches, found.launch_count, found.kernel_count) == (1, 1, 4)


def test_queue_over_time() -> None:
    made = MadeTrace()
    made.launched("a", at=0, start=10, dur=30)
    made.launched("b", at=2, start=40, dur=30)
    made.launched("c", at=4, start=70, dur=30)
    work = worked(made)
    (queue,) = queues(made)
    assert (queue.time_ns.tolist(), queue.length.tolist()) == (
        [0, 2_000, 4_000, 10_000, 40_000, 70_000],
        [1, 2, 3, 2, 1, 0],
    )
    assert queue_table(work, [queue]).rows == (("7", 3, 70_000, (10 + 38 + 66) / 70, 3, 0, 0, 0),)
    curve = queue_curve(work, [queue])
    assert len(curve.rows) == 500
    assert curve.rows[0] == ("7", 0, 1)
    assert max(row[2] for row in curve.rows) == 3


def test_clocks_that_disagree_make_nothing_negative() -> None:
    made = MadeTrace()
    made.launched("early", at=10, start=5, dur=30)
    (queue,) = queues(made)
    assert (queue.queued_ns, queue.most, queue.span_ns) == (0, 0, 0)
    assert figures(made).launch_delay_ns_median == 0
    assert figures(made).mean_queue is None


def full(slow: float, queued: int = 1024) -> MadeTrace:
    """Launches of 2 µs each while the device is busy; the last takes longer."""
    made = MadeTrace()
    made.kernel("long", 0, 10_000)
    for number in range(queued):
        made.launched("kernel", at=number * 3, start=10_000 + number, dur=1, call=2)
    made.launched("kernel", at=queued * 3, start=20_000, dur=1, call=slow)
    return made


def test_blocked_on_a_full_queue() -> None:
    made = full(slow=500)
    (queue,) = queues(made)
    assert (queue.blocked, queue.blocked_ns, queue.most) == (1, 498_000, 1025)
    # From the thousandth launch on, until 26 of the 1,025 have begun, one each microsecond.
    assert queue.full_ns == (10_025 - 999 * 3) * 1000
    assert figures(made).queue_full_ns == 498_000


def test_not_blocked() -> None:
    assert figures(full(slow=10)).queue_full_ns == 0
    assert figures(full(slow=500, queued=900)).queue_full_ns == 0


def test_short_kernels() -> None:
    made = MadeTrace()
    made.launched("tiny", at=0, start=10, dur=2, call=5)
    made.launched("tiny", at=20, start=30, dur=9.999, call=5)
    made.launched("tiny", at=40, start=50, dur=10, call=50)
    made.kernel("orphan", 70, 1)
    made.launched("large", at=80, start=90, dur=100)
    assert short_kernels_table(worked(made)).rows == (
        ("tiny", 2, 3, 11_999, 10_000, 1),
        ("orphan", 1, 1, 1_000, 0, 0),
    )
    found = figures(made)
    assert (found.kernel_count, found.short_kernel_count, found.short_kernel_ns) == (5, 3, 12_999)
