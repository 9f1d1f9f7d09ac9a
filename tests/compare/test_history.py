"""The trend of the step time over runs: levels that are given exactly, and what is concluded from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.comparison.history import HistoryPoint, history_document, history_sentences
from stepscope.comparison.statistics import Level

SCATTER = (0.3, -0.2, 0.1, -0.4, 0.2, 0.0, -0.1, 0.4, -0.3, 0.1, 0.2, -0.2, 0.0, 0.3, -0.1, 0.1, -0.3, 0.2, -0.2, 0.1)
"""By how many thousandths runs differ."""


def points(times_ms: Sequence[float], noise: float = 0.005, **settings: Sequence[Any]) -> list[HistoryPoint]:
    """``noise``: how far the steps of a run scatter."""
    level = {"error": noise / 5, "freedom": 20.0, "wander": noise / 10, "noise": noise, "steps": 100}
    return [
        HistoryPoint(
            id=f"run-{at}",
            name=f"run-{at}",
            path=Path(f"run-{at}"),
            created_wall_ns=at,
            commit=f"{at:040x}",
            level=Level(mean=ms * 1e6, **level),  # type: ignore[arg-type]
            settings={name: values[at] for name, values in settings.items()},
        )
        for at, ms in enumerate(times_ms)
    ]


def scattered(times_ms: Sequence[float]) -> list[float]:
    return [ms * (1 + off / 1000) for ms, off in zip(times_ms, SCATTER, strict=False)]


def test_runs_that_differ_by_chance_are_steady() -> None:
    document = history_document(points(scattered([100.0] * 20)))
    assert (document["verdict"], document["shape"], document["changes"]) == ("same", "steady", [])
    assert document["interval"][0] < 0 < document["interval"][1]
    (sentence,) = history_sentences(document)
    assert sentence.startswith("No change found in 20 runs; one of 0.")


def test_a_slowdown_is_found_with_the_run_that_began_it() -> None:
    workers = [2] * 12 + [0] * 8
    document = history_document(points(scattered([100.0] * 12 + [103.0] * 8), workers=workers))
    assert (document["verdict"], document["shape"]) == ("slower", "steps")
    (change,) = document["changes"]
    assert (change["before"], change["run"], change["first"], change["last"]) == (
        "run-11",
        "run-12",
        "run-12",
        "run-12",
    )
    assert change["change"] == pytest.approx(0.03, abs=0.0005)
    assert change["interval"][0] < 0.03 < change["interval"][1]
    assert change["settings"] == [{"name": "workers", "before": 2, "after": 0}]
    (sentence,) = history_sentences(document)
    assert sentence.startswith("Slower since run-12 (commit 0000000000): +3.0% (+2.")


def test_each_change_is_told_and_the_whole() -> None:
    document = history_document(points(scattered([100.0] * 7 + [110.0] * 6 + [104.0] * 7)))
    assert [row["run"] for row in document["changes"]] == ["run-7", "run-13"]
    assert (document["verdict"], round(document["change"], 3)) == ("slower", 0.04)
    last, first, whole = history_sentences(document)
    assert last.startswith("Faster since run-13")
    assert first.startswith("Slower since run-7")
    assert whole.startswith("In all 4.0% slower (+3.")


def test_a_slow_regression_over_many_runs_is_gradual() -> None:
    """Half a percent with every run: no run is to blame, and no two neighbors differ beyond doubt."""
    document = history_document(points(scattered([100.0 * 1.005**at for at in range(20)])))
    assert (document["verdict"], document["shape"], document["changes"]) == ("slower", "gradual", [])
    assert document["change"] == pytest.approx(1.005**19 - 1, abs=0.002)
    (sentence,) = history_sentences(document)
    assert sentence.startswith("Gradually slower: +9.9% (")
    assert sentence.endswith("from run-0 to run-19, without a clear first run.")


@pytest.mark.parametrize("at", [3, 10, 18])
def test_one_unusual_run_is_no_change(at: int) -> None:
    times = [100.0] * 20
    times[at] = 140.0
    document = history_document(points(scattered(times)))
    assert (document["verdict"], document["unusual"]) == ("same", [f"run-{at}"])


def test_the_last_run_alone_is_no_change_yet() -> None:
    document = history_document(points(scattered([100.0] * 11 + [120.0])))
    assert (document["changes"], document["unusual"]) == ([], ["run-11"])
    assert document["last"] == pytest.approx(0.2, abs=0.001)
    first, second = history_sentences(document)
    assert first == (
        "run-11, the last run, is 20.0% slower than the runs before it; the next run will show whether that stays."
    )
    assert second.startswith("No change found in 11 runs")
    document = history_document(points(scattered([100.0] * 11 + [120.0] * 2)))
    assert ([row["run"] for row in document["changes"]], document["last"]) == (["run-11"], None)


def test_too_few_runs_say_how_many_more() -> None:
    document = history_document(points([100.0, 150.0, 150.0]))
    assert (document["verdict"], document["needed"], document["changes"]) == ("cannot_tell", 2, [])
    assert history_sentences(document) == ["Cannot tell yet: 3 runs to compare, and it takes 5 or more."]
    assert history_document([])["verdict"] == "cannot_tell"


def test_two_runs_that_differ_are_not_both_unusual() -> None:
    document = history_document(points([100.0, 250.0]))
    assert (document["unusual"], document["needed"]) == ([], 3)


def test_runs_that_scatter_widely_are_not_called_the_same() -> None:
    document = history_document(points([100, 120, 95, 130, 88, 115, 104, 99]))
    assert (document["verdict"], document["shape"], document["changes"]) == ("cannot_tell", "steady", [])


@pytest.mark.few(1)
@pytest.mark.parametrize("spread", [0.001, 0.01, 0.05])
def test_chance_is_rarely_taken_for_a_change(spread: float) -> None:
    random = np.random.default_rng(20)
    wrong = sum(
        bool(history_document(points(100 * np.exp(random.normal(0, spread, 20))))["verdict"] in ("slower", "faster"))
        for _ in range(200)
    )
    assert wrong <= 2


def test_a_change_of_ten_times_the_spread_is_always_found_where_it_is() -> None:
    random = np.random.default_rng(21)
    for _ in range(100):
        levels = np.where(np.arange(20) < 13, 100.0, 105.0) * np.exp(random.normal(0, 0.005, 20))
        document = history_document(points(levels))
        assert [row["run"] for row in document["changes"]] == ["run-13"]


def test_steps_that_vary_in_the_same_way_in_each_run_hide_no_change() -> None:
    """A long batch every tenth step scatters the steps of each run by 20%, and the runs differ by a thousandth."""
    document = history_document(points(scattered([100.0] * 12 + [103.0] * 8), noise=0.2))
    assert [row["run"] for row in document["changes"]] == ["run-12"]
    assert document["noise"]["between"] < 0.003


def test_runs_that_are_fast_or_slow_without_any_order_have_no_change() -> None:
    """On two kinds of machines, in the order of a coin."""
    random = np.random.default_rng(22)
    wrong = 0
    for _ in range(200):
        levels = 100 * (1 + 0.01 * random.integers(0, 2, 20)) * np.exp(random.normal(0, 0.0003, 20))
        wrong += history_document(points(levels))["verdict"] in ("slower", "faster")
    assert wrong <= 4
