"""What is sent to an assistant: a document, a short text about it, and what was left out of it.

An answer is at most a few pages long.  Every text of it is made printable: names, log lines and errors come from jobs,
and a terminal may show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stepscope.records.text import ALLOWED_CONTROLS, printable, printable_document

__all__ = ["MOST_BYTES", "Answer", "bounded"]

MOST_BYTES = 20_000
"""The default limit of a document: about 5,000 words of a language model."""
LEAST_BYTES = 2_000
TEXT_BYTES = 2_000
_DEEPEST = 12
_SHORTEST = 80
"""Bytes that any part of a document may have: below, cutting gains nothing."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    """The answer in a few sentences."""
    document: Mapping[str, Any]
    more: str = ""
    """How to get what does not fit."""


def bounded(answer: Answer, most_bytes: int = MOST_BYTES) -> Answer:
    """Return the answer with a document of at most that size.

    Long lists end early and long texts are cut, the longest first.  ``truncated`` in the document then has a row for
    each: where, how many elements or characters are shown, and of how many; and ``more``.
    """
    text = printable(_cut_text(answer.text, TEXT_BYTES), keep=ALLOWED_CONTROLS)
    document = printable_document(answer.document)
    if _size(document) <= most_bytes:
        return Answer(text=text, document=document)
    rows: list[dict[str, Any]] = []
    budget = max(most_bytes, LEAST_BYTES) * 3 // 4
    while True:
        rows.clear()
        cut = _fitted(document, budget, "", 0, rows)
        rows.sort(key=lambda row: row["shown"] - row["of"])
        more = answer.more or "ask for less: fewer ranks, steps or rows"
        made = {**cut, "truncated": rows[:12], "more": more}
        if _size(made) <= most_bytes or budget < _SHORTEST:
            break
        budget = budget * 3 // 4
    return Answer(text=f"{text}\n(The answer is truncated: {more}.)", document=made)


def _fitted(value: Any, budget: int, place: str, depth: int, rows: list[dict[str, Any]]) -> Any:
    if _size(value) <= budget:
        return value
    if isinstance(value, str):
        cut = _cut_text(value, max(budget, _SHORTEST))
        if len(cut) < len(value):
            rows.append({"at": place, "shown": len(cut), "of": len(value)})
        return cut
    if depth >= _DEEPEST and isinstance(value, dict | list):
        rows.append({"at": place, "shown": 0, "of": len(value)})
        return None
    if isinstance(value, dict):
        return _fitted_mapping(value, budget, place, depth, rows)
    if isinstance(value, list):
        return _fitted_list(value, budget, place, depth, rows)
    return value


def _fitted_mapping(
    value: Mapping[str, Any], budget: int, place: str, depth: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Give each value what it needs, up to an equal share of what small ones leave."""
    sizes = {key: _size(inner) for key, inner in value.items()}
    if len(value) * _SHORTEST > max(budget, _SHORTEST):  # a table by name, such as a value for each of 10,000 ranks
        shown: dict[str, Any] = {}
        used = 0
        for key, inner in value.items():
            used += len(key.encode()) + sizes[key] + 4
            if used > budget and shown:
                break
            shown[key] = _fitted(inner, budget, f"{place}.{key}" if place else key, depth + 1, rows)
        if len(shown) < len(value):
            rows.append({"at": place, "shown": len(shown), "of": len(value)})
        return shown
    left = budget - sum(len(key.encode()) + 4 for key in value)
    share = 0
    ordered = sorted(sizes.values())
    for at, size in enumerate(ordered):
        share = max(left // (len(ordered) - at), 0)
        if size > share:
            break
        left -= size
    return {
        key: _fitted(inner, max(share, _SHORTEST), f"{place}.{key}" if place else key, depth + 1, rows)
        for key, inner in value.items()
    }


def _fitted_list(value: list[Any], budget: int, place: str, depth: int, rows: list[dict[str, Any]]) -> list[Any]:
    """Return the first elements; a long one is cut itself, so that there are several."""
    each = max(budget // 4, _SHORTEST)
    shown: list[Any] = []
    used = 2
    for at, inner in enumerate(value):
        found: list[dict[str, Any]] = []
        cut = _fitted(inner, each, f"{place}[{at}]", depth + 1, found)
        used += _size(cut) + 1
        if used > budget and shown:
            break
        shown.append(cut)
        rows += found
    if len(shown) < len(value):
        rows.append({"at": place, "shown": len(shown), "of": len(value)})
    return shown


def _cut_text(text: str, most_bytes: int) -> str:
    data = text.encode(errors="backslashreplace")
    return text if len(data) <= most_bytes else data[: most_bytes - 3].decode(errors="ignore") + "…"


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
