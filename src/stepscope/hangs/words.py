"""How ranks, lines of code and collectives are named in sentences about a hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stepscope.records.hang import Frame, WaitingIn

__all__ = [
    "collective_text",
    "file_name",
    "group_text",
    "listed",
    "one_line",
    "place_text",
    "ranks_text",
    "seconds_text",
]

RUNS_SHOWN = 8
SOURCE_CHARS = 60
MINUTE_S = 60
HOUR_S = 3600

Lines = Mapping[tuple[str, int], str]


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2, 3``, ``ranks 0, 2–63``; many stretches are cut and counted."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [part for run in runs for part in _run_parts(run)]
    if len(shown) <= RUNS_SHOWN:
        return f"ranks {', '.join(text for text, _ in shown)}"
    kept = shown[: RUNS_SHOWN - 2]
    left = len(numbers) - sum(count for _, count in kept)
    return f"ranks {', '.join(text for text, _ in kept)} and {left:,} more"


def _run_parts(run: Sequence[int]) -> list[tuple[str, int]]:
    if len(run) <= 2:  # 2, 3 rather than 2–3
        return [(str(number), 1) for number in run]
    return [(f"{run[0]}–{run[-1]}", len(run))]


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
    return waiting.description or waiting.group


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
