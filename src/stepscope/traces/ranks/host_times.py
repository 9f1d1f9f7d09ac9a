"""Where the time goes of a process that trains without a device: on its own threads.

There are no kernels then, and what runs is told by operators.  *span*: from the start of the first step that counts to
the end of the last.  *compute*: the instants at which at least one thread was inside an operator that is no call of a
collective; between operators a thread runs Python, or waits, and the trace does not tell which.  *comm*: at least one
collective was under way.  *overlap*: both at once.  *idle*: neither; so Python between the operators counts there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.intervals import EMPTY, Spans
from stepscope.traces.model.window import Window

__all__ = ["HostTimes", "host_compute", "host_times"]

CALLS = ("c10d::", "record_param_comms", "_c10d_functional::", "c10d_functional::")
"""Operators that hand a collective over, or wait for it."""


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    span_ns: int
    idle_ns: int
    compute_ns: int
    comm_ns: int
    overlap_ns: int


def host_compute(window: Window) -> Spans:
    """When some thread computed; a collective that an operator calls is no part of it."""
    slices = window.trace.slices
    rows = window.rows_of((Kind.OP,))
    if not len(rows):
        return EMPTY
    calling = window.trace.names_where(lambda name: name.startswith(CALLS))[slices.name[rows]]
    parts = []
    for thread in np.unique(slices.thread[rows]):
        own = slices.thread[rows] == thread
        working, calls = rows[own & ~calling], rows[own & calling]
        spans = intervals.merge(slices.start_ns[working], slices.end_ns[working])
        parts.append(intervals.difference(spans, intervals.merge(slices.start_ns[calls], slices.end_ns[calls])))
    return intervals.union(*parts)


def host_times(window: Window, compute: Spans, comm: Spans) -> HostTimes:
    start_ns = min((step.start_ns for step in window.steps), default=0)
    end_ns = max((step.end_ns for step in window.steps), default=0)
    compute, comm = intervals.cut(compute, start_ns, end_ns), intervals.cut(comm, start_ns, end_ns)
    return HostTimes(
        span_ns=end_ns - start_ns,
        idle_ns=end_ns - start_ns - intervals.total(intervals.union(compute, comm)),
        compute_ns=intervals.total(compute),
        comm_ns=intervals.total(comm),
        overlap_ns=intervals.total(intervals.intersection(compute, comm)),
    )
