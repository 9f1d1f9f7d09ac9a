"""Text for a screen of cells: what strangers wrote made harmless, cut and padded by the width that it is shown in.

Names of hosts and runs, titles, lines of logs: all of it is somebody else's.  What is not printable (escape sequences,
line ends, marks that turn the direction of writing) becomes ``?``; styles are put on by us, never read out of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stepscope.records.messages import printable

__all__ = ["STYLES", "columns", "fit", "plain", "printed_lines", "spark", "wrapped"]

STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "cyan", "healthy": "green"}
SPARKS = "▁▂▃▄▅▆▇█"
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Colours and cursor movements in what a job printed; they are not shown."""
_VARIANTS = re.compile("[\ufe00-\ufe0f]")
"""They ask for another width of the sign before them, and terminals disagree on it."""
_TAB = 4


def plain(text: str) -> str:
    """One line without anything that a terminal would obey."""
    return printable(_VARIANTS.sub("", text), mark="?")


def fit(text: str, width: int) -> str:
    """Exactly so many cells: padded, or cut with an ellipsis."""
    text = plain(text)
    if width <= 0:
        return ""
    if cell_len(text) > width:
        return set_cell_size(set_cell_size(text, width - 1).rstrip() + "…", width)
    return set_cell_size(text, width)


def columns(parts: Iterable[tuple[str, str]], width: int) -> Text:
    """Pieces with their styles on one line, cut at the width."""
    line = Text(no_wrap=True, end="")
    left = width
    for said, style in parts:
        words = plain(said)
        if cell_len(words) > left:
            line.append(fit(words, left), style)
            return line
        line.append(words, style)
        left -= cell_len(words)
    return line


def wrapped(text: str, width: int, most: int) -> list[str]:
    """At most so many lines, broken between words; the last is cut when there is more."""
    words, lines = plain(" ".join(text.split())).split(" "), [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fit(line, width).rstrip() for line in lines]


def printed_lines(data: bytes, most: int) -> list[str]:
    """The last lines of what a job printed, as a terminal would leave them: after ``\\r`` a line begins anew."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    lines = text.removesuffix("\n").split("\n") if text else []
    return [plain(_overwritten(line).expandtabs(_TAB)) for line in lines[-most:]] if most > 0 else []


def spark(values: Iterable[float], width: int) -> str:
    """The newest values as a line of blocks, from the least to the most; a single odd one does not flatten the rest."""
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    ordered = sorted(shown)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.98))]
    # Steps that take the same time are a flat line, not noise blown up to the whole height.
    span = max(high - low, 0.1 * high)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round(min((value - low) / span, 1.0) * steps) if span else 0] for value in shown)


def _overwritten(line: str) -> str:
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""
