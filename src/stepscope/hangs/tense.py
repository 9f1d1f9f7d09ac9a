"""A standstill told once it is over: the judge says what it sees, in the present, and the record keeps that.

    told_of(record, over=True).title    # "Rank 1 never called …: it slept at train.py:41 (…); rank 0 waited for it."

The judge has few verbs, so that a table says them all.  What is not the judge's is left as it is: lines of code, which
stand in brackets behind their place, names behind ``in``, ``of``, ``at`` and ``on``, and what a rank that died said.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from stepscope.hangs.words import SOURCE_CHARS
from stepscope.records.hang import HangRecord

__all__ = ["past_text", "past_title", "told_of"]

PAST = {
    "is": "was",
    "are": "were",
    "has": "had",
    "have": "had",
    "does": "did",
    "do": "did",
    "waits": "waited",
    "wait": "waited",
    "sleeps": "slept",
    "sleep": "slept",
    "stands": "stood",
    "hangs": "hung",
    "holds": "held",
    "uses": "used",
    "answers": "answered",
    "need": "needed",
    "says": "said",
    "comes": "came",
    "computes": "computed",
    "imports": "imported",
    "compiles": "compiled",
    "evaluates": "evaluated",
    "reads": "read",
    "writes": "wrote",
}
_CODE = re.compile(r":\d+ \(")
"""A line of code begins behind its number …"""
_GOES_ON = re.compile(r"\)(?=[;,.:]|$| (?:has|have|had|called|left|raised)\b)")
"""… and ends with a bracket after which a sentence can go on."""
_VERB = re.compile(
    rf"(?<![\w./:'\"-])(?<!\bin )(?<!\bof )(?<!\bat )(?<!\bon )(?<!\bhost )({'|'.join(PAST)})(?![\w(='\"-]|[./:]\w)"
)
_WAITERS = re.compile(r"(; ranks? [\d, –and…]+?) waits? (for (?:it|them)\b)(?!.*; ranks? [\d, –and…]+? waits? for)")


def told_of(record: HangRecord, *, over: bool = False) -> HangRecord:
    """``over``: whether the job is, where nobody saw the end of the standstill; the same record while it lasts."""
    if record.over is None and not over:
        return record
    parts = tuple(replace(part, title=past_title(part.kind, part.title)) for part in record.parts)
    record = replace(record, title=past_title(record.kind, record.title), parts=parts, flight=_flight(record.flight))
    if record.kind == "rank_crashed":
        return record
    return replace(
        record,
        culprits=tuple(replace(culprit, reason=past_text(culprit.reason)) for culprit in record.culprits),
        cycle=tuple(map(past_text, record.cycle)),
        evidence=tuple(map(past_text, record.evidence)),
    )


def past_text(text: str) -> str:
    """A sentence of the judge's in the past; one that is in it already stays."""
    code = _CODE.search(text)
    if code is None:
        return _VERB.sub(lambda verb: PAST[verb[1]], text)
    end = _end_of_code(text, code.end() - 1)
    return past_text(text[: code.start()]) + text[code.start() : end] + past_text(text[end:])


def _end_of_code(text: str, begin: int) -> int:
    """Where its brackets close; of code that was cut, or opens more than it closes, the first end that it can have."""
    depth = 0
    for at in range(begin, min(len(text), begin + SOURCE_CHARS + 2)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0 and _GOES_ON.match(text, at):
            return at + 1
    cut = text.find("…)", begin, begin + SOURCE_CHARS + 2)
    if cut >= 0:
        return cut + 2
    first = _GOES_ON.search(text, begin)
    return first.end() if first is not None else len(text)


def past_title(kind: str, title: str) -> str:
    """Of a death only who waited: it has the words of an exception in it."""
    return _WAITERS.sub(r"\1 waited \2", title) if kind == "rank_crashed" else past_text(title)


def _flight(flight: dict[str, Any]) -> dict[str, Any]:
    title = flight.get("title")
    return {**flight, "title": past_title(str(flight.get("kind")), title)} if isinstance(title, str) else flight
