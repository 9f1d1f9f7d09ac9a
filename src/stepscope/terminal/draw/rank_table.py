"""The table of ranks: those in sight, in the order that was chosen, with marks at those that a finding names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.text import Text

from stepscope.hangs.standing import HUNG
from stepscope.records.units import count_text, ms_text
from stepscope.reports.page import MARKS
from stepscope.terminal.documents import Ranks
from stepscope.terminal.pace import stretch_steps
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import STYLES, columns, fit

__all__ = ["ORDERS", "draw_ranks", "marks_of"]

T = TypeVar("T")

ORDERS = ("work", "comm", "wall", "rank")
"""What the table can be sorted by, as the API calls it; the longest first."""
TITLES = {"work": "work", "comm": "wait", "wall": "step", "rank": "rank"}
_STATES = {"exception": "bold red", "vanished": "bold red", HUNG: "bold red", "exited": "dim", "starting": "yellow"}
_SHORT = {"exception": "error"}
"""For want of room; all else as the page says it."""
RANK, STATE, NOW, NUMBER, HOST = 8, 9, 15, 10, 24
"""Columns of each; the host has what the others leave, up to as much as names need."""
NARROW, NARROWEST = 67, 52
"""Below these there is no room for what a rank does now, and for its host and state."""
BAR_FROM = 110
"""Columns from which on there is room for a bar of work and wait."""
_BAR = "█░"
"""Work and wait."""
STUCK_S = 2.0
"""A rank that is in a phase for longer is shown with the time."""


@dataclass(frozen=True, kw_only=True)
class _Cells:
    rank: str
    host: str
    state: str
    now: str
    numbers: list[str]


def draw_ranks(
    known: Snapshot, width: int, height: int, *, cursor: int, start: int, order: str, now_wall_ns: int = 0
) -> list[Text]:
    """``start`` and ``cursor``: the places of the first row in sight and of the chosen one, in the whole table.

    What was asked for may lag behind what is to be seen: rows that are not there yet are left empty.
    """
    heads = [_head(name, order) for name in ("work", "comm", "wall")]
    of = _of_steps(stretch_steps(known), NOW - 4) if known.steps else ""
    title = _Cells(rank=_head("rank", order), host="host", state="state", now=f"now{of:>{NOW - 3}}", numbers=heads)
    lines = [columns([(words, "dim") for words, _ in _parts(title, width)], width)]
    table = known.ranks
    if table is None or not table.rank:
        said = f"no rank has made a step{'' if known.over else ' yet'}" if known.run is not None else ""
        return [*lines, columns([(f"  {said}", "dim")], width)][: max(0, height)]
    marks = marks_of(known)
    held = range(len(table.rank)) if table.order == order else range(0)
    for place in range(start, min(start + height - 1, table.total)):
        at = place - table.start
        line = _row(known, table, at, width, marks, now_wall_ns) if at in held else columns([("  …", "dim")], width)
        lines.append(_chosen(line, width) if place == cursor else line)
    return lines[: max(0, height)]


def _of_steps(steps: int, room: int) -> str:
    said = f"{count_text(steps, 'step')}:"
    return said if len(said) <= room else f"of {steps:,}:"


def marks_of(known: Snapshot) -> dict[int, str]:
    """By rank, the gravest of the findings that name it."""
    found: dict[int, str] = {}
    for finding in known.findings.findings if known.findings is not None else ():
        for rank in finding.ranks:
            found.setdefault(rank, finding.severity)
    return found


def _row(known: Snapshot, table: Ranks, at: int, width: int, marks: dict[int, str], now_wall_ns: int) -> Text:
    rank, state = table.rank[at], _at(table.state, at, "")
    shown = (_at(table.standing, at, None) or state).partition(" ")[0]  # of "waits in all_reduce" there is room for one
    mark = marks.get(rank, "")
    wall, work = (_at(table.mean_ns.get(name, ()), at, 0.0) for name in ("wall", "work"))
    going = state in ("running", "starting") and not known.over
    cells = _Cells(
        rank=f" {MARKS.get(mark, ' ')}{rank:,}",
        host=_at(table.host, at, ""),
        state=_SHORT.get(shown, shown),
        now=_now(table, at, now_wall_ns) if going else "",
        numbers=[ms_text(value / 1e6) if wall else "–" for value in (work, max(0.0, wall - work), wall)],
    )
    looks = {"rank": STYLES.get(mark, ""), "state": _STATES.get(shown, ""), "work": "bold" if mark else ""}
    line = columns([(words, looks.get(name, "")) for words, name in _parts(cells, width)], width)
    if width >= BAR_FROM and wall:
        line.append("  ")
        _add_bar(line, work, wall, max(table.mean_ns.get("wall", (wall,))), width)
    return line


def _chosen(line: Text, width: int) -> Text:
    marked = Text("▶", end="", no_wrap=True).append_text(line[1:])
    marked.append(" " * max(0, width - marked.cell_len))
    # A bar whose colours are turned round shows what is not there.
    bar = next((at for at, sign in enumerate(marked.plain) if sign in _BAR), len(marked))
    marked.stylize("reverse", 0, bar)
    return marked


def _now(table: Ranks, at: int, now_wall_ns: int) -> str:
    phase = _at(table.live_phase, at, None)
    if phase is None:
        return ""
    in_it_s = (now_wall_ns - _at(table.live_since_wall_ns, at, now_wall_ns)) / 1e9
    return f"{phase} {_short_time(in_it_s)}" if in_it_s >= STUCK_S else phase


def _short_time(seconds: float) -> str:
    return (
        f"{seconds:.0f}s" if seconds < 100 else f"{seconds / 60:.0f}min" if seconds < 6000 else f"{seconds / 3600:.0f}h"
    )


def _parts(cells: _Cells, width: int) -> list[tuple[str, str]]:
    """What there is room for, each with its name."""
    host = min(HOST, width - RANK - 1 - STATE - 3 * NUMBER - (NOW if width >= NARROW else 0))
    parts = [(fit(cells.rank, RANK), "rank")]
    if width >= NARROWEST:
        parts += [(f" {fit(cells.host, host)}", "host"), (f" {fit(cells.state, STATE - 1)}", "state")]
    if width >= NARROW:
        parts.append((fit(cells.now, NOW), "now"))
    return [*parts, *((f"{cell:>{NUMBER}}", name) for cell, name in zip(cells.numbers, ("work", "", ""), strict=True))]


def _add_bar(line: Text, work: float, wall: float, longest: float, width: int) -> None:
    room = min(60, width - line.cell_len - 1)
    whole = round(wall / longest * room) if longest else 0
    of_work = min(whole, round(work / longest * room)) if longest else 0
    line.append(_BAR[0] * of_work, "blue")
    line.append(_BAR[1] * (whole - of_work), "cyan")


def _head(name: str, order: str) -> str:
    title = TITLES[name]
    if name != order:
        return f"  {title}" if name == "rank" else title
    return f" ▼{title}" if name == "rank" else f"▼ {title}"


def _at(values: Sequence[T], at: int, none: T) -> T:
    return values[at] if at < len(values) else none
