"""A table of a trace's document as lines of text: as many columns as fit, numbers to the right, long names cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.messages import printable
from stepscope.records.short_names import fitted, short_names
from stepscope.reports.cells import cell_text, headings, is_number

__all__ = ["table_lines"]

GAP = 2
WIDEST_NAME = 64
NARROWEST_NAME = 34
"""The first column keeps at least so much; columns of numbers at the right give way to it."""
WIDEST_OTHER = 24
"""Other columns of text."""

Row = Mapping[str, Any]


def table_lines(columns: Sequence[str], rows: Sequence[Row], width: int, *, of: int | None = None) -> list[str]:
    """A line of headings and one for each row, without indent; ``of``: how many rows there would be.

    The first column is the name of the thing; columns that are empty in all rows are left out.
    """
    shown = [column for column in columns if any(row[column] is not None and row[column] != "" for row in rows)]
    if not shown:
        return []
    heads = headings(shown)
    first, *others = shown
    cells = {column: _cells(column, rows) for column in others}
    widths = {column: max(map(len, [heads[column], *cells[column]])) for column in others}
    names = [printable(str(row[first])) if row[first] is not None else "" for row in rows]
    wanted = min(max(map(len, [heads[first], *names])), WIDEST_NAME)
    while others and min(wanted, NARROWEST_NAME) + sum(widths[column] + GAP for column in others) > width:
        others.pop()
    room = max(width - sum(widths[column] + GAP for column in others), NARROWEST_NAME)
    short = short_names(names, min(wanted, room))
    column_width = max([len(heads[first]), *map(len, short.values())])
    if all(is_number(row[first]) for row in rows):
        # A number that names something (a rank, a step) stands like a name.
        column_width = max(column_width, 4)
    titles = (_aligned(column, rows, heads[column], widths[column]) for column in others)
    lines = [heads[first].ljust(column_width) + "".join(titles)]
    for at, name in enumerate(names):
        figures = (_aligned(column, rows, cells[column][at], widths[column]) for column in others)
        lines.append((short[name].ljust(column_width) + "".join(figures)).rstrip())
    if of is not None and of > len(rows):
        lines.append(f"… and {of - len(rows):,} more")
    return lines


def _cells(column: str, rows: Sequence[Row]) -> list[str]:
    texts = [printable(cell_text(column, row[column])) for row in rows]
    if _numeric(column, rows):
        return texts
    short = short_names(texts, WIDEST_OTHER)
    return [fitted(short[text], WIDEST_OTHER) for text in texts]


def _numeric(column: str, rows: Sequence[Row]) -> bool:
    return all(row[column] is None or is_number(row[column]) for row in rows)


def _aligned(column: str, rows: Sequence[Row], text: str, width: int) -> str:
    return " " * GAP + (text.rjust(width) if _numeric(column, rows) else text.ljust(width))
