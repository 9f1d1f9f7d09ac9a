"""Advice as data: rows of lines and the facts under which they apply; the first row that fits is given.

    LOADING = (
        say("Read {host} first.", host=True, phase=("input", "h2d")),
        say("Nothing is known about {phase}."),
    )
    advice_for(LOADING, phase="input", host="node-1")     # ("Read node-1 first.",)

A table is next to the rule that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Advice", "advice_for", "say"]


@dataclass(frozen=True)
class Advice:
    lines: tuple[str, ...]
    """With facts in braces."""
    when: Mapping[str, Any]
    """By fact: True or False if it must be truthy or not, a tuple of values, or its value."""


def say(*lines: str, **when: Any) -> Advice:
    """One row of a table."""
    return Advice(lines=lines, when=when)


def advice_for(table: Sequence[Advice], **facts: Any) -> tuple[str, ...]:
    """The lines of the first row that fits the facts; nothing if none does."""
    for row in table:
        if all(_fits(facts[name], wanted) for name, wanted in row.when.items()):
            return tuple(line.format_map(facts) for line in row.lines)
    return ()


def _fits(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return bool(fact) is wanted
    return bool(fact in wanted) if isinstance(wanted, tuple) else bool(fact == wanted)
