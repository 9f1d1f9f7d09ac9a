"""All that was found, in full: the verdict with what to do, then the others."""

from __future__ import annotations

from rich.text import Text

from stepscope.reports.page import MARKS
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import STYLES, columns, wrapped

__all__ = ["draw_findings"]

INDENT = 4


def draw_findings(known: Snapshot, width: int, height: int) -> list[Text]:
    """``height`` lines at most; what does not fit is counted."""
    found = known.findings.findings if known.findings is not None else ()
    if not found:
        return [columns([("nothing was found so far", "dim")], width)][:height]
    lines: list[Text] = []
    for at, one in enumerate(found):
        marked = [(f"{MARKS.get(one.severity, '●')} ", STYLES.get(one.severity, ""))]
        block = [
            columns([*(marked if number == 0 else [("  ", "")]), (line, "bold" if at == 0 else "")], width)
            for number, line in enumerate(wrapped(one.title, width - 2, 4))
        ]
        for advice in one.advice:
            first, *rest = wrapped(advice, width - INDENT - 2, 4)
            block.append(columns([(f"{'– ':>{INDENT + 2}}", "dim"), (first, "")], width))
            block += [columns([(" " * (INDENT + 2), ""), (line, "")], width) for line in rest]
        if len(lines) + len(block) > height - (at < len(found) - 1):
            left = len(found) - at
            return [*lines, columns([(f"  and {left} more: `stepscope report`", "dim")], width)][:height]
        lines += block
    return lines
