"""Which rows of a trace count, and to which step each belongs.

Profiler steps are annotations of the host named ``ProfilerStep#N``.  With two or more the last is left out, since the
work it launched may be cut off: host slices from its start on, and the device work that they launched.  Without
profiler steps all is one step, from the first slice that counts to the last.

Device work belongs to the step in which it was launched; where the launch is not in the trace, to the step in which it
began.  But what began before the first work that the steps launched was queued by earlier steps: a device may be some
steps behind its host when the trace begins.  It counts, and belongs to no step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.view import HostView
from stepscope.traces.model.calls import CallTree, calls_of
from stepscope.traces.model.categories import DEVICE_KINDS, DEVICE_WORK, HOST_KINDS, Kind
from stepscope.traces.model.columns import Ints, Rows, Trace
from stepscope.traces.model.links import launches_of
from stepscope.traces.model.owners import owner_of

__all__ = ["Step", "Window", "window_of"]

STEP = re.compile(r"^ProfilerStep\s*#?\s*(\d+)")


@dataclass(frozen=True, kw_only=True)
class Step:
    number: int
    """As the profiler counts; 0 where there are no profiler steps."""
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Window:
    """A trace with what the analyses all need to know of it."""

    trace: Trace
    counts: NDArray[np.bool_]
    """[slices]; host and device slices that count; never those of ``Kind.OTHER`` and ``OVERHEAD``."""
    launch: Rows
    """[slices]; the call that launched it, counted or not; −1: none known."""
    steps: tuple[Step, ...]
    """Those that count, by time; at least one unless nothing counts."""
    left_out: Step | None
    """The last profiler step."""

    @cached_property
    def device_rows(self) -> Rows:
        """Kernels, copies and memsets that count, by start."""
        return self.rows_of(DEVICE_WORK)

    @cached_property
    def host_rows(self) -> Rows:
        return self.rows_of(HOST_KINDS)

    @cached_property
    def calls(self) -> CallTree:
        """Which of the host's slices that count lies inside which."""
        return calls_of(self.trace, self.host_rows)

    @cached_property
    def owner(self) -> Rows:
        """[slices]; the operator that runtime and device rows belong to, see ``owners``; −1: none."""
        return owner_of(self)

    @cached_property
    def host(self) -> HostView:
        """What the analyses of the host's side have in common."""
        return HostView(self)

    def rows_of(self, kinds: tuple[Kind, ...]) -> Rows:
        """Those that count; not to be written to: the answers are kept."""
        known = self._rows.get(kinds)
        if known is None:
            rows = self.trace.rows_of(kinds)
            known = self._rows[kinds] = rows[self.counts[rows]]
        return known

    @cached_property
    def _rows(self) -> dict[tuple[Kind, ...], Rows]:
        return {}

    @cached_property
    def step_of(self) -> NDArray[np.int32]:
        """[slices]; index into ``steps``; −1: before, between or after them, or it does not count."""
        slices = self.trace.slices
        known = self.launch >= 0
        began = np.where(known, slices.start_ns[self.launch], slices.start_ns)
        step = np.where(self.counts, _step_at(self.steps, began), -1).astype(np.int32)
        rows = self.device_rows
        launched = rows[known[rows] & (step[rows] >= 0)]
        if len(launched) and self.steps[0].name:
            earlier = rows[~known[rows] & (slices.start_ns[rows] < slices.start_ns[launched[0]])]
            step[earlier] = -1
        return step


def window_of(trace: Trace, *, keep_last: bool = False) -> Window:
    slices = trace.slices
    launch = launches_of(trace)
    counts = np.isin(slices.kind, [*HOST_KINDS, *DEVICE_KINDS])
    steps = _profiler_steps(trace)
    left_out = None
    if len(steps) > 1 and not keep_last:
        *steps, left_out = steps
        on_host = np.isin(slices.kind, HOST_KINDS)
        late = on_host & (slices.start_ns >= left_out.start_ns)
        launched_late = (launch >= 0) & late[launch]
        counts &= ~late & ~launched_late
    if not steps and counts.any():
        start_ns, end_ns = int(slices.start_ns[counts].min()), int(slices.end_ns[counts].max())
        steps = [Step(number=0, name="", start_ns=start_ns, end_ns=end_ns)]
    return Window(trace=trace, counts=counts, launch=launch, steps=tuple(steps), left_out=left_out)


def _profiler_steps(trace: Trace) -> list[Step]:
    """By time, each number once: of several processes' or threads' the first."""
    slices = trace.slices
    named = trace.names_where(STEP.match)
    found: dict[int, Step] = {}
    for row in np.flatnonzero(named[slices.name] & np.isin(slices.kind, [Kind.OP, Kind.ANNOTATION])).tolist():
        name = trace.name(row)
        match = STEP.match(name)
        number = int(match.group(1)) if match else 0
        if number not in found:
            start_ns, end_ns = int(slices.start_ns[row]), int(slices.end_ns[row])
            found[number] = Step(number=number, name=name, start_ns=start_ns, end_ns=end_ns)
    return sorted(found.values(), key=lambda step: step.start_ns)


def _step_at(steps: tuple[Step, ...], times: Ints) -> NDArray[np.int64]:
    """[n]; the step that holds each instant; −1: none."""
    if not steps:
        return np.full(len(times), -1, np.int64)
    starts = np.array([step.start_ns for step in steps])
    ends = np.array([step.end_ns for step in steps])
    at = np.searchsorted(starts, times, side="right") - 1
    return np.where((at >= 0) & (times < ends[np.maximum(at, 0)]), at, -1)
