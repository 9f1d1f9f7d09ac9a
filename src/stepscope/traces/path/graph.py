"""Dependencies in one rank's trace, which the critical path follows: launches, streams, threads; causes of host time.

*Work* runs concurrently with the threads: kernels, copies, memsets, and host collectives on dedicated threads (gloo).
The start of a work item depends on the latest of: the end of the previous one on its stream (``STREAM``), the end of
one on another stream that it waited for (``EVENT``), its launch (``LAUNCH``).

A thread continues from instant to instant, except at its *exits*: instants until which it had been waiting for work to
end or (with a full queue) to begin, or for another thread (autograd's, while ``backward`` waits). Forward operators
precede their backward ones on any such path, so the profiler's arrows between them add no edge.

Waits: of the host for device work, of device work for other streams.

CUPTI's own records (``cuda_sync`` rows: which stream, which recorded event) are used where available. Without them, a
synchronizing call is assumed to have waited for the work launched before it that ended last before it returned. Work
whose thread called ``cudaStreamWaitEvent`` before the launch is assumed to have waited for the work of another stream
that ended last before it began.

A launch that found a thousand others queued waited until the device began the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.stalls import loader_rows
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Ints, Kind, Rows, named
from stepscope.traces.model.intervals import EMPTY, Spans
from stepscope.traces.model.kernel_names import is_communication, is_synchronizing
from stepscope.traces.model.window import Window

__all__ = [
    "CAUSES",
    "FAR_NS",
    "Cause",
    "Graph",
    "HostLine",
    "HostWaits",
    "StreamWork",
    "Via",
    "expanded",
    "graph_of",
    "host_waits",
    "lines_of",
    "stream_waits",
    "stream_work_of",
]

# -- waits ------------------------------------------------------------------------------------------------------------

STREAM_WAIT: Final = re.compile(r"StreamWaitEvent")
RECORDED_WAIT: Final = re.compile(r"Stream ?Wait")
TO_HOST: Final = re.compile(r"DtoH|Device\s*->\s*(Host|Pageable)", re.IGNORECASE)
LATE_NS: Final = 2_000
"""Clocks of host and device agree to about this."""
FULL_QUEUE: Final = 1_000
"""CUDA queues up to 1,024 launches."""
BLOCKED_NS: Final = 20_000
"""A shorter launch was not delayed by a full queue."""
TRIES: Final = 16


@dataclass(frozen=True, kw_only=True)
class StreamWork:
    """Device work that counts, by start; all columns have the same length."""

    row: Rows
    start_ns: Ints
    end_ns: Ints
    call: Rows
    """The launching slice; −1: unknown."""
    launch_ns: Ints
    """When the host began to launch it; its own start if unknown."""
    line: Ints
    """Equal for work of one stream of one device."""
    before: Ints
    """Index of the previous work on its stream; −1: none."""


@dataclass(frozen=True, kw_only=True)
class HostWaits:
    """Host calls that waited for the device or might have, in order of release."""

    call: Rows
    work: Ints
    """Index into ``StreamWork``."""
    at_ns: Ints
    """When it was released: between the call's start (then it did not wait) and its end."""
    for_start: np.ndarray
    """Whether it waited for the work to begin, not to end."""


