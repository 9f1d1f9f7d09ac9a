"""Findings and tables into what people and scripts read.  No I/O: a run in, a document or a text out.

``summary`` makes the document of ``summary.json`` (docs/schema.md); every other form is drawn from that document, so a
number that two screens show comes from one place.
"""

from stepscope.reports.summary import summarise
from stepscope.reports.text import render_text

__all__ = ["render_text", "summarise"]
