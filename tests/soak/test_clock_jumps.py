"""Somebody sets the time of day while a run is recorded, back by an hour or ahead by a day."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from soak_node import SoakNode

from stepscope.reports import summarize
from stepscope.store.liveness import SILENT_S, processes_alive, read_lease
from stepscope.store.load import open_run

HOUR_S, DAY_S = 3600.0, 86400.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SoakNode]:
    made = SoakNode(tmp_path, node_disk=tmp_path / "node", hub_disk=tmp_path / "hub", hang_after_s=1800.0)
    yield made
    made.close()


@pytest.mark.faults
@pytest.mark.parametrize("set_s", [-HOUR_S, pytest.param(DAY_S, marks=pytest.mark.soak)])
def test_a_run_goes_on_as_if_nothing_had_happened(node: SoakNode, set_s: float) -> None:
    run_dir = node.paths.run_dir
    node.steps(20)
    node.until(lambda: len(node.events("rank_start")) == 2)
    node.clocks.set_time(set_s)
    node.steps(20)
    first = read_lease(run_dir)
    node.until(lambda: read_lease(run_dir) != first)
    lease = read_lease(run_dir)
    assert lease is not None
    assert lease.age_s() < SILENT_S
    assert processes_alive(run_dir)
    node.start_ranks()  # a restart after the jump still comes after what it replaced
    node.steps(30)
    node.until(lambda: len(node.events("rank_end")) == 2)
    assert node.finish()["delivered"] is True
    run = open_run(node.hub_paths.run_dir)
    steps = {(rank.identity.attempt, rank.rank): len(rank.steps) for rank in run.ranks}
    assert steps == {(0, 0): 40, (0, 1): 40, (1, 0): 30, (1, 1): 30}
    assert not run.hangs
    for rank in run.ranks:
        assert rank.ended_wall_ns is not None
        assert 0 <= rank.ended_wall_ns - rank.anchor_wall_ns < 600e9
    summary = summarize(run, alive=False)
    assert 0 <= summary["run"]["duration_s"] < 600
    assert summary["notices"] == []
