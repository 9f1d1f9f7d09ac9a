"""Where a step's time goes: the mean over the ranks beside the rank that works longest, phase by phase."""

from __future__ import annotations

from rich.text import Text

from stepscope.records.phases import BUILTIN_PHASES
from stepscope.records.units import count_text, ms_text, share_text
from stepscope.terminal.draw.bars import padded_bar
from stepscope.terminal.pace import recent, row_steps, stretch_steps
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, fit

__all__ = ["draw_phases", "means", "phase_head"]

NAME = 11
NUMBER = 9
SHARE = 5
COMM = "comm"
ODD = 1.3
"""A rank that takes so many times the mean in a phase is marked …"""
ODD_SHARE = 0.05
"""… if that is this much of the step."""
FOLD_FROM = 3
"""Of more lines than these the last is for the phases that have none of their own …"""
FOLD_SHARE = 0.02
"""… if they would be this much of the step."""
COLOURS = {
    "input": "yellow",
    "h2d": "yellow",
    "forward": "blue",
    "backward": "magenta",
    "comm": "cyan",
    "optimizer": "green",
    "eval": "white",
    "checkpoint": "white",
}


def means(known: Snapshot) -> dict[str, float]:
    """By ``wall``, ``work`` and phase, over the ranks and the steps of the stretch, in nanoseconds."""
    rows = recent(known)
    names = dict.fromkeys(name for row in rows for name in row.mean_ns)
    steps = sum(map(row_steps, rows))
    return {name: sum(row.mean_ns.get(name, 0.0) * row_steps(row) for row in rows) / steps for name in names}


def draw_phases(known: Snapshot, width: int, height: int) -> list[Text]:
    """The longest that there is room for, in the order of a step; the others, where they count, share the last."""
    mean = means(known)
    wall = mean.pop("wall", 0.0)
    mean.pop("work", None)
    if wall <= 0:
        return []
    slow = _slowest(known)
    by_weight = sorted(mean, key=lambda name: -_weight(name, mean, slow))
    left_out = sum(mean[name] for name in by_weight[max(0, height - 1) :])
    folded = by_weight[height - 2 :] if height > FOLD_FROM and left_out > FOLD_SHARE * wall else []
    own = by_weight[: max(1, height - 1 - bool(folded))]
    shown, folded = sorted(own, key=_place), [name for name in folded if _weight(name, mean, slow) > 0]
    longest = max([1.0, *(mean[name] for name in shown), *(slow.get(name, 0.0) for name in shown)])
    columns_of_rank = NUMBER + 2 if slow else 0
    room = width - NAME - NUMBER - SHARE - columns_of_rank
    each = max(4, (room - 4) // 2 if slow else room - 2)
    rows = [_row(name, mean[name], slow.get(name), wall, longest, each, width) for name in shown]
    if folded:
        together = sum(mean[name] for name in folded)
        of_slow = sum(slow.get(name, 0.0) for name in folded) if slow else None
        rows.append(_row(f"+{len(folded)} more", together, of_slow, wall, longest, each, width))
    return [_title(known, width, each, bool(slow)), *rows][:height]


def phase_head(known: Snapshot) -> str:
    """Over the names of phases: where devices are timed, these times are not theirs."""
    return "host phase" if known.device_timed else "phase"


def _row(name: str, mean: float, slow: float | None, wall: float, longest: float, each: int, width: int) -> Text:
    colour = COLOURS.get(name, "white")
    parts = [
        (fit(name, NAME), ""),
        (f"{ms_text(mean / 1e6):>{NUMBER}}{share_text(mean / wall):>{SHARE}}", ""),
        ("  ", ""),
        (padded_bar(mean / longest, each), colour),
    ]
    if slow is not None:
        odd = name != COMM and slow > ODD * mean and slow - mean > ODD_SHARE * wall
        parts += [
            (f"{ms_text(slow / 1e6):>{NUMBER}}", "bold" if odd else ""),
            (" ◀" if odd else "  ", "bold red"),
            ("  ", ""),
            (padded_bar(slow / longest, each), colour),
        ]
    return columns(parts, width)


def _title(known: Snapshot, width: int, each: int, both: bool) -> Text:
    count = known.status.ranks if known.status is not None else 0
    left = f"{phase_head(known):<{NAME}}{'mean':>{NUMBER}}{'':>{SHARE}}  "
    steps = count_text(stretch_steps(known), "step")
    said = [f"of {steps}, {count:,} ranks", f"{steps}, {count:,} ranks"] if count != 1 else [f"of {steps}"]
    over = next((words for words in (*said, steps) if len(words) <= each), "")
    parts = [(left, "dim"), (fit(over, each), "dim")]
    if both and known.slowest is not None:
        rank = f"{f'rank {known.slowest.rank[0]}':>{NUMBER}}    "
        parts += [(rank, "dim"), ("works longest" if each >= len("works longest") else "", "dim")]
    return columns(parts, width)


def _slowest(known: Snapshot) -> dict[str, float]:
    """Of the rank that works longest; empty when there is but one."""
    table = known.slowest
    if table is None or not table.rank or table.total < 2:
        return {}
    return {name: values[0] for name, values in table.mean_ns.items() if values and name not in ("wall", "work")}


def _weight(name: str, mean: dict[str, float], slow: dict[str, float]) -> float:
    return max(mean[name], slow.get(name, 0.0))


def _place(name: str) -> tuple[int, str]:
    """In the order of a step: ours, with what no hook claims last but for the user's own."""
    if name == "other":
        return len(BUILTIN_PHASES), name
    return (BUILTIN_PHASES.index(name), name) if name in BUILTIN_PHASES else (len(BUILTIN_PHASES) + 1, name)
