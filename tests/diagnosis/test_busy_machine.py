"""On a machine that others use, too: healthy jobs are not accused, faults are still found, and the load is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from example_counts import seeds
from fakes.cluster import Cluster, Fault, slow_at
from fakes.load_noise import host_figures, waits_ms
from fakes.samples import with_samples

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.processor_wait import levels_of, waited_ns, waiting_shares, without_waiting
from stepscope.diagnosis.engine.view import view_of
from stepscope.records.finding import Finding

LOADS = ("one", "all", "bursts")
NAMED = ["4711 97.0 python burn.py"]


def found(cluster: Cluster) -> list[Finding]:
    figures = host_figures(cluster.load, ranks=cluster.ranks, cores=cluster.cores) | {"busy_processes": NAMED}
    return diagnose(with_samples(cluster, host=figures, process={"cpu_wait": cluster.cpu_wait}))


def accused(findings: list[Finding]) -> list[str]:
    return [each.title for each in findings if each.severity != "info" and each.kind != "cpu_saturated"]


@pytest.mark.few(3)
@pytest.mark.seeds
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_healthy_job_beside_others_is_not_accused(load: str, ranks: int) -> None:
    for seed in seeds(8):
        assert accused(found(Cluster(ranks=ranks, steps=100, load=load, seed=seed))) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("phase", "kind"), [("forward", "compute_straggler"), ("input", "input_straggler")])
def test_the_rank_that_does_more_is_found_beside_others(load: str, phase: str, kind: str) -> None:
    """It waits longer than its peer, too, but not for the same work."""
    findings = found(Cluster(ranks=2, steps=200, load=load, seed=1, faults=(slow_at(1, phase, 40.0),)))
    blamed = [(each.kind, each.ranks, each.phase) for each in findings if accused([each])]
    assert blamed[0] == (kind, (1,), phase)
    assert {ranks for _, ranks, _ in blamed} == {(1,)}


EVERY_10 = range(9, 100, 10)
FROM_60 = range(60, 100)
WEAK = {
    "a tenth more from step 60 on": ((slow_at(1, "backward", 6.0, FROM_60),), "compute_straggler", (1,)),
    "every tenth step": ((slow_at(1, "forward", 60.0, EVERY_10),), "jitter", (1,)),
    "grows on one rank": ((slow_at(1, "input", 40.0, ramp=True),), "input_straggler", (1,)),
    "in turn": (
        tuple(slow_at(each, "backward", 30.0, range(each, 100, 2)) for each in (0, 1)),
        "rotating_straggler",
        (),
    ),
    "all from step 60 on": (tuple(slow_at(each, "forward", 30.0, FROM_60) for each in (0, 1)), "change_point", ()),
    "all for a while": (tuple(slow_at(each, "input", 40.0, range(30, 50)) for each in (0, 1)), "throughput_drop", ()),
    "all grow": (tuple(slow_at(each, "backward", 40.0, ramp=True) for each in (0, 1)), "drift", ()),
    "a long optimizer": (tuple(slow_at(each, "optimizer", 20.0) for each in (0, 1)), "optimizer_bound", ()),
}
"""Faults that the waiting for a processor hides in single steps, but not in the work of whole seconds."""
LONGER = {"input": 3.0, "forward": 18.0, "backward": 30.0, "optimizer": 7.0, "other": 1.0}


@pytest.mark.few(8)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", WEAK)
def test_weak_and_rare_faults_are_found_beside_others(name: str, load: str) -> None:
    faults, kind, ranks = WEAK[name]
    phases_ms = {"phases_ms": LONGER} if "tenth more" in name else {}
    findings = found(Cluster(ranks=2, steps=100, load=load, seed=0, faults=faults, warmup_ms=50.0, **phases_ms))
    assert (kind, ranks) in [(each.kind, each.ranks) for each in findings], findings


def test_a_stall_of_a_rank_that_waits_for_processors_is_found() -> None:
    stall = slow_at(1, "input", 1000.0, range(60, 61))
    findings = found(Cluster(ranks=2, steps=100, load="one", seed=3, faults=(stall,), warmup_ms=50.0))
    assert ("stall", (1,), "input") in [(each.kind, each.ranks, each.phase) for each in findings]


def test_a_burst_of_waiting_over_some_steps_is_no_stall() -> None:
    late = slow_at(2, "input", 6.0, FROM_60)
    cluster = Cluster(ranks=4, steps=100, load="bursts", seed=4, noise=0.05, phases_ms=LONGER, faults=(late,))
    assert accused(found(replace(cluster, warmup_ms=50.0))) == []
    periodic = tuple(slow_at(rank, "input", 60.0, EVERY_10) for rank in range(8))
    cluster = Cluster(ranks=8, steps=100, load="bursts", seed=4, noise=0.05, faults=periodic, warmup_ms=50.0)
    assert [title for title in accused(found(cluster)) if "longer than usual" in title] == []


@pytest.mark.parametrize("ms", [6.0, 20.0])
def test_both_ends_of_a_price_are_of_the_steps_that_really_passed(ms: float) -> None:
    facts, late = {"fsdp": {"version": 2}}, slow_at(1, "forward", ms)
    findings = found(
        Cluster(ranks=2, steps=200, load="bursts", comm_ms=5.0, warmup_ms=50.0, facts=facts, faults=(late,))
    )
    (cost,) = (each.cost for each in findings if each.kind == "compute_straggler")
    least = cost["least"]
    assert 0 < least["share"] < cost["share"]
    now_ms = cost["if_fixed"]["step_ms"] * cost["if_fixed"]["speedup"]
    assert least["if_fixed"]["step_ms"] * least["if_fixed"]["speedup"] == pytest.approx(now_ms, rel=0.002)


def test_a_slow_exchange_is_found_although_ranks_also_wait_for_each_other_in_turns() -> None:
    findings = found(Cluster(ranks=8, steps=100, load="bursts", seed=4, noise=0.05, comm_ms=25.0, warmup_ms=50.0))
    assert ("comm_bound", "comm") in [(each.kind, each.phase) for each in findings]
    assert "change_point" not in {each.kind for each in findings}


def test_a_change_is_dated_although_the_waiting_is_known_by_the_second() -> None:
    faults = tuple(slow_at(each, "forward", 30.0, FROM_60) for each in (0, 1))
    findings = found(Cluster(ranks=2, steps=100, load="bursts", seed=0, faults=faults, warmup_ms=50.0))
    (change,) = (each for each in findings if each.kind == "change_point")
    assert change.steps is not None
    assert change.steps[0] in range(58, 63)
    assert change.title.endswith("in forward, not counting the wait for processors.")


@pytest.mark.parametrize("load", LOADS)
def test_without_the_waiting_every_second_has_the_work_of_a_quiet_machine(load: str) -> None:
    cluster = Cluster(ranks=2, steps=200, load=load, seed=3, noise=0.02)
    run = with_samples(cluster, process={"cpu_wait": cluster.cpu_wait})
    view = view_of(build_window(run))
    calm = without_waiting(view)
    assert calm is not None
    assert float(view.work_ns.mean()) > 1.2 * 38e6
    _, heights, _ = levels_of(calm.work_ns[0])
    assert len(heights) >= 8
    assert heights / 1e6 == pytest.approx(np.full(len(heights), 38.0), rel=0.2)
    assert float(calm.work_ns.mean()) / 1e6 == pytest.approx(38.0, rel=0.03)
    assert float(np.median(calm.step_ns)) / 1e6 == pytest.approx(39.0, rel=0.05)


def test_a_machine_without_waiting_is_judged_as_it_is() -> None:
    cluster = Cluster(ranks=2, steps=200)
    assert without_waiting(view_of(build_window(cluster.run()))) is None
    assert without_waiting(view_of(build_window(with_samples(cluster, process={"cpu_wait": 0.02})))) is None
    # What is left of work that is nearly all waiting is not known well.
    assert without_waiting(view_of(build_window(with_samples(cluster, process={"cpu_wait": 0.9})))) is None


def stays_on_core(rank: int) -> Cluster:
    """Another program has the core of one of four ranks for itself in half of the time."""
    work = {"forward": 30.0, "backward": 50.0, "optimizer": 10.0}
    faults = tuple(slow_at(rank, phase, ms) for phase, ms in work.items())
    return Cluster(ranks=4, steps=100, phases_ms=work, faults=faults)


def test_a_rank_whose_core_is_shared_is_told_with_its_price_and_the_process() -> None:
    cluster = stays_on_core(2)

    def cpu_wait(rank: int, seconds: np.ndarray) -> np.ndarray:
        return np.full(len(seconds), 0.5 if rank == 2 else 0.01)

    run = with_samples(cluster, host={"busy_processes": NAMED}, process={"cpu_wait": cpu_wait})
    (first, *rest) = diagnose(run)
    assert (first.kind, first.severity, first.ranks, first.phase) == ("cpu_saturated", "critical", (2,), None)
    waits = "waits 90.5 ms a step for a core (50% of its time, its peers 2%)"
    assert first.title == f"Rank 2 {waits}, every step; all other ranks wait for it, which costs 88.9 ms a step."
    own_cores = "give each rank its own cores (taskset, cgroups, --exclusive)"
    assert first.advice == (f"Stop or move python burn.py (pid 4711, 97% of a core); or {own_cores}.",)
    assert first.evidence["busy_processes"] == [{"command": "python burn.py", "pids": [4711], "cpu_percent": 97.0}]
    assert first.cost["share"] == pytest.approx(0.5, abs=0.03)
    assert accused(rest) == []


def test_without_such_samples_the_same_rank_is_a_straggler() -> None:
    first = diagnose(stays_on_core(2).run())[0]
    assert (first.kind, first.ranks) == ("compute_straggler", (2,))


INPUT = {"input": 6.0, "forward": 14.0, "backward": 20.0}


def with_waits(share: float, faults: tuple[Fault, ...] = ()) -> list[Finding]:
    busy = {"cpu_percent": 100.0, "own_cpu_percent": 50.0, "cpu_count": 2, "procs_running": 6}
    cluster = Cluster(ranks=2, steps=100, phases_ms=INPUT, faults=faults)
    return diagnose(with_samples(cluster, host=busy, process={"cpu_wait": share}))


def test_a_bottleneck_that_waiting_can_explain_is_no_warning() -> None:
    quiet = [(each.kind, each.severity) for each in with_waits(0.0)]
    busy = [(each.kind, each.severity) for each in with_waits(0.4)]
    assert ("input_bound", "warning") in quiet
    assert ("input_bound", "info") in busy
    assert busy[0] == ("cpu_saturated", "warning")


def test_a_bottleneck_that_is_longer_than_all_waiting_stays_one() -> None:
    faults = (slow_at(0, "input", 60.0), slow_at(1, "input", 60.0))
    assert with_waits(0.3, faults)[0].kind == "input_bound"


def test_how_long_ranks_waited_is_taken_from_the_samples_of_their_steps() -> None:
    cluster = Cluster(ranks=2, steps=200, phases_ms={"forward": 50.0}, comm_ms=0.1)

    def cpu_wait(rank: int, seconds: np.ndarray) -> np.ndarray:
        return np.where(seconds > 5.5, 0.4, 0.0) if rank else np.zeros(len(seconds))

    view = view_of(build_window(with_samples(cluster, process={"cpu_wait": cpu_wait})))
    waited = waited_ns(view)
    assert waited is not None
    early, late = slice(0, 60), slice(140, 180)
    assert waiting_shares(view, waited, early).tolist() == [0.0, 0.0]
    assert waiting_shares(view, waited, late) == pytest.approx([0.0, 0.4], abs=0.02)
    assert waited_ns(view_of(build_window(cluster.run()))) is None


def test_the_model_of_load_makes_phases_longer_in_proportion_to_their_work() -> None:
    work_ms = np.stack([np.full((2, 4000), 1.0), np.full((2, 4000), 40.0)])
    waited = waits_ms("all", work_ms, cores=2, random=np.random.default_rng(0))
    assert waited.mean(axis=(1, 2)) == pytest.approx([1.1, 45.0], rel=0.15)
    assert float((waited[0] == 0).mean()) == pytest.approx(np.exp(-0.25), abs=0.02)
    none = waits_ms("none", work_ms, cores=2, random=np.random.default_rng(0))
    assert none.mean() < 0.1 * work_ms.mean()


def test_checkpoints_that_only_waiting_makes_long_are_no_warning() -> None:
    long = tuple(slow_at(0, "checkpoint", 200.0, range(at, at + 1)) for at in range(20, 100, 25))
    assert [each.severity for each in with_waits(0.0, long) if each.kind == "between_steps"] == ["warning"]
    assert [each.severity for each in with_waits(0.5, long) if each.kind == "between_steps"] == ["info"]
