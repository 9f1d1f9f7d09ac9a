"""What each thread of the host does at each instant: its line.

A line cuts a thread's time into pieces; each belongs to the innermost slice that runs, or to none (a gap: Python
without ``with_stack``, or idleness).  Where slices overlap without one holding the other, the one that began last has
the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.window import Window

__all__ = ["FAR_NS", "HostLine", "lines_of"]

FAR_NS = 1 << 62
"""Later than any instant of a trace."""


@dataclass(frozen=True, kw_only=True)
class HostLine:
    thread: int
    start_ns: Ints
    """Of the pieces, ascending; each ends where the next begins, the last one never does."""
    row: Rows
    """The innermost slice; −1: none."""

    @cached_property
    def ends_ns(self) -> Ints:
        return np.append(self.start_ns[1:], FAR_NS)

    def at(self, times: Ints) -> np.ndarray:
        """[n]; the piece in which each instant lies."""
        return np.searchsorted(self.start_ns, times, side="right") - 1


def lines_of(window: Window) -> dict[int, HostLine]:
    """By thread (an index of ``Trace.threads``), of all that has slices of the host."""
    rows = window.host_rows
    threads = window.trace.slices.thread[rows]
    order = np.argsort(threads, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(threads[order])) + 1) if len(rows) else []
    return {int(window.trace.slices.thread[own[0]]): _line(window, own) for own in parts}


def _line(window: Window, rows: Rows) -> HostLine:
    """Between the starts of two slices time goes to the first, after its end to its parent, and so on up."""
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
