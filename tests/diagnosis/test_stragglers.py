"""The right rank and the right phase, at the right price; and never a rank of a healthy job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import ALL, seeds
from fakes.cluster import Cluster, Death, slow_at
from fakes.cut import cut
from fakes.records import edited, timed_at
from numpy.typing import NDArray

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.rules.stragglers import _too_much_by_chance
from stepscope.judge.late_ranks import savings_ns
from stepscope.records.finding import Finding
from stepscope.records.series import RankSeries
from stepscope.records.text import ms_text

TINY_MS = {"input": 0.3, "forward": 0.2, "backward": 0.3, "optimizer": 0.15, "other": 0.05}
KINDS = {
    "input": "input_straggler",
    "h2d": "h2d_straggler",
    "forward": "compute_straggler",
    "backward": "compute_straggler",
    "optimizer": "compute_straggler",
    "other": "between_steps",
    "checkpoint": "between_steps",
    "augment": "straggler",
}
"""What a rank is called that is late in a phase."""
STEP_MS = 39.0
"""Of the default cluster: 38 ms of work and the all-reduce."""


def findings_of(cluster: Cluster) -> list[Finding]:
    run = cluster.run()
    return diagnose(run)


def stragglers_of(cluster: Cluster) -> list[Finding]:
    return [finding for finding in findings_of(cluster) if finding.kind in KINDS.values()]


def named(findings: list[Finding]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(finding.ranks, finding.phase) for finding in findings]


@pytest.mark.few(16)
@pytest.mark.parametrize(
    "phase", ["input", "h2d", "forward", "backward", "optimizer", "other", "checkpoint", "augment"]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_per_cent_in_any_phase_is_found_within_sixty_steps(phase: str, ranks: int, seed: int) -> None:
    culprit = (seed * 7 + 1) % ranks
    fault = slow_at(culprit, phase, 0.1 * STEP_MS)
    (found,) = stragglers_of(Cluster(ranks=ranks, steps=60, noise=0.03, seed=seed, faults=(fault,)))
    assert (found.kind, found.ranks, found.phase, found.severity) == (KINDS[phase], (culprit,), phase, "warning")
    assert found.evidence["excess_ms"] == pytest.approx(0.1 * STEP_MS, rel=0.3)


@pytest.mark.few(8)
@pytest.mark.parametrize("phase", ["input", "h2d", "forward", "optimizer", "other", "augment"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_where_waiting_hides_in_backward_the_culprit_is_found_all_the_same(phase: str, ranks: int) -> None:
    fault = slow_at(ranks - 1, phase, 0.1 * STEP_MS)
    (found,) = stragglers_of(Cluster(ranks=ranks, steps=60, noise=0.03, comm_measured=False, faults=(fault,)))
    assert (found.kind, found.ranks, found.phase) == (KINDS[phase], (ranks - 1,), phase)
    assert found.confidence == (0.6 if ranks == 2 else 0.85)
    assert found.evidence["wait_measured"] is False


def test_where_others_are_often_late_too_it_is_found_and_priced_lower() -> None:
    """Sixteen ranks with frequent hiccups: in half of the steps somebody else would be last without the culprit."""
    (found,) = stragglers_of(Cluster(ranks=16, steps=60, noise=0.03, tail=0.01, faults=(slow_at(9, "forward", 3.9),)))
    assert (found.ranks, found.phase, found.severity) == ((9,), "forward", "info")
    assert 0.02 < found.cost["share"] < 0.05


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_slow_device_is_seen_on_the_device_clock(phase: str) -> None:
    """The host of a GPU waits in the same place on all ranks; only the device knows."""
    cluster = Cluster(ranks=4, steps=60, device_timed=True, faults=(slow_at(2, phase, 5.0),))
    (found,) = stragglers_of(cluster)
    assert (found.ranks, found.phase, found.evidence["clock"]) == ((2,), phase, "device")


@pytest.mark.parametrize("unknown", ["all of the host's times", "a step of the device's"])
def test_a_price_is_not_corrected_by_what_is_not_known(unknown: str) -> None:
    """The steps that were timed on the device are compared with all steps of the host, if there are any."""
    view = view_of(build_window(Cluster(ranks=2, steps=60, noise=0.03, device_timed=True).run()))
    at, saved_ns = slice(0, len(view.steps)), np.full(len(view.steps), 1e6)
    if unknown == "a step of the device's":
        wall_ns = view.wall_ns * [[1.0], [2.0]]  # not in lockstep: a step's length is the longest, if there is any
        wall_ns[:, 3] = np.nan
        view = replace(view, wall_ns=wall_ns)
    else:
        view = replace(view, window=replace(view.window, wall_ns=np.full_like(view.window.wall_ns, np.nan)))
    assert _too_much_by_chance(view, 1, saved_ns, at) == 0.0


def test_three_per_cent_are_found_within_two_hundred_steps() -> None:
    (found,) = stragglers_of(Cluster(ranks=4, steps=200, faults=(slow_at(3, "backward", 0.03 * STEP_MS),)))
    assert (found.ranks, found.phase, found.severity) == ((3,), "backward", "info")


def test_the_price_is_what_the_fault_costs() -> None:
    (found,) = findings_of(Cluster(ranks=4, steps=101, noise=0.001, faults=(slow_at(2, "backward", 30.0),)))
    assert found.severity == "critical"
    assert found.title == "Rank 2 is 30.0 ms slower than its peers in backward every step; all other ranks wait for it."
    assert found.cost["share"] == pytest.approx(30 / 69, abs=0.002)
    assert found.cost["seconds"] == pytest.approx(3.0, abs=0.01)
    assert found.cost["rank_hours"] == pytest.approx(4 * 3.0 / 3600, abs=1e-4)
    assert found.cost["if_fixed"]["step_ms"] == pytest.approx(39.0, abs=0.1)
    assert found.cost["if_fixed"]["speedup"] == pytest.approx(69 / 39, abs=0.01)
    assert found.evidence["last_in_steps"] == found.evidence["steps_used"] == 100
    assert found.evidence["median_ms_by_rank"]["2"] == pytest.approx(68.0, abs=0.1)
    assert found.evidence["peers_median_ms"] == pytest.approx(38.0, abs=0.1)
    assert found.steps == (1, 100)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [None, range(60, 120)])
def test_the_title_says_what_fixing_gains(seed: int, steps: range | None) -> None:
    """What is longer in one phase and shorter in another makes nobody wait."""
    larger, smaller = slow_at(1, "other", 30.0, steps), slow_at(0, "forward", 10.0, steps)
    (found,) = stragglers_of(Cluster(ranks=2, steps=120, noise=0.05, seed=seed, faults=(larger, smaller)))
    assert found.ranks == (1,)
    assert found.evidence["excess_ms_by_phase"]["other"] == pytest.approx(30.0, abs=1.5)
    assert found.evidence["gain_ms"] == pytest.approx(20.0, abs=1.5)
    assert f" {ms_text(found.evidence['gain_ms'])} more than " in found.title
    seconds = found.evidence["gain_ms"] * found.evidence["steps_used"] / 1000
    assert seconds == pytest.approx(found.cost["seconds"], rel=0.01)
    now_ms = found.cost["if_fixed"]["step_ms"] * found.cost["if_fixed"]["speedup"]
    assert now_ms * 119 / 1000 * found.cost["share"] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("fsdp", "least"), [(True, True), (False, False)])
def test_over_gloo_the_exchange_of_fsdp_may_change(fsdp: bool, least: bool) -> None:
    """It takes 8 ms on the rank that waits least, a quarter of what is promised."""
    facts = {"fsdp": {"version": 2}} if fsdp else {}
    late = slow_at(1, "forward", 30.0)
    (found,) = stragglers_of(Cluster(ranks=2, steps=80, noise=0.01, comm_ms=8.0, facts=facts, faults=(late,)))
    assert ("least" in found.cost) is least
    at_least_ms = 22.0 if least else 30.0
    assert found.evidence["least_gain_ms"] == pytest.approx(at_least_ms, abs=1.0)


def test_a_rank_that_a_later_one_hides_is_not_said_to_be_waited_for() -> None:
    faults = (slow_at(1, "input", 10.0), slow_at(5, "optimizer", 25.0))
    first, second = stragglers_of(Cluster(ranks=8, steps=60, noise=0.01, faults=faults))
    assert first.ranks == (5,)
    assert first.title.endswith("; all other ranks wait for it.")
    assert second.evidence["gain_ms"] < 1.0
    gain = ms_text(second.evidence["gain_ms"])
    assert second.title == (
        f"Rank 1 is {ms_text(second.evidence['excess_ms'])} slower than its peers in input every step; "
        f"fixing it alone gains {gain}, because other ranks are late, too."
    )


def test_two_ranks_with_the_same_trouble_are_one_finding() -> None:
    faults = (slow_at(1, "input", 20.0), slow_at(5, "input", 20.0))
    (found,) = stragglers_of(Cluster(ranks=8, steps=60, faults=faults))
    assert (found.ranks, found.phase) == ((1, 5), "input")
    assert found.cost["share"] == pytest.approx(20 / 59, abs=0.02)


def test_two_ranks_with_different_trouble_are_two_findings_the_costlier_first() -> None:
    faults = (slow_at(1, "input", 10.0), slow_at(5, "optimizer", 25.0))
    assert named(stragglers_of(Cluster(ranks=8, steps=60, faults=faults))) == [((5,), "optimizer"), ((1,), "input")]


def test_an_excess_spread_over_phases_names_no_phase() -> None:
    faults = tuple(slow_at(1, phase, 4.0) for phase in ("input", "forward", "backward"))
    (found,) = stragglers_of(Cluster(ranks=4, steps=60, faults=faults))
    assert (found.kind, found.ranks, found.phase) == ("straggler", (1,), None)


def test_ranks_that_never_wait_for_each_other_are_compared_by_their_steps() -> None:
    cluster = Cluster(ranks=4, steps=60, synchronized=False, comm_measured=False, faults=(slow_at(0, "backward", 9.0),))
    (found,) = stragglers_of(cluster)
    assert (found.ranks, found.phase, found.evidence["lockstep"]) == ((0,), "backward", False)
    assert found.cost["share"] == pytest.approx(9 / 47, abs=0.02)
    assert "ranks do not wait for each other" in found.title


def test_a_fault_that_began_in_the_first_half_is_found() -> None:
    (found,) = stragglers_of(Cluster(ranks=4, steps=100, faults=(slow_at(1, "forward", 20.0, range(30, 100)),)))
    assert (found.ranks, found.phase) == ((1,), "forward")


def test_a_rank_that_died_can_have_been_the_straggler() -> None:
    cluster = Cluster(ranks=4, steps=80, deaths=(Death(rank=2, step=50),), faults=(slow_at(2, "forward", 20.0),))
    assert named(findings_of(cluster)) == [((2,), "backward"), ((2,), "forward")]


def test_the_straggler_is_still_found_after_another_rank_died() -> None:
    cluster = Cluster(ranks=4, steps=80, deaths=(Death(rank=0, step=30),), faults=(slow_at(2, "forward", 20.0),))
    assert named(stragglers_of(cluster)) == [((2,), "forward")]


@pytest.mark.parametrize("after_sync", ["other", "optimizer"])
def test_one_long_stall_is_no_straggler(after_sync: str) -> None:
    cluster = Cluster(ranks=4, steps=150, faults=(slow_at(1, after_sync, 5000.0, range(70, 71)),))
    (found,) = findings_of(cluster)
    assert (found.kind, found.ranks, found.phase, found.steps) == ("stall", (1,), after_sync, (70, 70))


def test_an_input_wait_on_one_rank_is_a_straggler_not_input_bound() -> None:
    for ranks in (2, 4):
        findings = findings_of(Cluster(ranks=ranks, steps=60, faults=(slow_at(1, "input", 40.0),)))
        assert [(finding.kind, finding.ranks, finding.phase) for finding in findings] == [
            ("input_straggler", (1,), "input")
        ]


NOISES = [(0.02, 0.0, 0.0), (0.1, 0.02, 0.0), (0.3, 0.05, 0.0), (0.05, 0.01, 0.03), (0.1, 0.05, 0.1)]


@pytest.mark.few(12)
@pytest.mark.seeds
@pytest.mark.parametrize(("noise", "tail", "drift"), NOISES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("tiny", [True, False])
def test_a_healthy_noisy_job_is_never_warned_of(
    noise: float, tail: float, drift: float, ranks: int, tiny: bool
) -> None:
    drawn = [(seed, steps) for seed in range(4) for steps in (15, 60, 200)]
    for seed, steps in drawn if ALL else drawn[1::7]:  # two of the lengths
        cluster = Cluster(
            ranks=ranks,
            steps=steps,
            seed=seed,
            noise=noise,
            tail=tail,
            drift=drift,
            comm_measured=seed % 2 == 0,
            comm_ms=0.05 if tiny else 1.0,
            warmup_ms=3.0 if tiny else 200.0,
            **({"phases_ms": TINY_MS} if tiny else {}),
        )
        loud = [finding.title for finding in findings_of(cluster) if finding.severity != "info"]
        assert loud == []


def test_a_slow_backward_that_hides_behind_the_peers_wait_is_known_from_ddp() -> None:
    """As on NCCL: every rank's backward is equally long, and DDP measures one in a hundred."""
    cluster = Cluster(
        ranks=4, steps=1000, comm_measured=False, device_timed=True, faults=(slow_at(2, "backward", 8.0),)
    )
    run = cluster.run()
    assert stragglers_of(cluster) == []

    def report(series: RankSeries, steps: NDArray[Any]) -> None:
        steps["ddp_compute_ns"][100::100] = 20_000_000 + series.rank * 1000 + (series.rank == 2) * 8_000_000

    (found,) = (finding for finding in diagnose(edited(run, report)) if finding.kind == "compute_straggler")
    assert (found.ranks, found.phase, found.evidence["compared"]) == ((2,), "backward", "ddp")
    assert found.cost["share"] == pytest.approx(8 / 47, abs=0.01)


