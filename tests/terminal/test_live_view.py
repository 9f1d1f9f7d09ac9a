"""What the keys make of what is looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.terminal.documents import Output, Rank, Ranks, Snapshot, Wanted
from stepscope.terminal.screen import ViewState, move_cursor, next_order, refresh_frozen, toggle_pane, wanted_by


def test_the_table_follows_the_cursor() -> None:
    view = ViewState()
    for _ in range(7):
        view = move_cursor(view, 1, total=300, rows=5)
    assert (view.cursor, view.start) == (7, 3)
    assert (move_cursor(view, -5, total=300, rows=5).cursor, move_cursor(view, -5, total=300, rows=5).start) == (2, 2)
    end = move_cursor(view, 10**9, total=300, rows=5)
    assert (end.cursor, end.start) == (299, 295)
    assert move_cursor(end, -(10**9), total=300, rows=5) == ViewState()
    assert move_cursor(ViewState(), 1, total=0, rows=0) == ViewState()


@given(st.lists(st.integers(-20, 20), max_size=20), st.integers(0, 40), st.integers(0, 12))
def test_the_cursor_is_always_in_sight(moves: list[int], total: int, rows: int) -> None:
    view = ViewState()
    for by in moves:
        view = move_cursor(view, by, total=total, rows=rows)
        assert 0 <= view.cursor < max(total, 1)
        assert 0 <= view.start <= view.cursor < view.start + max(rows, 1) or rows == 0


def test_sorted_by_one_after_the_other() -> None:
    view, orders = ViewState(cursor=4, start=2), []
    for _ in range(4):
        view = next_order(view, ("forward", "comm"))
        orders.append(view.order)
    assert orders == ["comm", "wall", "rank", "work"]
    assert (view.cursor, view.start) == (0, 0)
    assert next_order(ViewState(), ("forward",)).order == "wall"


def test_panes_come_and_go() -> None:
    assert toggle_pane(ViewState(pane="rank", rank=3), "output") == ViewState(pane="output")
    assert toggle_pane(ViewState(pane="output"), "output") == ViewState()


def test_only_what_is_in_sight_is_asked_for() -> None:
    assert wanted_by(ViewState(start=40), rows=6, output=False) == Wanted(order="work", start=34, limit=18)
    assert wanted_by(ViewState(start=2), rows=6, output=False) == Wanted(order="work", start=0, limit=14)
    assert wanted_by(ViewState(pane="rank", rank=3), rows=0, output=False) == Wanted(limit=2, rank=3, output=True)
    assert wanted_by(ViewState(), rows=3, output=True).output


def test_a_frozen_view_takes_only_what_it_does_not_have() -> None:
    ranks, two = Ranks(order="work", rank=(3, 1), total=9), Ranks(order="wall", rank=(1, 3), total=9)
    frozen, now = Snapshot(ranks=ranks, beat=1), Snapshot(ranks=two, beat=9, rank=Rank(rank=1), output=Output(path="x"))
    assert refresh_frozen(frozen, now, ViewState()).ranks == ranks
    sorted_ = refresh_frozen(frozen, now, ViewState(order="wall"))
    assert (sorted_.ranks, sorted_.beat) == (two, 1)
    picked = refresh_frozen(frozen, now, ViewState(pane="rank", rank=1))
    assert (picked.rank, picked.output, picked.ranks) == (Rank(rank=1), Output(path="x"), ranks)
    assert refresh_frozen(picked, Snapshot(rank=Rank(rank=1, log="new")), ViewState(pane="rank", rank=1)) == picked
