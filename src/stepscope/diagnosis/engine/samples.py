"""Read numbers from the agent's samples, which come from a file and may contain anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

__all__ = ["LARGEST", "during", "extremes", "number", "numbers", "of_kind"]

Line = TypeVar("Line", bound=Mapping[str, Any])
LARGEST = 1e300
"""Larger values cannot be measurements, and integers of that size do not fit a float."""


def number(line: Mapping[str, Any], key: str) -> float | None:
    """The value if it is a finite number."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def numbers(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def extremes(lines: Iterable[Mapping[str, Any]], key: str, end: Literal["max", "min"]) -> list[float]:
    """Like ``numbers``; for a sample that summarizes many, the highest or the lowest of them."""
    found = []
    for line in lines:
        over = line.get("over")
        kept = over.get(end) if isinstance(over, dict) else None
        value = number(kept, key) if isinstance(kept, dict) else None
        value = number(line, key) if value is None else value
        if value is not None:
            found.append(value)
    return found


def during(lines: Iterable[Line], start_wall_ns: float, end_wall_ns: float) -> Iterator[Line]:
    for line in lines:
        wall_ns = line.get("wall_ns")
        if type(wall_ns) is not int:  # fast path: there may be a hundred thousand, and nearly all are int
            wall_ns = number(line, "wall_ns") or 0
        if start_wall_ns <= wall_ns <= end_wall_ns:
            yield line


def of_kind(lines: Iterable[Line], kind: str) -> Iterator[Line]:
    return (line for line in lines if line.get("kind") == kind)
