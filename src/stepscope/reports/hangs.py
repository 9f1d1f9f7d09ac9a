"""Hangs in the summary: rows of ``summary.json``, and from those the section of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.hangs.finding import steps_of, title_of
from stepscope.hangs.tense import told_of
from stepscope.hangs.text import hang_lines
from stepscope.records.hang import HangRecord
from stepscope.records.naming import hang_name
from stepscope.records.units import count_text

__all__ = ["hang_section", "hangs_table", "listed_steps"]

LEFT_OUT = ("schema", "ranks", "flight")
"""Long, and in the hang's own file."""
SHOWN = 3


def hangs_table(hangs: Sequence[HangRecord], *, over: bool = False) -> list[dict[str, Any]]:
    """One row a hang, in order of time, told as of now (``told_of``); ``file``: where all of it is."""
    return [
        {key: value for key, value in told_of(hang, over=over).to_dict().items() if key not in LEFT_OUT}
        | {"file": f"hangs/{hang_name(hang.host, hang.number)}", "steps": listed_steps(hang)}
        for hang in hangs
    ]


def listed_steps(hang: HangRecord) -> list[int] | None:
    """The first and the last of the steps it stood in, for JSON."""
    steps = steps_of(hang)
    return None if steps is None else [*steps]


def hang_section(
    rows: Sequence[Mapping[str, Any]], width: int, *, led_by: str = "", now_wall_ns: int | None = None
) -> list[str]:
    """The heading and the lines of the first few hangs; ``led_by``: the sentence that stands at the head of the page;
    ``now_wall_ns``: the time, of a run that goes on."""
    if now_wall_ns is not None and any(row["over"] is None for row in rows):
        earlier = f" (and stood still {count_text(len(rows) - 1, 'time')} before)" if len(rows) > 1 else ""
        lines = [f"The job stands still now{earlier}"]
    else:
        lines = ["The job stood still" if len(rows) == 1 else f"The job stood still {len(rows)} times"]
    for row in rows[:SHOWN]:
        record = HangRecord.from_dict({**row, "schema": 1})
        first_last = row.get("steps")
        steps = (first_last[0], first_last[1]) if first_last else None
        lines += hang_lines(record, width, title=title_of(record) != led_by, now_wall_ns=now_wall_ns, steps=steps)
    if len(rows) > SHOWN:
        lines.append(f"  … and {len(rows) - SHOWN} more in hangs/")
    return lines
