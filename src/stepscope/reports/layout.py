"""Text layout shared by all reports: marks, labels, wrapped sentences, bars, tables, and formatted numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepscope.records.text import bytes_text, ns_text, number_text, printable
from stepscope.traces.model.kernel_names import fitted, short_names

__all__ = [
    "LABEL",
    "MARKS",
    "NARROWEST",
    "WIDE_LABEL",
    "Page",
    "bar",
    "cell_text",
    "cut",
    "headings",
    "is_number",
    "labeled_lines",
    "table_lines",
]


# -- figures ----------------------------------------------------------------------------------------------------------
# Formatted table cells. The ending of a column's name gives its unit
# (``traces/model/tables.py``).

ENDINGS = ("_ns", "_bytes", "_share", "_gbps", "_flops", "_tflops", "_percent")
SECOND_NAMES = {"_share": "share", "_ns": "{} time", "_bytes": "{} size"}
"""Headings of columns whose name without its unit is already taken."""
LARGE = {10**15: "P", 10**12: "T", 10**9: "G", 10**6: "M"}


def cell_text(column: str, value: Any) -> str:
    """Format a cell; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number_text(column, value)
    return str(value)


def headings(columns: Sequence[str]) -> dict[str, str]:
    """By column: ``self_host_ns`` → ``self host``; a share of a column that is already there becomes ``share``."""
    out: dict[str, str] = {}
    for column in columns:
        ending = next((ending for ending in ENDINGS if column.endswith(ending)), "")
        text = (column[: len(column) - len(ending)] or column.strip("_")).replace("_", " ")
        out[column] = text if text not in out.values() else SECOND_NAMES.get(ending, "{}").format(text)
    return out


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_text(column: str, value: float) -> str:
    if value > 0 and ("change" in column or column.startswith("by_")):
        return f"+{_amount_text(column, value)}"
    return _amount_text(column, value)


def _amount_text(column: str, value: float) -> str:
    if column.endswith("_ns"):
        return ns_text(value)
    if column.endswith("bytes"):
        return bytes_text(value) if value >= 0 else f"-{bytes_text(-value)}"
    if column.endswith("_share"):
        return _percent(value * 100)
    if column.endswith("_percent"):
        return _percent(value)
    if column.endswith("_gbps"):
        return f"{number_text(value)} GB/s"
    if column.endswith("_tflops"):
        return f"{number_text(value)} TFLOP/s"
    if column.endswith("flops"):
        return _large(value)
    if value == int(value):
        return f"{int(value):,}"
    return number_text(value) if value >= 0 else f"{value:.3g}"


def _percent(percent: float) -> str:
    """``0.4%``, ``12.3%``, ``100%``; a tiny share is not shown as zero."""
    if 0 < percent < 0.05:
        return "<0.1%"
    if -0.05 < percent < 0:
        return ">-0.1%"
    return f"{percent:.1f}%" if abs(percent) < 99.95 else f"{percent:.0f}%"


def _large(value: float) -> str:
    for size, letter in LARGE.items():
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}"


# -- page -------------------------------------------------------------------------------------------------------------

MARKS = {"critical": "✖", "warning": "▲", "info": "●", "healthy": "✔"}
COLORS = {"critical": "31", "warning": "33", "info": "36", "healthy": "32", "bold": "1", "dim": "2"}
EIGHTHS = " ▏▎▍▌▋▊▉█"
LABEL = 10
"""Width of the labels at the left."""
NARROWEST = 60


class Page:
    """The lines so far, and the width and color that every part needs."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = width
        self.color = color
        self.lines: list[str] = []

    def paint(self, text: str, *styles: str) -> str:
        if not self.color or not text:
            return text
        return f"\x1b[{';'.join(COLORS[style] for style in styles)}m{text}\x1b[0m"

    def blank(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def marked(self, mark: str, text: str, *, bold: bool) -> None:
        """Add a sentence after its mark."""
        first, *rest = self._wrapped(text, 2)
        styles = (mark, "bold") if bold else ()
        self.lines.append(f"{self.paint(MARKS[mark], mark)} {self.paint(first, *styles) if styles else first}")
        self.lines += [f"  {self.paint(line, *styles) if styles else line}" for line in rest]

    def labeled(self, label: str, texts: Iterable[str], *, verbatim: bool = False) -> None:
        """Add paragraphs next to a label; ``verbatim``: they are lines that fit."""
        shown = label
        for text in texts:
            for line in [text] if verbatim else self._wrapped(text, 2 + LABEL):
                self.lines.append(f"  {self.paint(shown.ljust(LABEL), 'dim')}{line}".rstrip())
                shown = ""

    def items(self, label: str, parts: Sequence[str]) -> None:
        """Add short facts in a row next to a label, broken only between facts."""
        if not parts:
            return
        rows = [parts[0]]
        for part in parts[1:]:
            if len(rows[-1]) + len(part) + 3 <= self.width - 2 - LABEL:
                rows[-1] += f" · {part}"
            else:
                rows.append(part)
        self.labeled(label, rows)

    def _wrapped(self, text: str, indent: int) -> list[str]:
        plain = " ".join(text.split())
        return textwrap.wrap(plain, self.width - indent, break_on_hyphens=False) or [""]


def bar(share: float, columns: int) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * columns * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"


WIDE_LABEL = 11
"""The column of labels in reports that are a list of labeled sentences: on dumps, and on a job without stragglers."""


def labeled_lines(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label:<{WIDE_LABEL}}",
        subsequent_indent=" " * (2 + WIDE_LABEL),
        break_on_hyphens=False,
        break_long_words=False,
    )


# -- trace tables -----------------------------------------------------------------------------------------------------
# A table of a trace's document as text: as many columns as fit, numbers right-aligned, long names cut.

GAP = 2
WIDEST_NAME = 64
NARROWEST_NAME = 34
"""Minimum width of the first column; number columns on the right are dropped in its favor."""
WIDEST_OTHER = 24
"""Maximum width of other text columns."""

Row = Mapping[str, Any]


def table_lines(columns: Sequence[str], rows: Sequence[Row], width: int, *, of: int | None = None) -> list[str]:
    """A line of headings and one per row, without indent; ``of``: the total number of rows.

    The first column is the name of the row; columns that are empty in all rows are left out.
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
        # A number that is a name (a rank, a step) is aligned like a name.
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
