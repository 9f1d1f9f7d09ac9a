"""``stacks.jsonl``: where ranks were seen, by line, as the agent wrote it down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stepscope.store.jsonl import read_jsonl
from stepscope.store.paths import STACKS

__all__ = ["checked_stacks", "read_stacks"]

_LARGEST = (1 << 63) - 1
_NUMBERS = ("rank", "pid", "wall_ns", "step")


def read_stacks(run_dir: Path, rank_of: Callable[[int], int | None]) -> tuple[tuple[dict[str, Any], ...], int]:
    """The stacks, in order of time, and how many lines were none.

    ``rank_of``: the rank that a pid is shown as, where that is known.
    """
    records, bad = read_jsonl(run_dir / STACKS)
    stacks, none = checked_stacks(records, rank_of)
    return stacks, bad + none


def checked_stacks(
    records: Iterable[dict[str, Any]], rank_of: Callable[[int], int | None]
) -> tuple[tuple[dict[str, Any], ...], int]:
    """The same of lines that were read already."""
    stacks, bad = [], 0
    for record in records:
        stack = _checked(record)
        if stack is None:
            bad += 1
            continue
        shown = rank_of(stack["pid"])
        stacks.append(stack if shown is None else {**stack, "rank": shown})
    return tuple(sorted(stacks, key=lambda stack: stack["wall_ns"])), bad


def _checked(raw: dict[str, Any]) -> dict[str, Any] | None:
    frames = raw.get("frames")
    if not all(_is_count(raw.get(name)) for name in _NUMBERS) or not isinstance(raw.get("phase"), str):
        return None
    if not isinstance(frames, list) or not frames or not all(_is_frame(frame) for frame in frames):
        return None
    plain = [{name: frame[name] for name in ("file", "line", "function")} for frame in frames]
    between = raw.get("between")
    return {
        **{name: raw[name] for name in (*_NUMBERS, "phase")},
        "between": between if isinstance(between, bool) else None,
        "frames": plain,
    }


def _is_frame(raw: Any) -> bool:
    return (
        isinstance(raw, dict)
        and _is_count(raw.get("line"))
        and isinstance(raw.get("file"), str)
        and isinstance(raw.get("function"), str)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST
