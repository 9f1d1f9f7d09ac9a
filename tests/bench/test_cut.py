from __future__ import annotations

from dataclasses import replace

import numpy as np
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death
from fakes.cut import cut

from stepscope.records.series import RankError


def test_steps_up_to_and_with_the_one_named() -> None:
    run = Cluster(ranks=2, steps=30, device_timed=True).run()
    short = cut(run, 11)
    for series, whole in zip(short.ranks, run.ranks, strict=True):
        assert series.steps["step"].tolist() == list(range(12))
        assert series.steps.timed.tolist() == [True] * 12
        assert (series.state, series.ended_wall_ns) == ("running", None)
        assert len(whole.steps) == 30


def test_a_rank_that_ended_before_stays_ended() -> None:
    run = Cluster(ranks=2, steps=30, deaths=(Death(rank=1, step=5),)).run()
    short = cut(run, 11)
    assert [series.state for series in short.ranks] == ["running", "vanished"]
    assert len(short.ranks[1].steps) == 5
    assert short.ranks[1].ended_wall_ns == run.ranks[1].ended_wall_ns


def test_nothing_is_known_of_what_came_later() -> None:
    steps = Cluster(ranks=1, steps=30).run().ranks[0].steps
    end = int(np.sum(steps["wall_ns"][:12])) + ANCHOR_WALL_NS
    rows = tuple({"wall_ns": end + shift} for shift in (-1000, 1000))
    errors = tuple(RankError(rank=0, pid=1, type="E", message="", wall_ns=row["wall_ns"]) for row in rows)
    run = Cluster(ranks=1, steps=30, samples=rows, errors=errors, meta={"end": {"exit_code": 0}}).run()
    short = cut(replace(run, events=rows, stacks=rows), 11)
    assert short.samples == short.events == short.stacks == rows[:1]
    assert short.errors == errors[:1]
    assert short.meta["end"] is None
    assert run.meta["end"] == {"exit_code": 0}


def test_ranks_without_steps() -> None:
    run = Cluster(ranks=2, steps=0).run()
    assert cut(run, 3).ranks == run.ranks
    assert cut(replace(run, ranks=()), 3).ranks == ()
