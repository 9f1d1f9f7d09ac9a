"""The call tree of host threads: which slice lies inside which, and sums over nested calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints, Rows, Trace
from stepscope.traces.model.tables import sorted_by_key

__all__ = [
    "CallTree",
    "Nest",
    "calls_of",
    "holders",
    "innermost_at",
    "medians",
    "nest_of",
    "padded",
    "parents_of",
    "sums",
]


# -- call tree --------------------------------------------------------------------------------------------------------

FOREVER = 1 << 62


def padded(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Append −1, so that row −1 (none) has the value −1 (none)."""
    return np.append(values, np.int32(-1))


@dataclass(frozen=True, kw_only=True)
class CallTree:
    """The nesting of slices; all columns have one entry per slice of the trace."""

    parents: Rows
    """The innermost slice around it on the same thread; −1: none, or not in the tree."""
    depth: NDArray[np.int32]
    """Number of slices around it; −1: not in the tree."""

    def nearest(self, which: NDArray[np.bool_]) -> Rows:
        """Return the slice itself if it is in ``which``, else the innermost around it that is; −1: none; [slices]."""
        # One more entry for −1 keeps rows beyond the outermost there; each iteration doubles how far a row looks.
        up = padded(self.parents)
        marked = np.append(which, True)
        up[:-1][which] = np.flatnonzero(which)
        left = np.flatnonzero(~marked[up])
        while len(left):
            further = up[up[left]]
            up[left] = further
            left = left[~marked[further]]
        return up[:-1]

    def holder(self, which: NDArray[np.bool_]) -> Rows:
        """Return the innermost slice of ``which`` around it, excluding itself; −1: none; [slices]."""
        return padded(self.nearest(which))[self.parents]


def holders(tree: CallTree, which: NDArray[np.bool_], rows: Rows) -> Rows:
    """Return ``CallTree.holder`` for some rows only (−1: none): many times faster for few rows; [rows]."""
    up, known = padded(tree.parents), np.append(which, True)
    at = up[rows]
    left = np.flatnonzero(~known[at])
    while len(left):
        at[left] = up[at[left]]
        left = left[~known[at[left]]]
    return at


def calls_of(trace: Trace, rows: Rows) -> CallTree:
    """Build the tree of ``rows`` (ascending).

    A slice that begins inside another but ends after it (clocks, asynchronous ranges) is not its child; nor is a slice
    without duration at the other's end.
    """
    parents = np.full(len(trace), -1, np.int32)
    depth = np.full(len(trace), -1, np.int32)
    slices = trace.slices
    threads = slices.thread[rows]
    order = np.argsort(threads, kind="stable")
    for own in np.split(rows[order], np.flatnonzero(np.diff(threads[order])) + 1):
        above, depth[own], crossing = _laminar(slices.start_ns[own], slices.end_ns[own])
        parents[own] = padded(own)[above]
        for first, end in crossing:
            part = own[first:end]
            starts, ends = slices.start_ns[part].tolist(), slices.end_ns[part].tolist()
            parents[part], depth[part] = _nested(starts, ends, part.tolist())
    return CallTree(parents=parents, depth=depth)


def innermost_at(trace: Trace, tree: CallTree, rows: Rows, threads: NDArray[np.int32], times: Ints) -> Rows:
    """Return the innermost of ``rows`` that ran at each instant on each thread, [n]; −1: none.

    ``rows`` are ascending and all in the tree. A row runs from its start up to, but not including, its end.
    """
    slices = trace.slices
    order = np.lexsort((slices.start_ns[rows], slices.thread[rows]))
    own = rows[order]
    step = int(max(slices.end_ns.max(initial=0), times.max(initial=0))) + 1
    keys = slices.thread[own] * np.int64(step) + slices.start_ns[own]
    at = np.searchsorted(keys, threads * np.int64(step) + times, side="right") - 1
    found = padded(own)[at]
    found = np.where((found >= 0) & (slices.thread[found] == threads), found, -1) if len(own) else found
    ended = np.flatnonzero((found >= 0) & (slices.end_ns[found] <= times)) if len(own) else at[:0]
    while len(ended):
        found[ended] = tree.parents[found[ended]]
        ended = ended[(found[ended] >= 0)]
        ended = ended[slices.end_ns[found[ended]] <= times[ended]]
    return found.astype(np.int32)


def parents_of(trace: Trace, rows: Rows) -> Rows:
    """Return for ``rows`` (ascending) the innermost of them around each on the same thread, else −1; [slices]."""
    return calls_of(trace, rows).parents


