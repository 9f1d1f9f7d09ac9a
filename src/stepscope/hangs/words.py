"""How lines of code, collectives and times are named in sentences about a hang; ranks as ``flight/`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.records.collectives import group_name
from stepscope.records.hang import Frame, WaitingIn

__all__ = [
    "SOURCE_CHARS",
    "collective_text",
    "file_name",
    "group_text",
    "listed",
    "more_than_text",
    "one_line",
    "place_text",
    "seconds_text",
    "steps_text",
]

SOURCE_CHARS = 60
"""Of a line of code in a sentence."""
MINUTE_S = 60
HOUR_S = 3600

Lines = Mapping[tuple[str, int], str]


def listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]])) if parts else ""


def file_name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path


def one_line(text: str, most: int) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def place_text(frame: Frame | None, lines: Lines, *, code: bool = True) -> str:
    """``train.py:41 (time.sleep(999))``; without its number ``train.py, in next_batch``; empty without a frame."""
    if frame is None:
        return ""
    source = one_line(lines.get((frame.file, frame.line), ""), SOURCE_CHARS) if code else ""
    where = f"{file_name(frame.file)}:{frame.line}" if frame.line else f"{file_name(frame.file)}, in {frame.function}"
    return f"{where} ({source})" if source else where


def group_text(waiting: WaitingIn) -> str:
    return group_name(waiting.group, waiting.description)


def collective_text(waiting: WaitingIn | None) -> str:
    """``all_reduce number 7 of default_pg``, ``recv from rank 3``, or as much of it as is known."""
    if waiting is None:
        return "a collective"
    op = waiting.op or "a collective"
    if waiting.peer is not None:
        return f"{op} {'to' if 'send' in op else 'from'} rank {waiting.peer}"
    number = f" number {waiting.sequence}" if waiting.sequence is not None else ""
    group = group_text(waiting)
    return f"{op}{number}" + (f" of {group}" if group else "")


def seconds_text(seconds: float) -> str:
    """``14 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = round(max(seconds, 0.0))
    if whole < 2 * MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02d} s"
    return f"{whole // HOUR_S:,} h {whole % HOUR_S // MINUTE_S:02d} min"


def steps_text(first: int, last: int) -> str:
    """``step 41``, ``steps 60–61``."""
    return f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"


def more_than_text(seconds: float) -> str:
    """``more than 14 s``, of what goes on: true when it is said, and as long as it is read."""
    return f"more than {seconds_text(int(seconds))}"