def stream_work_of(window: Window) -> StreamWork:
    rows = window.device_rows
    slices = window.trace.slices
    call = window.launch[rows]
    start_ns = slices.start_ns[rows]
    line = _stream_key(slices.device[rows], slices.stream[rows])
    order = np.argsort(line, kind="stable")
    before = np.full(len(rows), -1, np.int64)
    same = line[order][1:] == line[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    return StreamWork(
        row=rows,
        start_ns=start_ns,
        end_ns=slices.end_ns[rows],
        call=call,
        launch_ns=np.where(call >= 0, slices.start_ns[call], start_ns),
        line=line,
        before=before,
    )


def _stream_key(device: np.ndarray, stream: np.ndarray) -> Ints:
    return device.astype(np.int64) << 32 | (stream.astype(np.int64) & 0xFFFFFFFF)


def host_waits(window: Window, work: StreamWork) -> HostWaits:
    trace, slices = window.trace, window.trace.slices
    if not len(work.row):
        none = np.empty(0, np.int64)
        return HostWaits(call=none.astype(np.int32), work=none, at_ns=none, for_start=none.astype(bool))
    calls = window.rows_of((Kind.RUNTIME,))
    syncing = calls[named(trace, calls, is_synchronizing)]
    # Calls that launch a copy themselves are handled below.
    syncing = syncing[~np.isin(syncing, work.call)]
    waited = _said_by_sync(window, work, syncing)
    unsaid = waited == -1
    waited[unsaid] = _last_ended(window, work, syncing[unsaid])
    copies = np.flatnonzero((work.call >= 0) & (slices.kind[work.row] == Kind.MEMCPY))
    to_host = named(trace, work.row[copies], TO_HOST.search)
    blocking = named(trace, work.call[copies], is_synchronizing)
    inside = work.end_ns[copies] <= slices.end_ns[work.call[copies]]
    copies = copies[(to_host & inside) | blocking]
    queued, freed = _full_queue(window, work, work.call[copies])
    call = np.concatenate([syncing, work.call[copies], queued])
    target = np.concatenate([waited, copies, freed])
    for_start = np.repeat([False, True], [len(call) - len(queued), len(queued)])
    known = target >= 0
    call, target, for_start = call[known], target[known], for_start[known]
    released = np.where(for_start, work.start_ns[target], work.end_ns[target])
    at_ns = np.clip(released, slices.start_ns[call], slices.end_ns[call])
    order = np.argsort(at_ns, kind="stable")
    return HostWaits(call=call[order], work=target[order], at_ns=at_ns[order], for_start=for_start[order])


def _said_by_sync(window: Window, work: StreamWork, calls: Rows) -> Ints:
    """Return the awaited work according to CUPTI, [calls]; −1: no record, −2: no such work."""
    trace, slices = window.trace, window.trace.slices
    out = np.full(len(calls), -1, np.int64)
    rows = trace.syncs.row
    if not len(rows) or not len(calls):
        return out
    order = np.argsort(slices.correlation[rows], kind="stable")
    known = slices.correlation[rows][order]
    at = np.minimum(np.searchsorted(known, slices.correlation[calls]), len(known) - 1)
    found = np.flatnonzero((known[at] == slices.correlation[calls]) & (known[at] > 0))
    side = order[at[found]]
    row = rows[side]
    on_stream = trace.syncs.on_stream[side]
    stream = np.where(on_stream >= 0, on_stream, slices.stream[row])
    recorded = _recorded_ns(window, trace.syncs.record_correlation[side])
    before_ns = np.where(recorded >= 0, recorded, slices.start_ns[calls[found]])
    last = _last_launched(work, slices.device[row], stream, before_ns)
    out[found] = np.where(last >= 0, last, -2)
    return out


def _recorded_ns(window: Window, correlations: Ints) -> Ints:
    """Return when the call with each correlation (``cudaEventRecord``) began, [n]; −1: not found."""
    slices = window.trace.slices
    calls = window.rows_of((Kind.RUNTIME,))
    order = np.argsort(slices.correlation[calls], kind="stable")
    known = slices.correlation[calls][order]
    if not len(known):
        return np.full(len(correlations), -1, np.int64)
    at = np.minimum(np.searchsorted(known, correlations), len(known) - 1)
    there = (known[at] == correlations) & (correlations > 0)
    return np.where(there, slices.start_ns[calls[order][at]], -1)


def _last_launched(work: StreamWork, device: np.ndarray, stream: np.ndarray, before_ns: Ints) -> Ints:
    """Return the last work launched on a stream (−1: the last to end on the device) before an instant; −1: none."""
    out = np.full(len(device), -1, np.int64)
    wanted = _stream_key(device, stream)
    for line in np.unique(wanted):
        waiting = np.flatnonzero(wanted == line)
        everywhere = int(stream[waiting[0]]) < 0
        own = np.flatnonzero(work.line >> 32 == line >> 32 if everywhere else work.line == line)
        own = own[np.argsort(work.launch_ns[own], kind="stable")]
        at = np.searchsorted(work.launch_ns[own], before_ns[waiting], side="left") - 1
        if everywhere and len(own):
            own = _latest_so_far(work.end_ns, own)
        out[waiting[at >= 0]] = own[at[at >= 0]]
    return out


def _latest_so_far(end_ns: Ints, own: Ints) -> Ints:
    """Return for each item the one that ends last among it and all before."""
    ends = end_ns[own]
    leads = ends >= np.maximum.accumulate(ends)
    return np.asarray(own[np.maximum.accumulate(np.where(leads, np.arange(len(own)), 0))])


def _last_ended(window: Window, work: StreamWork, calls: Rows) -> Ints:
    """Return for each call the earlier launched work that ended last before it returned; −1: none, or too far back."""
    slices = window.trace.slices
    return _ended_before(work, slices.end_ns[calls] + LATE_NS, slices.start_ns[calls], np.full(len(calls), -1))


def _ended_before(work: StreamWork, end_ns: Ints, launched_ns: Ints, not_on: Ints) -> Ints:
    """Return the work that ended last by ``end_ns``, launched before ``launched_ns``, not on line ``not_on``; [n]."""
    by_end = np.argsort(work.end_ns, kind="stable")
    at = np.searchsorted(work.end_ns[by_end], end_ns, side="right") - 1
    out = np.full(len(end_ns), -1, np.int64)
    open_ = np.flatnonzero(at >= 0)
    for back in range(TRIES):
        open_ = open_[at[open_] >= back]
        if not len(open_):
            break
        candidate = by_end[at[open_] - back]
        fits = (work.launch_ns[candidate] < launched_ns[open_]) & (work.line[candidate] != not_on[open_])
        out[open_[fits]] = candidate[fits]
        open_ = open_[~fits]
    return out


def _full_queue(window: Window, work: StreamWork, but: Rows) -> tuple[Rows, Ints]:
    """Find launches delayed by a full queue, and the work whose start made room; ``but``: calls to leave out."""
    slices = window.trace.slices
    calls = work.call[work.call >= 0]
    calls = np.unique(calls[slices.dur_ns[calls] >= BLOCKED_NS])
    begun = np.searchsorted(work.start_ns, slices.start_ns[calls], side="right")
    queued = np.searchsorted(np.sort(work.launch_ns), slices.start_ns[calls], side="left") - begun
    calls = calls[queued >= FULL_QUEUE]
    calls = np.setdiff1d(calls, but)
    freed = np.searchsorted(work.start_ns, slices.end_ns[calls], side="right") - 1
    for _ in range(TRIES):
        # Skip what the call itself launches.
        freed -= (freed >= 0) & (work.launch_ns[np.maximum(freed, 0)] >= slices.start_ns[calls])
    freed = np.where(work.launch_ns[np.maximum(freed, 0)] < slices.start_ns[calls], freed, -1)
    held_up = (freed >= 0) & (work.start_ns[np.maximum(freed, 0)] > slices.start_ns[calls])
    return calls[held_up], freed[held_up]


def stream_waits(window: Window, work: StreamWork) -> Ints:
    """Return the work of another stream that each item waited for, [work]; −1: none known."""
    trace = window.trace
    rows = trace.syncs.row
    waits = rows[named(trace, rows, RECORDED_WAIT.search)]
    return _recorded_waits(window, work, waits) if len(waits) else _guessed_waits(window, work)


def _recorded_waits(window: Window, work: StreamWork, waits: Rows) -> Ints:
    """Assign CUPTI's waits to the next work launched on the waiting stream."""
    trace, slices = window.trace, window.trace.slices
    out = np.full(len(work.row), -1, np.int64)
    side = np.searchsorted(trace.syncs.row, waits)
    call = window.launch[waits]
    called_ns = np.where(call >= 0, slices.start_ns[call], slices.start_ns[waits])
    recorded = _recorded_ns(window, trace.syncs.record_correlation[side])
    before_ns = np.where(recorded >= 0, recorded, called_ns)
    on_stream = trace.syncs.on_stream[side]
    source = _last_launched(work, slices.device[waits], on_stream, before_ns)
    source = np.where(on_stream >= 0, source, -1)
    waiting = _stream_key(slices.device[waits], slices.stream[waits])
    for line in np.unique(waiting[source >= 0]):
        own = np.flatnonzero(work.line == line)
        own = own[np.argsort(work.launch_ns[own], kind="stable")]
        mine = np.flatnonzero((waiting == line) & (source >= 0))
        first = np.searchsorted(work.launch_ns[own], called_ns[mine], side="left")
        for at, wait in zip(first.tolist(), mine.tolist(), strict=True):
            if at < len(own):
                waiter, candidate = own[at], source[wait]
                if candidate < waiter and (out[waiter] < 0 or work.end_ns[candidate] > work.end_ns[out[waiter]]):
                    out[waiter] = candidate
    return out


def _guessed_waits(window: Window, work: StreamWork) -> Ints:
    trace, slices = window.trace, window.trace.slices
    out = np.full(len(work.row), -1, np.int64)
    calls = window.rows_of((Kind.RUNTIME,))
    waits = calls[named(trace, calls, STREAM_WAIT.search)]
    if not len(waits):
        return out
    launched = np.flatnonzero(work.call >= 0)
    thread = slices.thread[work.call[launched]]
    since = np.where(work.before[launched] >= 0, work.launch_ns[work.before[launched]], -1)
    for each in np.unique(slices.thread[waits]):
        times = slices.start_ns[waits[slices.thread[waits] == each]]
        own = np.flatnonzero(thread == each)
        at = np.searchsorted(times, work.launch_ns[launched[own]], side="left") - 1
        called = np.where(at >= 0, times[np.maximum(at, 0)], -1)
        own, called = own[called > since[own]], called[called > since[own]]
        waiter = launched[own]
        source = _ended_before(work, work.start_ns[waiter], called, work.line[waiter])
        same_device = (source >= 0) & (work.line[source] >> 32 == work.line[waiter] >> 32)
        out[waiter] = np.where(same_device & (source < waiter), source, -1)
    return out


# -- host lines -------------------------------------------------------------------------------------------------------
# A line shows what a host thread does at each instant. It cuts the thread's time into pieces; each belongs to the
# innermost running slice, or to none (a gap: Python without ``with_stack``, or idle time). Where slices overlap without
# nesting, the one that began last gets the time.

FAR_NS = 1 << 62
"""Later than any instant of a trace."""


@dataclass(frozen=True, kw_only=True)
class HostLine:
    thread: int
    start_ns: Ints
    """Start of each piece, ascending; each ends where the next begins, and the last never ends."""
    row: Rows
    """The innermost slice; −1: none."""

    @cached_property
    def ends_ns(self) -> Ints:
        return np.append(self.start_ns[1:], FAR_NS)

    def at(self, times: Ints) -> np.ndarray:
        """Return the piece that contains each instant, [n]."""
        return np.searchsorted(self.start_ns, times, side="right") - 1


def lines_of(window: Window) -> dict[int, HostLine]:
    """Build the lines of all threads with host slices, keyed by index into ``Trace.threads``."""
    rows = window.host_rows
    threads = window.trace.slices.thread[rows]
    order = np.argsort(threads, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(threads[order])) + 1) if len(rows) else []
    return {int(window.trace.slices.thread[own[0]]): _line(window, own) for own in parts}