def _laminar(start_ns: Ints, end_ns: Ints) -> tuple[Rows, NDArray[np.int32], list[tuple[int, int]]]:
    """Return indices of parents, and depths, for one thread, and the ranges in which crossing slices make them wrong.

    Without crossings, every slice that began earlier and is still open encloses this one: its depth is the number of
    open slices, and its parent the last one before it with a depth one less. A slice without duration encloses nothing.
    """
    count = len(start_ns)
    lasting = end_ns > start_ns
    depth: Ints = np.cumsum(lasting, dtype=np.int64) - lasting.astype(np.int64)
    depth -= np.searchsorted(np.sort(end_ns[lasting]), start_ns, side="right")
    level = depth.astype(np.int32)
    at = np.flatnonzero(lasting)
    # Depth and place in one number: in sorted order, the parent is just before the child's position.
    keys = np.sort(depth[at] * count + at)
    found = np.searchsorted(keys, (depth - 1) * count + np.arange(count)) - 1
    inner = level > 0
    above = np.where(inner, keys[found] % count if len(keys) else -1, -1).astype(np.int32)
    wrong = np.flatnonzero(inner & (end_ns[above] < end_ns))
    if not len(wrong):
        return above, level, []
    # Everything restarts where nothing is open, so crossings elsewhere do not matter.
    borders = np.append(np.flatnonzero(~inner), count)
    hit = np.unique(np.searchsorted(borders, wrong, side="right"))
    return above, level, [(int(borders[each - 1]), int(borders[each])) for each in hit.tolist()]


def _nested(starts: list[int], ends: list[int], rows: list[int]) -> tuple[list[int], list[int]]:
    """Return parents and depths for one thread."""
    parents, depths = [], []
    # The open slices; their ends never increase from bottom to top. A slice that ends before the newest can enclose
    # nothing that the newest, which is nearer, does not. Each is therefore removed once, and the whole is linear.
    open_rows, open_ends = [-1], [FOREVER]
    top_end = FOREVER
    for start, end, row in zip(starts, ends, rows, strict=True):
        while top_end < end or top_end <= start:
            open_rows.pop()
            open_ends.pop()
            top_end = open_ends[-1]
        parents.append(open_rows[-1])
        depths.append(len(open_rows) - 1)
        open_rows.append(row)
        open_ends.append(end)
        top_end = end
    return parents, depths


# -- sums over nested rows --------------------------------------------------------------------------------------------
# Some host rows (operators, annotations, modules) with their nesting, and sums over them. A call inside another of the
# same group (name, shape, path) counts once in totals.

Groups = NDArray[np.int64]


def sums(groups: NDArray[np.integer], values: Ints, count: int) -> Ints:
    """Sum by group, [count]; exact, as nanoseconds and bytes of a trace stay far below 2⁵³."""
    return np.bincount(groups, values, count).astype(np.int64)


def medians(groups: Groups, values: Ints, count: int) -> Ints:
    """Return the lower median of each group, a value that occurred, [count]; no group is empty."""
    _, values = sorted_by_key(groups, values)
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    middle: Ints = values[first + (sizes - 1) // 2]
    return middle


@dataclass(frozen=True, kw_only=True)
class Nest:
    rows: Rows
    above: NDArray[np.int32]
    """[rows]; index into ``rows`` of the innermost one around it; −1: none."""
    around: NDArray[np.int32]
    """[slices] plus one entry for row −1; index into ``rows`` of itself or the innermost around it; −1: none."""

    def outermost(self, groups: Groups) -> NDArray[np.bool_]:
        """Return which rows are not inside another of the same group, [rows]."""
        out = np.ones(len(self.rows), bool)
        left = np.flatnonzero(self.above >= 0)
        up = self.above[left]
        while len(left):
            same = groups[up] == groups[left]
            out[left[same]] = False
            left, up = left[~same], self.above[up[~same]]
            left, up = left[up >= 0], up[up >= 0]
        return out

    def totals(self, groups: Groups, values: Ints, count: int, outermost: NDArray[np.bool_]) -> Ints:
        """Sum ``values`` [rows] for the row itself and each one around it, once per group; [count]."""
        out = np.zeros(count, np.int64)
        at = np.flatnonzero(values).astype(np.int32)
        worth = values[at]
        while len(at):
            once = outermost[at]
            out += sums(groups[at[once]], worth[once], count)
            at = self.above[at]
            worth, at = worth[at >= 0], at[at >= 0]
        return out


def nest_of(calls: CallTree, rows: Rows) -> Nest:
    index = np.full(len(calls.parents) + 1, -1, np.int32)
    index[rows] = np.arange(len(rows), dtype=np.int32)
    nearest = np.append(calls.nearest(index[:-1] >= 0), np.int32(-1))
    around = index[nearest]
    return Nest(rows=rows, above=around[calls.parents[rows]], around=around)
