"""Why nothing ran on a stream: the gaps between its pieces of work, by cause.

A gap lasts from the latest end before a piece of work (kernel, copy or memset) to its start.  It is a *host wait* if
the call that launched that work began only after the gap had; else a *kernel wait* if it is shorter than 30 µs, which
is what starting a kernel takes; else *other*: the work was queued in time but could not start, as when the stream waits
for an event of another.  Where the launching call is not known, a gap is no host wait.  Before the first work and
after the last there is no gap, so that gaps and work together are the stream's span.

*sync*: the part of the host waits in which the thread that was to launch was held up in a call that waits for the
device (``cudaStreamSynchronize``, ``cudaMemcpy``, a copy to pageable memory …).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.work import Work, work_of
from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.runtime_names import is_synchronising
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = [
    "Gaps",
    "StreamIdle",
    "gaps_of",
    "idle_by_lane",
    "idle_by_operator",
    "idle_of",
    "idle_table",
    "on_one_stream",
    "synchronising_calls",
]

KERNEL_WAIT_NS: Final = 30_000
HOST, KERNEL, OTHER = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class StreamIdle:
    host_wait_ns: int
    kernel_wait_ns: int
    other_ns: int
    sync_ns: int
    """Part of ``host_wait_ns``."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Those longer than nothing, stream by stream and by time."""

    work: NDArray[np.int64]
    """Index of the work that ended it."""
    start_ns: Ints
    gap_ns: Ints
    cause: NDArray[np.int8]
    sync_ns: Ints


def on_one_stream(work: Work) -> Work:
    """The same as if all of it were on one stream: its gaps are the idle time of the device as a whole."""
    return replace(work, lane=np.zeros(len(work), np.int64), lanes=("all",) if len(work) else ())


def idle_of(window: Window, work: Work | None = None) -> dict[str, StreamIdle]:
    """By stream; ``work``: where it is known already."""
    work = work_of(window) if work is None else work
    return idle_by_lane(work, gaps_of(work))


def idle_by_lane(work: Work, gaps: Gaps) -> dict[str, StreamIdle]:
    sums = {name: column.tolist() for name, column in _sums(work, gaps).items()}
    return {
        lane: StreamIdle(**{name: column[index] for name, column in sums.items()})
        for index, lane in enumerate(work.lanes)
    }


def gaps_of(work: Work) -> Gaps:
    order = work.by_lane
    lane, start_ns, end_ns = work.lane[order], work.start_ns[order], work.end_ns[order]
    # Lanes are moved far apart, so that the running maximum starts afresh with each.
    shift_ns = lane * (int(end_ns.max()) + 1) if len(order) else lane
    before_ns = np.maximum.accumulate(end_ns + shift_ns)[:-1] - shift_ns[1:]
    same = lane[1:] == lane[:-1]
    at = np.flatnonzero(same & (start_ns[1:] > before_ns))
    index = order[at + 1]
    began_ns, gap_ns = before_ns[at], start_ns[at + 1] - before_ns[at]
    host = work.known[index] & (work.call_start_ns[index] > began_ns)
    cause = np.where(host, HOST, np.where(gap_ns < KERNEL_WAIT_NS, KERNEL, OTHER)).astype(np.int8)
    sync_ns = np.zeros(len(at), np.int64)
    sync_ns[host] = _synchronising_ns(work, index[host], began_ns[host])
    return Gaps(work=index, start_ns=began_ns, gap_ns=gap_ns, cause=cause, sync_ns=sync_ns)


def synchronising_calls(work: Work) -> Rows:
    """Calls of the runtime that wait for the device, by start."""
    trace, window = work.window.trace, work.window
    calls = window.rows_of((Kind.RUNTIME,))
    waits = trace.names_where(is_synchronising)[trace.slices.name[calls]]
    to_pageable = work.known & ~work.kernel
    to_pageable[to_pageable] = trace.names_where(lambda name: "-> Pageable" in name)[work.name[to_pageable]]
    holds = np.zeros(len(trace), bool)
    holds[calls[waits]] = True
    holds[work.launch[to_pageable]] = True
    return np.flatnonzero(holds).astype(np.int32)


