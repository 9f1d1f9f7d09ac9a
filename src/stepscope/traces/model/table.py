"""A table that an analysis returns, in a form that text, CSV, JSON and HTML are all made of.

Columns tell their unit by their name's ending: ``_ns``, ``_bytes``, ``_share`` (0 to 1), ``_gbps`` (10⁹ bytes a
second), ``_flops``, ``_tflops`` (10¹² a second); counts and text have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Table", "table_of"]


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    """snake_case; part of the interface, as are its columns."""
    title: str
    """For people."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """Plain ints, floats, strings, None; the most important first."""
    left_out: int = 0
    """Rows beyond the limit, which are not here."""
    left_out_sums: dict[str, int] = field(default_factory=dict)
    """Of these rows, of the columns that are whole numbers: so that totals are not lost with the rows."""
    note: str = ""
    """What a reader should know: a definition, a limit of the data."""

    def to_rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def table_of(
    name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, limit: int = 1000, note: str = ""
) -> Table:
    """Of rows that are sorted already; beyond ``limit`` they are left out and counted."""
    every = list(rows)
    left_out = every[limit:]
    # Of rows that nobody will see only the sums are made.
    whole = {
        column: int(sum(values))
        for column, values in zip(columns, zip(*left_out, strict=True), strict=False)
        if all(type(value) is int or isinstance(value, np.integer) for value in values)
    }
    return Table(
        name=name,
        title=title,
        columns=tuple(columns),
        rows=tuple(tuple(_plain(value) for value in row) for row in every[:limit]),
        left_out=len(left_out),
        left_out_sums=whole,
        note=note,
    )


def _plain(value: Any) -> Any:
    """Numpy's scalars as Python's; what is no number as None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
