"""The time of a step and what it is a figure of, how fast steps come, and the newest of them as a line of blocks."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from stepscope.records.units import ms_text
from stepscope.terminal.pace import recent, steps_per_second, still_s, stretch_steps, usual_wall_ns, usual_words
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, fit, spark

__all__ = ["draw_step_time", "still_words"]

LABEL = 8
LEAST_SPARK = 12
"""Blocks that words leave room for."""


def draw_step_time(known: Snapshot, width: int, *, now_wall_ns: int = 0) -> Text:
    """``69.0 ms  median of 256, mean of ranks   14.5/s  ▁▁▂▁``; a rate only while steps come."""
    label = (fit("step", LABEL), "dim")
    if not recent(known):
        return columns([label, ("no steps" if known.over else "no steps yet", "dim")], width)
    parts = [label, (f"{ms_text(usual_wall_ns(known) / 1e6):>8}  ", "bold")]
    still, rate = still_s(known, now_wall_ns), steps_per_second(known, now_wall_ns)
    pace = (still_words(still), "bold yellow") if still is not None else (f"{rate:,.1f}/s" if rate else "", "bold")
    room = width - sum(cell_len(words) for words, _ in parts) - (cell_len(pace[0]) + 2 if pace[0] else 0)
    about = next((words for words in _about(known) if cell_len(words) + 2 + LEAST_SPARK <= room), "")
    parts += [(f"{about}  ", "dim")] if about else []
    parts += [pace, ("  ", "")] if pace[0] else []
    room = width - sum(cell_len(words) for words, _ in parts)
    return columns([*parts, (spark([row.mean_ns["wall"] / 1e6 for row in known.steps], room), "cyan")], width)


def still_words(seconds: float) -> str:
    return f"no step for {seconds:.0f} s" if seconds < 100 else f"no step for {seconds / 60:,.0f} min"


def _about(known: Snapshot) -> list[str]:
    """What the figure is, the fullest words first."""
    middle = usual_words(known)
    if known.status is not None and known.status.ranks > 1:
        return [f"{middle}, mean of ranks", middle]
    return [f"{middle} {'step' if stretch_steps(known) == 1 else 'steps'}", middle]
