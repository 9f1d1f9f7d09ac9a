"""What the keys make of what is looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.terminal.documents import Rank, Ranks
from stepscope.terminal.snapshot import Output, Snapshot
from stepscope.terminal.view import View, caught_up, moved, sorted_anew, toggled, wanted_by
from stepscope.terminal.wanted import Wanted


def test_the_table_follows_the_cursor() -> None:
    view = View()
    for _ in range(7):
        view = moved(view, 1, total=300, rows=5)
    assert (view.cursor, view.start) == (7, 3)
    assert (moved(view, -5, total=300, rows=5).cursor, moved(view, -5, total=300, rows=5).start) == (2, 2)
    end = moved(view, 10**9, total=300, rows=5)
    assert (end.cursor, end.start) == (299, 295)
    assert moved(end, -(10**9), total=300, rows=5) == View()
    assert moved(View(), 1, total=0, rows=0) == View()


@given(st.lists(st.integers(-20, 20), max_size=20), st.integers(0, 40), st.integers(0, 12))
def test_the_cursor_is_always_in_sight(moves: list[int], total: int, rows: int) -> None:
    view = View()
    for by in moves:
        view = moved(view, by, total=total, rows=rows)
        assert 0 <= view.cursor < max(total, 1)
        assert 0 <= view.start <= view.cursor < view.start + max(rows, 1) or rows == 0


def test_sorted_by_one_after_the_other() -> None:
    view, orders = View(cursor=4, start=2), []
    for _ in range(4):
        view = sorted_anew(view, ("forward", "comm"))
        orders.append(view.order)
    assert orders == ["comm", "wall", "rank", "work"]
    assert (view.cursor, view.start) == (0, 0)
    assert sorted_anew(View(), ("forward",)).order == "wall"


def test_panes_come_and_go() -> None:
    assert toggled(View(pane="rank", rank=3), "output") == View(pane="output")
    assert toggled(View(pane="output"), "output") == View()


def test_only_what_is_in_sight_is_asked_for() -> None:
    assert wanted_by(View(start=40), rows=6, output=False) == Wanted(order="work", start=34, limit=18)
    assert wanted_by(View(start=2), rows=6, output=False) == Wanted(order="work", start=0, limit=14)
    assert wanted_by(View(pane="rank", rank=3), rows=0, output=False) == Wanted(limit=2, rank=3, output=True)
    assert wanted_by(View(), rows=3, output=True).output


def test_a_frozen_view_takes_only_what_it_does_not_have() -> None:
    one, two = Ranks(order="work", rank=(3, 1), total=9), Ranks(order="wall", rank=(1, 3), total=9)
    frozen, now = Snapshot(ranks=one, beat=1), Snapshot(ranks=two, beat=9, rank=Rank(rank=1), output=Output(path="x"))
    assert caught_up(frozen, now, View()).ranks == one
    sorted_ = caught_up(frozen, now, View(order="wall"))
    assert (sorted_.ranks, sorted_.beat) == (two, 1)
    picked = caught_up(frozen, now, View(pane="rank", rank=1))
    assert (picked.rank, picked.output, picked.ranks) == (Rank(rank=1), Output(path="x"), one)
    assert caught_up(picked, Snapshot(rank=Rank(rank=1, log="new")), View(pane="rank", rank=1)) == picked
