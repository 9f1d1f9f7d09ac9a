"""A cell of a table as people read it: the ending of the column's name tells the unit (``traces/model/table.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.units import bytes_text, ns_text, number_text

__all__ = ["cell_text", "headings", "is_number"]

ENDINGS = ("_ns", "_bytes", "_share", "_gbps", "_flops", "_tflops", "_percent")
AGAIN = {"_share": "share", "_ns": "{} time", "_bytes": "{} size"}
"""Headings of columns whose name without its unit stands there already."""
LARGE = {10**15: "P", 10**12: "T", 10**9: "G", 10**6: "M"}


def cell_text(column: str, value: Any) -> str:
    """Empty where there is nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number_text(column, value)
    return str(value)


def headings(columns: Sequence[str]) -> dict[str, str]:
    """By column: ``self_host_ns`` → ``self host``; a share of what stands there already is only called so."""
    out: dict[str, str] = {}
    for column in columns:
        ending = next((ending for ending in ENDINGS if column.endswith(ending)), "")
        text = (column[: len(column) - len(ending)] or column.strip("_")).replace("_", " ")
        out[column] = text if text not in out.values() else AGAIN.get(ending, "{}").format(text)
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
    """``0.4%``, ``12.3%``, ``100%``; what is there but tiny is not told as nothing."""
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
