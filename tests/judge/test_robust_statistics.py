"""The statistics, against plain definitions."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from stepscope.judge.statistics import (
    block_medians,
    lower_median,
    mean_rank,
    median_rank,
    medians,
    peer_deviation,
    persistence_z,
    spread,
    z_needed,
)

VALUES = st.floats(0, 1e9, allow_nan=False)
TABLES = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9), elements=VALUES)


@given(TABLES)
def test_peer_deviation_is_from_the_median_of_the_others(values: np.ndarray) -> None:
    deviation = peer_deviation(values)
    for rank, row in enumerate(values):
        others = np.delete(values, rank, axis=0)
        for step, value in enumerate(row):
            if len(others):
                expected = value - statistics.median(others[:, step].tolist())
                assert deviation[rank, step] == pytest.approx(expected, rel=1e-9, abs=1e-6)
            else:
                assert np.isnan(deviation[rank, step])


@given(TABLES, st.data())
def test_ranks_that_left_have_no_say(values: np.ndarray, data: st.DataObject) -> None:
    ranks, steps = values.shape
    gone_at = data.draw(st.lists(st.integers(0, steps), min_size=ranks, max_size=ranks))
    cut = values.copy()
    for rank, step in enumerate(gone_at):
        cut[rank, step:] = np.nan
    deviation, middle, mean, by_rank = peer_deviation(cut), median_rank(cut), mean_rank(cut), medians(cut)
    for step in range(steps):
        there = [rank for rank in range(ranks) if step < gone_at[rank]]
        left = [cut[rank, step] for rank in there]
        assert mean[step] == pytest.approx(statistics.fmean(left) if left else 0.0)
        assert middle[step] == pytest.approx(statistics.median(left) if left else np.nan, nan_ok=True)
        for rank in range(ranks):
            others = [cut[other, step] for other in there if other != rank]
            expected = cut[rank, step] - statistics.median(others) if rank in there and others else np.nan
            assert deviation[rank, step] == pytest.approx(expected, rel=1e-9, abs=1e-6, nan_ok=True)
    for rank in range(ranks):
        own = cut[rank, : gone_at[rank]].tolist()
        assert by_rank[rank] == pytest.approx(statistics.median(own) if own else np.nan, nan_ok=True)


def test_spread_is_that_of_a_normal_distribution_and_deaf_to_outliers() -> None:
    values = np.random.default_rng(1).normal(10.0, 2.0, 4001)
    values[:400] = 1e6
    assert spread(values) == pytest.approx(2.0, rel=0.2)


def test_lower_median_takes_the_lesser_of_two() -> None:
    assert lower_median(np.array([5.0, 1.0])) == 1.0
    assert lower_median(np.array([5.0, 1.0, 3.0])) == 3.0


def test_blocks_leave_out_the_oldest_steps() -> None:
    values = np.array([[100.0, 1.0, 1.0, 2.0, 2.0]])
    assert block_medians(values, 3).tolist() == [[2.0]]
    assert block_medians(values, 2).tolist() == [[1.0, 2.0]]
    assert block_medians(values[:, :1], 2).shape == (1, 0)


def test_a_few_steps_more_are_not_less_evidence() -> None:
    """41 steps must not be cut into 13 blocks where 40 make 20."""
    for seed in range(20):
        deviation = np.random.default_rng(seed).normal(4.0, 1.0, 44)
        assert persistence_z(deviation) > 0.8 * persistence_z(deviation[-40:])


def test_more_comparisons_need_more_evidence() -> None:
    assert z_needed(1) == pytest.approx(3.719, abs=0.001)
    assert z_needed(1000) == pytest.approx(5.199, abs=0.001)


class TestPersistence:
    noise = np.random.default_rng(2).standard_normal(60)

    def test_noise_is_no_evidence(self) -> None:
        assert persistence_z(self.noise) < 3.0

    def test_a_lasting_excess_is(self) -> None:
        assert persistence_z(self.noise + 2.5) > 5.0

    def test_a_large_one_is_clear_even_if_it_began_late(self) -> None:
        late = self.noise + np.where(np.arange(60) >= 24, 30.0, 0.0)
        assert persistence_z(late) == float("inf")

    def test_one_stall_is_not(self) -> None:
        stalled = self.noise.copy()
        stalled[30] = 5000.0
        assert persistence_z(stalled) < 3.0

    def test_slow_wander_is_not(self) -> None:
        wander = 5 * np.sin(np.arange(60) / 9) + 2.0
        assert persistence_z(wander + self.noise) < 3.0

    def test_without_any_noise_the_sign_decides(self) -> None:
        assert persistence_z(np.full(12, 1.0)) == float("inf")
        assert persistence_z(np.full(12, -1.0)) == 0.0
        assert persistence_z(np.zeros(12)) == 0.0
