"""What somebody looks at: which part, which rank, in which order.  A value; keys make a new one.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from stepscope.terminal.draw.rank_table import ORDERS
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.wanted import Wanted

__all__ = ["Pane", "View", "caught_up", "moved", "sorted_anew", "toggled", "wanted_by"]

Pane = Literal["ranks", "rank", "findings", "output", "events", "help"]


@dataclass(frozen=True, kw_only=True)
class View:
    pane: Pane = "ranks"
    order: str = "work"
    cursor: int = 0
    """The place of the chosen rank in the table."""
    start: int = 0
    """The place of the first row in sight."""
    rank: int | None = None
    """The rank that is looked at."""


def moved(view: View, by: int, *, total: int, rows: int) -> View:
    """The cursor ``by`` places on, and the table after it."""
    cursor = min(max(view.cursor + by, 0), max(total - 1, 0))
    start = min(view.start, cursor)
    start = max(start, cursor - max(rows, 1) + 1)
    return replace(view, cursor=cursor, start=max(0, min(start, max(total - rows, 0))))


def sorted_anew(view: View, phases: tuple[str, ...]) -> View:
    """By the next of the orders; one that the run has no figures for is passed over."""
    orders = [order for order in ORDERS if order != "comm" or "comm" in phases]
    at = orders.index(view.order) if view.order in orders else -1
    return replace(view, order=orders[(at + 1) % len(orders)], cursor=0, start=0)


def toggled(view: View, pane: Pane) -> View:
    return replace(view, pane="ranks" if view.pane == pane else pane, rank=None)


def wanted_by(view: View, *, rows: int, output: bool) -> Wanted:
    """``output``: whether there is room for it beside the rest."""
    # A screen of rows before those in sight and one after them: whoever scrolls does not wait.
    before = min(view.start, max(1, rows))
    return Wanted(
        order=view.order,
        start=view.start - before,
        limit=before + 2 * max(1, rows),
        rank=view.rank if view.pane == "rank" else None,
        output=output or view.pane in ("output", "rank"),
    )


def caught_up(frozen: Snapshot, now: Snapshot, view: View) -> Snapshot:
    """A frozen view in which somebody goes on to something that was not in sight: that, and nothing else, is of now."""
    if not _has_rows(frozen, view) and _has_rows(now, view):
        frozen = replace(frozen, ranks=now.ranks)
    if view.rank is not None and now.rank is not None and now.rank.rank == view.rank:
        if frozen.rank is None or frozen.rank.rank != view.rank:
            return replace(frozen, rank=now.rank, output=now.output)
    elif frozen.output is None or (frozen.rank is not None and view.rank is None):
        return replace(frozen, rank=None, output=now.output)
    return frozen


def _has_rows(known: Snapshot, view: View) -> bool:
    table = known.ranks
    return table is not None and table.order == view.order and view.cursor - table.start in range(len(table.rank))
