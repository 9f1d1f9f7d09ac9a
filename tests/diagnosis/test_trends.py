"""Slower and slower, slower from a step on, slower for a while; and none of it in noise and wander."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import seeds
from fakes.cluster import Cluster, Death, Fault, slow_at
from fakes.records import edited
from numpy.typing import NDArray

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.claims import unexplained_steps
from stepscope.diagnosis.engine.view import View, view_of
from stepscope.diagnosis.rules.spikes import find_spikes
from stepscope.diagnosis.rules.trends import find_trends
from stepscope.records.finding import Finding
from stepscope.records.series import RankSeries


def view_at(cluster: Cluster) -> View:
    return view_of(build_window(cluster.run()))


def found_in(cluster: Cluster) -> list[Finding]:
    view = view_at(cluster)
    claims = find_spikes(view, view.step_ns, [])
    claims += find_trends(view, unexplained_steps(view, claims))
    return [claim.finding for claim in claims]


def everywhere(
    ranks: int, phase: str, ms: float, steps: range | None = None, *, ramp: bool = False
) -> tuple[Fault, ...]:
    return tuple(slow_at(rank, phase, ms, steps, ramp=ramp) for rank in range(ranks))


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "other"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_that_grow_are_drift_in_the_phase_that_grows(phase: str, ranks: int) -> None:
    (found,) = found_in(Cluster(ranks=ranks, steps=120, faults=everywhere(ranks, phase, 8.0, ramp=True)))
    assert (found.kind, found.severity, found.ranks, found.phase) == ("drift", "warning", (), phase)
    assert found.evidence["ms_per_1000_steps"] == pytest.approx(8.0 / 120 * 1000, rel=0.15)
    assert found.evidence["growth_share"] == pytest.approx(0.2, abs=0.03)
    assert found.evidence["p"] < 1e-4
    assert found.cost["share"] == pytest.approx(0.085, abs=0.02)
    assert found.steps == (1, 119)


def test_the_sentence_of_a_drift() -> None:
    (found,) = found_in(Cluster(ranks=1, steps=120, noise=0.0, faults=everywhere(1, "input", 12.0, ramp=True)))
    assert found.title == "Steps grow by 0.100 ms each step: 38.6 ms at first, 49.4 ms now; the growth is in input."


def test_one_rank_that_gets_slower_is_named() -> None:
    (found,) = found_in(Cluster(ranks=4, steps=120, faults=(slow_at(2, "forward", 20.0, ramp=True),)))
    assert (found.kind, found.ranks, found.phase) == ("drift", (2,), "forward")


def test_little_growth_is_told_but_not_warned_of() -> None:
    (found,) = found_in(Cluster(ranks=1, steps=300, noise=0.01, faults=everywhere(1, "input", 3.0, ramp=True)))
    assert (found.kind, found.severity) == ("drift", "info")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_slower_from_a_step_on_is_a_change_at_that_step(ranks: int, measured: bool, seed: int) -> None:
    faults = everywhere(ranks, "forward", 12.0, range(61, 100))
    (found,) = found_in(Cluster(ranks=ranks, steps=100, comm_measured=measured, seed=seed, faults=faults))
    assert (found.kind, found.severity, found.ranks, found.phase) == ("change_point", "warning", (), "forward")
    assert found.steps is not None
    assert abs(found.steps[0] - 61) <= 2
    assert found.steps[1] == 99
    assert found.evidence["change_share"] == pytest.approx(0.3, abs=0.03)
    assert found.cost["seconds"] == pytest.approx(0.012 * 39, rel=0.1)


def test_the_sentence_of_a_change() -> None:
    (found,) = found_in(Cluster(ranks=1, steps=100, noise=0.0, faults=everywhere(1, "forward", 12.0, range(61, 100))))
    assert found.title == "From step 61 on, steps take 50.0 ms instead of 38.0 ms (+32%), in forward."


def test_a_change_of_one_rank_names_it() -> None:
    for measured in (True, False):
        cluster = Cluster(
            ranks=4, steps=100, comm_measured=measured, faults=(slow_at(1, "other", 12.0, range(50, 100)),)
        )
        (found,) = found_in(cluster)
        assert (found.kind, found.ranks, found.phase) == ("change_point", (1,), "other")


@pytest.mark.seeds
def test_a_tenth_more_is_found_ten_steps_after_it_began() -> None:
    for seed in seeds(10):
        faults = everywhere(2, "forward", 5.0, range(50, 60))
        (found,) = found_in(Cluster(ranks=2, steps=60, seed=seed, faults=faults))
        assert found.kind == "change_point"
        assert found.steps is not None
        assert abs(found.steps[0] - 50) <= 2


def test_a_change_for_the_better_is_none_and_neither_is_the_end_of_a_fast_stretch() -> None:
    assert found_in(Cluster(ranks=2, steps=100, faults=everywhere(2, "forward", 12.0, range(50)))) == []
    slow_at_both_ends = everywhere(1, "forward", 12.0, range(50)) + everywhere(1, "forward", 12.0, range(70, 120))
    assert found_in(Cluster(ranks=1, steps=120, faults=slow_at_both_ends)) == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_slow_stretch_that_recovered_is_a_drop(ranks: int) -> None:
    faults = everywhere(ranks, "input", 20.0, range(61, 90))
    (found,) = found_in(Cluster(ranks=ranks, steps=200, faults=faults))
    assert (found.kind, found.severity, found.phase) == ("throughput_drop", "warning", "input")
    assert found.steps is not None
    assert abs(found.steps[0] - 61) <= 1
    assert abs(found.steps[1] - 89) <= 1
    assert found.evidence["steps_per_second_before"] == pytest.approx(25.5, abs=1.0)
    assert found.evidence["steps_per_second_during"] == pytest.approx(17.0, abs=0.8)
    assert found.cost["seconds"] == pytest.approx(0.58, rel=0.1)


def test_the_sentence_of_two_drops() -> None:
    faults = everywhere(1, "input", 20.0, range(50, 80)) + everywhere(1, "input", 20.0, range(120, 150))
    (found,) = found_in(Cluster(ranks=1, steps=200, noise=0.0, faults=faults))
    assert found.title == (
        "Steps 50 to 79, 120 to 149 were slower: 17.2 steps/s instead of 26.3, in input; then the pace recovered."
    )
    assert found.evidence["stretches"] == [[50, 79], [120, 149]]
    assert found.steps == (50, 149)


def test_a_drop_and_a_change_may_both_be_there() -> None:
    faults = everywhere(1, "input", 20.0, range(50, 80)) + everywhere(1, "forward", 15.0, range(150, 200))
    assert [(finding.kind, finding.phase) for finding in found_in(Cluster(ranks=1, steps=200, faults=faults))] == [
        ("change_point", "forward"),
        ("throughput_drop", "input"),
    ]


@pytest.mark.seeds
@pytest.mark.parametrize("drift", [0.02, 0.05])
def test_wander_is_neither_drift_nor_change(drift: float) -> None:
    for ranks, steps in ((1, 30), (1, 100), (2, 60), (4, 200)):
        for seed in seeds(25):
            found = found_in(Cluster(ranks=ranks, steps=steps, drift=drift, seed=seed))
            assert [finding.kind for finding in found if finding.severity != "info"] == []


def test_a_job_disturbed_in_half_of_its_steps_has_not_changed() -> None:
    values = np.random.default_rng(5).normal(40e6, 0.5e6, 100)
    values[1:70:3] += 20e6
    values[70:] += 20e6 * (np.arange(30) % 3 > 0)
    view = view_at(Cluster(ranks=1, steps=101))
    assert find_trends(view, values) == []


def test_a_slower_exchange_is_warned_of_and_waiting_for_whoever_is_last_is_not() -> None:
    view = view_at(Cluster(ranks=8, steps=101))
    at = view.phases.index("comm")
    for hit, severity in ((np.ones((8, 40)), "warning"), (np.arange(8)[:, None] != np.arange(40) % 8, "info")):
        phase_ns = view.phase_ns.copy()
        phase_ns[at, :, 60:] += 12e6 * hit
        slower = replace(view, phase_ns=phase_ns, wall_ns=phase_ns.sum(axis=0))
        (claim,) = find_trends(slower, slower.step_ns)
        assert (claim.finding.kind, claim.finding.phase, claim.finding.severity) == ("change_point", "comm", severity)


def test_a_rank_that_died_is_no_change_and_hides_none() -> None:
    deaths = (Death(rank=3, step=50),)
    assert found_in(Cluster(ranks=4, steps=100, deaths=deaths)) == []
    faults = everywhere(4, "forward", 12.0, range(61, 100))
    (found,) = found_in(Cluster(ranks=4, steps=100, deaths=deaths, faults=faults))
    assert (found.kind, found.ranks, found.phase) == ("change_point", (), "forward")


def test_series_of_nothing_say_nothing() -> None:
    view = view_at(Cluster(ranks=2, steps=40))
    assert find_trends(view, np.zeros(len(view.steps))) == []
    assert find_trends(view, np.full(len(view.steps), 4e7)) == []
    assert find_trends(view_at(Cluster(ranks=1, steps=0)), np.zeros(0)) == []


# -- series of real jobs ----------------------------------------------------------------------------------------------


def real(captured: Path, name: str) -> list[tuple[str, str, tuple[int, int] | None, int | None]]:
    series = json.loads((captured / "series" / "megatron_iteration.json").read_text())
    ms = np.array(series[name]["iteration_time_ms"])
    run = Cluster(ranks=1, steps=len(ms)).run()

    def take(_: RankSeries, rows: NDArray[Any]) -> None:
        rows["phase_ns"] = 0
        rows["phase_ns"][:, 0] = rows["wall_ns"] = np.rint(ms * 1e6).astype(np.uint64)

    view = view_of(build_window(edited(run, take)))
    claims = find_spikes(view, view.step_ns, [])
    claims += find_trends(view, unexplained_steps(view, claims))
    found = [claim.finding for claim in claims]
    return [(finding.kind, finding.severity, finding.steps, finding.evidence.get("period")) for finding in found]


def test_a_real_job_that_does_something_every_ten_steps(shared_data: Path) -> None:
    name = "hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G/golden_values_dev_dgx_h100"
    assert real(shared_data, name) == [("jitter", "warning", (9, 39), 10)]


def test_real_even_jobs_are_left_alone(shared_data: Path) -> None:
    for name in (
        "bert/bert_mcore_tp2_pp2_resume_torch_dist_local_spec/golden_values_dev_dgx_h100_2nd",
        "gpt/gpt3_15b_8t_release_sm/golden_values_lts_dgx_a100",
        "t5/t5_release/golden_values_dev_dgx_h100",
    ):
        assert real(shared_data, name) == []


def test_a_machine_that_gets_slower_is_no_change_of_its_longest_phase() -> None:
    """Half of the step is input, and from step 60 on everything takes 1.6 times as long."""
    phases = {"input": 20.0, "forward": 10.0, "backward": 10.0}
    slower = tuple(slow_at(0, name, 0.6 * ms, range(60, 120)) for name, ms in phases.items())
    only = (slow_at(0, "input", 24.0, range(60, 120)),)
    for faults, phase in ((slower, None), (only, "input")):
        found = diagnose(Cluster(ranks=1, steps=120, phases_ms=phases, noise=0.01, faults=faults).run())
        change = next(finding for finding in found if finding.kind == "change_point")
        assert change.phase == phase
        assert not [line for line in change.advice if "storage" in line]


def test_steps_of_which_nothing_is_left_do_not_grow() -> None:
    """Earlier rules may explain the first steps completely."""
    view = view_of(build_window(Cluster(ranks=1, steps=100).run()))
    left_ns = np.maximum(np.linspace(-10e6, 90e6, len(view.steps)), 0.0)
    assert "drift" not in [claim.finding.kind for claim in find_trends(view, left_ns)]
