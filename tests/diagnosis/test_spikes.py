"""One stall is one finding, at its step; what comes again comes with its period; noise is neither."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_counts import seeds
from fakes.cluster import Cluster, Death, Fault, slow_at
from fakes.records import records_of, with_records

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.claims import unexplained_steps
from stepscope.diagnosis.engine.view import View, view_of
from stepscope.diagnosis.rules.spikes import JITTER_ADVICE, STALL_ADVICE, find_spikes
from stepscope.diagnosis.rules.trends import find_trends
from stepscope.judge.advice import advice_for
from stepscope.judge.chain import Claim
from stepscope.records.finding import Finding


def view_at(cluster: Cluster, facts: dict[str, Any] | None = None) -> View:
    run = cluster.run()
    return view_of(build_window(replace(run, ranks=tuple(replace(rank, facts=facts or {}) for rank in run.ranks))))


def found_in(cluster: Cluster, facts: dict[str, Any] | None = None) -> list[Finding]:
    """All that is found over time, each rule on what those before it left."""
    view = view_at(cluster, facts)
    claims = find_spikes(view, view.step_ns, [])
    claims += find_trends(view, unexplained_steps(view, claims))
    return [claim.finding for claim in claims]


def everywhere(ranks: int, phase: str, ms: float, steps: range) -> tuple[Fault, ...]:
    return tuple(slow_at(rank, phase, ms, steps) for rank in range(ranks))


@pytest.mark.few(15)
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "other"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("step", [5, 31, 59])
def test_a_stall_of_five_seconds_is_one_finding_at_its_step(phase: str, ranks: int, step: int) -> None:
    fault = slow_at(ranks - 1, phase, 5000.0, range(step, step + 1))
    (found,) = found_in(Cluster(ranks=ranks, steps=60, faults=(fault,)))
    if (phase, step, ranks) in {("optimizer", 59, 16), ("other", 59, 16)}:
        # The peers' next step, in which they would have waited, is not there any more: the mean hardly shows it.
        assert (found.kind, found.phase) == ("stall", phase)
        return
    assert (found.kind, found.severity, found.phase, found.steps) == ("stall", "warning", phase, (step, step))
    assert found.ranks == ((ranks - 1,) if ranks > 1 else ())
    if step < 59:
        assert found.evidence["extra_ms"] == pytest.approx(5000.0, rel=0.01)
        assert found.cost["seconds"] == pytest.approx(5.0, rel=0.01)


def test_the_sentence_names_step_rank_and_phase() -> None:
    (found,) = found_in(Cluster(ranks=4, steps=60, faults=(slow_at(1, "forward", 5000.0, range(57, 58)),)))
    assert found.title == (
        "Step 57 took 5.04 s, 5.00 s longer than usual, on rank 1 in forward; all other ranks waited."
    )
    assert found.cost["if_fixed"]["step_ms"] == pytest.approx(39.5, abs=0.3)


@pytest.mark.parametrize("phase", ["input", "forward", "optimizer", "other"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_culprit_is_told_where_waiting_hides_in_backward(phase: str, ranks: int) -> None:
    fault = slow_at(0, phase, 5000.0, range(30, 31))
    (found,) = found_in(Cluster(ranks=ranks, steps=60, comm_measured=False, faults=(fault,)))
    assert (found.kind, found.ranks, found.phase, found.steps) == ("stall", (0,), phase, (30, 30))


def test_a_stall_of_all_ranks_names_none() -> None:
    (found,) = found_in(Cluster(ranks=4, steps=60, faults=everywhere(4, "forward", 2000.0, range(20, 21))))
    assert (found.kind, found.ranks, found.phase, found.steps) == ("stall", (), "forward", (20, 20))
    assert "waited" not in found.title


def test_three_stalls_at_odd_steps_are_three_findings_and_a_fourth_makes_them_jitter() -> None:
    odd = [slow_at(1, "forward", 3000.0, range(step, step + 1)) for step in (11, 20, 47, 52)]
    three = found_in(Cluster(ranks=4, steps=60, faults=tuple(odd[:3])))
    assert [(found.kind, found.steps) for found in three] == [
        ("stall", (11, 11)),
        ("stall", (20, 20)),
        ("stall", (47, 47)),
    ]
    (four,) = found_in(Cluster(ranks=4, steps=60, faults=tuple(odd)))
    assert (four.kind, four.phase, four.evidence["spikes"], four.evidence["period"]) == ("jitter", "forward", 4, None)


def test_several_slow_steps_in_a_row_are_one_stall() -> None:
    (found,) = found_in(Cluster(ranks=2, steps=100, faults=everywhere(2, "input", 1000.0, range(40, 44))))
    assert (found.kind, found.phase, found.steps) == ("stall", "input", (40, 43))
    assert found.title == "Steps 40 to 43 took 4.00 s longer than usual, in input."


def test_a_short_stall_is_told_but_not_warned_of() -> None:
    (found,) = found_in(Cluster(ranks=1, steps=100, faults=(slow_at(0, "input", 300.0, range(40, 41)),)))
    assert (found.kind, found.severity) == ("stall", "info")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("phase", ["input", "forward", "other"])
@pytest.mark.parametrize("measured", [True, False])
def test_every_tenth_step_is_jitter_with_its_period_rank_and_phase(ranks: int, phase: str, measured: bool) -> None:
    fault = slow_at(ranks - 1, phase, 60.0, range(0, 100, 10))
    (found,) = found_in(Cluster(ranks=ranks, steps=100, comm_measured=measured, faults=(fault,)))
    assert (found.kind, found.severity, found.phase) == ("jitter", "warning", phase)
    assert found.ranks == ((ranks - 1,) if ranks > 1 else ())
    assert (found.evidence["period"], found.evidence["spikes"]) == (10, 9)
    assert found.evidence["extra_ms"] == pytest.approx(60.0, rel=0.05)
    assert found.cost["share"] == pytest.approx(0.12, abs=0.01)
    assert found.title.startswith("Every 10th step takes ")


def test_a_missing_beat_and_a_stray_do_not_hide_the_period() -> None:
    steps = [9, 19, 29, 49, 59, 63, 69, 79, 89]
    faults = tuple(slow_at(0, "forward", 60.0, range(step, step + 1)) for step in steps)
    (found,) = found_in(Cluster(ranks=1, steps=100, faults=faults))
    assert (found.kind, found.evidence["period"]) == ("jitter", 10)


@pytest.mark.parametrize(("period", "first"), [(2, 0), (4, 1), (10, 3), (16, 5)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_beat_of_small_steps_is_found_by_folding(period: int, first: int, ranks: int) -> None:
    faults = everywhere(ranks, "forward", 8.0, range(first, 200, period))
    (found,) = found_in(Cluster(ranks=ranks, steps=200, faults=faults))
    assert (found.kind, found.ranks, found.phase, found.evidence["period"]) == ("jitter", (), "forward", period)
    assert found.evidence["extra_ms"] == pytest.approx(8.0, rel=0.1)
    assert found.cost["share"] == pytest.approx(8.0 / period / (39.0 + 8.0 / period), rel=0.2)


def test_a_small_beat_of_one_rank_names_it() -> None:
    (found,) = found_in(Cluster(ranks=4, steps=200, faults=(slow_at(2, "backward", 12.0, range(3, 200, 8)),)))
    assert (found.ranks, found.phase, found.evidence["period"]) == ((2,), "backward", 8)


def test_evaluation_and_checkpoints_are_no_spikes() -> None:
    for phase in ("eval", "checkpoint", "validate"):
        for ranks in (1, 4):
            fault = slow_at(0, phase, 500.0, range(9, 100, 10))
            assert found_in(Cluster(ranks=ranks, steps=100, faults=(fault,))) == []


def test_what_another_finding_explained_is_not_told_again() -> None:
    view = view_at(Cluster(ranks=1, steps=100, faults=(slow_at(0, "other", 60.0, range(9, 100, 10)),)))
    (first,) = find_spikes(view, view.step_ns, [])
    assert find_spikes(view, unexplained_steps(view, [first]), [first]) == []


def test_a_claim_on_the_time_between_steps_is_not_taken_off_twice() -> None:
    faults = (slow_at(0, "checkpoint", 500.0, range(9, 100, 10)), slow_at(0, "forward", 60.0, range(4, 100, 10)))
    view = view_at(Cluster(ranks=1, steps=100, faults=faults))
    claim = Claim(
        finding=Finding(kind="between_steps", severity="info", title=""),
        explained_ns=view.phase("checkpoint").sum(axis=0),
    )
    (claim,) = find_spikes(view, unexplained_steps(view, [claim]), [claim])
    assert (claim.finding.phase, claim.finding.evidence["period"]) == ("forward", 10)
    assert claim.finding.evidence["usual_ms"] == pytest.approx(38.0, abs=0.5)


def test_the_usual_step_is_the_whole_one_whatever_of_it_is_explained() -> None:
    faults = (slow_at(0, "forward", 60.0, range(4, 100, 10)),)
    phases_ms = {"input": 2.0, "forward": 10.0, "backward": 20.0, "mine": 30.0}
    view = view_at(Cluster(ranks=1, steps=100, noise=0.0, phases_ms=phases_ms, faults=faults))
    claim = Claim(finding=Finding(kind="between_steps", severity="info", title=""), explained_ns=view.phase("mine")[0])
    (claim,) = find_spikes(view, unexplained_steps(view, [claim]), [claim])
    assert claim.finding.evidence["usual_ms"] == 62.0
    assert claim.finding.title.startswith("Every 10th step takes 60.0 ms longer than the usual 62.0 ms, in forward")


def test_workers_that_fall_behind_are_told_by_their_number() -> None:
    cluster = Cluster(ranks=1, steps=100, faults=(slow_at(0, "input", 40.0, range(3, 100, 4)),))
    (found,) = found_in(cluster, facts={"loader": {"num_workers": 4}})
    assert found.evidence["period"] == 4
    assert found.advice[0] == "One step in 4 (num_workers) waits: the workers cannot keep up; raise num_workers."
    (unknown,) = found_in(cluster)
    assert "(num_workers)" not in unknown.advice[0]


def test_waits_at_the_start_of_epochs_are_told_as_such() -> None:
    (found,) = found_in(Cluster(ranks=2, steps=200, epoch_every=25, epoch_input_ms=400.0))
    assert (found.kind, found.phase, found.evidence["period"]) == ("jitter", "input", 25)
    assert found.evidence["at_epoch_starts"] == 1.0
    assert "persistent_workers=True" in found.advice[0]


@pytest.mark.seeds
def test_spikes_of_another_rank_each_time_are_never_a_warning() -> None:
    for seed in seeds(10):
        for found in found_in(Cluster(ranks=8, steps=100, tail=0.02, seed=seed)):
            assert found.severity == "info"


@pytest.mark.few(15)
@pytest.mark.seeds
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("steps", [12, 30, 60, 150])
@pytest.mark.parametrize(
    "noise",
    [
        {"noise": 0.02},
        {"noise": 0.05},
        {"noise": 0.03, "tail": 0.02},
        {"noise": 0.02, "drift": 0.03},
        {"noise": 0.0},
    ],
)
def test_healthy_runs_give_no_warning(ranks: int, steps: int, noise: dict[str, float]) -> None:
    for seed in seeds(8):
        found = found_in(Cluster(ranks=ranks, steps=steps, seed=seed, **noise))
        assert [finding.kind for finding in found if finding.severity != "info"] == []


@pytest.mark.seeds
def test_even_noise_gives_nothing_at_all() -> None:
    for seed in seeds(50):
        assert found_in(Cluster(ranks=2, steps=80, noise=0.04, seed=seed)) == []


def test_a_rank_that_died_stops_nothing() -> None:
    fault = slow_at(1, "forward", 5000.0, range(40, 41))
    deaths = (Death(rank=3, step=30), Death(rank=2, step=45))
    (found,) = found_in(Cluster(ranks=4, steps=60, deaths=deaths, faults=(fault,)))
    assert (found.kind, found.ranks, found.phase, found.steps) == ("stall", (1,), "forward", (40, 40))


def test_series_of_nothing_say_nothing() -> None:
    view = view_at(Cluster(ranks=2, steps=40))
    assert find_spikes(view, np.zeros(len(view.steps)), []) == []
    assert found_in(Cluster(ranks=2, steps=5)) == []
    assert find_spikes(view_at(Cluster(ranks=1, steps=0)), np.zeros(0), []) == []


@pytest.mark.parametrize("nccl", [False, True])
def test_advice_names_nccl_only_where_it_is_used(nccl: bool) -> None:
    for advice in (
        advice_for(JITTER_ADVICE, phase="comm", nccl=nccl, place="", more_bytes=False),
        advice_for(STALL_ADVICE, phase="comm", nccl=nccl, where=""),
    ):
        assert ("NCCL_DEBUG" in " ".join(advice)) is nccl
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    run = Cluster(ranks=2).run()
    ranks = tuple(replace(rank, identity=replace(rank.identity, backend=backend)) for rank in run.ranks)
    assert view_of(build_window(replace(run, ranks=ranks))).nccl is nccl


# -- steps that have more to do than most -----------------------------------------------------------------------------


def gan(*, ranks: int = 1, steps: int = 200, every: int = 5, generator_ms: float = 40.0, **more: Any) -> Cluster:
    """A generator that is stepped with every n-th batch: a second backward pass, and what it takes."""
    with_generator = range(every, steps, every)
    counts = np.ones(steps, np.int64)
    counts[with_generator.start :: every] = 2
    own = tuple(
        fault
        for phase, share in (("forward", 0.4), ("backward", 0.4), ("optimizer", 0.2))
        for fault in everywhere(ranks, phase, share * generator_ms, with_generator)
    )
    return Cluster(ranks=ranks, steps=steps, backwards=counts, faults=(*own, *more.pop("faults", ())), **more)


@pytest.mark.few(6)
@pytest.mark.parametrize("every", [2, 3, 5, 10, 50])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_generator_of_every_nth_step_is_no_jitter(ranks: int, every: int, noise: float) -> None:
    found = diagnose(gan(ranks=ranks, every=every, noise=noise).run())
    assert {finding.kind for finding in found} <= {"healthy", "compute_bound"}
    assert noise > 0.1 or "slow steps" not in found[0].title


def test_what_else_comes_every_fifth_step_is_still_found_and_told_apart() -> None:
    first, *_ = diagnose(gan(faults=everywhere(1, "other", 60.0, range(5, 200, 5))).run())
    assert (first.kind, first.phase) == ("jitter", "other")
    found = diagnose(gan(faults=everywhere(1, "input", 12.0, range(5, 200, 5))).run())
    (read,) = (finding for finding in found if finding.kind == "jitter")
    assert (read.phase, read.evidence["period"]) == ("input", 5)
    assert "besides its additional backward passes" in read.title


def test_more_passes_from_a_step_on_are_no_change_of_the_pace() -> None:
    """Gradient accumulation that grows during the run."""
    counts = np.where(np.arange(200) < 100, 2, 4)
    twice = tuple(slow_at(0, phase, ms, range(100, 200)) for phase, ms in (("forward", 10.0), ("backward", 20.0)))
    found = diagnose(Cluster(ranks=1, steps=200, backwards=counts, faults=twice).run())
    assert {finding.kind for finding in found} <= {"healthy", "compute_bound"}


def test_an_odd_step_with_more_passes_may_take_as_much_longer_and_no_more() -> None:
    counts = np.ones(100, np.int64)
    counts[50] = 2
    twice = diagnose(
        Cluster(ranks=1, steps=100, backwards=counts, faults=everywhere(1, "forward", 30.0, range(50, 51))).run()
    )
    assert {finding.kind for finding in twice} <= {"healthy", "compute_bound"}
    stalled = diagnose(
        Cluster(ranks=1, steps=100, backwards=counts, faults=everywhere(1, "forward", 2000.0, range(50, 51))).run()
    )
    assert ("stall", (50, 50)) in {(finding.kind, finding.steps) for finding in stalled}


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(10))
def test_the_scatter_of_longer_steps_has_no_beat(seed: int) -> None:
    """On a busy machine what takes longest is lengthened most."""
    job = gan(generator_ms=80.0, noise=0.0)
    scatter = np.random.default_rng(seed).exponential(1.0, 200)
    late = (slow_at(0, "forward", 60.0 * scatter[step], range(step, step + 1)) for step in range(5, 200, 5))
    found = diagnose(replace(job, faults=(*job.faults, *late)).run())
    assert [finding for finding in found if finding.evidence.get("period") is not None] == []
    assert {finding.severity for finding in found} == {"info"}


def judged_with_samples(cluster: Cluster, steps: range) -> list[Finding]:
    """What is found if Stepscope looked at the layers in these steps."""
    view = view_of(build_window(replace(cluster, sampled_steps=tuple(steps)).run()))
    return [claim.finding for claim in find_spikes(view, view.step_ns, [])]


def test_steps_in_which_the_layers_were_looked_at_are_no_spikes() -> None:
    steps = range(37, 1000, 25)
    each = [everywhere(2, "forward", 60.0, range(step, step + 1)) for step in steps]
    slower = Cluster(ranks=2, steps=1000, faults=tuple(fault for faults in each for fault in faults))
    assert [found.kind for found in found_in(slower)] == ["jitter"]
    assert judged_with_samples(slower, steps) == []
    stalled = Cluster(ranks=2, steps=1000, faults=(slow_at(0, "forward", 5000.0, range(137, 138)),))
    assert [(found.kind, found.steps) for found in judged_with_samples(stalled, steps)] == [("stall", (137, 137))]


def test_the_first_look_may_take_longer() -> None:
    """A GPU loads the kernels for it."""
    steps = range(37, 1000, 100)
    first = Cluster(ranks=2, steps=1000, faults=tuple(everywhere(2, "forward", 400.0, range(37, 38))))
    assert judged_with_samples(first, steps) == []
    later = Cluster(ranks=2, steps=1000, faults=tuple(everywhere(2, "forward", 400.0, range(137, 138))))
    assert [(found.kind, found.steps) for found in judged_with_samples(later, steps)] == [("stall", (137, 137))]


def test_steps_that_call_the_model_more_often_take_longer_by_design() -> None:
    """Episodes of reinforcement learning: 10 calls of the model in most steps, 71 in some."""
    at = range(15, 200, 37)
    faults = tuple(slow_at(0, "other", 6.0 * 38.0, range(step, step + 1)) for step in at)
    for calls, kinds in ((71, ["healthy", "compute_bound"]), (10, ["jitter"])):
        run = Cluster(ranks=1, steps=200, faults=faults).run()
        steps, device = records_of(run.ranks[0])
        steps["forwards"] = 10
        steps["forwards"][list(at)] = calls
        run = replace(run, ranks=(with_records(run.ranks[0], steps, device),))
        assert [finding.kind for finding in diagnose(run)][: len(kinds)] == kinds
