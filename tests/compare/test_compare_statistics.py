"""How large a change is, and when that is certain: on series whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.comparison.statistics import (
    Change,
    Level,
    Series,
    change_between,
    is_recurring,
    judge,
    level_of,
    needed_to_decide,
    ordinary,
    t_quantile,
    unusual_steps,
    verdict_of,
)

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def series(values: Floats, first: int = 0) -> Series:
    return Series(numbers=np.arange(first, first + len(values)), values=values)


def noisy(seed: int, *, count: int = 200, noise: float = 0.005, level: float = 100.0) -> Floats:
    return np.asarray(level * (1 + np.random.default_rng(seed).normal(0.0, noise, count)), np.float64)


def autocorrelated(seed: int, count: int, memory: float) -> Floats:
    random = np.random.default_rng(seed)
    values = np.zeros(count)
    for at in range(1, count):
        values[at] = memory * values[at - 1] + random.normal()
    return values


def change(value: float, half: float) -> Change:
    return Change(
        change=value, low=value - half, high=value + half, before=1.0, after=1.0 + value, within=half / 4,
        between=half / 4, freedom=10.0, steps=100, baselines=1, paired=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (0.0, 0.009, "same"),
        (0.005, 0.004, "same"),
        (0.0, 0.02, "cannot_tell"),
        (0.015, 0.02, "cannot_tell"),
        (0.03, 0.02, "slower"),
        (-0.03, 0.02, "faster"),
        (0.012, 0.004, "slower"),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side_or_within_the_margin(value: float, half: float, verdict: str) -> None:
    assert verdict_of(change(value, half)) == verdict


def test_the_change_is_that_of_the_mean() -> None:
    found = change_between([series(np.full(50, 100.0))], series(np.full(50, 105.0)))
    assert found.change == pytest.approx(0.05)
    assert (found.before, found.after) == (100.0, 105.0)
    assert found.low > 0, "steps that do not vary show a change of five percent at once"


def test_equal_runs_are_not_called_slower() -> None:
    verdicts = [judge([series(noisy(seed))], series(noisy(1000 + seed))).verdict for seed in range(100)]
    assert verdicts.count("slower") + verdicts.count("faster") <= 1


def test_a_slowdown_of_three_percent_is_found_with_one_baseline_and_of_two_percent_with_three() -> None:
    for seed in range(20):
        runs = [series(noisy(seed * 10 + at)) for at in range(3)]
        slow = noisy(seed * 10 + 9)
        assert judge(runs[:1], series(slow * 1.03)).verdict == "slower"
        assert judge(runs, series(slow * 1.02)).verdict == "slower"
        assert judge(runs, series(slow / 1.02)).verdict == "faster"


def test_a_slowdown_of_every_tenth_step_is_found() -> None:
    """A median would not see it."""
    slow = noisy(2, count=400)
    slow[::10] *= 1.5
    found = judge([series(noisy(1, count=400))], series(slow))
    assert found.verdict == "slower"
    assert found.change.change == pytest.approx(0.05, abs=0.004)


def test_a_pattern_that_repeats_drops_out() -> None:
    """Long batches are the same in every run of a job."""
    pattern = np.random.default_rng(5).uniform(0.7, 1.3, 60)
    runs = [series(noisy(at, count=60, noise=0.001) * pattern) for at in range(4)]
    paired = change_between(runs[:3], runs[3])
    assert paired.paired
    assert paired.high - paired.low < 0.025
    apart = change_between(runs[:3], series(runs[3].values, first=1000))
    assert not apart.paired
    assert apart.high - apart.low > 5 * (paired.high - paired.low)


def test_dependent_steps_widen_the_error() -> None:
    """Coverage, not a formula: the error must cover how much means of such series really scatter."""
    means, errors = [], []
    for seed in range(200):
        values = 100 + autocorrelated(seed, 200, 0.8)
        means.append(values.mean())
        errors.append(level_of(values).error * values.mean())
    assert np.median(errors) > 0.75 * np.std(means)
    assert np.median(errors) > 2 * np.std(autocorrelated(0, 200, 0.8)) / math.sqrt(200)


def test_baselines_that_differ_widen_the_interval_and_equal_ones_narrow_it() -> None:
    after = series(noisy(9))
    single_run = change_between([series(noisy(1))], after)
    alike = change_between([series(noisy(at)) for at in (1, 2, 3, 4)], after)
    uneven = change_between([series(noisy(at) * (0.91 + 0.03 * at)) for at in (1, 2, 4, 5)], after)
    assert alike.high - alike.low < 0.7 * (single_run.high - single_run.low)
    assert uneven.high - uneven.low > 3 * (single_run.high - single_run.low)
    assert uneven.between == pytest.approx(0.035, rel=0.3)


def test_a_run_that_wanders_is_not_trusted() -> None:
    """A machine whose speed drifts by percents within a run differs as much from run to run."""
    drift = 1 + 0.05 * np.sin(np.linspace(0, 3, 200))
    calm = change_between([series(noisy(1))], series(noisy(2)))
    wandering = change_between([series(noisy(1))], series(noisy(2) * drift))
    assert wandering.high - wandering.low > 2 * (calm.high - calm.low)


def test_single_unusual_steps_are_left_out() -> None:
    slow = noisy(2)
    slow[[50, 120]] *= 20
    found = judge([series(noisy(1))], series(slow))
    assert found.ordinary
    assert found.unusual == (0, 2)
    assert abs(found.change.change) < 0.005


def test_recurring_unusual_steps_are_never_called_the_same() -> None:
    """They cost a fifth of the time; that ordinary steps are equal is no reason to say that the runs are."""
    runs = [series(noisy(at)) for at in range(6)]
    slow = noisy(9)
    slow[[20, 60, 100, 140]] *= 20
    found = judge(runs, series(slow))
    assert found.verdict in ("slower", "cannot_tell")
    assert not found.ordinary


def test_ordinary_steps_decide_where_recurring_stalls_hide_a_change() -> None:
    rare = np.random.default_rng(3)
    runs = []
    for at in range(4):
        values = noisy(at)
        values[rare.choice(200, 6, replace=False)] *= rare.uniform(2, 30, 6)
        runs.append(values)
    slow = noisy(7) * 1.1
    slow[rare.choice(200, 6, replace=False)] *= rare.uniform(20, 40, 6)
    found = judge([series(values) for values in runs], series(slow))
    assert found.verdict == "slower"
    assert found.ordinary
    assert found.all_steps is not None
    assert found.change.change == pytest.approx(0.1, abs=0.01)


def test_what_is_unusual() -> None:
    values = noisy(1, count=50)
    values[[10, 30]] = 150.0, 60.0
    marked = unusual_steps(values)
    assert np.flatnonzero(marked).tolist() == [10, 30]
    assert not is_recurring(marked)
    assert abs(ordinary(values, marked)[10] - 100) < 2
    assert is_recurring(np.arange(50) % 10 == 0)


def test_a_part_of_a_step_may_be_zero() -> None:
    nothing = series(np.zeros(50))
    found = change_between([nothing], series(np.full(50, 3.0)), part_of=100.0)
    assert found.change == pytest.approx(0.03)
    assert found.low > 0
    apart = change_between([nothing], series(np.full(50, 3.0), first=500), part_of=100.0)
    assert apart.change == pytest.approx(0.03)


@pytest.mark.parametrize("factor", [1.002, 1.02, 1.2, 3.0])
def test_it_does_not_matter_which_of_two_runs_is_the_baseline(factor: float) -> None:
    """A speedup is as certain as the slowdown that taking it back is."""
    first, second = series(noisy(1, noise=0.03)), series(noisy(2, noise=0.03) * factor)
    there, back = change_between([first], second), change_between([second], first)
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)
    assert (1 + there.low) * (1 + back.high) == pytest.approx(1)
    assert (1 + there.high) * (1 + back.low) == pytest.approx(1)


def test_a_level_stands_for_a_run_without_steps() -> None:
    level = Level(mean=100.0, error=0.001, freedom=50.0, wander=0.0, noise=0.005, steps=100)
    found = change_between([level], series(noisy(1) * 1.1))
    assert found.change == pytest.approx(0.1, abs=0.005)
    assert found.low > 0
    assert not found.paired


def test_what_is_needed_to_decide() -> None:
    """The promise is kept: with so many more steps and runs, the interval is as narrow as was asked for."""
    few = change_between([series(noisy(1, count=20, noise=0.032))], series(noisy(2, count=20, noise=0.032) * 1.02))
    assert verdict_of(few) == "cannot_tell"
    needed = needed_to_decide(few, 0.02)
    assert needed.both
    assert needed.steps is not None
    assert needed.runs is not None
    more = needed.steps + 20
    runs = [series(noisy(10 + at, count=more, noise=0.03)) for at in range(1 + needed.runs)]
    longer = change_between(runs, series(noisy(2, count=more, noise=0.03)))
    assert (longer.high - longer.low) / 2 < 0.022
    assert needed_to_decide(few, 0.0).steps is None, "no number of steps makes an interval a point"


def test_more_steps_do_not_help_where_runs_differ() -> None:
    runs = [series(noisy(at) * (0.91 + 0.03 * at)) for at in (1, 2, 4, 5)]
    needed = needed_to_decide(change_between(runs, series(noisy(9))), 0.02)
    assert needed.steps is None


@pytest.mark.parametrize(("freedom", "exact"), [(3, 5.841), (5, 4.032), (10, 3.169), (30, 2.750), (1000, 2.581)])
def test_quantiles_of_t(freedom: float, exact: float) -> None:
    assert exact <= t_quantile(freedom) * 1.001 <= exact * 1.05


@given(
    st.lists(st.floats(1e-3, 1e12), min_size=5, max_size=60), st.lists(st.floats(1e-3, 1e12), min_size=5, max_size=60)
)
@example([1.0, 1.0, 77755660614.0, 581884532254.0, 1e12], [1.0, 0.001, 0.001, 0.001, 0.001])  # rounding
def test_any_positive_numbers_give_an_interval_around_the_change(before: list[float], after: list[float]) -> None:
    found = judge([series(np.array(before))], series(np.array(after)))
    assert math.isfinite(found.change.change)
    assert found.change.low <= found.change.change <= found.change.high
