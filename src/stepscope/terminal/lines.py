"""A run in plain lines: the wording that everything shares which tells of a run as it goes on."""

from __future__ import annotations

import time

from stepscope.records.messages import printable
from stepscope.reports.page import MARKS

__all__ = ["finding_line", "news_line"]

WITHDRAWN = "○"


def news_line(step: int, words: str, *, wall_s: float | None = None) -> str:
    """``02:14:07  step 1,200   …``."""
    clock = time.strftime("%H:%M:%S", time.localtime(wall_s))
    return f"{clock}  step {max(step, 0):<7,} {printable(words)}"


def finding_line(step: int, severity: str, title: str, *, withdrawn: bool = False, wall_s: float | None = None) -> str:
    mark = WITHDRAWN if withdrawn else MARKS.get(severity, MARKS["info"])
    return news_line(step, f"{mark} {'no longer: ' if withdrawn else ''}{title}", wall_s=wall_s)
