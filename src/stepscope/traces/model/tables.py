"""Tables that analyses return, the source of text, CSV, JSON and HTML; and the grouped statistics they are made of.

The ending of a column's name is its unit: ``_ns``, ``_bytes``, ``_share`` (0 to 1), ``_gbps`` (10⁹ bytes per second),
``_flops``, ``_tflops`` (10¹² per second); counts and text have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints

__all__ = ["Grouped", "Table", "distinct", "distinct_rows", "grouped", "median", "sorted_by_key", "sums_of", "table_of"]


# -- table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    """snake_case; part of the interface, as are its columns."""
    title: str
    """For display."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Plain ints, floats, strings, None; the most important first."""
    left_out: int = 0
    """Number of rows beyond the limit, which are not included."""
    left_out_sums: dict[str, int] = field(default_factory=dict)
    """Sums of these rows for integer columns, so that totals are complete."""
    note: str = ""
    """What a reader should know: a definition, a limit of the data."""

    def to_rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def table_of(
    name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, limit: int = 1000, note: str = ""
) -> Table:
    """Build a table from sorted rows; rows beyond ``limit`` are left out and counted."""
    every = list(rows)
    left_out = every[limit:]
    # Only the sums of left-out rows are needed.
    whole = {
        column: int(sum(values))
        for column, values in zip(columns, zip(*left_out, strict=True), strict=False)
        if all(type(value) is int or isinstance(value, np.integer) for value in values)
    }
    return Table(
        name=name,
        title=title,
        columns=tuple(columns),
        rows=tuple(tuple(v if type(v) in PLAIN else _plain(v) for v in row) for row in every[:limit]),
        left_out=len(left_out),
        left_out_sums=whole,
        note=note,
    )


PLAIN: Final = frozenset((int, str, bool, type(None)))


def _plain(value: Any) -> Any:
    """Convert numpy scalars to Python's, and NaN to None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


# -- grouped statistics -----------------------------------------------------------------------------------------------
# Counts, sums, extremes and medians of integers, for all groups at once and exact.

WORD_BITS: Final = 63
DENSE: Final = 1 << 18
"""Numbers in a range of this size, or of four times their count, are looked up instead of sorted."""


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Statistics of the non-empty groups, by ``key``."""

    key: Ints
    count: Ints
    total: Ints
    mean: Ints
    """Rounded to the nearest, as are the next two."""
    median: Ints
    deviation: Ints
    """The standard deviation of these values (population, not sample)."""
    least: Ints
    most: Ints


def grouped(keys: NDArray[np.integer], values: Ints) -> Grouped:
    """Group the values; neither keys nor values may be negative."""
    keys, values = sorted_by_key(keys, values)
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.diff(np.append(first, len(keys)))
    total = np.add.reduceat(values, first) if len(first) else np.empty(0, np.int64)
    low, high = values[first + (count - 1) // 2], values[first + count // 2]
    mean = total / count
    squares = (values - np.repeat(mean, count)) ** 2
    variance = (np.add.reduceat(squares, first) if len(first) else squares) / count
    return Grouped(
        key=keys[first].astype(np.int64),
        count=count,
        total=total,
        mean=np.rint(mean).astype(np.int64),
        median=low + (high - low) // 2,
        deviation=np.rint(np.sqrt(variance)).astype(np.int64),
        least=values[first],
        most=values[first + count - 1],
    )


def sorted_by_key(keys: NDArray[np.integer], values: Ints) -> tuple[NDArray[np.integer], Ints]:
    """Sort by key, then by value; neither may be negative."""
    bits = int(values.max()).bit_length() if len(values) else 0
    if bits + (int(keys.max()).bit_length() if len(keys) else 0) > WORD_BITS:
        order = np.lexsort((values, keys))
        return keys[order], values[order]
    # Both in one number, which is several times faster to sort.
    both = np.sort((keys.astype(np.int64) << bits) | values)
    return both >> bits, both & ((1 << bits) - 1)


def distinct(values: NDArray[np.integer]) -> tuple[NDArray[Any], Ints]:
    """Return the distinct values, ascending, and the index of each value among them; sort only what is far apart."""
    if not len(values):
        return values, np.empty(0, np.int64)
    low, high = int(values.min()), int(values.max())
    if high - low > DENSE + 4 * len(values):
        known, index = np.unique(values, return_inverse=True)
        return known, index
    offset = values.astype(np.int64) - low
    used = np.zeros(high - low + 1, bool)
    used[offset] = True
    number = np.cumsum(used) - 1
    return (np.flatnonzero(used) + low).astype(values.dtype), number[offset]


def distinct_rows(*columns: NDArray[np.integer[Any]]) -> tuple[Ints, Ints]:
    """Return where each distinct combination of values occurs first, and the number of each row's combination."""
    number = distinct(columns[0])[1]
    for column in columns[1:]:
        known, own = distinct(column)
        number = distinct(number * len(known) + own)[1]
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    return first, number


def sums_of(groups: Grouped, keys: NDArray[np.integer], values: NDArray[np.integer] | NDArray[np.bool_]) -> Ints:
    """Sum another column by group, [groups]; its keys must be among the groups'."""
    at = np.searchsorted(groups.key, keys)
    # Sums of integers below 2⁵³ are exact in doubles.
    return np.bincount(at, values, minlength=len(groups.key)).astype(np.int64)


def median(values: Ints) -> int | None:
    """Return the median, for an even count the midpoint rounded down; None if empty."""
    if not len(values):
        return None
    middle = np.partition(values, [(len(values) - 1) // 2, len(values) // 2])
    low, high = int(middle[(len(values) - 1) // 2]), int(middle[len(values) // 2])
    return low + (high - low) // 2
