"""Traces small enough to be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.whatif.operations import read_meta, read_trace
from stepscope.whatif.replay import WhatIf, analyze

Rows = list[dict[str, Any]]


def analyzed(files: Any) -> WhatIf:
    return analyze(read_trace(files.trace, read_meta(files.meta)))


def test_a_slow_data_parallel_rank(files: Any, two_lanes: Rows) -> None:
    found = analyzed(files.write(two_lanes, dp_size=2, pp_size=1))
    assert found.slowdown == pytest.approx(15 / 12)
    assert found.by_dp_rank == pytest.approx({1: 15 / 12, 0: 1})
    assert list(found.by_dp_rank) == [1, 0]
    assert found.by_stage == pytest.approx({0: 15 / 12})
    assert found.by_worker == pytest.approx({1: 15 / 12, 0: 1})
    assert found.by_operation == pytest.approx(
        {
            "backward-compute": 14 / 12,
            "forward-compute": 13 / 12,
            "params-all-gather": 1,
            "grads-reduce-scatter": 1,
            "optimizer": 1,
        }
    )
    assert found.worst_workers == (1,)
    assert (found.mw.original_s, found.mw.ideal_s) == pytest.approx((15, 12))
    assert (found.mw.removed_s, found.mw.added_s) == pytest.approx((12, 15))
    assert (found.mw.share_removed, found.mw.share_added) == pytest.approx((1, 1))
    assert (found.steps, found.notes) == (1, ())


def test_a_slow_stage_that_a_fast_one_makes_up_for(files: Any, two_stages: Rows) -> None:
    found = analyzed(files.write(two_stages, dp_size=1, pp_size=2))
    assert found.slowdown == pytest.approx(1)
    assert found.by_stage == pytest.approx({1: 12.5 / 11, 0: 9.5 / 11})
    assert found.by_dp_rank == pytest.approx({0: 1})
    assert found.by_worker == pytest.approx({100: 1, 0: 9.5 / 11})
    assert found.by_operation == pytest.approx(
        {"forward-compute": 1, "backward-compute": 1, "forward-pp-comm": 1, "backward-pp-comm": 1, "optimizer": 1}
    )
    assert (found.ms.removed_s, found.ms.added_s) == pytest.approx((9.5, 12.5))
    assert found.ms.share_removed is None


def test_waiting_for_a_partner_is_no_length(files: Any, op: Callable[..., Any], two_stages: Rows) -> None:
    """Both ends of every transfer get half a second, however long the one that came first had waited."""
    late = [{**row, "start_ts": row["start_ts"] + 3, "step": 1} for row in two_stages]
    late = [{**row, "duration": row["duration"] + 2} if row["optype"] == "backward-recv" else row for row in late]
    late = [{**row, "start_ts": row["start_ts"] - 2} if row["optype"] == "backward-recv" else row for row in late]
    found = analyzed(files.write([*two_stages, *late], dp_size=1, pp_size=2))
    assert found.slowdown == pytest.approx(1)
    assert found.mw.original_s == pytest.approx(11)


def test_a_partner_whose_clock_is_off_leaves_nothing_to_count(files: Any, two_lanes: Rows) -> None:
    """The reduction of lane 0 cannot have ended before lane 1 came: it counts as none, a small offset as it is."""
    off = [
        {**row, "duration": 12.5 - row["start_ts"]}
        if (row["optype"], row["dp_rank"]) == ("grads-reduce-scatter", 0)
        else row
        for row in two_lanes
    ]
    found = analyzed(files.write(off, dp_size=2, pp_size=1))
    assert found.mw.original_s == pytest.approx(15), "lane 1 still takes its second"
    assert found.mw.ideal_s == pytest.approx(11.5), "the median of 0 and 1"


def test_a_job_without_stragglers(files: Any, two_lanes: Rows) -> None:
    even = [{**row, "dp_rank": lane, "rank": lane} for row in two_lanes if row["dp_rank"] == 1 for lane in range(3)]
    found = analyzed(files.write(even, dp_size=3, pp_size=1))
    assert found.slowdown == pytest.approx(1)
    for slowdowns in (found.by_worker, found.by_stage, found.by_dp_rank, found.by_operation):
        assert list(slowdowns.values()) == pytest.approx([1] * len(slowdowns))
    assert found.worst_workers == (0,), "of equals, the first"


def test_no_time_at_all(files: Any, two_lanes: Rows) -> None:
    nothing = [{**row, "start_ts": 0.0, "duration": 0.0} for row in two_lanes]
    found = analyzed(files.write(nothing, dp_size=2, pp_size=1))
    assert found.slowdown == 1
    assert found.mw.share_removed is None


def test_the_worst_workers_are_three_in_a_hundred(files: Any, two_lanes: Rows) -> None:
    slow, fast = ([row for row in two_lanes if row["dp_rank"] == lane] for lane in (1, 0))
    rows = [{**row, "dp_rank": lane, "rank": lane} for lane in range(34) for row in (slow if lane in (7, 9) else fast)]
    found = analyzed(files.write(rows, dp_size=34, pp_size=1))
    assert found.worst_workers == (7, 9), "3% of 34, rounded up"
    assert found.mw.share_removed == pytest.approx((15 - found.mw.removed_s) / (15 - found.mw.ideal_s))


def test_progress_is_told_to_its_end(files: Any, two_lanes: Rows) -> None:
    reports: list[tuple[int, int]] = []
    trace = read_trace(files.write(two_lanes, dp_size=2, pp_size=1).trace, read_meta(files.meta))
    analyze(trace, progress=lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == list(range(1, len(reports) + 1))
    assert {total for _, total in reports} == {len(reports)}
