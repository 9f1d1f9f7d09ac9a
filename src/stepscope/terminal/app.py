"""The view on a terminal: handles keys, draws the newest snapshot at most twice a second. The only user of Textual.

The screen is one widget. Functions draw its content (``screen.py``, ``wording.py``), and only changed lines are written
to the terminal, which keeps it light over ssh. Colors are the terminal's sixteen on its own background, so that light,
dark and no color (``NO_COLOR``) remain the user's choice. The mouse is left to the terminal, for copying text.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from stepscope.terminal.documents import Snapshot
from stepscope.terminal.feed import Feed
from stepscope.terminal.screen import (
    Pane,
    ViewState,
    draw_screen,
    move_cursor,
    next_order,
    refresh_frozen,
    toggle_pane,
    wanted_by,
)

__all__ = ["ScreenLines", "WatchApp"]

REDRAW_S = 0.5


class ScreenLines(Widget):
    """Lines of text, shown unchanged."""

    DEFAULT_CSS = "ScreenLines { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._strips: list[Strip] = []

    def show(self, lines: list[Text]) -> None:
        width = self.size.width
        console = self.app.console
        strips = [Strip(line.render(console)).adjust_cell_length(width) for line in lines]
        changed = [at for at, strip in enumerate(strips) if at >= len(self._strips) or strip != self._strips[at]]
        self._strips = strips
        if changed:
            self.refresh(*(Region(0, at, width, 1) for at in changed))

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)


class WatchApp(App[None]):
    CSS = "Screen { background: ansi_default; color: ansi_default; overflow: hidden; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+q", "quit", priority=True),
        Binding("ctrl+c", "interrupt", priority=True),
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("home", "move(-1000000000)"),
        Binding("end", "move(1000000000)"),
        Binding("enter", "pick"),
        Binding("escape", "leave_pane"),
        Binding("s", "sort"),
        Binding("f", "freeze"),
        Binding("v", "pane('findings')"),
        Binding("l", "pane('output')"),
        Binding("e", "pane('events')"),
        Binding("h,p,question_mark", "pane('help')"),
    ]

    def __init__(self, feed: Feed, *, beside_job: bool = False) -> None:
        """``beside_job``: Ctrl-C is for the job that was started from the same terminal, and SIGTERM ends the view."""
        super().__init__(ansi_color=True)
        self.feed = feed
        self._beside_job = beside_job
        self._view = ViewState()
        self._frozen: Snapshot | None = None
        self._frozen_wall_ns = 0
        self._rows = 0
        """Rows of the table when it was last visible."""
        self.screen_lines = ScreenLines()
        self._launcher = os.getppid()
        self._interrupts = 0

    def compose(self) -> ComposeResult:
        yield self.screen_lines

    def on_mount(self) -> None:
        self.set_interval(REDRAW_S, self.draw)
        if self._beside_job:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)

    def on_resize(self, _event: Resize) -> None:
        self.call_after_refresh(self.draw)

    @property
    def shown(self) -> Snapshot:
        return self._frozen or self.feed.now

    def draw(self) -> None:
        if self._beside_job and os.getppid() != self._launcher:
            self.exit()  # the launcher was killed, and the terminal is no longer ours
            return
        width, height = self.screen_lines.size
        if width <= 0 or height <= 0:
            return
        if self._frozen is not None:
            self._frozen = refresh_frozen(self._frozen, self.feed.now, self._view)
        drawn = draw_screen(
            self.shown,
            self._view,
            width,
            height,
            frozen=self._frozen is not None,
            beside_job=self._beside_job,
            interrupts=self._interrupts,
            now_wall_ns=self._frozen_wall_ns or self.feed.wall_ns(),
        )
        self.screen_lines.show(drawn.lines)
        self._rows = drawn.rows or self._rows
        self.feed.want(wanted_by(self._view, rows=self._rows, output=drawn.output))

    def _look(self, view: ViewState) -> None:
        if view != self._view:
            self._view = view
            self.draw()

    # ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def action_interrupt(self) -> None:
        if not self._beside_job:
            self.exit()
            return
        # Without the view the terminal would send SIGINT to its whole process group; do the same.
        os.killpg(os.getpgrp(), signal.SIGINT)
        self._interrupts += 1
        self.draw()

    def action_move(self, by: int) -> None:
        table = self.shown.ranks
        view = move_cursor(self._view, by, total=table.total if table is not None else 0, rows=self._rows)
        self._look(self._with_rank(view) if view.pane == "rank" else view)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self._rows - 1))

    def action_pick(self) -> None:
        self._look(self._with_rank(self._view))

    def action_leave_pane(self) -> None:
        self._look(replace(self._view, pane="ranks", rank=None))

    def action_sort(self) -> None:
        status = self.shown.status
        self._look(next_order(self._view, tuple(status.phases) if status is not None else ()))

    def action_freeze(self) -> None:
        freeze = self._frozen is None
        self._frozen = self.feed.now if freeze else None
        self._frozen_wall_ns = self.feed.wall_ns() if freeze else 0
        self.draw()

    def action_pane(self, pane: Pane) -> None:
        self._look(toggle_pane(self._view, pane))

    def _with_rank(self, view: ViewState) -> ViewState:
        """Show the rank under the cursor, if its row is known."""
        table = self.shown.ranks
        at = view.cursor - table.start if table is not None else -1
        if table is None or table.order != view.order or not 0 <= at < len(table.rank):
            return view
        return replace(view, pane="rank", rank=table.rank[at])
