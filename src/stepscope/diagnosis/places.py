"""The place in the user's code that a stack shows: the innermost line that is not a library's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from stepscope.diagnosis.view import View

__all__ = ["seen_at"]

LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "stepscope/recorder")
"""In the path of a frame that is not the user's own."""
AGREE_SHARE = 0.3
"""Of the stacks must show a place for it to be named."""


def seen_at(view: View, ranks: Collection[int] = ()) -> str:
    """``write_report, train.py:66``: where the ranks (all when none are given) were mostly seen; empty if nowhere."""
    seen = [
        place
        for stack in view.window.stacks
        if (not ranks or stack.get("rank") in ranks) and (place := _place(stack.get("frames")))
    ]
    functions = Counter((path, function) for path, function, _ in seen)
    if not functions:
        return ""
    (path, function), count = functions.most_common(1)[0]
    if count < AGREE_SHARE * len(seen):
        return ""
    line = Counter(at for *where, at in seen if where == [path, function]).most_common(1)[0][0]
    where = f"{path.rpartition('/')[2]}:{line}"
    return where if function in ("", "<module>") else f"{function}, {where}"


def _place(frames: Any) -> tuple[str, str, int] | None:
    """Path, function and line of the innermost frame of the user's own."""
    for frame in frames if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            return None
        path, function, line = frame.get("file"), frame.get("function"), frame.get("line")
        if not isinstance(path, str) or any(part in path for part in LIBRARIES):
            continue
        return path, function if isinstance(function, str) else "", line if isinstance(line, int) else 0
    return None
