"""Which samples count: those of steady steps, not of imports, start-up, warm-up and compilation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death

from stepscope.diagnosis import build_window
from stepscope.diagnosis.engine.readings import in_steady_steps, spaced
from stepscope.records.series import RunData

TENTH = {"forward": 100.0}
"""Step n begins at n tenths of a second, and what the steps before it took for warming up and compiling."""


def counted(run: RunData, *rows: int, times: list[float]) -> list[float]:
    """Of the times, in seconds since the cluster began, those that count."""
    wall_ns = ANCHOR_WALL_NS + np.array(times) * 1e9
    return [at for at, keep in zip(times, in_steady_steps(build_window(run), rows, wall_ns), strict=True) if keep]


def cluster(**more: object) -> Cluster:
    return replace(Cluster(ranks=1, steps=50, phases_ms=TENTH, noise=0.0, warmup_ms=900.0), **more)  # type: ignore[arg-type]


def test_from_a_second_after_the_warm_up_to_the_end_of_the_last_step() -> None:
    # The first step takes a second and the other 49 a tenth each: steady from 1.0 to 5.9.
    times = [-30.0, -1.0, 0.0, 0.5, 1.0, 1.5, 1.9, 2.1, 3.0, 5.8, 6.0, 7.0]
    assert counted(cluster().run(), 0, times=times) == [2.1, 3.0, 5.8]


def test_a_sample_of_a_compile_step_does_not_count_nor_one_that_looks_back_at_it() -> None:
    # Step 20 begins at 1.0 + 1.9 = 2.9 and takes half a second more: until 3.5.
    run = cluster(compile_steps=(20,)).run()
    assert counted(run, 0, times=[2.5, 2.85, 3.0, 3.4, 3.6, 4.4, 4.55, 5.0]) == [2.5, 2.85, 4.55, 5.0]


def test_samples_of_steps_whose_records_were_lost_count() -> None:
    assert counted(cluster(missing={0: range(20, 40)}).run(), 0, times=[2.5, 3.5, 4.5, 5.5]) == [2.5, 3.5, 4.5, 5.5]


def test_ranks_that_share_a_device_all_have_to_be_steady() -> None:
    run = Cluster(ranks=2, steps=50, phases_ms=TENTH, noise=0.0, warmup_ms=900.0, synchronized=False).run()
    first, second = run.ranks
    late = replace(run, ranks=(first, replace(second, anchor_wall_ns=ANCHOR_WALL_NS + 3 * 10**9)))
    times = [2.5, 2.9, 3.1, 4.0, 4.9, 5.1, 5.8, 6.5, 8.8, 9.0]
    assert counted(late, 0, times=times) == [2.5, 2.9, 3.1, 4.0, 4.9, 5.1, 5.8]
    assert counted(late, 1, times=times) == [5.1, 5.8, 6.5, 8.8]
    # The second one warms up from 3.0 to 4.0, and the first one ends at 5.9; it has no say before and after.
    assert counted(late, 0, 1, times=times) == [2.5, 2.9, 5.1, 5.8, 6.5, 8.8]


def test_a_rank_that_died_while_warming_up_has_no_steady_step() -> None:
    run = Cluster(ranks=2, steps=50, phases_ms=TENTH, noise=0.0, warmup_ms=900.0, deaths=(Death(rank=1, step=1),)).run()
    assert counted(run, 1, times=[0.5, 1.5, 3.0]) == []
    assert counted(run, 0, 1, times=[0.5, 1.5, 3.0]) == [3.0]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_without_a_steady_step_has_no_such_sample(steps: int) -> None:
    run = cluster(steps=steps).run()
    window = build_window(run)
    at = np.array([ANCHOR_WALL_NS, ANCHOR_WALL_NS + 5e8, np.nan])
    assert not in_steady_steps(window, range(len(window.ranks)), at).any()
    assert not in_steady_steps(window, (), at).any()


def test_an_attempt_that_is_over_does_not_count() -> None:
    first = cluster(attempt=0).series()
    second = [replace(series, anchor_wall_ns=ANCHOR_WALL_NS + 20 * 10**9) for series in cluster(attempt=1).series()]
    run = replace(cluster().run(), ranks=(*first, *second))
    assert counted(run, 0, times=[3.0, 5.0, 10.0, 21.0, 23.0, 25.0]) == [23.0, 25.0]


def test_some_samples_about_a_second_apart() -> None:
    quick, slow = np.arange(0.0, 3.0, 0.2), np.arange(3.0, 8.0, 1.01)
    times = np.concatenate([quick, slow])
    shown = times[spaced(ANCHOR_WALL_NS + times * 1e9)]
    assert shown.round(2).tolist() == [0.0, 1.0, 1.8, 2.8, 4.01, 5.02, 6.03, 7.04]
    assert spaced(np.zeros(0)).tolist() == []
