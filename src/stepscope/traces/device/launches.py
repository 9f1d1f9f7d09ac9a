"""How the host feeds the device: the cost of launches, how long work waits, and how much of it is queued.

A *launch* is a runtime call whose work is in the trace, whatever its name: ``cudaLaunchKernel``, ``cuLaunchKernelEx``,
``hipExtModuleLaunchKernel``, an asynchronous copy, Intel's calls. A CUDA graph's launch is one launch, however many
kernels it starts; its stream and start are those of its first work. *delay*: from the start of the call to the start of
the work, including queueing behind other work. A launch is *queued* for exactly its delay, so the mean queue is the sum
of delays divided by the time.

A stream holds about 1,024 launches; the next call waits until there is room. A launch counts as *blocked* if at its
start at least 1,000 are queued on its stream and it takes more than five times the median duration of calls with its
name. Only the time beyond that median counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.work import Work
from stepscope.traces.model.columns import Codes, Ints, Rows
from stepscope.traces.model.tables import Table, grouped, sums_of, table_of

__all__ = [
    "SHORT_NS",
    "Launches",
    "Queue",
    "launches_in",
    "launches_table",
    "queue_curve",
    "queue_table",
    "queues_of",
    "short_kernels_table",
]

SHORT_NS: Final = 10_000
SLOW_CALL_NS: Final = 50_000
LONG_DELAY_NS: Final = 100_000
FULL: Final = 1000
"""Slightly less than the limit: the trace may have lost some."""
UNUSUAL: Final = 5
POINTS: Final = 500
"""Points of the curve, over all streams."""
STREAMS: Final = 4
"""Maximum number of streams with a curve."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches by the start of the calls."""

    row: Rows
    """The call."""
    name: Codes
    start_ns: Ints
    call_ns: Ints
    lane: NDArray[np.int64]
    starts_work_ns: Ints
    """When its first work began, but never before the call."""
    work: Ints
    """Number of work items."""
    work_ns: Ints
    """Sum of their durations."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def delay_ns(self) -> Ints:
        return self.starts_work_ns - self.start_ns


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue of one stream."""

    lane: int
    launches: int
    span_ns: int
    """From the first launch to the last start of work; the following figures are within it."""
    most: int
    queued_ns: int
    """Sum of all delays."""
    full_ns: int
    """While at least 1,000 were queued."""
    blocked: int
    """Number of calls."""
    blocked_ns: int
    time_ns: Ints
    """When the length changes, ascending."""
    length: Ints
    """From then on."""


def launches_in(work: Work) -> Launches:
    slices = work.window.trace.slices
    known = np.flatnonzero(work.known)
    # Work is sorted by start, so the first index of a call is its first work.
    row, first, at = np.unique(work.launch[known], return_index=True, return_inverse=True)
    at = at.reshape(-1)
    first = known[first]
    start_ns = slices.start_ns[row]
    return Launches(
        row=row,
        name=slices.name[row],
        start_ns=start_ns,
        call_ns=slices.dur_ns[row],
        lane=work.lane[first],
        starts_work_ns=np.maximum(work.start_ns[first], start_ns),
        work=np.bincount(at, minlength=len(row)),
        work_ns=np.bincount(at, work.dur_ns[known], minlength=len(row)).astype(np.int64),
    )


def launches_table(work: Work, launches: Launches) -> Table:
    """Build one row per name of a launching call, the longest total first."""
    name = launches.name
    calls, delays = grouped(name, launches.call_ns), grouped(name, launches.delay_ns)
    columns = (
        sums_of(calls, name, launches.work),
        calls.total,
        calls.median,
        calls.most,
        delays.median,
        delays.most,
        sums_of(calls, name, launches.work_ns < launches.call_ns),
        sums_of(calls, name, launches.call_ns > SLOW_CALL_NS),
        sums_of(calls, name, launches.delay_ns > LONG_DELAY_NS),
    )
    unknown = int((~work.known).sum())
    return table_of(
        "launches",
        "Launches by call",
        LAUNCH_COLUMNS,
        (
            (work.window.trace.text(int(calls.key[place])), calls.count[place], *(column[place] for column in columns))
            for place in np.argsort(-calls.total, kind="stable").tolist()
        ),
        note="delay: from the start of the call to the start of its work; slow calls take over 50 µs, long delays over "
        "100 µs." + (f"  {unknown} work items have no launch in the trace." if unknown else ""),
    )


LAUNCH_COLUMNS: Final = (
    "call", "count", "work", "call_ns", "call_median_ns", "call_max_ns", "delay_median_ns", "delay_max_ns",
    "shorter_than_call", "slow_calls", "long_delays",
)  # fmt: skip


