"""Ranks that are late in turns, and work that differs by design."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.records.throughput import Work
from stepscope.reports import summarize
from tests.support.layer_samples import model, sampled

KINDS = {"rotating_straggler", "imbalance"}


def uneven(run: RunData) -> list[Finding]:
    return [finding for finding in diagnose(run) if finding.kind in KINDS]


def in_turns(ranks: int, ms: float, phase: str = "forward", steps: int = 80) -> Cluster:
    faults = tuple(slow_at(rank, phase, ms, range(rank, steps, ranks)) for rank in range(ranks))
    return Cluster(ranks=ranks, steps=steps, faults=faults)


@pytest.mark.few(4)
@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
def test_another_rank_in_each_step(ranks: int, phase: str) -> None:
    run = in_turns(ranks, 30.0, phase).run()
    (found,) = uneven(run)
    assert (found.kind, found.ranks, found.phase, found.severity) == ("rotating_straggler", (), phase, "critical")
    assert found.evidence["excess_ms"] == pytest.approx(30.0, rel=0.1)
    assert found.cost["share"] == pytest.approx(30 / 69, abs=0.03)
    assert {finding.kind for finding in diagnose(run)} == {"rotating_straggler"}


def test_where_waiting_is_not_measured_what_comes_before_it_tells() -> None:
    cluster = replace(in_turns(4, 30.0), comm_measured=False)
    (found,) = uneven(cluster.run())
    assert (found.kind, found.phase, found.confidence) == ("rotating_straggler", "forward", 0.7)


def lengths(ranks: int, spread: float, *, alike: bool = True) -> RunData:
    """Each rank and step has its own length; forward and backward follow it, or only forward does."""
    random = np.random.default_rng(7)
    factors = np.exp(random.normal(0.0, spread, (ranks, 80)))
    other = factors if alike else np.exp(random.normal(0.0, spread, (ranks, 80)))
    faults = tuple(
        slow_at(rank, phase, float(base * factor[rank, step]), range(step, step + 1))
        for phase, base, factor in (("forward", 10.0, factors), ("backward", 20.0, other))
        for rank in range(ranks)
        for step in range(80)
    )
    return Cluster(ranks=ranks, steps=80, phases_ms={"input": 2.0, "optimizer": 4.0}, faults=faults).run()


def with_work(run: RunData, work: Callable[[int, int], Work | None], steps: Sequence[int] = (11, 37)) -> RunData:
    """What each rank was given in sampled steps, by rank and step."""
    records = sampled(model("a", "b"), ranks=len(run.ranks), steps=steps)
    given = tuple(replace(sample, work=work(sample.rank, sample.step)) for sample in records.samples)
    return replace(run, layers=replace(records, samples=given))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_batches_of_unequal_size_are_an_imbalance(ranks: int) -> None:
    run = with_work(lengths(ranks, 0.4), lambda rank, step: Work(flops=1000 * (1 + (rank + step) % 2)))
    (found,) = uneven(run)
    assert (found.kind, found.severity, found.evidence["by"]) == ("imbalance", "warning", "steps")
    assert found.title.startswith("Batches differ in size between ranks, differently in each step; waiting for the")
    assert found.evidence["forward_backward_correlation"] > 0.9
    assert (found.evidence["sizes_differ"], found.evidence["sizes_compared"]) == (True, 2)


def test_that_batches_differ_is_not_concluded_from_times_alone() -> None:
    """A busy machine lengthens forward and backward of one rank, too."""
    run = lengths(4, 0.4)
    for equal in (Work(flops=1000), Work(tokens=4096, samples=4)):
        (found,) = uneven(with_work(run, lambda rank, step, equal=equal: equal))
        assert (found.kind, found.severity, found.evidence["sizes_differ"]) == ("imbalance", "info", False)
        assert found.title.startswith(
            "A different rank computes longest in each step, with batches of equal size; waiting for it costs "
        )
    for unknown in (run, with_work(run, lambda rank, step: Work(samples=8)), with_work(run, lambda rank, step: None)):
        (found,) = uneven(unknown)
        assert (found.severity, found.evidence["sizes_differ"]) == ("info", None)
        assert found.title.startswith("A different rank computes longest in each step; waiting for it costs ")
    (found,) = uneven(with_work(run, lambda rank, step: Work(samples=8 + 2 * rank)))
    assert (found.severity, found.evidence["sizes_differ"]) == ("warning", True)


@pytest.mark.parametrize("work", [None, Work(flops=1000)])
def test_processes_without_a_group_do_not_wait_for_each_other(work: Work | None) -> None:
    """Hogwild: each trains the shared model at its own pace."""
    for run in (lengths(2, 0.4), in_turns(2, 30.0).run()):
        alone = [replace(rank, identity=replace(rank.identity, world_size=1, backend="")) for rank in run.ranks]
        found = diagnose(with_work(replace(run, ranks=tuple(alone)), lambda rank, step: work))
        assert not KINDS & {finding.kind for finding in found}
        assert not [finding.title for finding in found if "wait for it" in finding.title]


def test_processes_without_a_group_lose_what_each_of_them_waits() -> None:
    """Hogwild: the title, the table and the cost have the mean of the processes, not what both wait in a step."""
    run = Cluster(ranks=2, steps=60, synchronized=False, noise=0.4, phases_ms={"input": 20.0, "forward": 30.0}).run()
    alone = [replace(rank, identity=replace(rank.identity, world_size=1, backend="")) for rank in run.ranks]
    document = summarize(replace(run, ranks=tuple(alone)))
    (found,) = (each for each in document["findings"] if each["kind"] == "input_bound")
    assert found["cost"]["share"] == pytest.approx(document["phases"]["input"]["share"], abs=0.02)
    assert found["evidence"]["input_ms_per_step"] == pytest.approx(document["phases"]["input"]["mean_ms"], rel=0.05)


def test_noise_that_hits_forward_and_backward_apart_is_none() -> None:
    assert uneven(lengths(4, 0.4, alike=False)) == []


def stages(fault_ms: float, *, reported: bool) -> RunData:
    """Ranks 2 and 3 are another pipeline stage, with more work."""
    faults = tuple(slow_at(rank, "forward", fault_ms) for rank in (2, 3))
    run = Cluster(ranks=4, steps=60, faults=faults).run()
    peers = [[[0, 2, 1]], [[0, 2, 1]], [[2, 2, 1]], [[2, 2, 1]]]
    facts = [{"peers": own} if reported else {} for own in peers]
    return replace(run, ranks=tuple(replace(rank, facts=own) for rank, own in zip(run.ranks, facts, strict=True)))


def test_stages_with_different_work_are_an_imbalance_and_no_stragglers() -> None:
    (found,) = diagnose(stages(15.0, reported=True))
    assert (found.kind, found.ranks, found.evidence["by"]) == ("imbalance", (2, 3), "groups")
    assert found.evidence["work_ms_by_group"] == pytest.approx([38.0, 53.0], rel=0.03)
    assert found.cost["share"] == pytest.approx(7.5 / 54, abs=0.02)
    (found,) = diagnose(stages(15.0, reported=False))
    assert (found.kind, found.ranks) == ("compute_straggler", (2, 3))


def test_a_rank_is_compared_with_its_peers_only() -> None:
    run = stages(15.0, reported=True)
    slow = Cluster(
        ranks=4,
        steps=60,
        faults=(*(slow_at(rank, "forward", 15.0) for rank in (2, 3)), slow_at(0, "backward", 6.0)),
    ).run()
    facts = [rank.facts for rank in run.ranks]
    run = replace(slow, ranks=tuple(replace(rank, facts=own) for rank, own in zip(slow.ranks, facts, strict=True)))
    found = {(finding.kind, finding.ranks, finding.phase) for finding in diagnose(run)}
    assert ("compute_straggler", (0,), "backward") in found
    assert not any(kind == "compute_straggler" and ranks != (0,) for kind, ranks, _ in found)


@pytest.mark.parametrize("hosts", [2, 4])
def test_all_ranks_of_a_host_are_the_hosts_doing(hosts: int) -> None:
    members = range(8 - 8 // hosts, 8)
    faults = tuple(slow_at(rank, "forward", 6.0) for rank in members)
    (found,) = diagnose(Cluster(ranks=8, steps=60, hosts=hosts, faults=faults).run())
    assert (found.kind, found.ranks, found.phase) == ("node_straggler", tuple(members), "forward")
    assert found.evidence["hosts"] == [f"node{hosts - 1}"]
    assert f"host node{hosts - 1}" in found.title


def test_one_rank_of_a_host_is_not() -> None:
    (found,) = diagnose(Cluster(ranks=8, steps=60, hosts=2, faults=(slow_at(5, "forward", 6.0),)).run())
    assert (found.kind, found.ranks) == ("compute_straggler", (5,))


# -- batches of different size ----------------------------------------------------------------------------------------


def with_batches(*sizes: int | None, **facts: Any) -> list[Finding]:
    run = Cluster(ranks=len(sizes), steps=40).run()
    facts = {"ddp": {"bucket_mb": 25.0}, **facts}
    series = [
        replace(rank, facts={"loader": {"batch_size": size, "last_batch": 3 + rank.rank}, **facts})
        for rank, size in zip(run.ranks, sizes, strict=True)
    ]
    found = diagnose(replace(run, ranks=tuple(series)))
    assert found[0].kind == "healthy"
    return [finding for finding in found if finding.kind == "uneven_batches"]


def test_loaders_with_different_batch_sizes_are_a_remark() -> None:
    (found,) = with_batches(32, 32, 16, 32)
    assert (found.kind, found.severity, found.ranks) == ("uneven_batches", "info", (2,))
    assert found.title == "Rank 2 has batches of 16 samples, the other ranks of 32."
    assert found.evidence == {"batch_sizes": {"0": 32, "1": 32, "2": 16, "3": 32}, "usual": 32, "measured": False}
    (found,) = with_batches(64, 32, 32, 8)
    assert found.title == "Ranks 0 and 3 have batches of 8 to 64 samples, the other ranks of 32."


@pytest.mark.parametrize("sizes", [(32, 32), (32, None), (None, None), (32,)])
def test_batches_that_are_equal_or_not_known(sizes: tuple[int | None, ...]) -> None:
    """Also if the last batches of an epoch differ."""
    assert with_batches(*sizes) == []
    assert with_batches(16, 32, ddp={}) == [], "each trains its own model"


def test_a_slow_rank_with_larger_batches_has_more_work() -> None:
    run = Cluster(ranks=2, steps=60, faults=(slow_at(0, "forward", 6.0),)).run()

    def advice(*sizes: int) -> str:
        facts = [{"loader": {"batch_size": size}, "ddp": {"bucket_mb": 25.0}} for size in sizes]
        series = tuple(replace(rank, facts=own) for rank, own in zip(run.ranks, facts, strict=True))
        found = diagnose(replace(run, ranks=series))[0]
        assert (found.kind, found.ranks) == ("compute_straggler", (0,))
        return found.advice[0]

    assert advice(96, 32) == (
        "Rank 0 has batches of 96 samples, the other rank of 32: that is more work for each step. "
        "Use one size on all ranks."
    )
    unexplained = (
        "Check that rank 0 (host node0) computes the same as the others: batch shape, sequence length, branches."
    )
    assert advice(32, 32) == advice(16, 32) == unexplained


def measured(*samples: Sequence[int | None], group: str = "") -> list[Finding]:
    """Of ranks without a loader: what each was given in its sampled steps."""
    run = Cluster(ranks=len(samples), steps=40).run()
    records = sampled(model("a", "b"), ranks=len(samples), steps=range(5, 5 + 2 * len(samples[0]), 2))
    given = [
        replace(sample, group=group, work=Work(samples=samples[sample.rank][(sample.step - 5) // 2]))
        for sample in records.samples
    ]
    series = [replace(rank, facts={"ddp": {"bucket_mb": 25.0}}) for rank in run.ranks]
    found = diagnose(replace(run, ranks=tuple(series), layers=replace(records, samples=tuple(given))))
    return [finding for finding in found if finding.kind == "uneven_batches"]


def test_batches_are_measured_where_there_is_no_loader() -> None:
    (found,) = measured((32, 32, 32), (32, 32, 32), (24, 24, 24))
    assert found.title == "Rank 2 has batches of 24 samples, the other ranks of 32."
    assert found.evidence == {"batch_sizes": {"0": 32, "1": 32, "2": 24}, "usual": 32, "measured": True}
    assert measured((32, 32), (24, 24)) == [], "too few steps"
    assert measured((32, 32, 32), (32, 24, 24)) == [], "they vary from step to step"
    assert measured((32, 32, 32), (24, None, 24)) == [], "not all are known"
    assert measured((32, 32, 32), (24, 24, 24), group="tp=1") == [], "parts of one model"