def test_a_culprit_that_dies_saves_nothing_once_it_is_gone() -> None:
    """Not minus infinity either: other rules go on with what a claim has saved."""
    run = Cluster(
        ranks=2,
        steps=40,
        phases_ms={"forward": 4.0},
        comm_ms=1.0,
        faults=(slow_at(0, "forward", 20.0),),
        deaths=(Death(rank=0, step=30, state="vanished"),),
    ).run()
    view = view_of(build_window(run))
    gone = np.isnan(view.work_ns[0])
    assert gone.any()
    typical_ns = np.where(gone, np.inf, 4e6)[None]  # infinite: outside of the steps that are accused
    saved_ns = savings_ns(view.work_ns, np.array([0]), typical_ns)
    assert np.isfinite(saved_ns).all()
    assert (saved_ns[gone] == 0).all()
    assert (saved_ns[~gone] > 15e6).all()


def on_nccl(**about: object) -> Cluster:
    return Cluster(ranks=4, steps=120, device_timed=True, backend="nccl", **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_on_nccl_a_rank_is_named_by_what_its_device_works(phase: str) -> None:
    (found,) = stragglers_of(on_nccl(faults=(slow_at(2, phase, 12.0),)))
    assert (found.kind, found.ranks, found.phase) == (KINDS[phase], (2,), phase)
    assert found.evidence["wait_measured"] is True
    assert found.cost["if_fixed"]["step_ms"] == pytest.approx(STEP_MS, rel=0.05)


@pytest.mark.parametrize("phase", ["forward", "optimizer", "other"])
def test_on_nccl_nobody_is_named_where_waiting_was_not_measured(phase: str) -> None:
    """The one who waits is as long in some phase as the one who is late in another: it would be a guess."""
    assert stragglers_of(on_nccl(comm_measured=False, faults=(slow_at(2, phase, 12.0),))) == []


def test_no_price_is_higher_than_what_the_rest_of_the_step_allows() -> None:
    """Two ranks, each late in a phase of its own: without the one, the step is as long as the other makes it."""
    faults = (slow_at(0, "forward", 20.0), slow_at(1, "backward", 15.0))
    for found in stragglers_of(Cluster(ranks=2, steps=80, faults=faults)):
        assert found.cost["if_fixed"]["step_ms"] >= STEP_MS * 0.97


def test_what_the_host_waits_on_nccl_is_no_waiting() -> None:
    """There a wait only tells the stream to wait; without device times nothing is known, and nobody is named."""
    run = on_nccl(faults=(slow_at(2, "forward", 12.0),)).run()
    untimed = replace(run, ranks=tuple(timed_at(rank, slice(0)) for rank in run.ranks))
    assert not view_of(build_window(untimed)).comm_measured
    assert [finding.ranks for finding in diagnose(untimed) if finding.ranks] == []


def test_a_rank_that_is_always_behind_is_found_however_much_that_wanders() -> None:
    """As on shared cores: 30 to 150 ms in every step, in long waves."""
    waves = [30.0, 60.0, 45.0, 70.0, 100.0, 150.0, 110.0, 60.0]
    faults = tuple(slow_at(0, "other", ms, range(at * 25, at * 25 + 25)) for at, ms in enumerate(waves))
    found = stragglers_of(Cluster(ranks=4, steps=200, noise=0.1, drift=0.1, faults=faults))
    assert named(found) == [((0,), "other")]


def test_of_two_ranks_the_one_that_is_always_behind_is_found_however_much_that_wanders() -> None:
    """Each of two ranks deviates as much as the other, so the noise seems to be as large as the excess."""
    waves = [49.0, 45.0, 42.0, 46.0, 66.0, 92.0, 84.0, 76.0]
    faults = tuple(slow_at(1, "inside", ms, range(at * 80, at * 80 + 80)) for at, ms in enumerate(waves))
    found = stragglers_of(Cluster(ranks=2, steps=640, noise=0.3, drift=0.3, faults=faults))
    assert named(found) == [((1,), "other")]


@pytest.mark.parametrize("step_ms", [1.0, 5.0, 40.0])
def test_the_place_of_a_core_is_worth_no_warning(step_ms: float) -> None:
    """One of two healthy ranks is a little slower in every single step: 0.3 ms of 40, a few percent of tiny steps."""
    phases = {"forward": 0.4 * step_ms, "backward": 0.6 * step_ms}
    faults = (slow_at(1, "forward", min(0.3, 0.04 * step_ms)),)
    found = findings_of(Cluster(ranks=2, steps=700, phases_ms=phases, comm_ms=0.1 * step_ms, faults=faults))
    assert [finding.title for finding in found if finding.severity != "info"] == []


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(20))
def test_two_healthy_ranks_that_wander_are_not_accused(seed: int) -> None:
    found = stragglers_of(Cluster(ranks=2, steps=700, noise=0.3, drift=0.3, seed=seed))
    assert found == []


