"""The whole screen: exactly as many lines as there is room for, the most important ones first.

    which run, how it stands                                                     ● live
    ✖ what is wrong, its price, what to do
    step time, and the newest steps
    the phases          ┐
    the machines        │ or, in their place: a rank, what was printed, events, help;
    the table of ranks  ┘ in a wide window beside them
    the last event
    the keys

What changes from one moment to the next stays where it is: the table takes up what the others leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from stepscope.terminal.draw.events import draw_event_line, draw_events
from stepscope.terminal.draw.findings import draw_findings
from stepscope.terminal.draw.header import draw_header
from stepscope.terminal.draw.keys import draw_help, draw_keys
from stepscope.terminal.draw.machine import draw_machine
from stepscope.terminal.draw.output import draw_output
from stepscope.terminal.draw.phases import draw_phases
from stepscope.terminal.draw.rank_detail import draw_rank
from stepscope.terminal.draw.rank_table import draw_ranks
from stepscope.terminal.draw.step_time import draw_step_time
from stepscope.terminal.draw.verdict import draw_verdict
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.view import View

__all__ = ["WIDE", "Drawn", "draw_screen"]

WIDE = 140
"""Columns from which on there is a second half."""
LEFT_SHARE = 0.58
RULES_FROM = 30
"""Lines from which on there is room for rules between the parts."""
_VERDICT = ((14, 1), (18, 3), (24, 4), (30, 6), (100_000, 8))
"""Lines of the screen, below which the verdict has so many."""
_PHASES = ((16, 0), (20, 3), (24, 5), (30, 6), (100_000, 11))
TABLE_LEAST = 3


@dataclass(frozen=True, kw_only=True)
class Drawn:
    lines: list[Text]
    rows: int
    """Of the table, that are in sight."""
    output: bool
    """Whether there is room for what was printed besides everything else."""


def draw_screen(
    known: Snapshot,
    view: View,
    width: int,
    height: int,
    *,
    frozen: bool = False,
    beside_job: bool = False,
    interrupts: int = 0,
    now_wall_ns: int = 0,
) -> Drawn:
    wide = width >= WIDE
    rule = [Text("─" * width, "dim", no_wrap=True, end="")] if height >= RULES_FROM else []
    top = [draw_header(known, width, frozen=frozen, now_wall_ns=now_wall_ns)]
    verdict = draw_verdict(known, width, _of(_VERDICT, height))
    top += [*rule, *verdict, *rule, draw_step_time(known, width, now_wall_ns=now_wall_ns)]
    bottom = [draw_event_line(known, width)] if height >= 12 else []
    bottom = [*rule, *bottom, draw_keys(width, beside_job=beside_job, pane=view.pane, interrupts=interrupts)]
    room = max(0, height - len(top) - len(bottom))
    left = int(width * LEFT_SHARE) if wide else width
    rows = 0
    if wide or view.pane == "ranks":
        body, rows = _usual(known, view, left, room, height, now_wall_ns)
        if wide:
            body = _beside(body, _pane(known, view, width - left - 3, room, beside_job=beside_job), left, room)
    else:
        body = _pane(known, view, width, room, beside_job=beside_job)
    body = body[:room] + [Text("", end="")] * max(0, room - len(body))
    lines = [*top, *body, *bottom][:height]
    for line in lines:
        line.truncate(width)  # of a window too narrow for a single word
    return Drawn(lines=lines, rows=rows, output=wide)


def _usual(known: Snapshot, view: View, width: int, room: int, height: int, now_wall_ns: int) -> tuple[list[Text], int]:
    """Phases, machines and the table; how many rows of it."""
    below = [draw_machine(known, width)]
    if height >= RULES_FROM:
        below.append(Text("─" * width, "dim", no_wrap=True, end=""))
    ranks = max(known.ranks.total if known.ranks is not None else 0, known.status.ranks if known.status else 0)
    most = _of(_PHASES, height)
    if most:
        most = max(most, room - len(below) - 1 - ranks)  # what a table of few ranks leaves empty
    phases = draw_phases(known, width, min(most, max(0, room - TABLE_LEAST - 1)))
    lines = [*phases, *below]
    left = max(0, room - len(lines))
    table = draw_ranks(
        known, width, left, cursor=view.cursor, start=view.start, order=view.order, now_wall_ns=now_wall_ns
    )
    return [*lines, *table], max(0, left - 1)


def _pane(known: Snapshot, view: View, width: int, room: int, *, beside_job: bool) -> list[Text]:
    if view.pane == "help":
        return draw_help(width, room, beside_job=beside_job)
    if view.pane == "findings":
        return draw_findings(known, width, room)
    if view.pane == "events":
        return draw_events(known, width, room)
    if view.pane == "rank" and view.rank is not None:
        detail = draw_rank(known, width, max(1, room - 4), rank=view.rank)
        return [*detail, *draw_output(known, width, room - len(detail))]
    return draw_output(known, width, room)


def _beside(left: list[Text], right: list[Text], width: int, room: int) -> list[Text]:
    lines: list[Text] = []
    for at in range(room):
        line = left[at].copy() if at < len(left) else Text("", end="")
        line.append(" " * max(0, width - line.cell_len))
        line.append(" │ ", "dim")
        if at < len(right):
            line.append_text(right[at])
        lines.append(line)
    return lines


def _of(steps: tuple[tuple[int, int], ...], height: int) -> int:
    return next(lines for below, lines in steps if height < below)
