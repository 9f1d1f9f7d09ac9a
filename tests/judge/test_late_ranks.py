"""Late ranks in arrays of work and wait: the two tests, and the cost; the same engine judges runs and traces."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stepscope.judge.late_ranks import Intervals, LateRanks, excesses, late_by_order, peers_typical_ns, savings_ns
from stepscope.judge.replay import Meeting, replay
from stepscope.judge.statistics import chance_of_at_least, peer_deviation

MS = 1e6


def noisy(ranks: int, intervals: int, *, seed: int = 0) -> NDArray[np.float64]:
    return 100 * MS + np.random.default_rng(seed).normal(0, MS, (ranks, intervals))


def intervals_of(work_ns: NDArray[np.float64]) -> Intervals:
    wait_ns = np.fmax.reduce(work_ns, axis=0) - work_ns
    return Intervals(work_ns=work_ns, wait_ns=wait_ns, counts=np.ones(work_ns.shape[1], np.bool_))


def late_in(work_ns: NDArray[np.float64]) -> LateRanks | None:
    return next(late_by_order(intervals_of(work_ns)), None)


# -- both tests see the same rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, 300])
def test_a_late_rank_is_found_by_excess_and_by_order(count: int) -> None:
    work_ns = noisy(8, count)
    work_ns[3] += 10 * MS
    (by_excess,) = excesses(peer_deviation(work_ns), least_ns=2 * MS, comparisons=8, stretch=8)
    assert (by_excess.rank, by_excess.at) == (3, slice(0, count))
    assert by_excess.excess_ns == pytest.approx(10 * MS, rel=0.1)
    by_order = late_in(work_ns)
    assert by_order is not None
    assert by_order.ranks == (3,)


def test_nobody_is_late_among_equals() -> None:
    work_ns = noisy(8, 200)
    assert list(excesses(peer_deviation(work_ns), least_ns=0.2 * MS, comparisons=8, stretch=8)) == []
    assert late_in(work_ns) is None


def test_only_excess_knows_since_when() -> None:
    work_ns = noisy(4, 200)
    work_ns[1, 120:] += 8 * MS
    (found,) = excesses(peer_deviation(work_ns), least_ns=2 * MS, comparisons=4, stretch=8)
    assert found.rank == 1
    assert abs(found.at.start - 120) <= 3
    assert found.at.stop == 200


def test_only_order_needs_three_intervals() -> None:
    work_ns = noisy(4, 3)
    work_ns[2] += 20 * MS
    assert list(excesses(peer_deviation(work_ns), least_ns=2 * MS, comparisons=4, stretch=8)) == []
    late = late_in(work_ns)
    assert late is not None
    assert late.ranks == (2,)


def test_a_rank_that_is_nearly_as_late_is_late_too() -> None:
    work_ns = noisy(8, 40)
    work_ns[2] += 20 * MS
    work_ns[5] += 16 * MS
    late = late_in(work_ns)
    assert late is not None
    assert late.ranks == (2, 5)


def test_a_rank_that_is_late_once_per_step_is_judged_by_the_waiting() -> None:
    work_ns = noisy(8, 400)
    work_ns[6, ::10] += 200 * MS
    late = late_in(work_ns)
    assert late is not None
    assert late.ranks == (6,)
    assert 0 < late.judged.sum() < 400


def test_a_few_early_ranks_are_no_reason_to_blame_the_rest() -> None:
    work_ns = noisy(4, 40)
    work_ns[0] -= 30 * MS
    assert late_in(work_ns) is None


def test_intervals_that_do_not_count_say_nothing() -> None:
    work_ns = noisy(4, 40)
    work_ns[2] += 20 * MS
    assert (
        next(late_by_order(Intervals(work_ns=work_ns, wait_ns=-work_ns, counts=np.zeros(40, np.bool_))), None) is None
    )


# -- cost -----------------------------------------------------------------------------------------------------------


def test_what_a_late_rank_costs_is_what_the_replay_saves() -> None:
    """The closed form agrees with the meetings that it stands for: all ranks, once per interval."""
    work_ns = noisy(6, 50)
    work_ns[4] += 9 * MS
    late = np.array([4])
    typical_ns = peers_typical_ns(work_ns, late, np.zeros(6, np.intp))
    ranks = tuple(range(6))
    meetings = [*(Meeting((rank,)) for rank in ranks), Meeting((6,), ranks)]

    def length(work: NDArray[np.float64]) -> NDArray[np.float64]:
        lengths = np.vstack((work, np.zeros(50)))
        ends = replay(meetings, lengths, np.empty_like(lengths), lambda before, _: np.max(before or [0.0], axis=0))
        return np.asarray(ends[6])

    faster_ns = work_ns.copy()
    faster_ns[4] = np.minimum(work_ns[4], typical_ns[0])
    assert savings_ns(work_ns, late, typical_ns) == pytest.approx(length(work_ns) - length(faster_ns))


def test_without_a_rank_the_others_wait_for_the_next() -> None:
    work_ns = np.array([[1.0, 5.0, np.nan], [4.0, 2.0, 3.0], [2.0, 3.0, np.nan]])
    assert savings_ns(work_ns, [1], -np.inf).tolist() == [2.0, 0.0, np.inf]
    assert intervals_of(work_ns).last.tolist() == [1, 0, 1]


def test_chance_of_many_intervals() -> None:
    """Beyond 200 the terms of the sum no longer fit into a float; the result goes on where it was."""
    assert chance_of_at_least(5, 8, 1 / 8) == pytest.approx(0.00123, rel=0.01)
    one_more = (7 * chance_of_at_least(61, 200, 1 / 8) + chance_of_at_least(60, 200, 1 / 8)) / 8
    assert chance_of_at_least(61, 201, 1 / 8) == pytest.approx(one_more)
    assert chance_of_at_least(60_000, 100_000, 1 / 8) == 0
    assert chance_of_at_least(10_000, 100_000, 1 / 8) == pytest.approx(1)
    assert chance_of_at_least(301, 300, 1 / 8) == 0
