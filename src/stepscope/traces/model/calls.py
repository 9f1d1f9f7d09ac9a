"""The call tree of host threads: which slice lies inside which, and sums over nested calls.

Which slice of a host thread lies inside which.
"""

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


# -- calls ------------------------------------------------------------------------------------------------------------

FOREVER = 1 << 62


def padded(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """With −1 at the end, so that the row −1 (none) has the value −1 (none)."""
    return np.append(values, np.int32(-1))


@dataclass(frozen=True, kw_only=True)
class CallTree:
    """All columns are as long as the trace has slices."""

    parents: Rows
    """The innermost slice of the same thread that holds it; −1: none, or it is not in the tree."""
    depth: NDArray[np.int32]
    """How many hold it; −1: it is not in the tree."""

    def nearest(self, which: NDArray[np.bool_]) -> Rows:
        """[slices]; itself where it is one of ``which``, else the innermost of them that holds it; −1: none."""
        # One more for −1, so that who is beyond the outermost stays there; each turn doubles how far a row looks.
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
        """[slices]; the innermost of ``which`` that holds it, itself not counted; −1: none."""
        return padded(self.nearest(which))[self.parents]


def holders(tree: CallTree, which: NDArray[np.bool_], rows: Rows) -> Rows:
    """[rows]; as ``CallTree.holder`` has it, of some rows (−1: none) only: for few it is many times faster."""
    up, known = padded(tree.parents), np.append(which, True)
    at = up[rows]
    left = np.flatnonzero(~known[at])
    while len(left):
        at[left] = up[at[left]]
        left = left[~known[at[left]]]
    return at


def calls_of(trace: Trace, rows: Rows) -> CallTree:
    """The tree of ``rows`` (ascending).

    A slice that begins inside another but ends after it (clocks, asynchronous ranges) is no child of it; nor is one
    without length that stands at the other's end.
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
    """[n]; which of ``rows`` (ascending, all in the tree) ran at each instant on each thread, the innermost; −1: none.

    A row runs from its start on, and no longer at its end.
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
    """[slices]; of ``rows`` (ascending) the innermost of them on the same thread that holds it, else −1."""
    return calls_of(trace, rows).parents


def _laminar(start_ns: Ints, end_ns: Ints) -> tuple[Rows, NDArray[np.int32], list[tuple[int, int]]]:
    """Of one thread, the indices of parents, and depths; where slices cross, they are wrong: from where to where.

    Who began before and is still open holds it, if none cross: then its depth is how many are open, and its parent the
    last before it with one less.  Without length it holds nothing.
    """
    count = len(start_ns)
    lasting = end_ns > start_ns
    depth: Ints = np.cumsum(lasting, dtype=np.int64) - lasting.astype(np.int64)
    depth -= np.searchsorted(np.sort(end_ns[lasting]), start_ns, side="right")
    level = depth.astype(np.int32)
    at = np.flatnonzero(lasting)
    # A word that has the depth before the place: sorted by it, the parent stands just before where its child would.
    keys = np.sort(depth[at] * count + at)
    found = np.searchsorted(keys, (depth - 1) * count + np.arange(count)) - 1
    inner = level > 0
    above = np.where(inner, keys[found] % count if len(keys) else -1, -1).astype(np.int32)
    wrong = np.flatnonzero(inner & (end_ns[above] < end_ns))
    if not len(wrong):
        return above, level, []
    # Where nothing is open all starts anew, so that what crosses elsewhere does not matter.
    borders = np.append(np.flatnonzero(~inner), count)
    hit = np.unique(np.searchsorted(borders, wrong, side="right"))
    return above, level, [(int(borders[each - 1]), int(borders[each])) for each in hit.tolist()]


def _nested(starts: list[int], ends: list[int], rows: list[int]) -> tuple[list[int], list[int]]:
    """Of one thread, parents and depths."""
    parents, depths = [], []
    # What is open, with ends that never grow from the bottom up: who ends before the newest does can hold nothing that
    # the newest, which is nearer, does not; so each is taken off once and all is linear.
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


# -- nesting ----------------------------------------------------------------------------------------------------------
# Some host rows (operators, annotations, modules) with who of them holds whom, and sums over them.
#
# A call inside of another of the same group (name, shape, path) counts once in totals.

Groups = NDArray[np.int64]


def sums(groups: NDArray[np.integer], values: Ints, count: int) -> Ints:
    """[count]; exact: nanoseconds and bytes of a trace stay far below 2⁵³."""
    return np.bincount(groups, values, count).astype(np.int64)


def medians(groups: Groups, values: Ints, count: int) -> Ints:
    """[count], all with members; the lower one of the two in the middle: a value that occurred."""
    _, values = sorted_by_key(groups, values)
    sizes = np.bincount(groups, minlength=count)
    first = np.cumsum(sizes) - sizes
    middle: Ints = values[first + (sizes - 1) // 2]
    return middle


@dataclass(frozen=True, kw_only=True)
class Nest:
    rows: Rows
    above: NDArray[np.int32]
    """[rows]; the index into ``rows`` of the innermost that holds it; −1: none."""
    around: NDArray[np.int32]
    """[slices] and one more for the row −1; the index into ``rows`` of itself or who holds it; −1: none."""

    def outermost(self, groups: Groups) -> NDArray[np.bool_]:
        """[rows]; not inside of one of the same group."""
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
        """[count]; ``values`` [rows] count for the row itself and each one around it, once per group."""
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