def _synchronising_ns(work: Work, index: NDArray[np.int64], began_ns: Ints) -> Ints:
    """How much of each host wait, up to the launching call, its thread spent in calls that wait for the device."""
    slices = work.window.trace.slices
    calls = synchronising_calls(work)
    thread = slices.thread[work.launch[index]]
    until_ns = np.minimum(work.call_start_ns[index], work.start_ns[index])
    out = np.zeros(len(index), np.int64)
    for each in np.intersect1d(thread, slices.thread[calls]):
        own = calls[slices.thread[calls] == each]
        held = intervals.merge(slices.start_ns[own], slices.end_ns[own])
        mine = thread == each
        out[mine] = intervals.covered(began_ns[mine], until_ns[mine], held)
    return out


def _sums(work: Work, gaps: Gaps) -> dict[str, Ints]:
    """[lanes] each, by the names of ``StreamIdle``."""
    lane = work.lane[gaps.work]

    def total(values: Ints, which: NDArray[np.bool_]) -> Ints:
        return np.bincount(lane[which], values[which], minlength=len(work.lanes)).astype(np.int64)

    return {
        "host_wait_ns": total(gaps.gap_ns, gaps.cause == HOST),
        "kernel_wait_ns": total(gaps.gap_ns, gaps.cause == KERNEL),
        "other_ns": total(gaps.gap_ns, gaps.cause == OTHER),
        "sync_ns": total(gaps.sync_ns, gaps.cause == HOST),
    }


def idle_table(work: Work, gaps: Gaps) -> Table:
    """The busiest stream first."""
    sums = {name: column.tolist() for name, column in _sums(work, gaps).items()}
    counts = np.bincount(work.lane, minlength=len(work.lanes)).tolist()
    gap_counts = np.bincount(work.lane[gaps.work], minlength=len(work.lanes)).tolist()
    rows = []
    for index, lane in enumerate(work.lanes):
        own = work.lane == index
        span_ns = int(work.end_ns[own].max() - work.start_ns[own].min())
        causes = [column[index] for column in sums.values()]
        idle_ns = sum(causes[:3])
        share = idle_ns / span_ns if span_ns else None
        busy_ns = span_ns - idle_ns
        rows.append((lane, counts[index], span_ns, busy_ns, gap_counts[index], idle_ns, share, *causes))
    return table_of(
        "idle",
        "Idle time by stream and cause",
        ("stream", "work", "span_ns", "busy_ns", "gaps", "idle_ns", "idle_share", *sums),
        sorted(rows, key=lambda row: -row[3]),
        note="host wait: launched too late; kernel wait: under 30 µs although launched in time; other: launched in "
        "time but held up; sync: the part of host wait in which the host waited for the device.",
    )


def idle_by_operator(work: Work, gaps: Gaps) -> Table:
    """Whose launch ended the host waits of each stream; the costliest first."""
    host = gaps.cause == HOST
    index, gap_ns, sync_ns = gaps.work[host], gaps.gap_ns[host], gaps.sync_ns[host]
    owner = work.owner[index].astype(np.int64)
    keys, place = np.unique(work.lane[index] * (len(work.window.trace.strings) + 1) + owner + 1, return_inverse=True)
    place = place.reshape(-1)
    longest_ns = np.zeros(len(keys), np.int64)
    np.maximum.at(longest_ns, place, gap_ns)
    columns = (
        np.bincount(place, minlength=len(keys)),
        np.bincount(place, gap_ns, minlength=len(keys)).astype(np.int64),
        np.bincount(place, sync_ns, minlength=len(keys)).astype(np.int64),
        longest_ns,
    )
    order = np.argsort(-columns[1], kind="stable")
    text, width = work.window.trace.text, len(work.window.trace.strings) + 1
    return table_of(
        "idle_by_operator",
        "What was launched too late",
        ("stream", "operator", "gaps", "host_wait_ns", "sync_ns", "longest_ns"),
        (
            (work.lanes[key // width], text(key % width - 1), *values)
            for key, *values in zip(keys[order].tolist(), *(column[order].tolist() for column in columns), strict=True)
        ),
        limit=100,
        note="The operator whose launch ended the wait, or the launching call where no operator is known.",
    )