def _line(window: Window, rows: Rows) -> HostLine:
    """Build a line: time between two starts belongs to the first slice, after its end to its parent, and so on."""
    slices, parents = window.trace.slices, window.calls.parents
    until = np.append(slices.start_ns[rows[1:]], FAR_NS)
    at, now = slices.start_ns[rows], rows
    starts, owners = [np.array([-FAR_NS])], [np.array([-1], np.int32)]
    while len(now):
        end = np.minimum(np.where(now >= 0, slices.end_ns[now], FAR_NS), until)
        there = end > at
        starts.append(at[there])
        owners.append(now[there])
        goes_on = end < until
        at, until = end[goes_on], until[goes_on]
        now = parents[now[goes_on]]
    start_ns, row = np.concatenate(starts), np.concatenate(owners)
    order = np.argsort(start_ns, kind="stable")
    return HostLine(thread=int(slices.thread[rows[0]]), start_ns=start_ns[order], row=row[order])


# -- chains -----------------------------------------------------------------------------------------------------------
# Consecutive work items of a stream, each delayed by the previous one; a walk passes a chain in one go. The head of a
# chain was delayed by something else, or follows a collective, where walks stop.


@dataclass(frozen=True, kw_only=True)
class Chains:
    order: Ints
    """Work by stream, then by start; *place* is the index in this array."""
    place: Ints
    """[work]"""
    head: list[int]
    """[work]; the first item of its chain."""
    low: Ints
    """[work]; the place of the head."""
    start_ns: Ints
    """[places]"""
    line: Ints
    """[places]; the stream's number, ascending."""


