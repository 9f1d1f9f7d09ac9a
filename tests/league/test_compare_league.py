"""The league of comparisons: how pairs are made and scored, and its result on recorded series where they exist."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from compare.__main__ import (
    DATA,
    held_out,
    league_of_series,
    mlperf_jobs,
    pairs_of,
    slowed,
    verdict_with,
)
from compare.history import RUNS, History, found_in, histories_of, is_findable, level_of_run, points_of, score

from stepscope.comparison.statistics import Series, judge


def write_series(folder: Path, *, noise: float) -> None:
    """Sixteen jobs of six runs each; four single series."""
    random = np.random.default_rng(0)
    repeated = {f"job{at}": [(1000 * (1 + random.normal(0, noise, 12))).tolist() for _ in range(6)] for at in range(16)}
    single = {f"test{at}": {"iteration_time_ms": (100 * (1 + random.normal(0, noise, 60))).tolist()} for at in range(4)}
    (folder / "mlperf_v5_throughput.json").write_text(json.dumps(repeated))
    (folder / "megatron_iteration.json").write_text(json.dumps(single))


def test_jobs_are_divided_by_their_names_alone() -> None:
    assert [held_out(f"job{at}") for at in range(4)] == [held_out(f"job{at}") for at in range(4)]
    assert {held_out(f"job{at}") for at in range(16)} == {False, True}


def test_pairs_are_of_one_job_and_the_same_each_time(tmp_path: Path) -> None:
    write_series(tmp_path, noise=0.01)
    jobs = mlperf_jobs(tmp_path)
    cases = pairs_of(jobs, 2, held=True)
    assert cases
    for case, pair in zip(cases, pairs_of(jobs, 2, held=True), strict=True):
        runs = [id(run) for run in (*case.baselines, case.candidate)]
        assert len(set(runs)) == 3
        assert set(runs) <= {id(run) for run in jobs[case.job]}
        assert runs == [id(run) for run in (*pair.baselines, pair.candidate)]


def test_a_slowdown_of_all_steps_or_of_every_tenth() -> None:
    run = Series(numbers=np.arange(100), values=np.full(100, 10.0))
    assert slowed(run, 0.05).values.mean() == pytest.approx(10.5)
    assert slowed(run, 0.05, tenth=True).values.mean() == pytest.approx(10.5)
    assert np.median(slowed(run, 0.05, tenth=True).values) == 10.0


def test_narrower_intervals_decide_more() -> None:
    random = np.random.default_rng(4)
    first, other = (
        Series(numbers=np.arange(50), values=level * (1 + random.normal(0, 0.002, 50))) for level in (100, 101.5)
    )
    judged = judge([first], other)
    assert (judged.verdict, verdict_with(judged, 1.0), verdict_with(judged, 0.5)) == (
        "cannot_tell", "cannot_tell", "slower",
    )  # fmt: skip


def test_the_league_prints_both_kinds_of_series(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare.__main__.PAIRS_PER_JOB", 1)
    monkeypatch.setattr("compare.__main__.LENGTHS", (20,))
    write_series(tmp_path, noise=0.001)
    assert league_of_series(tmp_path, tune=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "held-out half"
    assert any(line.startswith("MLPerf, 1 baseline ") for line in lines)
    assert any(line.startswith("Megatron halves, 20 steps ") for line in lines)


def test_recorded_series_raise_few_false_alarms() -> None:
    """A part of what ``make league-compare`` measures: repeated runs of real jobs, of the half that taught nothing."""
    if not (DATA / "mlperf_v5_throughput.json").is_file():
        pytest.skip("the recorded series are not here (../shared/data/series)")
    cases = pairs_of(mlperf_jobs(DATA), 3, held=True)[::4]
    called = [judge(case.baselines, case.candidate).verdict for case in cases]
    assert len(cases) > 150
    assert called.count("slower") <= 0.02 * len(cases)
    worse = [judge(case.baselines, slowed(case.candidate, 0.03)).verdict for case in cases]
    assert worse.count("slower") >= 0.85 * len(cases)
    assert worse.count("faster") <= 0.01 * len(cases)


# -- histories --------------------------------------------------------------------------------------------------------


def test_histories_take_turns_through_the_runs_of_a_job(tmp_path: Path) -> None:
    write_series(tmp_path, noise=0.01)
    jobs = mlperf_jobs(tmp_path)
    histories = histories_of(jobs, held=True)
    assert histories == histories_of(jobs, held=True)
    assert histories
    for history in histories:
        assert held_out(history.job)
        assert len(history.runs) == RUNS
        assert sorted(history.runs[:6]) == list(range(6))
        assert all(first != other for first, other in pairwise(history.runs))
        assert 3 <= history.step_at <= RUNS - 3


def test_a_step_is_looked_for_at_its_run() -> None:
    random = np.random.default_rng(3)
    runs = [Series(numbers=np.arange(40), values=1e8 * (1 + random.normal(0, 0.001, 40))) for _ in range(6)]
    levels = [level_of_run(run) for run in runs]
    history = History(job="x", runs=tuple(at % 6 for at in range(RUNS)), step_at=12)
    found = found_in(points_of(history, levels, [1.0] * 12 + [1.05] * 8), 12)
    assert (found.at_place, found.in_range, found.slower, found.elsewhere, found.wrong) == (True, True, True, 0, False)
    other = found_in(points_of(history, levels, [1.0] * 12 + [1.05] * 8), 8)
    assert (other.at_place, other.in_range, other.slower, other.elsewhere) == (False, False, True, 1)
    faster = found_in(points_of(history, levels, [1.0] * 12 + [0.95] * 8), 12)
    assert (faster.at_place, faster.slower, faster.wrong) == (False, False, True)


def test_what_is_findable_depends_on_the_noise_and_the_place() -> None:
    assert is_findable(0.02, 0.005, 10)
    assert not is_findable(0.02, 0.02, 10)
    assert is_findable(0.02, 0.008, 10)
    assert not is_findable(0.02, 0.008, 3)


def test_the_histories_of_calm_jobs_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare.history.HISTORIES_PER_JOB", 2)
    write_series(tmp_path, noise=0.001)
    assert score(mlperf_jobs(tmp_path), held=True)
    shown = capsys.readouterr().out
    assert "no change       0.0% report one" in shown
    assert "wrong sign      0" in shown
