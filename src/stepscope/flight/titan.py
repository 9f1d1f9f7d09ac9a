"""torchtitan's structured logs: where each rank was when its log ends.  Pure.

One JSON object per line (``structured_logs/SOURCE.global_rank_N.….jsonl``): ``rank``, ``step``, ``log_type_name`` with
``X_start``, ``X_end`` and ``X_error`` around a stretch of work, ``caller`` as ``file:line:function``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["RankLog", "is_titan_log", "read_titan_log"]

MAX_OPEN = 64
MAX_TEXT = 400


@dataclass(frozen=True, kw_only=True)
class RankLog:
    rank: int
    step: int | None = None
    inside: tuple[str, ...] = ()
    """Stretches of work that were begun and not ended, the innermost last."""
    caller: str = ""
    error: str = ""
    time_us: int = 0


def is_titan_log(text: str) -> bool:
    return any("log_type_name" in row for row in _rows(text[:65536]))


def read_titan_log(text: str) -> RankLog | None:
    """Of the end of a log: the first line may be cut, and so may the last."""
    rank, step, time_us = None, None, 0
    caller = error = ""
    inside: list[tuple[str, str]] = []
    for row in _rows(text):
        number = row.get("global_rank", row.get("rank"))
        if type(number) is not int or number < 0:
            continue
        rank = number
        step = row["step"] if type(row.get("step")) is int else step
        time_us = row["time_us"] if type(row.get("time_us")) is int else time_us
        name = row.get("log_type_name")
        where = row["caller"][:MAX_TEXT] if isinstance(row.get("caller"), str) else ""
        if not isinstance(name, str):
            continue
        if name.endswith("_start") and len(inside) < MAX_OPEN:
            inside.append((name.removesuffix("_start")[:MAX_TEXT], where))
        elif name.endswith("_end"):
            inside = _left(inside, name.removesuffix("_end")[:MAX_TEXT])
        elif name.endswith("_error"):
            error = row["message"][:MAX_TEXT] if isinstance(row.get("message"), str) else name
        caller = where
    if rank is None:
        return None
    return RankLog(
        rank=rank,
        step=step,
        inside=tuple(name for name, _ in inside),
        caller=inside[-1][1] if inside else caller,
        error=error,
        time_us=time_us,
    )


def _left(inside: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    """Without the innermost of that name; what began before the part that was read is not in there."""
    for place in range(len(inside) - 1, -1, -1):
        if inside[place][0] == name:
            return inside[:place] + inside[place + 1 :]
    return inside


def _rows(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
