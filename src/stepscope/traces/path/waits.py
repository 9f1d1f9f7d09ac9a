"""Waits: host calls for device work, device work for work of other streams; and the activity of each host thread.

CUPTI's own records (``cuda_sync`` rows: which stream, which recorded event) are used where available. Without them, a
synchronizing call is assumed to have waited for the work launched before it that ended last before it returned. Work
whose thread called ``cudaStreamWaitEvent`` before the launch is assumed to have waited for the work of another stream
that ended last before it began.

A launch that found a thousand others queued waited until the device began the next one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from stepscope.traces.model.columns import Ints, Kind, Rows, named
from stepscope.traces.model.kernel_names import is_synchronising
from stepscope.traces.model.window import Window

__all__ = ["FAR_NS", "HostLine", "HostWaits", "StreamWork", "host_waits", "lines_of", "stream_waits", "stream_work_of"]


# -- waits ------------------------------------------------------------------------------------------------------------

STREAM_WAIT: Final = re.compile(r"StreamWaitEvent")
SAID_WAIT: Final = re.compile(r"Stream ?Wait")
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
    syncing = calls[named(trace, calls, is_synchronising)]
    # Calls that launch a copy themselves are handled below.
    syncing = syncing[~np.isin(syncing, work.call)]
    waited = _said_by_sync(window, work, syncing)
    unsaid = waited == -1
    waited[unsaid] = _last_ended(window, work, syncing[unsaid])
    copies = np.flatnonzero((work.call >= 0) & (slices.kind[work.row] == Kind.MEMCPY))
    to_host = named(trace, work.row[copies], TO_HOST.search)
    blocking = named(trace, work.call[copies], is_synchronising)
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
        asked = np.flatnonzero(wanted == line)
        everywhere = int(stream[asked[0]]) < 0
        own = np.flatnonzero(work.line >> 32 == line >> 32 if everywhere else work.line == line)
        own = own[np.argsort(work.launch_ns[own], kind="stable")]
        at = np.searchsorted(work.launch_ns[own], before_ns[asked], side="left") - 1
        if everywhere and len(own):
            own = _latest_so_far(work.end_ns, own)
        out[asked[at >= 0]] = own[at[at >= 0]]
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
    said = rows[named(trace, rows, SAID_WAIT.search)]
    return _said_waits(window, work, said) if len(said) else _guessed_waits(window, work)


def _said_waits(window: Window, work: StreamWork, said: Rows) -> Ints:
    """Assign CUPTI's waits to the next work launched on the waiting stream."""
    trace, slices = window.trace, window.trace.slices
    out = np.full(len(work.row), -1, np.int64)
    side = np.searchsorted(trace.syncs.row, said)
    call = window.launch[said]
    called_ns = np.where(call >= 0, slices.start_ns[call], slices.start_ns[said])
    recorded = _recorded_ns(window, trace.syncs.record_correlation[side])
    before_ns = np.where(recorded >= 0, recorded, called_ns)
    on_stream = trace.syncs.on_stream[side]
    source = _last_launched(work, slices.device[said], on_stream, before_ns)
    source = np.where(on_stream >= 0, source, -1)
    waiting = _stream_key(slices.device[said], slices.stream[said])
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
