"""Synthetic traffic: what its records promise, and that the steps around them still add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes.cluster import Cluster
from fakes.cut import cut
from fakes.traffic import Exchange, SlowLink, Traffic

from stepscope.records.collectives import FLAG_ASYNC, FLAG_WAITED, OPS, kept_by_itself

MESH = Traffic(
    mesh={"dp": 2, "tp": 2},
    exchanges=(Exchange(dimension="tp", count=2, mb=1.0, ms=1.0), Exchange(dimension="dp", ms=3.0, hidden_ms=1.0)),
)
JOB = Cluster(ranks=4, steps=40, traffic=MESH)


def test_groups_are_the_lines_of_the_mesh() -> None:
    assert [(group.slot, group.name, group.kind, group.ranks) for group in MESH.groups(3)] == [
        (0, "0", "world", (0, 1, 2, 3)),
        (1, "dp1", "data", (1, 3)),
        (2, "tp2", "tensor", (2, 3)),
    ]


def test_steps_still_add_up_and_ranks_keep_pace() -> None:
    ranks = JOB.run().ranks
    for series in ranks:
        assert (sum(map(series.steps.phase, series.steps.table.phases)) == series.steps["wall_ns"]).all()
    ends = np.array([np.cumsum(series.steps["wall_ns"])[-1] for series in ranks], float)
    assert np.ptp(ends) < 20e6  # what they do after the last all-reduce


def test_sums_are_those_of_the_single_ones_and_blocked_time_is_comm() -> None:
    for series in JOB.run().ranks:
        assert series.comm is not None and series.collectives is not None
        kept = [step for step in range(40) if kept_by_itself(step)]
        assert series.collectives["step"].tolist() == [step for step in kept for _ in range(3)]
        assert [OPS[op] for op in np.unique(series.comm["op"])] == ["all_reduce"]
        for step in kept:
            single = series.collectives[series.collectives["step"] == step]
            sums = series.comm[series.comm["step"] == step]
            assert sums["group"].tolist() == [1, 2] and sums["count"].tolist() == [1, 2]
            assert abs(int(sums["exposed_ns"].sum()) - int(single["exposed_ns"].sum())) <= 3
            assert int(sums["exposed_ns"].sum()) < series.steps.phase("comm")[step]
        beside = series.comm[series.comm["group"] == 1]
        assert set(beside["flags"].tolist()) == {FLAG_ASYNC | FLAG_WAITED}
        assert (beside["span_ns"] - beside["exposed_ns"]).astype(float) == pytest.approx(np.full(40, 1e6), abs=2)


def test_a_slow_link_slows_its_groups_in_its_steps_only() -> None:
    fault = SlowLink(ranks=(3,), times=10.0, bytes_times=2.0, dimension="tp", steps=range(20, 40))
    even = replace(JOB, traffic=replace(MESH, noise=0.0, work_ms=0.0, faults=(fault,)), noise=0.0)
    for series in even.run().ranks:
        assert series.comm is not None
        rows = series.comm[series.comm["group"] == 2]
        slow = series.rank in (2, 3)
        assert rows["bytes"][[10, 30]].tolist() == [2 << 20, (4 if slow else 2) << 20]
        assert (rows["exposed_ns"][[10, 30]] / 1e6).tolist() == pytest.approx([2.0, 20.0 if slow else 2.0], abs=1e-3)


def test_a_cut_run_has_the_collectives_of_its_steps() -> None:
    series = cut(JOB.run(), 9).ranks[0]
    assert series.comm is not None and series.collectives is not None
    assert (series.comm["step"].max(), series.collectives["step"].max()) == (9, 9)
