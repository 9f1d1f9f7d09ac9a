"""Findings and tables into what people and scripts read.  No I/O: a run in, a document or a text out.

``summary`` makes the document of ``summary.json`` (docs/schema.md); every other form is drawn from that document, so a
number that two screens show comes from one place.

Both names are loaded when they are first asked for: who draws a trace need not wait for the rules of runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.reports.summary import summarise
    from stepscope.reports.summary_text import render_text

__all__ = ["render_text", "summarise"]


def __getattr__(name: str) -> Any:
    if name == "summarise":
        from stepscope.reports.summary import summarise

        return summarise
    if name == "render_text":
        from stepscope.reports.summary_text import render_text

        return render_text
    raise AttributeError(f"module 'stepscope.reports' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
