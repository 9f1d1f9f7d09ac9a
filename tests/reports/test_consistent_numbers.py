"""Every percentage and duration of a summary agrees with the others: on simulated jobs, and on recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_counts import seeds
from fakes.cluster import Cluster, slow_at
from summary_consistency import contradictions

from stepscope.reports import render_text, summarize
from stepscope.store.load import open_run

RECORDED = sorted((Path(__file__).parents[1] / "diagnosis" / "data").glob("h200_*/*/run.json"))
FAULTS = {
    "straggler": (slow_at(1, "other", 30.0), slow_at(0, "forward", 10.0)),
    "late": (slow_at(1, "backward", 20.0, range(60, 120)),),
    "input": tuple(slow_at(rank, "input", 15.0) for rank in (0, 1)),
    "evaluation": tuple(slow_at(rank, "eval", 900.0, range(20, 120, 25)) for rank in (0, 1)),
    "stall": tuple(slow_at(rank, "forward", 4000.0, range(70, 71)) for rank in (0, 1)),
    "healthy": (),
}


@pytest.mark.few(3)
@pytest.mark.seeds
@pytest.mark.parametrize("fault", FAULTS)
def test_simulated_jobs(fault: str) -> None:
    for seed in seeds(8):
        for timed in (False, True):
            cluster = Cluster(ranks=2, steps=120, noise=0.05, seed=seed, faults=FAULTS[fault], device_timed=timed)
            summary = summarize(cluster.run())
            assert contradictions(summary, render_text(summary)) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("path", RECORDED[::4], ids=lambda path: path.parent.name)
def test_recorded_jobs(path: Path) -> None:
    summary = summarize(open_run(path.parent))
    assert contradictions(summary, render_text(summary), measured=True) == []
