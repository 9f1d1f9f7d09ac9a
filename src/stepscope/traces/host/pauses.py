"""When the main thread stood still: garbage collections, and holes in which it told nothing.

A *pause* is a run of Python's collector as the profiler saw it, asked for or not.  A *hole* is a stretch of more than
5 ms of a step in which no operator and no call of the runtime ran on the main thread, nor any on autograd's threads
(for which it waits in backward): Python code of somebody's own, or a wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepscope.traces.model import intervals
from stepscope.traces.model.calls import innermost_at
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["Pause", "holes", "pauses_of", "untold"]

COLLECTOR = re.compile(r"^Python GC$|^<built-in function collect>$|^gc\.collect$|^gc\.py\(\d+\): collect$")
MIN_HOLE_NS = 5_000_000
MAX_PAUSES = 1000


@dataclass(frozen=True, kw_only=True)
class Pause:
    kind: str
    """``gc``."""
    start_ns: int
    dur_ns: int


def pauses_of(window: Window) -> tuple[Pause, ...]:
    """By time; of very many the longest."""
    trace, slices = window.trace, window.trace.slices
    rows = np.sort(np.concatenate([window.rows_of((Kind.PYTHON,)), window.host.annotations]))
    rows = rows[trace.names_where(COLLECTOR.match)[slices.name[rows]]] if len(rows) else rows
    # A collection that was asked for is seen twice, one inside the other.
    spans = intervals.merge(slices.start_ns[rows], slices.end_ns[rows])
    dur_ns = spans.end_ns - spans.start_ns
    kept = np.sort(np.argsort(-dur_ns, kind="stable")[:MAX_PAUSES])
    return tuple(Pause(kind="gc", start_ns=int(spans.start_ns[at]), dur_ns=int(dur_ns[at])) for at in kept)


def holes(window: Window) -> Table | None:
    """None: the main thread never stood still so long."""
    starts, ends = untold(window, intervals.EMPTY, MIN_HOLE_NS)
    if not len(starts):
        return None
    told = _told(window)
    return _table(window, told[window.trace.slices.thread[told] == window.host.main_thread], starts, ends)


def untold(window: Window, known: intervals.Spans, least_ns: int) -> tuple[Ints, Ints]:
    """Stretches of steps, each in one step, longer than so much: nothing told runs, nor anything ``known``.

    None where the main thread tells nothing at all.
    """
    slices, main = window.trace.slices, window.host.main_thread
    told = _told(window)
    if not (slices.thread[told] == main).any():
        return intervals.EMPTY
    busy = told[np.isin(slices.thread[told], [main, *window.host.autograd_threads.tolist()])]
    step_starts = np.array([step.start_ns for step in window.steps], np.int64)
    steps = intervals.merge(step_starts, np.array([step.end_ns for step in window.steps], np.int64))
    running = intervals.union(known, intervals.merge(slices.start_ns[busy], slices.end_ns[busy]))
    # Steps that touch are one span there: a hole from one into the next is cut at their border.
    starts, ends = _cut(intervals.difference(steps, running), step_starts)
    long = ends - starts > least_ns
    return starts[long], ends[long]


def _told(window: Window) -> Rows:
    """Operators and calls of the runtime."""
    return np.sort(np.concatenate([window.host.ops, window.rows_of((Kind.RUNTIME,))]))


def _cut(spans: intervals.Spans, borders: Ints) -> tuple[Ints, Ints]:
    if not len(spans.start_ns):
        return spans
    index = np.searchsorted(spans.start_ns, borders, side="right") - 1
    within = borders[(index >= 0) & (borders > spans.start_ns[index]) & (borders < spans.end_ns[index])]
    return np.sort(np.append(spans.start_ns, within)), np.sort(np.append(spans.end_ns, within))


def _table(window: Window, told: Rows, starts: Ints, ends: Ints) -> Table:
    trace, slices = window.trace, window.trace.slices
    middle = (starts + ends) // 2
    main = np.full(len(starts), window.host.main_thread, np.int32)
    inside = innermost_at(trace, window.calls, window.host_rows, main, middle)
    steps = trace.names_where(lambda text: text.startswith("ProfilerStep"))
    after = np.searchsorted(slices.start_ns[told], ends)
    finish = np.argsort(slices.end_ns[told], kind="stable")
    before = np.searchsorted(slices.end_ns[told][finish], starts, side="right") - 1
    step_starts = np.array([step.start_ns for step in window.steps], np.int64)
    step = np.searchsorted(step_starts, starts, side="right") - 1

    def name(row: int) -> str | None:
        return trace.name(row) if row >= 0 else None

    rows = []
    for at in np.argsort(starts - ends, kind="stable").tolist():
        previous = int(told[finish][before[at]]) if before[at] >= 0 else -1
        following = int(told[after[at]]) if after[at] < len(told) else -1
        around = int(inside[at])
        sources = window.host.sources
        source = sources.text(around) or sources.text(previous) or sources.text(following)
        number = window.steps[int(step[at])].number
        rows.append(
            (
                number,
                starts[at],
                ends[at] - starts[at],
                None if steps[slices.name[around]] else name(around),
                source,
                name(previous),
                name(following),
            )
        )
    columns = ("step", "start_ns", "dur_ns", "inside", "source", "after", "before")
    note = "No operator ran on the main thread for more than 5 ms: Python code, or a wait."
    return table_of("holes", "Holes of the main thread", columns, rows, limit=100, note=note)
