"""What all analyses of the host's side ask of a window, computed once: ``Window.host``.

Old profilers wrote annotations (steps, the DataLoader's, the optimiser's) as operators: by their names they are taken
for what they are.

*Forward of*: autograd's operators carry the sequence number of the forward operator that made their node.  Several
forward operators share a number (the outer ones too); the node is made by the last of them to start, since making it
counts the number up.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.sources import Sources, sources_of
from stepscope.traces.model.calls import padded
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Ints, Rows

if TYPE_CHECKING:
    from stepscope.traces.model.window import Window

__all__ = ["LABEL", "HostView"]

LABEL = re.compile(r"^(ProfilerStep\s*#?\s*\d|enumerate\(DataLoader\)#|Optimizer\.\w+#)")
"""Annotations that were operators once."""
Mask = NDArray[np.bool_]


class HostView:
    def __init__(self, window: Window) -> None:
        # Not kept: the window keeps this, and two that keep each other live until the collector comes.
        self.trace = window.trace
        self.calls = window.calls
        self.host_rows = window.host_rows
        self._ops = window.rows_of((Kind.OP,))
        self._annotations = window.rows_of((Kind.ANNOTATION,))
        self.pythons = window.rows_of((Kind.PYTHON,))

    @cached_property
    def _labels(self) -> Mask:
        return self.trace.names_where(LABEL.match)

    @cached_property
    def ops(self) -> Rows:
        """Operators that count and are no annotations, by start."""
        return self._ops[~self._labels[self.trace.slices.name[self._ops]]]

    @cached_property
    def annotations(self) -> Rows:
        """By start; also those that were written as operators."""
        mistaken = self._ops[self._labels[self.trace.slices.name[self._ops]]]
        return np.sort(np.concatenate([self._annotations, mistaken]))

    def mask(self, rows: Rows) -> Mask:
        out = np.zeros(len(self.trace), bool)
        out[rows] = True
        return out

    @cached_property
    def op_holder(self) -> Rows:
        """[slices]; of host rows the innermost operator that holds it; −1: none."""
        return self.calls.holder(self.is_op[:-1])

    @cached_property
    def is_op(self) -> Mask:
        """[slices] and one more for the row −1: operators that count."""
        return np.append(self.mask(self.ops), False)

    @cached_property
    def side(self) -> Rows:
        """[slices]; of operators and annotations the index into ``Trace.ops``; −1: none."""
        out = np.full(len(self.trace), -1, np.int32)
        out[self.trace.ops.row] = np.arange(len(self.trace.ops.row), dtype=np.int32)
        return out

    @cached_property
    def main_thread(self) -> int:
        """The one with the profiler's steps, else the process's first, else the busiest; −1: no host rows."""
        slices, threads = self.trace.slices, self.trace.threads
        if not len(self.host_rows):
            return -1
        names = self.trace.names_where(lambda name: name.startswith("ProfilerStep"))
        for row in self.annotations[names[slices.name[self.annotations]]].tolist():
            return int(slices.thread[row])
        used = np.unique(slices.thread[self.host_rows])
        first = [int(at) for at in used if threads[at].pid == threads[at].tid]
        if len(first) == 1:
            return first[0]
        roots = self.host_rows[self.calls.parents[self.host_rows] < 0]
        return int(np.bincount(slices.thread[roots], slices.dur_ns[roots]).argmax())

    @cached_property
    def autograd_threads(self) -> NDArray[np.int32]:
        """Threads, other than the main one, on which autograd's engine runs operators."""
        ops, slices = self.trace.ops, self.trace.slices
        rows = ops.row[(ops.forward_thread > 0) & (ops.sequence >= 0)]
        rows = rows[self.is_op[rows]]
        return np.setdiff1d(slices.thread[rows], self.main_thread).astype(np.int32)

    @cached_property
    def sources(self) -> Sources:
        return sources_of(self)

    @cached_property
    def forward_of(self) -> Rows:
        """[slices]; of autograd's operators and all inside them the forward operator; −1: none, or not autograd's."""
        ops, slices = self.trace.ops, self.trace.slices
        out = np.full(len(self.trace), -1, np.int32)
        numbered = (ops.sequence >= 0) & self.mask(self.ops)[ops.row]
        backward = np.flatnonzero(numbered & (ops.forward_thread > 0))
        forward = np.flatnonzero(numbered & (ops.forward_thread <= 0))
        if not len(backward) or not len(forward):
            return out
        threads = slices.thread[ops.row[forward]]
        for origin in np.unique(ops.forward_thread[backward]):
            own = backward[ops.forward_thread[backward] == origin]
            best, most = None, 0
            # The profiler's numbers of threads are its own: which thread is meant shows by the matches.
            for thread in np.unique(threads):
                there = forward[threads == thread]
                found = _last_before(ops.sequence, ops.row, there, own)
                if (count := int((found >= 0).sum())) > most:
                    best, most = found, count
            if best is not None:
                out[ops.row[own]] = best
        linked = self.calls.nearest(out >= 0)
        return padded(out)[linked]


def _last_before(sequence: Ints, row: Rows, forward: NDArray[np.int64], backward: NDArray[np.int64]) -> Rows:
    """[backward]; the row of the last of ``forward`` with its number that starts before it; −1: none."""
    span = int(row.max()) + 2
    keys = sequence[forward] * span + row[forward]
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], sequence[backward] * span + row[backward]) - 1
    found = forward[order][np.maximum(at, 0)]
    return np.where((at >= 0) & (sequence[found] == sequence[backward]), row[found], -1).astype(np.int32)
