"""Hangs in the summary: rows of ``summary.json``, and from those the section of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.hangs.text import hang_lines
from stepscope.records.hang import HangRecord
from stepscope.records.naming import hang_name

__all__ = ["hang_section", "hangs_table"]

LEFT_OUT = ("schema", "ranks", "flight")
"""Long, and in the hang's own file."""
SHOWN = 3


def hangs_table(hangs: Sequence[HangRecord]) -> list[dict[str, Any]]:
    """One row a hang, in order of time; ``file``: where all of it is."""
    return [
        {key: value for key, value in hang.to_dict().items() if key not in LEFT_OUT}
        | {"file": f"hangs/{hang_name(hang.host, hang.number)}"}
        for hang in hangs
    ]


def hang_section(rows: Sequence[Mapping[str, Any]], width: int, *, led_by: str = "") -> list[str]:
    """The lines of the first few hangs; ``led_by``: the sentence that stands at the head of the page."""
    lines: list[str] = []
    for row in rows[:SHOWN]:
        record = HangRecord.from_dict({**row, "schema": 1})
        lines += hang_lines(record, width, title=record.title != led_by)
    if len(rows) > SHOWN:
        lines.append(f"  … and {len(rows) - SHOWN} more in hangs/")
    return lines
