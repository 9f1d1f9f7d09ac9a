"""The step table: views where they can be, copies where they must be, and nothing invented in between."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cluster import Cluster, Death
from fakes.records import records_of, steps_of, timed_at

from stepscope.diagnosis import build_window
from stepscope.records.series import RankSeries
from stepscope.step_table import Grid, join_steps

SERIES = Cluster(ranks=3, steps=8, device_timed=True, allocated_mb=10.0).series()


def test_ranks_that_follow_each_other_are_joined_without_copying() -> None:
    joined = join_steps([series.steps for series in SERIES[1:]])
    assert joined.first.tolist() == [0, 8, 16]
    assert np.shares_memory(joined.phase_ns, SERIES[0].steps.table.phase_ns)
    assert joined.rank(1).same(SERIES[2].steps)


@pytest.mark.parametrize("ranks", [(2, 0), (0, 2), (1,)])
def test_ranks_of_any_order_are_joined(ranks: tuple[int, ...]) -> None:
    joined = join_steps([SERIES[rank].steps for rank in ranks])
    assert all(joined.rank(place).same(SERIES[rank].steps) for place, rank in enumerate(ranks))


def test_tables_with_other_phases_and_without_device_times_are_joined() -> None:
    (other,) = Cluster(ranks=1, steps=3, phases_ms={"forward": 4.0, "augment": 3.0}).series()
    joined = join_steps([SERIES[0].steps, other.steps])
    assert joined.phases == ("other", "input", "forward", "backward", "comm", "optimizer", "augment")
    assert joined.rank(0).same(SERIES[0].steps)
    assert joined.rank(1).same(other.steps)
    assert np.isnan(joined.rank(1).device("augment")).all()


def test_a_window_over_steps_that_all_ranks_made_is_a_view() -> None:
    run = Cluster(ranks=3, steps=40).run()
    table = run.ranks[0].steps.table
    for window in (build_window(run), build_window(run, last=10)):
        assert np.shares_memory(window.phase_ns, table.phase_ns)
        assert np.shares_memory(window.wall_ns, table.plain["wall_ns"])
        with pytest.raises(ValueError, match="read-only"):
            window.wall_ns[0, 0] = 0.0


def test_a_grid_says_where_a_rank_has_no_step() -> None:
    run = Cluster(ranks=3, steps=6, deaths=(Death(rank=1, step=2),)).run()
    table = join_steps([series.steps for series in run.ranks])
    assert table.shared_steps() is None
    grid = Grid(table, np.arange(6))
    assert np.isnan(grid(table.column("wall_ns"))).tolist() == [[False] * 6, [False] * 2 + [True] * 4, [False] * 6]
    assert grid(table.column("batches"), 0)[1].tolist() == [1, 1, 0, 0, 0, 0]
    assert grid(table.phase_ns).shape == (len(table.phases), 3, 6)


def test_some_steps_of_a_rank() -> None:
    steps = SERIES[1].steps
    assert steps.part(slice(2, 5))["step"].tolist() == [2, 3, 4]
    assert len(steps.part(slice(0))) == 0
    assert steps.part(steps["step"] % 3 == 0)["step"].tolist() == [0, 3, 6]
    assert timed_at(SERIES[1], slice(2)).steps.timed.tolist() == [True] * 2 + [False] * 6
    assert not timed_at(SERIES[1], slice(2)).steps.same(steps)


def test_records_with_one_name_in_two_slots_count_once() -> None:
    (series,) = Cluster(ranks=1, steps=2, phases_ms={"forward": 4.0, "augment": 3.0, "tokens": 2.0}).series()
    names: tuple[str, ...] = tuple("augment" if name == "tokens" else name for name in series.phase_names)
    (steps,) = steps_of([records_of(series)], [names])
    assert steps.phase("augment").tolist() == (series.steps.phase("augment") + series.steps.phase("tokens")).tolist()


def _unnamed(series: RankSeries) -> tuple[str, ...]:
    return tuple("" if name == "augment" else name for name in series.phase_names)


def test_time_of_a_slot_without_a_name_is_not_lost() -> None:
    (series,) = Cluster(ranks=1, steps=2, phases_ms={"forward": 4.0, "augment": 3.0}).series()
    (steps,) = steps_of([records_of(series)], [_unnamed(series)])
    assert steps.phase("slot_9").tolist() == series.steps.phase("augment").tolist()