def short_kernels_table(work: Work) -> Table:
    """List kernels shorter than 10 µs by name, the most frequent first."""
    slices = work.window.trace.slices
    groups = work.by_kernel
    short = work.kernel & (work.dur_ns < SHORT_NS)
    name, dur_ns = work.name[short], work.dur_ns[short]
    call_ns = np.where(work.known[short], slices.dur_ns[work.launch[short]], 0)
    counts = sums_of(groups, name, np.ones(len(name), np.int64))
    columns = (sums_of(groups, name, dur_ns), sums_of(groups, name, call_ns), sums_of(groups, name, dur_ns < call_ns))
    order = [place for place in np.argsort(-counts, kind="stable").tolist() if counts[place]]
    strings = work.window.trace.strings
    return table_of(
        "short_kernels",
        "Kernels under 10 µs",
        ("name", "count", "of_count", "total_ns", "call_ns", "shorter_than_call"),
        (
            (strings[code], counts[place], groups.count[place], *(c[place] for c in columns))
            for place in order
            for code in [int(groups.key[place])]
        ),
        limit=100,
        note="call_ns: host time spent launching them.",
    )


def queues_of(work: Work, launches: Launches) -> list[Queue]:
    """Return the queue of each stream with launches, the one with most launches first."""
    columns = (launches.start_ns, launches.starts_work_ns, launches.call_ns, _usual_ns(launches))
    queues = [
        _queue(lane, *(column[launches.lane == lane] for column in columns))
        for lane in np.unique(launches.lane).tolist()
    ]
    return sorted(queues, key=lambda queue: -queue.launches)


def _usual_ns(launches: Launches) -> Ints:
    """Return the median duration of calls with the same name, [launches]."""
    calls = grouped(launches.name, launches.call_ns)
    return calls.median[np.searchsorted(calls.key, launches.name)]


def _queue(lane: int, start_ns: Ints, out_ns: Ints, call_ns: Ints, usual_ns: Ints) -> Queue:
    time_ns = np.concatenate([start_ns, out_ns])
    order = np.argsort(time_ns, kind="stable")
    time_ns, length = time_ns[order], np.cumsum(np.repeat([1, -1], len(start_ns))[order])
    # Changes at the same instant count as one.
    last = np.append(time_ns[1:] != time_ns[:-1], True)
    time_ns, length = time_ns[last], length[last]
    lasts_ns = np.diff(time_ns)
    blocked = (length[np.searchsorted(time_ns, start_ns)] >= FULL) & (call_ns > UNUSUAL * usual_ns)
    return Queue(
        lane=lane,
        launches=len(start_ns),
        span_ns=int(time_ns[-1] - time_ns[0]),
        most=int(length.max()),
        queued_ns=int((out_ns - start_ns).sum()),
        full_ns=int(lasts_ns[length[:-1] >= FULL].sum()),
        blocked=int(blocked.sum()),
        blocked_ns=int((call_ns - usual_ns)[blocked].sum()),
        time_ns=time_ns,
        length=length,
    )


def queue_table(work: Work, queues: list[Queue]) -> Table:
    return table_of(
        "queue",
        "Launches queued by stream",
        ("stream", "launches", "span_ns", "mean_length", "max_length", "full_ns", "blocked_calls", "blocked_ns"),
        (
            (
                work.lanes[each.lane],
                each.launches,
                each.span_ns,
                each.queued_ns / each.span_ns if each.span_ns else None,
                each.most,
                each.full_ns,
                each.blocked,
                each.blocked_ns,
            )
            for each in queues
        ),
        note="Queued: launched but not started.  full: at least 1,000 queued; blocked: extra time of calls that then "
        "took over five times as long as usual.",
    )


def queue_curve(work: Work, queues: list[Queue]) -> Table:
    """Return the longest queue in equal time intervals, for the streams with most launches."""
    shown = [each for each in queues[:STREAMS] if each.span_ns]
    rows = []
    for each in shown:
        first_ns, last_ns = int(each.time_ns[0]), int(each.time_ns[-1])
        edges = np.unique(np.linspace(first_ns, last_ns, POINTS // len(shown) + 1).astype(np.int64))
        # An interval begins with the length since the last change before it and ends with that of the last change in
        # it.
        first = np.searchsorted(each.time_ns, edges[:-1], side="right") - 1
        last = np.searchsorted(each.time_ns, edges[1:], side="left") - 1
        most = np.maximum(np.maximum.reduceat(each.length[:-1], first), each.length[last])
        rows += [(work.lanes[each.lane], *point) for point in zip(edges[:-1].tolist(), most.tolist(), strict=True)]
    return table_of(
        "queue_curve",
        "Launches queued over time",
        ("stream", "start_ns", "max_length"),
        rows,
        note="The longest queue between start_ns and the next row's, for the four streams with most launches.",
    )
