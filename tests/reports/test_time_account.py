"""The account of a whole run: its parts add up to its duration, whatever happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_counts import examples
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.records.series import RunData
from stepscope.reports import render_text, summarize

SECOND = 10**9
PHASES = {"forward": 40.0, "backward": 50.0, "optimizer": 9.0, "other": 1.0}


def ending(cluster: Cluster, at_s: float) -> RunData:
    """The run starts a second before its first step."""
    end = {"status": "finished", "exit_code": 0, "wall_ns": ANCHOR_WALL_NS + round(at_s * SECOND)}
    return replace(cluster, meta={"end": end}).run()


def parts_of(run: RunData) -> dict[str, Any]:
    account = summarize(run)["time_account"]
    return {part: seconds for part, seconds in account["parts"].items() if seconds}


def test_every_second_of_a_run_has_its_part() -> None:
    """100 steps of 0.1 s, three times an evaluation of 2 s, once a checkpoint of 1 s; then 5 s to the end."""
    evaluations = tuple(slow_at(rank, "eval", 2000.0, range(at, at + 1)) for rank in (0, 1) for at in (25, 50, 75))
    checkpoint = tuple(slow_at(rank, "checkpoint", 1000.0, range(90, 91)) for rank in (0, 1))
    cluster = Cluster(
        ranks=2,
        steps=100,
        noise=0.0,
        comm_ms=0.0,
        phases_ms=PHASES,
        faults=(*evaluations, *checkpoint),
        warmup_ms=900.0,
    )
    run = ending(cluster, 22.9)
    assert parts_of(run) == pytest.approx(
        {"start_up": 1.0, "warm_up": 1.0, "training": 9.9, "evaluation": 6.0, "checkpoints": 1.0, "end": 5.0}, abs=0.01
    )
    summary = summarize(run)
    assert summary["time_account"]["seconds"] == summary["run"]["duration_s"] == 23.9
    assert summary["time_account"]["training_time_s"] == pytest.approx(16.9, abs=0.01)
    text = " ".join(render_text(summary).split())
    assert (
        "whole run start-up 1.00 s (4%) · warm-up 1.00 s (4%) · training 9.90 s (41%) evaluation 6.00 s (25%) · "
        "checkpoints 1.00 s (4%) · end 5.00 s (21%)"
    ) in text


def test_an_evaluation_after_the_last_step_is_not_the_end() -> None:
    """100 steps of 0.1 s; then three of four stacks are in the evaluation, until the rank leaves its last phase."""
    run = ending(Cluster(ranks=1, steps=100, noise=0.0, phases_ms=PHASES, warmup_ms=0.0), 15.0)
    (rank,) = run.ranks
    phases = ["eval", "eval", "other", "eval", "other"]
    stacks = [
        {"rank": 0, "wall_ns": ANCHOR_WALL_NS + round((10.5 + at) * SECOND), "phase": phase}
        for at, phase in enumerate(phases)
    ]
    rank = replace(rank, live_since_ns=rank.anchor_mono_ns + 14 * SECOND)
    run = replace(run, ranks=(rank,), stacks=({"rank": 0, "wall_ns": ANCHOR_WALL_NS, "phase": "eval"}, *stacks))
    assert parts_of(run) == pytest.approx(
        {"start_up": 1.0, "warm_up": 0.1, "training": 9.9, "last_evaluation": 3.0, "end": 2.0}, abs=0.01
    )
    assert "evaluation after the last step 3.00 s (19%) · end 2.00 s" in " ".join(render_text(summarize(run)).split())


def test_a_stall_is_a_part_of_its_own() -> None:
    stall = tuple(slow_at(rank, "forward", 8000.0, range(60, 61)) for rank in (0, 1))
    run = ending(Cluster(ranks=2, steps=100, noise=0.0, phases_ms=PHASES, faults=stall), 20.0)
    parts = parts_of(run)
    assert parts["stalls"] == pytest.approx(8.0, abs=0.05)
    (found,) = (finding for finding in summarize(run)["findings"] if finding["kind"] == "stall")
    assert found["cost"]["seconds"] == parts["stalls"]
    share = found["cost"]["seconds"] / summarize(run)["time_account"]["training_time_s"]
    assert found["cost"]["share"] == pytest.approx(share, abs=0.001)


def test_a_run_without_steps_is_start_up() -> None:
    run = replace(ending(Cluster(ranks=1, steps=1), 7.0), ranks=())
    assert parts_of(run) == {"start_up": 8.0}
    assert "whole run start-up 8.00 s (100%)" in render_text(summarize(run))


def test_steps_that_were_lost_are_not_recorded() -> None:
    cluster = Cluster(ranks=1, steps=100, noise=0.0, phases_ms=PHASES, missing={0: range(40, 60)})
    assert parts_of(ending(cluster, 15.0))["not_recorded"] == pytest.approx(2.0, abs=0.01)


def test_earlier_attempts_come_first() -> None:
    first, second = (ending(Cluster(ranks=1, steps=50, attempt=attempt), 30.0) for attempt in (0, 1))
    later = tuple(
        replace(series, anchor_wall_ns=series.anchor_wall_ns + 20 * SECOND, ended_wall_ns=None)
        for series in second.ranks
    )
    earlier = tuple(replace(series, ended_wall_ns=ANCHOR_WALL_NS + 10 * SECOND) for series in first.ranks)
    parts = parts_of(replace(second, ranks=(*earlier, *later)))
    assert parts["earlier_attempts"] == 11.0
    assert parts["start_up"] == pytest.approx(10.0, abs=0.01)
    # A node that was killed may be found dead when the next attempt has trained already.
    late = tuple(replace(series, ended_wall_ns=ANCHOR_WALL_NS + 25 * SECOND) for series in earlier)
    parts = parts_of(replace(second, ranks=(*late, *later)))
    assert parts["earlier_attempts"] == 21.0
    assert "start_up" not in parts
    assert parts["training"] > 0


def test_a_clock_that_was_set_back_does_not_make_parts_negative() -> None:
    for at_s in (-0.5, 0.0, 3.0):
        account = summarize(ending(Cluster(ranks=2, steps=100), at_s))["time_account"]
        assert min(account["parts"].values()) >= 0
        assert round(sum(account["parts"].values()), 3) == account["seconds"] == round(1 + at_s, 3)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.0, 100.0), st.booleans(), st.integers(0, 60))
def test_parts_add_up(seed: int, ranks: int, until_s: float, dies: bool, steps: int) -> None:
    cluster = Cluster(
        ranks=ranks,
        steps=steps + 2,
        seed=seed,
        noise=0.3,
        tail=0.05,
        deaths=(Death(rank=0, step=steps // 2 + 1),) if dies else (),
        faults=(slow_at(0, "eval", 700.0, range(3, 60, 20)),),
    )
    summary = summarize(ending(cluster, until_s))
    account = summary["time_account"]
    assert round(sum(account["parts"].values()), 3) == account["seconds"] == summary["run"]["duration_s"]
    assert min(account["parts"].values()) >= 0
