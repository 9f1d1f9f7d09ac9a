"""The pieces of walks as segments: each with its cause, its name and its operator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Codes, Ints, Rows
from stepscope.traces.model.window import Window
from stepscope.traces.path.causes import Cause
from stepscope.traces.path.chains import expanded
from stepscope.traces.path.graph import Graph, Via
from stepscope.traces.path.host_lines import HostLine
from stepscope.traces.path.walk import What

__all__ = ["Pieces", "Segments", "segments_of", "summed"]


DENSE: Final = 1 << 18
BLOCK: Final = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Of walks, as columns."""

    start_ns: Ints
    end_ns: Ints
    what: Ints
    index: Ints
    node: Ints
    """Which part of a route it belongs to."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    start_ns: Ints
    end_ns: Ints
    cause: NDArray[np.int8]
    """``Cause``."""
    name: Codes
    """The innermost slice's or the work's (of a delay: the delayed work's); −1: none."""
    operator: Codes
    """The operator that it belongs to; −1: none."""
    place: NDArray[np.int32]
    """A thread (an index of ``Trace.threads``), or that which stands for a stream; −1: none."""
    node: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, which: Any) -> Segments:
        return Segments(**{each.name: getattr(self, each.name)[which] for each in fields(self)})


def summed(key: Ints, time_ns: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """The keys (0 to ``size``) that there are, ascending; the sum of the times and the number of each."""
    if size <= DENSE + 4 * len(key):
        # Sums of float64 are exact up to 2⁵³ ns, which is 104 days.
        count = np.bincount(key, minlength=1)
        groups = np.flatnonzero(count)
        return groups, np.bincount(key, time_ns, minlength=1)[groups].astype(np.int64), count[groups]
    # In blocks, each of which needs several times its size, and whose keys are few: many pieces have the same.
    blocks = [_summed(key[at : at + BLOCK], time_ns[at : at + BLOCK]) for at in range(0, max(len(key), 1), BLOCK)]
    found, times, counts = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    groups, which = np.unique(found, return_inverse=True)
    return groups, np.bincount(which, times).astype(np.int64), np.bincount(which, counts).astype(np.int64)


def _summed(key: Ints, time_ns: Ints) -> tuple[Ints, Ints, Ints]:
    groups, which = np.unique(key, return_inverse=True)
    return groups, np.bincount(which, time_ns).astype(np.int64), np.bincount(which)


def segments_of(graph: Graph, pieces: Pieces) -> Segments:
    """In no particular order."""
    on_thread = np.flatnonzero(pieces.what == What.THREAD)
    chains = np.flatnonzero(pieces.what == What.CHAIN)
    works = np.flatnonzero((pieces.what == What.WORK) | (pieces.what == What.DELAY))
    parts = [_of_work(graph, pieces, works), _of_chains(graph, pieces, chains)]
    threads = pieces.index[on_thread]
    operator = _operators(graph.window)
    for thread in np.unique(threads).tolist():
        which = on_thread[threads == thread]
        line = graph.lines.get(thread)
        parts.append(_nowhere(pieces, which) if line is None else _of_thread(graph, line, pieces, which, operator))
    columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(Segments)}
    parts.clear()
    # One after the other, so that no more than one column is there twice.
    return Segments(**{name: np.concatenate(columns.pop(name)) for name in list(columns)})


def _operators(window: Window) -> Rows:
    """[slices]; itself if it is an operator, else the one that holds it; −1: none."""
    is_op = np.zeros(len(window.trace), bool)
    is_op[window.rows_of((Kind.OP,))] = True
    return window.calls.nearest(is_op)


def _of_chains(graph: Graph, pieces: Pieces, which: Ints) -> Segments:
    of, start_ns, until_ns, work, delay = expanded(
        graph.chains, graph.work_ends_ns, pieces.start_ns[which], pieces.end_ns[which], pieces.index[which]
    )
    what = np.where(delay > 0, int(What.DELAY), int(What.WORK))
    node = pieces.node[which][of]
    single = Pieces(start_ns=start_ns, end_ns=until_ns, what=what, index=work, node=node)
    return _of_work(graph, single, np.arange(len(work)))


def _of_work(graph: Graph, pieces: Pieces, which: Ints) -> Segments:
    window, slices = graph.window, graph.window.trace.slices
    work = pieces.index[which]
    row = graph.row[work]
    kernel = slices.kind[row] == Kind.KERNEL
    cause = np.where(kernel, Cause.COMPUTE, Cause.COPY)
    cause = np.where(np.array(graph.collective, bool)[work], Cause.COMMUNICATION, cause)
    launched = np.isin(np.array(graph.via, np.int64)[work], (Via.LAUNCH, Via.NOTHING))
    delay = np.where(launched, Cause.LAUNCH_DELAY, Cause.KERNEL_GAP)
    owner = window.owner[row]
    return Segments(
        start_ns=pieces.start_ns[which],
        end_ns=pieces.end_ns[which],
        cause=np.where(pieces.what[which] == What.DELAY, delay, cause).astype(np.int8),
        name=slices.name[row],
        operator=np.where(owner >= 0, slices.name[owner], -1).astype(np.int32),
        place=slices.thread[row],
        node=pieces.node[which].astype(np.int32),
    )


def _of_thread(graph: Graph, line: HostLine, pieces: Pieces, which: Ints, operator: Rows) -> Segments:
    slices = graph.window.trace.slices
    start_ns, end_ns = pieces.start_ns[which], pieces.end_ns[which]
    first, last = line.at(start_ns), line.at(end_ns - 1)
    count = last - first + 1
    of = np.repeat(np.arange(len(which), dtype=np.int32), count)
    at = np.arange(len(of), dtype=np.int32) + (first - np.cumsum(count) + count).astype(np.int32)[of]
    row = line.row[at]
    owner = np.where(row >= 0, operator[row], -1)
    return Segments(
        start_ns=np.maximum(line.start_ns[at], start_ns[of]),
        end_ns=np.minimum(line.ends_ns[at], end_ns[of]),
        cause=graph.causes[line.thread][at],
        name=np.where(row >= 0, slices.name[row], -1).astype(np.int32),
        operator=np.where(owner >= 0, slices.name[owner], -1).astype(np.int32),
        place=np.full(len(at), line.thread, np.int32),
        node=pieces.node[which].astype(np.int32)[of],
    )


def _nowhere(pieces: Pieces, which: Ints) -> Segments:
    none = np.full(len(which), -1, np.int32)
    return Segments(
        start_ns=pieces.start_ns[which],
        end_ns=pieces.end_ns[which],
        cause=np.full(len(which), int(Cause.OTHER), np.int8),
        name=none,
        operator=none,
        place=none,
        node=pieces.node[which].astype(np.int32),
    )
