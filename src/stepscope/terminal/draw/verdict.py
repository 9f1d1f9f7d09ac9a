"""What is wrong, what it costs and what to do: the first thing to be read."""

from __future__ import annotations

from rich.text import Text

from stepscope.reports.page import MARKS
from stepscope.terminal.documents import Verdict
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import STYLES, columns, fit, wrapped

__all__ = ["draw_verdict", "look_of"]

TITLE_LINES = 3
LABEL = 7
MORE_FROM = 40
"""Columns from which on there is room for how much else was found."""
GRAVEST_FIRST = ("critical", "warning", "info")


def draw_verdict(known: Snapshot, width: int, height: int) -> list[Text]:
    verdict = known.findings.verdict if known.findings is not None else None
    if verdict is None or not verdict.title:
        return _nothing(known, width, height)
    look = look_of(verdict, known)
    room = max(1, height - bool(verdict.price) - bool(verdict.advice))
    more = _more(known) if width >= MORE_FROM else []
    kept = sum(len(words) for words, _ in more) + 2 if more else 0
    first, *rest = wrapped(verdict.title, width - 2 - kept, min(room, TITLE_LINES))
    style = STYLES.get(look, "bold")
    padded = fit(first, width - kept) if more else first
    lines = [columns([(f"{MARKS.get(look, '●')} ", style), (padded, "bold"), *more], width)]
    lines += [columns([("  ", ""), (line, "bold")], width) for line in rest]
    if verdict.price:
        gain = verdict.kind == "healthy"
        price = f"at most {verdict.price}" if gain else verdict.price
        # A price that does not fit on a line is worth a second one where the advice still has one after it.
        most = 2 if height - len(lines) > 2 else 1
        lines += _labelled("to gain" if gain else "price", price, width, most)
    for advice in verdict.advice:
        if len(lines) >= height:
            break
        label = "to do" if advice is verdict.advice[0] else ""
        last = advice is verdict.advice[-1]
        lines += _labelled(label, advice, width, height - len(lines) if last else min(2, height - len(lines)))
    return lines[:height]


def _more(known: Snapshot) -> list[tuple[str, str]]:
    """``▲ +4 more: v``: that the verdict is not all, and how grave the gravest of the others is."""
    others = known.findings.findings[1:] if known.findings is not None else ()
    if not others:
        return []
    gravest = next((one for one in GRAVEST_FIRST if any(other.severity == one for other in others)), "info")
    return [(MARKS[gravest], STYLES[gravest]), (f" +{len(others)} more: ", ""), ("v", "bold")]


def look_of(verdict: Verdict, known: Snapshot) -> str:
    """As the summary has it: a healthy run is green unless it leaves much on the table."""
    if verdict.kind != "healthy":
        return verdict.severity if verdict.severity in MARKS else "info"
    first = known.findings.findings[0] if known.findings is not None and known.findings.findings else None
    return "info" if first is not None and first.evidence.get("large") else "healthy"


def _labelled(label: str, text: str, width: int, most: int) -> list[Text]:
    lines = wrapped(text, width - LABEL - 3, most)
    return [
        columns([(f"  {label if at == 0 else '':<{LABEL}} ", "dim"), (line, "")], width)
        for at, line in enumerate(lines)
    ]


def _nothing(known: Snapshot, width: int, height: int) -> list[Text]:
    if known.link in ("refused", "missing") or (known.link == "lost" and known.run is None):
        lines = wrapped(known.why, width - 2, height)
        return [
            columns([("✖ " if at == 0 else "  ", "bold red"), (line, "bold")], width) for at, line in enumerate(lines)
        ]
    if known.run is None:
        said = "Opening the run …"
    elif known.over:
        said = "The run is over, and there is not enough of it to judge."
    elif known.step < 0:
        said = "No step yet: the job is starting, or it is not a training loop that is known by itself."
    else:
        said = "Nothing found so far."
    return [columns([("● ", "dim"), (line, "")], width) for line in wrapped(said, width - 2, height)[:1]]
