"""Some host rows (operators, annotations, modules) with who of them holds whom, and sums over them.

A call inside of another of the same group (name, shape, path) counts once in totals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.calls import CallTree
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.statistics import sorted_by_key

__all__ = ["Nest", "medians", "nest_of", "sums"]

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
