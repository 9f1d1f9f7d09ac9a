"""The league of comparisons: how pairs are made and scored, and its result on recorded series where they exist."""

from __future__ import annotations

import json
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
)

from stepscope.compare.statistics import Series, judge


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
    for case, again in zip(cases, pairs_of(jobs, 2, held=True), strict=True):
        runs = [id(run) for run in (*case.baselines, case.candidate)]
        assert len(set(runs)) == 3
        assert set(runs) <= {id(run) for run in jobs[case.job]}
        assert runs == [id(run) for run in (*again.baselines, again.candidate)]


def test_a_slowdown_of_all_steps_or_of_every_tenth() -> None:
    run = Series(numbers=np.arange(100), values=np.full(100, 10.0))
    assert slowed(run, 0.05).values.mean() == pytest.approx(10.5)
    assert slowed(run, 0.05, tenth=True).values.mean() == pytest.approx(10.5)
    assert np.median(slowed(run, 0.05, tenth=True).values) == 10.0


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
