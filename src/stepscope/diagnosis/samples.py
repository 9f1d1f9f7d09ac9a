"""Numbers out of the agent's samples, which come from a file and may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["LARGEST", "during", "number", "numbers", "of_kind"]

LARGEST = 1e300
"""Beyond it is nothing that anybody measured, and an integer of that size has no float."""


def number(line: Mapping[str, Any], key: str) -> float | None:
    """The value when it is a finite number."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def numbers(lines: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def during(lines: Iterable[dict[str, Any]], start_wall_ns: float, end_wall_ns: float) -> Iterator[dict[str, Any]]:
    return (line for line in lines if start_wall_ns <= (number(line, "wall_ns") or 0) <= end_wall_ns)


def of_kind(lines: Iterable[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (line for line in lines if line.get("kind") == kind)
