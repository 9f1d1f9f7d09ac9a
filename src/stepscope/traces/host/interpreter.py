"""Python threads that run at the same time as the one that trains: only one of them can hold the interpreter's lock.

A trace with Python functions shows which thread is inside which function, but not which one holds the lock (GIL).  A
thread *runs Python* while the innermost slice is a Python function: not a built-in one, which may release the lock as
``sleep``, ``acquire`` and file access do, and neither an operator nor a call of the device's runtime.  While two
threads run Python, one of them waits for the other.  Functions that other threads had entered before the first step do
not count: the trace does not have the built-in ones among them, and nearly all of these threads wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.traces.host.stalls import BUILT_IN
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import Kind
from stepscope.traces.model.window import Window

__all__ = ["Contention", "contention_of"]


@dataclass(frozen=True, kw_only=True)
class Contention:
    shared_ns: int
    """The main thread and another one both run Python, within steps."""
    threads: int
    """How many others."""
    place: str | None
    """Of the one that does so longest: its outermost line of user code, else its outermost function."""


def contention_of(window: Window) -> Contention:
    trace, slices = window.trace, window.trace.slices
    pythons = window.host.pythons
    main = window.host.main_thread
    training = {main, *window.host.autograd_threads.tolist()}
    others = [thread for thread in np.unique(slices.thread[pythons]).tolist() if thread not in training]
    if not others or main < 0:
        return Contention(shared_ns=0, threads=0, place=None)
    starts = np.array([step.start_ns for step in window.steps], np.int64)
    steps = intervals.merge(starts, np.array([step.end_ns for step in window.steps], np.int64))
    own = intervals.intersection(_running(window, main), steps)
    shared = {thread: intervals.intersection(own, _running(window, thread)) for thread in others}
    busy = [thread for thread in others if intervals.total(shared[thread])]
    if not busy:
        return Contention(shared_ns=0, threads=0, place=None)
    longest = max(busy, key=lambda thread: intervals.total(shared[thread]))
    rows = pythons[(slices.thread[pythons] == longest) & (slices.start_ns[pythons] > window.steps[0].start_ns)]
    lines = rows[window.host.sources.code[rows] >= 0]
    chosen = lines if len(lines) else rows
    place = int(chosen[np.lexsort((-slices.dur_ns[chosen], window.calls.depth[chosen]))[0]])
    return Contention(
        shared_ns=intervals.total(intervals.union(*(shared[thread] for thread in busy))),
        threads=len(busy),
        place=window.host.sources.text(place) or trace.name(place),
    )


def _running(window: Window, thread: int) -> intervals.Spans:
    """When a thread runs Python."""
    trace, slices = window.trace, window.trace.slices
    rows = window.host_rows[slices.thread[window.host_rows] == thread]
    kinds = slices.kind[rows]
    built_in = trace.names_where(lambda name: name.startswith(BUILT_IN))[slices.name[rows]]
    if thread != window.host.main_thread and window.steps:
        rows, kinds, built_in = (
            each[slices.start_ns[rows] > window.steps[0].start_ns] for each in (rows, kinds, built_in)
        )
    python, other = rows[(kinds == Kind.PYTHON) & ~built_in], rows[built_in | np.isin(kinds, [Kind.OP, Kind.RUNTIME])]
    return intervals.difference(
        intervals.merge(slices.start_ns[python], slices.end_ns[python]),
        intervals.merge(slices.start_ns[other], slices.end_ns[other]),
    )
