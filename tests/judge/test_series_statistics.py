"""Trend, change and rhythm of a single series, with and without noise that looks like them."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.judge.statistics import fold, levels, local_median, rhythm, trend, wander


def noise(count: int, seed: int, *, size: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, size, count)


def wandering(count: int, seed: int, *, size: float, memory: float = 0.9) -> np.ndarray:
    shocks = np.random.default_rng(seed).normal(0.0, size * np.sqrt(1 - memory**2), count + 100)
    level = np.zeros(count + 100)
    for at in range(1, len(level)):
        level[at] = memory * level[at - 1] + shocks[at]
    return 1.0 + level[100:]


def test_the_local_median_is_that_of_the_steps_around_and_fewer_at_the_ends() -> None:
    values = np.array([5.0, 1.0, 2.0, 9.0, 3.0, 3.0, 100.0])
    assert local_median(values, 3).tolist() == [3.0, 2.0, 2.0, 3.0, 3.0, 3.0, 51.5]
    assert local_median(np.zeros(0)).tolist() == []
    assert local_median(np.array([4.0, 6.0])).tolist() == [5.0, 5.0]


def test_a_line_is_a_trend_with_its_own_slope() -> None:
    found = trend(10.0 + 0.25 * np.arange(100))
    assert found.slope == pytest.approx(0.25)
    assert found.start == pytest.approx(10.0)
    assert found.p < 1e-7
    assert found.wander == pytest.approx(0.0, abs=1e-9)


def test_outliers_do_not_turn_the_line() -> None:
    values = 10.0 + 0.25 * np.arange(100)
    values[90:94] += 1000.0
    assert trend(values).slope == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("values", [np.zeros(100), np.full(100, 7.0), np.arange(100.0)[::-1], np.zeros(3), np.zeros(0)])
def test_nothing_rises_in_what_is_constant_falls_or_is_too_short(values: np.ndarray) -> None:
    assert trend(values).p >= 0.5


def test_whether_a_clear_line_is_certain_does_not_depend_on_chance() -> None:
    """Of pairs that rise no more than all do, so their accidental memory decides."""
    found = [trend(1 + np.linspace(0, 0.3, 120) + wandering(120, seed, size=0.001)) for seed in range(60)]
    noise = np.random.default_rng(3).normal(0, 0.03, (60, 120))
    found += [trend(1 + np.linspace(0, 0.3, 120) + each) for each in noise]
    assert max(each.p_line for each in found) < 1e-6
    assert max(each.p for each in found) > 1e-6


def test_no_trend_is_certain_in_noise() -> None:
    noise = np.random.default_rng(4).normal(1, 0.03, (400, 120))
    assert 0 < sum(trend(each).p_line < 0.01 for each in noise) <= 12
    assert min(trend(each).p_line for each in noise) > 1e-5
    assert [trend(values).p_line for values in (np.ones(100), np.arange(100.0), -np.arange(100.0))] == [1.0, 0.0, 1.0]


def test_slow_wander_is_no_trend() -> None:
    assert sum(trend(wandering(200, seed, size=0.05)).p_line < 1e-6 for seed in range(200)) == 0
    assert sum(trend(wandering(200, seed, size=0.05)).p < 1e-4 for seed in range(200)) <= 1


@pytest.mark.parametrize("at", [10, 33, 61, 90])
@pytest.mark.parametrize("seed", range(8))
def test_a_change_of_ten_per_cent_is_found_at_its_step(at: int, seed: int) -> None:
    values = noise(100, seed)
    values[at:] += 0.1
    (first, found), _ = levels(values, least_change=0.05)
    assert first == 0
    assert abs(found - at) <= 2


def test_both_ends_of_a_slow_stretch_are_found_in_a_long_series() -> None:
    values = noise(20_000, 1)
    values[7_003:7_203] += 0.3
    assert levels(values, least_change=0.05)[0] == [0, 7_003, 7_203]


def test_a_constant_series_has_one_level() -> None:
    assert levels(np.full(50, 3.0), least_change=0.1)[0] == [0]
    assert levels(np.zeros(50), least_change=0.0)[0] == [0]
    assert levels(np.zeros(0), least_change=0.0)[0] == []


def test_wander_and_wild_steps_change_no_level() -> None:
    changed = 0
    for seed in range(200):
        values = wandering(150, seed, size=0.03)
        values[np.random.default_rng(seed).random(150) < 0.05] *= 4
        changed += len(levels(values, least_change=0.05)[0]) > 1
    assert changed <= 4


def test_wander_is_told_from_noise_by_its_memory() -> None:
    assert wander(noise(1000, 0)).memory < 0.3
    assert wander(wandering(1000, 0, size=0.05, memory=0.97)).memory > 0.4
    stepped = noise(1000, 0)
    stepped[500:] += 1.0
    assert wander(stepped, [500]).scatter == pytest.approx(wander(noise(1000, 0)).scatter, rel=0.3)


@pytest.mark.parametrize(
    ("events", "period"),
    [
        ([10, 20, 30, 40, 50], 10),
        ([9, 19, 29, 39], 10),
        ([12, 23, 33, 43, 54, 64], 10),
        ([5, 15, 35, 45, 65, 75], 10),
        ([7, 17, 27, 31, 37, 47, 57, 67], 10),
        ([24, 49, 74], 25),
        ([100, 200, 300, 400], 100),
    ],
)
def test_a_beat_is_found_with_a_step_of_slack_gaps_and_a_stray(events: list[int], period: int) -> None:
    found = rhythm(events)
    assert found is not None
    assert found.period == period


@pytest.mark.parametrize("events", [[], [3], [3, 9], [3, 9, 30], [3, 9, 30, 31, 55], [1, 2, 3, 4, 5, 6]])
def test_no_beat_where_there_is_none(events: list[int]) -> None:
    assert rhythm(events) is None


def test_random_events_hardly_ever_keep_a_beat() -> None:
    random = np.random.default_rng(0)
    found = sum(rhythm(sorted(random.choice(100, 6, replace=False).tolist())) is not None for _ in range(500))
    assert found <= 3


@pytest.mark.parametrize("period", [2, 3, 7, 10, 20])
def test_small_slow_steps_are_found_by_folding(period: int) -> None:
    rest = noise(200, 3) - 1.0
    rest[1::period] += 0.15
    found = fold(rest)
    assert found is not None
    assert found.period == period
    assert found.excess == pytest.approx(0.15, rel=0.15)
    assert (found.at % period == 1).all()


def test_nothing_is_folded_out_of_noise_with_heavy_tails() -> None:
    found = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        rest = random.normal(0.0, 0.02, 100)
        hit = random.random(100) < 0.3
        rest[hit] += random.exponential(1.0, int(hit.sum()))
        found += fold(rest) is not None
    assert found <= 1


@pytest.mark.parametrize("rest", [np.zeros(100), np.zeros(0), np.ones(5)])
def test_what_never_changes_has_no_period(rest: np.ndarray) -> None:
    assert fold(rest) is None
