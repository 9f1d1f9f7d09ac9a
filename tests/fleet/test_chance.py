"""How likely counts are by chance, and medians of groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stepscope.fleet.chance import corrected, group_medians, least_chance, median_interval, middle_excess


@pytest.mark.parametrize(
    ("count", "trials", "mean", "chance"),
    [
        (0, 10, 1.0, 1.0),
        (3, 3, 0.3, 0.001),
        (2, 3, 1.5, 1.0),  # less than one above the mean: no bound
        (10, 10, 5.0, 1 / 1024),
        (4, 5, 0.5, 5 * 0.1**4 * 0.9 + 0.1**5),
        (1, 0, 0.0, 1.0),
    ],
)
def test_so_many_or_more(count: int, trials: int, mean: float, chance: float) -> None:
    assert least_chance(count, trials, mean) == pytest.approx(chance)


def test_a_large_count_agrees_with_the_sum_of_all_terms() -> None:
    share = 0.02
    terms = [math.comb(800, at) * share**at * (1 - share) ** (800 - at) for at in range(40, 801)]
    assert least_chance(40, 800, 16.0) == pytest.approx(math.fsum(terms), rel=1e-9)


def test_the_bound_holds_for_unequal_probabilities() -> None:
    shares = [0.5, 0.01, 0.3, 0.02, 0.1]
    exact = np.array([1.0])
    for share in shares:
        exact = np.convolve(exact, [1 - share, share])
    for count in (2, 3, 4, 5):
        assert exact[count:].sum() <= least_chance(count, len(shares), sum(shares))


def test_the_best_of_many() -> None:
    assert corrected(1e-4, 50) == pytest.approx(0.005)
    assert corrected(0.2, 50) == 1.0


def test_medians_of_groups_and_how_far_values_are_above_them() -> None:
    values, groups = np.array([5.0, 1.0, 9.0, 2.0, 4.0, 3.0]), np.array([1, 1, 1, 2, 2, 3])
    assert group_medians(values, groups).tolist() == [5.0, 5.0, 5.0, 3.0, 3.0, 3.0]
    assert middle_excess(values, groups)[:5].tolist() == [0.0, -4.0, 4.0, -2.0, 2.0]
    assert math.isnan(middle_excess(values, groups)[5])


def test_the_median_of_groups_is_that_of_a_loop() -> None:
    random = np.random.default_rng(0)
    groups = random.integers(0, 40, 300)
    values = random.normal(size=300)
    for at, found in enumerate(group_medians(values, groups)):
        assert found == pytest.approx(np.median(values[groups == groups[at]]))


def test_an_interval_for_a_median() -> None:
    assert median_interval(np.arange(1.0, 10.0)) == (5.0, 2.0, 8.0)
    assert median_interval(np.array([3.0])) == (3.0, 3.0, 3.0)
