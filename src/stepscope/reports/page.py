"""A page of plain text for the terminal: marks, labels at the left, wrapped sentences, bars."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["LABEL", "MARKS", "NARROWEST", "Page", "bar", "cut"]

MARKS = {"critical": "✖", "warning": "▲", "info": "●", "healthy": "✔"}
COLOURS = {"critical": "31", "warning": "33", "info": "36", "healthy": "32", "bold": "1", "dim": "2"}
EIGHTHS = " ▏▎▍▌▋▊▉█"
LABEL = 10
"""Columns of the labels at the left."""
NARROWEST = 60


class Page:
    """Lines so far, and the two things every part needs to know."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = width
        self.color = color
        self.lines: list[str] = []

    def paint(self, text: str, *looks: str) -> str:
        if not self.color or not text:
            return text
        return f"\x1b[{';'.join(COLOURS[look] for look in looks)}m{text}\x1b[0m"

    def blank(self) -> None:
        if self.lines and self.lines[-1]:
            self.lines.append("")

    def marked(self, look: str, text: str, *, bold: bool) -> None:
        """A sentence behind its mark."""
        first, *rest = self._wrapped(text, 2)
        looks = (look, "bold") if bold else ()
        self.lines.append(f"{self.paint(MARKS[look], look)} {self.paint(first, *looks) if looks else first}")
        self.lines += [f"  {self.paint(line, *looks) if looks else line}" for line in rest]

    def labelled(self, label: str, texts: Iterable[str]) -> None:
        """Paragraphs beside a label."""
        shown = label
        for text in texts:
            for line in self._wrapped(text, 2 + LABEL):
                self.lines.append(f"  {self.paint(shown.ljust(LABEL), 'dim')}{line}".rstrip())
                shown = ""

    def items(self, label: str, parts: Sequence[str]) -> None:
        """Short facts in a row beside a label, broken between facts only."""
        if not parts:
            return
        rows = [parts[0]]
        for part in parts[1:]:
            if len(rows[-1]) + len(part) + 3 <= self.width - 2 - LABEL:
                rows[-1] += f" · {part}"
            else:
                rows.append(part)
        self.labelled(label, rows)

    def _wrapped(self, text: str, indent: int) -> list[str]:
        plain = " ".join(text.split())
        return textwrap.wrap(plain, self.width - indent, break_on_hyphens=False) or [""]


def bar(share: float, columns: int) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * columns * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"