def chains_of(stream: Ints, start_ns: Ints, follows: NDArray[np.bool_]) -> Chains:
    """Build the chains; ``follows`` [work]: delayed by the previous item on its stream, which is not a collective."""
    order = np.argsort(stream, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    head = np.maximum.accumulate(np.where(follows[order], 0, np.arange(len(order)))) if len(order) else order
    return Chains(
        order=order,
        place=place,
        head=order[head][place].tolist(),
        low=head[place],
        start_ns=start_ns[order],
        line=np.cumsum(np.diff(stream[order], prepend=stream[order][:1]) != 0),
    )


def expanded(
    chains: Chains, end_ns: Ints, start_ns: Ints, until_ns: Ints, work: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Expand stretches of chains that end in ``work``: one row per work item and one per delay before one.

    Returns the stretch, start, end and work item of each row, and whether it is the delay before it (1) or the item
    (0).
    """
    starts = chains.start_ns
    span = int(max(starts.max(initial=0), until_ns.max(initial=0))) + 2
    key = chains.line * span + starts
    top, low = chains.place[work], chains.low[work]
    first = np.clip(np.searchsorted(key, chains.line[top] * span + start_ns, side="right") - 1, low, top)
    last = np.clip(np.searchsorted(key, chains.line[top] * span + until_ns, side="left") - 1, low, top)
    count = last - first + 1
    of = np.repeat(np.arange(len(work)), count)
    at = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    own = chains.order[at]
    next_ns = np.where(at < last[of], starts[np.minimum(at + 1, len(starts) - 1)], until_ns[of])
    done_ns = np.where(at < last[of], np.minimum(end_ns[own], next_ns), next_ns)
    follower = chains.order[np.minimum(at + 1, len(starts) - 1)]
    which = np.concatenate([of, of])
    begins = np.maximum(np.concatenate([starts[at], done_ns]), start_ns[which])
    ends = np.concatenate([done_ns, next_ns])
    delay = np.repeat([0, 1], len(of))
    there = ends > begins
    return which[there], begins[there], ends[there], np.concatenate([own, follower])[there], delay[there]


# -- causes -----------------------------------------------------------------------------------------------------------
# Why time passes on the critical path; for the host, one cause per piece of a thread's line.

HOST_COLLECTIVE: Final = re.compile(r"^(gloo|mpi|ucc|ccl|xccl):")


class Cause(IntEnum):
    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    LAUNCH_DELAY = 3
    KERNEL_GAP = 4
    SYNCHRONIZATION = 5
    HOST_OPERATOR = 6
    HOST_RUNTIME = 7
    DATA_LOADING = 8
    HOST_PYTHON = 9
    OTHER = 10


CAUSES: Final = tuple(cause.name.lower() for cause in Cause)
BY_KIND: Final = np.full(256, int(Cause.HOST_PYTHON), np.int8)
BY_KIND[Kind.OP], BY_KIND[Kind.RUNTIME] = Cause.HOST_OPERATOR, Cause.HOST_RUNTIME


def host_communicates(name: str) -> bool:
    return HOST_COLLECTIVE.match(name) is not None


def host_causes(window: Window, lines: dict[int, HostLine]) -> dict[int, NDArray[np.int8]]:
    """Return the causes by thread, [pieces of its line]."""
    trace, slices = window.trace, window.trace.slices
    loaders = loader_rows(window)
    out = {}
    for thread, line in lines.items():
        row = line.row
        kind = np.where(row >= 0, slices.kind[row], Kind.OTHER)
        cause = BY_KIND[kind]
        calls = np.flatnonzero(kind == Kind.RUNTIME)
        cause[calls[named(trace, row[calls], is_synchronizing)]] = Cause.SYNCHRONIZATION
        ranges = np.flatnonzero(kind == Kind.ANNOTATION)
        cause[ranges[named(trace, row[ranges], host_communicates)]] = Cause.COMMUNICATION
        own = loaders[slices.thread[loaders] == thread]
        if len(own):
            loading = intervals.merge(slices.start_ns[own], slices.end_ns[own])
            cause[intervals.holds(loading, line.start_ns)] = Cause.DATA_LOADING
        out[thread] = cause
    return out


# -- graph ------------------------------------------------------------------------------------------------------------

AUTOGRAD: Final = re.compile(r"Backward\d*$|^autograd::|^torch::autograd::")
ISSUES: Final = re.compile(r"^c10d::")
LONG_WAIT_NS: Final = 100_000
"""An operator's own time of at least this may be waiting."""
AFTER_NS: Final = 200_000
"""Minimum tolerance between the end of a collective and the continuation of its waiter."""


class Via(IntEnum):
    """What the start of a work item, or a thread's continuation at an exit, depended on."""

    NOTHING = 0
    STREAM = 1
    EVENT = 2
    LAUNCH = 3
    """The target is a thread."""
    END = 4
    """Exits only: the end of a work item."""
    START = 5
    """Exits only: the start of a work item."""
    THREAD = 6
    """Exits only: another thread."""


@dataclass(frozen=True, kw_only=True)
class Exits:
    """The exits of one thread, in order of time."""

    at_ns: list[int]
    since_ns: list[int]
    """When it began to wait."""
    via: list[int]
    target: list[int]
    """A work item or a thread."""


@dataclass(frozen=True, kw_only=True)
class WorkColumns:
    """One entry per work item: device work by start, then host collectives."""

    row: Rows
    """Its slice."""
    start_ns: Ints
    end_ns: Ints
    collective: NDArray[np.bool_]
    call: Rows
    """The launching call; −1: unknown."""
    launch_thread: Ints
    """−1: unknown."""
    launched_ns: Ints
    """When its launch released it; its start if unknown."""
    before: Ints
    """The previous one on its stream; −1: none."""
    awaited: Ints
    """The one on another stream that it waited for; −1: none known."""
    via: Ints
    """Which of them was the latest."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Columns of work are also lists, in which walks and replays read single items many times faster."""

    window: Window
    lines: dict[int, HostLine]
    main: list[int]
    """[steps]; the thread that the step ran on; −1: none."""
    columns: WorkColumns
    chains: Chains
    """Chains of one stream or, for host collectives, of one thread."""
    exits: dict[int, Exits]
    """By thread; where it had been waiting."""
    checks: dict[int, Exits]
    """By thread; the exits, and where it would have waited had it arrived earlier (``since_ns`` is ``at_ns``)."""

    @property
    def row(self) -> Rows:
        return self.columns.row

    @property
    def call(self) -> Rows:
        return self.columns.call

    @cached_property
    def work_ns(self) -> Ints:
        """[work]; durations."""
        return self.columns.end_ns - self.columns.start_ns

    @cached_property
    def start_ns(self) -> list[int]:
        return self.columns.start_ns.tolist()  # type: ignore[no-any-return]

    @cached_property
    def end_ns(self) -> list[int]:
        return self.columns.end_ns.tolist()  # type: ignore[no-any-return]

    @cached_property
    def collective(self) -> list[bool]:
        return self.columns.collective.tolist()  # type: ignore[no-any-return]

    @cached_property
    def launch_thread(self) -> list[int]:
        return self.columns.launch_thread.tolist()  # type: ignore[no-any-return]

    @cached_property
    def launched_ns(self) -> list[int]:
        return self.columns.launched_ns.tolist()  # type: ignore[no-any-return]

    @cached_property
    def before(self) -> list[int]:
        return self.columns.before.tolist()  # type: ignore[no-any-return]

    @cached_property
    def awaited(self) -> list[int]:
        return self.columns.awaited.tolist()  # type: ignore[no-any-return]

    @cached_property
    def via(self) -> list[int]:
        return self.columns.via.tolist()  # type: ignore[no-any-return]

    @cached_property
    def causes(self) -> dict[int, NDArray[np.int8]]:
        """By thread: one cause per piece of its line, see ``host_causes``."""
        return host_causes(self.window, self.lines)


def graph_of(window: Window) -> Graph:
    slices = window.trace.slices
    lines = lines_of(window)
    work = stream_work_of(window)
    main = _main_threads(window)
    collectives = _host_collectives(window)
    row = np.concatenate([work.row, collectives])
    start_ns, end_ns = slices.start_ns[row], slices.end_ns[row]
    call = np.concatenate([work.call, np.full(len(collectives), -1, np.int32)])
    asker, lane_before = _asked(window, collectives, main, len(work.row))
    launch_thread = np.concatenate([np.where(work.call >= 0, slices.thread[work.call], -1), asker])
    waits = host_waits(window, work)
    # A call that waits for the work it launches itself had launched it before it began to wait.
    waiting = np.isin(call, waits.call[~waits.for_start])
    launch_end_ns = np.where(waiting, slices.start_ns[call], slices.end_ns[call])
    launched = np.where(call >= 0, np.minimum(launch_end_ns, start_ns), start_ns)
    before = np.concatenate([work.before, lane_before])
    awaited = np.concatenate([stream_waits(window, work), np.full(len(collectives), -1)])
    exits = _Exits(window, lines)
    exits.add_waits(work, waits)
    exits.add_threads(main)
    exits.add_collectives(collectives, len(work.row), set(main) | set(asker.tolist()))
    collective = named(window.trace, row, is_communication) & (slices.kind[row] == Kind.KERNEL)
    collective[len(work.row) :] = True
    via = _latest(start_ns, end_ns, launched, launch_thread, before, awaited)
    stream = np.concatenate([work.line, -1 - slices.thread[collectives].astype(np.int64)])
    follows = (via == Via.STREAM) & ~np.append(collective, False)[before] & ~collective
    return Graph(
        window=window,
        lines=lines,
        main=main,
        columns=WorkColumns(
            row=row,
            start_ns=start_ns,
            end_ns=end_ns,
            collective=collective,
            call=call,
            launch_thread=launch_thread,
            launched_ns=launched,
            before=before,
            awaited=awaited,
            via=via,
        ),
        chains=chains_of(stream, start_ns, follows),
        exits=exits.sorted(lambda each: each[1] < each[0]),
        checks=exits.sorted(lambda each: True),
    )


def _latest(start_ns: Ints, end_ns: Ints, launched: Ints, thread: Ints, before: Ints, awaited: Ints) -> np.ndarray:
    """Return what each start depended on, [work]; for ties the own stream, then the other stream."""
    none = np.int64(-1) << 62
    ends = np.append(end_ns, none)
    times = np.stack(
        [
            np.full(len(start_ns), none + 1),
            np.minimum(np.where(before >= 0, ends[before], none), start_ns),
            np.minimum(np.where(awaited >= 0, ends[awaited], none), start_ns),
            np.where(thread >= 0, launched, none),
        ]
    )
    return np.argmax(times, axis=0) if len(start_ns) else np.empty(0, np.int64)


def _main_threads(window: Window) -> list[int]:
    """Return the thread of each profiler step, [steps]; without profiler steps, the busiest thread.

    The busiest is the one whose outermost slices take most time. It is always a thread with slices, so it has a line.
    """
    slices = window.trace.slices
    rows = window.host_rows
    if not len(rows):
        return [-1] * len(window.steps)
    top = rows[window.calls.depth[rows] == 0]
    seen = np.unique(slices.thread[rows])
    busiest = int(seen[np.argmax(np.bincount(slices.thread[top], slices.dur_ns[top], seen[-1] + 1)[seen])])
    out = []
    for step in window.steps:
        first = np.searchsorted(slices.start_ns, step.start_ns, side="left")
        last = np.searchsorted(slices.start_ns, step.start_ns, side="right")
        own = [row for row in range(first, last) if step.name and window.trace.name(row) == step.name]
        own = [row for row in own if slices.kind[row] in (Kind.OP, Kind.ANNOTATION)]
        threads = [int(slices.thread[row]) for row in own]
        out.append(threads[0] if threads and threads[0] in seen else busiest)
    return out


def _host_collectives(window: Window) -> Rows:
    """Return host collectives on threads that do nothing else: outermost slices, by start."""
    rows = window.rows_of((Kind.OP, Kind.ANNOTATION))
    rows = rows[named(window.trace, rows, host_communicates)]
    return np.asarray(rows[window.calls.depth[rows] == 0])


def _asked(window: Window, collectives: Rows, main: list[int], offset: int) -> tuple[Ints, Ints]:
    """Return the requesting thread of each collective and the previous one on its own thread, [collectives].

    The requester is the thread of the last ``c10d`` operator begun before it. The previous collective counts if it
    ended after the request, else −1.
    """
    slices = window.trace.slices
    ops = window.rows_of((Kind.OP,))
    ops = np.append(ops[named(window.trace, ops, ISSUES.match)], np.int32(-1))
    at = np.searchsorted(slices.start_ns[ops[:-1]], slices.start_ns[collectives], side="right") - 1
    known = ops[at] >= 0
    asker = np.where(known, slices.thread[ops[at]], main[0] if main else -1).astype(np.int64)
    asked_ns = np.where(known, slices.end_ns[ops[at]], 0)
    before = np.full(len(collectives), -1, np.int64)
    last: dict[int, int] = {}
    for index, thread in enumerate(slices.thread[collectives].tolist()):
        earlier = last.get(thread, -1)
        if earlier >= 0 and asked_ns[index] < slices.end_ns[collectives[earlier]]:
            before[index] = offset + earlier
        last[thread] = index
    return asker, before


class _Exits:
    def __init__(self, window: Window, lines: dict[int, HostLine]) -> None:
        self.window, self.lines = window, lines
        self.found: dict[int, list[tuple[int, int, int, int]]] = {thread: [] for thread in lines}

    def sorted(self, wanted: Callable[[tuple[int, int, int, int]], bool]) -> dict[int, Exits]:
        out = {}
        for thread, every in self.found.items():
            found = [each for each in every if wanted(each)]
            at, since, via, target = zip(*sorted(found), strict=True) if found else ((), (), (), ())
            out[thread] = Exits(at_ns=list(at), since_ns=list(since), via=list(via), target=list(target))
        return out

    def add_waits(self, work: StreamWork, waits: HostWaits) -> None:
        slices = self.window.trace.slices
        threads = slices.thread[waits.call].tolist()
        since = slices.start_ns[waits.call].tolist()
        for thread, at, began, index, for_start in zip(
            threads, waits.at_ns.tolist(), since, waits.work.tolist(), waits.for_start.tolist(), strict=True
        ):
            # Work that had not begun by then cannot have delayed the call: the clocks disagree.
            if work.start_ns[index] < at or began == at or for_start:
                self.found[thread].append((at, began, Via.START if for_start else Via.END, index))

    def add_threads(self, main: list[int]) -> None:
        """Add waits of the main thread for autograd's threads, and of other threads for the main thread.

        Whatever a thread does is assumed to depend on what the main thread had done when it began.
        """
        slices = self.window.trace.slices
        ops = self.window.rows_of((Kind.OP,))
        helpers = set(slices.thread[ops[named(self.window.trace, ops, AUTOGRAD.search)]].tolist())
        rows = self.window.host_rows
        rows = rows[self.window.calls.depth[rows] == 0]
        for thread in sorted(set(self.lines) - set(main)):
            own = rows[slices.thread[rows] == thread]
            busy = intervals.merge(slices.start_ns[own], slices.end_ns[own])
            for waiter in sorted(set(main) - {-1}):
                begins, ends = self._waits_for(waiter, busy) if thread in helpers else (EMPTY.start_ns, EMPTY.end_ns)
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                    self.found[waiter].append((end, begin, Via.THREAD, thread))
                alone = np.searchsorted(ends, busy.start_ns, side="right") == np.searchsorted(begins, busy.end_ns)
                self._follow(thread, waiter, busy, np.union1d(begins, busy.start_ns[alone]))

    def _waits_for(self, waiter: int, busy: Spans) -> tuple[Ints, Ints]:
        """Return when the waiter waits for the busy thread.

        It waits while it shows no activity and the other thread is busy for at least half of the time from its first
        span there to its last.
        """
        line, slices = self.lines[waiter], self.window.trace.slices
        first, last = line.at(busy.start_ns), line.at(busy.end_ns - 1)
        count = last - first + 1
        of = np.repeat(np.arange(len(first)), count)
        piece = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
        starts = np.maximum(busy.start_ns[of], line.start_ns[piece])
        ends = np.minimum(busy.end_ns[of], line.ends_ns[piece])
        row = line.row[piece]
        kind = np.where(row >= 0, slices.kind[row], Kind.ANNOTATION)
        long_op = (kind == Kind.OP) & (line.ends_ns[piece] - line.start_ns[piece] >= LONG_WAIT_NS)
        idle = np.isin(kind, (Kind.ANNOTATION, Kind.PYTHON)) | long_op
        piece, starts, ends = piece[idle], starts[idle], ends[idle]
        heads = np.flatnonzero(np.diff(piece, prepend=-1))
        if not len(heads):
            return EMPTY.start_ns, EMPTY.end_ns
        begins, until = starts[heads], np.maximum.reduceat(ends, heads)
        helped = 2 * np.add.reduceat(ends - starts, heads) >= until - begins
        return begins[helped], until[helped]

    def _follow(self, thread: int, leader: int, busy: Spans, begins: Ints) -> None:
        """Add exits: the thread could not begin before the leader arrived there."""
        before = np.searchsorted(busy.start_ns, begins, side="left") - 1
        ended = np.append(busy.end_ns, -FAR_NS)[before]
        for at, since in zip(begins.tolist(), np.minimum(ended, begins - 1).tolist(), strict=True):
            self.found[thread].append((at, since, Via.THREAD, leader))

    def add_collectives(self, collectives: Rows, offset: int, waiters: set[int]) -> None:
        """Add waits for host collectives: a thread that shows no activity until one has ended waited for it."""
        slices = self.window.trace.slices
        for waiter in sorted(waiters & set(self.lines)):
            line = self.lines[waiter]
            best: dict[int, tuple[int, int]] = {}
            for index, row in enumerate(collectives.tolist()):
                for piece, at in self._waited(line, int(slices.start_ns[row]), int(slices.end_ns[row])):
                    best[piece] = max(best.get(piece, (-1, -1)), (at, offset + index))
            for piece, (at, index) in best.items():
                self.found[waiter].append((at, int(line.start_ns[piece]), Via.END, index))

    def _waited(self, line: HostLine, start: int, end: int) -> list[tuple[int, int]]:
        """Return the piece of a line in which the end of a collective was awaited, and until when; at most one."""
        trace, slices = self.window.trace, self.window.trace.slices
        at = int(np.searchsorted(line.start_ns, end, side="left")) - 1
        for piece in (at, at - 1):
            # The slice may end slightly after the waiting thread has continued.
            if piece < 0:
                continue
            begin, until = int(line.start_ns[piece]), int(line.ends_ns[piece])
            row = int(line.row[piece])
            waits = row < 0 or slices.kind[row] in (Kind.ANNOTATION, Kind.PYTHON) or ISSUES.match(trace.name(row))
            released = min(end, until)
            waited = released - max(begin, start)
            if waits and waited > max(end - until, 0) and until - released <= max(AFTER_NS, (until - begin) // 4):
                return [(piece, released)]
        return []
