"""Which steps are compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from fakes.records import records_of, timed_at, with_records

from stepscope.diagnosis import Apart, Window, build_window
from stepscope.diagnosis.engine.readings import in_steady_steps, spaced
from stepscope.records.series import RankSeries, RunData
from stepscope.records.steps import FLAG_DISCOVERY


def window_of(*ranks: RankSeries) -> Window:
    return build_window(replace(Cluster(ranks=0, steps=0).run(), ranks=ranks))


def test_a_window_over_the_last_steps_forgets_ranks_that_were_gone_by_then() -> None:
    run = Cluster(ranks=3, steps=60, deaths=(Death(rank=1, step=30),)).run()
    window = build_window(run, last=20)
    assert (window.ranks, window.steps[0], window.steps[-1], window.left_out) == ((0, 2), 40, 59, 0)
    assert build_window(run, last=200).ranks == (0, 1, 2)


def test_samples_and_stacks_are_those_of_the_steps() -> None:
    run = Cluster(ranks=1, steps=60, noise=0.0, warmup_ms=0.0).run()
    times = [ANCHOR_WALL_NS + int(ms * 1e6) for ms in (-1, 100, 1400, 2000, 2400)]
    lines = tuple({"kind": "host", "wall_ns": wall_ns} for wall_ns in times)
    run = replace(run, samples=lines, stacks=lines)
    assert [line["wall_ns"] for line in build_window(run).samples] == times[1:4]
    assert [line["wall_ns"] for line in build_window(run, last=20).stacks] == times[3:4]


def test_ranks_are_peers_as_the_recorder_says_else_all_of_them() -> None:
    def peer_rows(peers: object) -> list[int]:
        ranks = Cluster(ranks=4, steps=12).series()
        by_rank = peers if isinstance(peers, dict) else dict.fromkeys(range(4), peers)
        return list(window_of(*(replace(rank, facts={"peers": by_rank.get(rank.rank)}) for rank in ranks)).groups)

    assert peer_rows({0: [[0, 2, 2]], 1: [[1, 2, 2]], 2: [[0, 2, 2]], 3: [[1, 2, 2]]}) == [0, 1, 0, 1]
    for garbage in (None, [], "all", [[0, 1]], [[0, "2", 1]], [[0, -1, 1]], [7]):
        assert peer_rows(garbage) == [0, 0, 0, 0]


def test_all_steps_of_all_ranks_line_up() -> None:
    window = build_window(Cluster(ranks=3, steps=20).run())
    assert window.ranks == (0, 1, 2)
    assert window.steps.tolist() == list(range(20))
    assert window.phases == ("other", "input", "forward", "backward", "comm", "optimizer")
    assert window.left_out == 0
    assert np.array_equal(window.phase_ns.sum(axis=0), window.wall_ns)


def test_a_dead_rank_is_compared_up_to_its_last_step_and_the_others_go_on() -> None:
    window = build_window(Cluster(ranks=3, steps=20, deaths=(Death(rank=1, step=12),)).run())
    assert window.steps.tolist() == list(range(20))
    assert not np.isnan(window.wall_ns[:, :12]).any()
    assert np.isnan(window.wall_ns[1, 12:]).all()
    assert not np.isnan(window.wall_ns[[0, 2], 12:]).any()
    assert np.isnan(window.phase_ns[:, 1, 12:]).all()
    assert window.left_out == 0


def test_what_a_running_rank_has_not_finished_is_left_out() -> None:
    window = build_window(Cluster(ranks=3, steps=20, unfinished={0: 20, 1: 17, 2: 19}).run())
    assert window.steps.tolist() == list(range(17))
    assert window.left_out == 3


def test_a_step_with_a_lost_record_is_left_out() -> None:
    window = build_window(Cluster(ranks=3, steps=20, missing={1: (4, 5), 2: (5, 9)}).run())
    assert window.steps.tolist() == [step for step in range(20) if step not in (4, 5, 9)]
    assert window.left_out == 3


def test_only_the_last_attempt_counts() -> None:
    first, second = Cluster(ranks=2, steps=30).series(), Cluster(ranks=2, steps=12, attempt=1).series()
    window = window_of(*first, *second)
    assert (window.attempt, len(window.steps)) == (1, 12)


def test_phases_are_aligned_by_name_not_by_slot() -> None:
    first, other = Cluster(ranks=2, steps=12, phases_ms={"forward": 4.0, "augment": 3.0, "tokenize": 2.0}).series()
    names = list(other.phase_names)
    names[9], names[10] = names[10], names[9]
    steps, device = records_of(other)
    steps["phase_ns"][:, [9, 10]] = steps["phase_ns"][:, [10, 9]]
    window = window_of(first, with_records(replace(other, phase_names=tuple(names)), steps, device))
    augment, tokenize = (window.phase_ns[window.phases.index(name)] for name in ("augment", "tokenize"))
    assert np.median(augment, axis=1) == pytest.approx(3e6, rel=0.05)
    assert np.median(tokenize, axis=1) == pytest.approx(2e6, rel=0.05)


def test_a_phase_that_one_rank_alone_has_is_zero_elsewhere() -> None:
    window = build_window(Cluster(ranks=2, steps=12, faults=(slow_at(1, "log", 2.0),)).run())
    log = window.phase_ns[window.phases.index("log")]
    assert log[0].tolist() == [0.0] * 12
    assert log[1].tolist() == [2e6] * 12


def test_first_and_slow_leading_steps_are_warm_up() -> None:
    window = build_window(Cluster(ranks=2, steps=50, warmup_steps=4).run())
    assert window.warmup == (
        Apart(step=0, reason="first"),
        *(Apart(step=step, reason="warm-up") for step in (1, 2, 3)),
    )
    assert window.steady.sum() == 46


def test_warm_up_is_at_most_a_fifth_of_the_run() -> None:
    window = build_window(Cluster(ranks=1, steps=50, warmup_steps=20).run())
    assert len(window.warmup) <= 10


def test_an_even_run_has_only_its_first_step_set_apart() -> None:
    window = build_window(Cluster(ranks=2, steps=50, warmup_steps=0, noise=0.001).run())
    assert window.warmup == (Apart(step=0, reason="first"),)


def test_compile_steps_are_set_apart_wherever_they_are() -> None:
    window = build_window(Cluster(ranks=2, steps=50, compile_steps=(1, 30)).run())
    assert window.warmup == (
        Apart(step=0, reason="first"),
        Apart(step=1, reason="compile"),
        Apart(step=30, reason="compile"),
    )


def test_leading_discovery_steps_are_set_apart() -> None:
    (series,) = Cluster(ranks=1, steps=30).series()
    steps, device = records_of(series)
    steps["flags"][[1, 2, 20]] |= FLAG_DISCOVERY
    window = window_of(with_records(series, steps, device))
    assert [(apart.step, apart.reason) for apart in window.warmup] == [(0, "first"), (1, "discovery"), (2, "discovery")]


def test_device_times_stand_where_they_were_ready() -> None:
    first, other = Cluster(ranks=2, steps=20, device_timed=True).series()
    window = window_of(first, timed_at(other, slice(15)))
    assert window.device_ns is not None
    assert not np.isnan(window.device_ns[:, 0]).any()
    assert np.isnan(window.device_ns[:, 1, 15:]).all()
    assert not np.isnan(window.device_ns[:, 1, :15]).any()


@pytest.mark.parametrize("cluster", [Cluster(ranks=0, steps=0), Cluster(ranks=3, steps=0)])
def test_nothing_recorded_gives_an_empty_window(cluster: Cluster) -> None:
    window = build_window(cluster.run())
    assert (window.ranks, window.phases, len(window.steps), window.warmup) == ((), (), 0, ())


# -- Which samples count: those of steady steps, not of imports, start-up, warm-up and compilation --------------------


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
