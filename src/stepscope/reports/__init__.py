"""From findings and tables to documents and text for people and scripts. No I/O.

``summary`` makes the document of ``summary.json`` (docs/schema.md). Every other form is drawn from that document, so
that a number on two screens has one source.

Both names are loaded on first use: drawing a trace must not wait for the rules of runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.reports.summary import summarize
    from stepscope.reports.summary_text import render_text

__all__ = ["render_text", "summarize"]


def __getattr__(name: str) -> Any:
    if name == "summarize":
        from stepscope.reports.summary import summarize

        return summarize
    if name == "render_text":
        from stepscope.reports.summary_text import render_text

        return render_text
    raise AttributeError(f"module 'stepscope.reports' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