@pytest.mark.parametrize("workers", [2, 4])
def test_late_workers_of_one_rank_make_it_a_straggler_although_only_every_nth_step_waits(workers: int) -> None:
    """Each of n workers delivers its batch at about the same time, so one step waits for all of them."""
    fault = slow_at(1, "input", 20.0 * workers, range(workers - 1, 120, workers))
    cluster = Cluster(ranks=2, steps=120, faults=(fault,), facts={"loader": {"num_workers": workers}})
    findings = diagnose(cluster.run())
    assert [(each.kind, each.ranks, each.phase) for each in findings] == [("input_straggler", (1,), "input")]
    assert findings[0].evidence["gain_ms"] == pytest.approx(20.0, rel=0.05)
    (unknown,) = diagnose(replace(cluster, facts={}).run())
    assert unknown.kind == ("jitter" if workers > 2 else "input_straggler")


# -- late for a part of the run ----------------------------------------------------------------------------------------


def late(cluster: Cluster, *, until: int | None = None) -> list[Finding]:
    run = cluster.run() if until is None else cut(cluster.run(), until)
    return [finding for finding in diagnose(run) if finding.kind.endswith("straggler")]


@pytest.mark.few(4)
@pytest.mark.seeds
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_ten_per_cent_from_a_step_on_are_known_ten_steps_later(ranks: int, phase: str) -> None:
    for seed in seeds(3):
        fault = slow_at(1, phase, 3.9, range(40, 100))
        (found,) = late(Cluster(ranks=ranks, steps=100, seed=seed, faults=(fault,)), until=49)
        assert (found.ranks, found.phase) == ((1,), phase)
        assert found.steps is not None and abs(found.steps[0] - 40) <= 2
        assert found.steps[1] == 49
        assert "from step" in found.title


def test_it_says_from_when_to_when() -> None:
    (found,) = late(Cluster(ranks=4, steps=200, faults=(slow_at(2, "forward", 20.0, range(80, 120)),)))
    assert found.steps is not None
    assert abs(found.steps[0] - 80) <= 1 and abs(found.steps[1] - 119) <= 1
    assert f"in steps {found.steps[0]} to {found.steps[1]}" in found.title
    assert found.cost["seconds"] == pytest.approx(40 * 0.02, rel=0.1)


def test_one_that_grows_is_found_with_the_time_it_took() -> None:
    (found,) = late(Cluster(ranks=4, steps=100, faults=(slow_at(3, "backward", 40.0, ramp=True),)))
    assert (found.ranks, found.phase) == ((3,), "backward")
    assert found.cost["seconds"] == pytest.approx(100 * 0.02, rel=0.15)


def test_seven_steps_are_too_few_to_say() -> None:
    assert late(Cluster(ranks=4, steps=100, faults=(slow_at(2, "forward", 4.0, range(50, 56)),))) == []
