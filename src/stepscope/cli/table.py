"""Columns of text, aligned."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

from stepscope.records.messages import printable

__all__ = ["format_table"]

GAP = "  "


def format_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Collection[int] = (), width: int | None = None
) -> str:
    """Heads, a rule, rows; the ``numeric`` columns stand to the right.  What cannot be printed is escaped.

    With a ``width`` the last column is cut to what is left of it, but not below its head.
    """
    lines = [[printable(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(heads))]
    if width is not None:
        left = width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(left, _width(lines[0][-1])))
        lines = [[*line[:-1], _cut(line[-1], widths[-1])] for line in lines]
    lines.insert(1, ["─" * width for width in widths])
    return "\n".join(
        GAP.join(_padded(cell, widths[column], right=column in numeric) for column, cell in enumerate(line)).rstrip()
        for line in lines
    )


def _width(text: str) -> int:
    """Columns on a terminal: East Asian wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while _width(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


def _padded(text: str, width: int, *, right: bool) -> str:
    padding = " " * (width - _width(text))
    return padding + text if right else text + padding
