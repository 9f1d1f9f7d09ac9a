"""Findings about communication: the right kind, group and rank for each injected fault; silence over healthy seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_counts import seeds
from fakes.cluster import Cluster, slow_at
from fakes.records import edited
from fakes.traffic import Exchange, SlowLink, Traffic

from stepscope.diagnosis import diagnose
from stepscope.records.finding import Finding

KINDS = {"comm_bound", "low_overlap", "slow_collective", "comm_straggler", "group_imbalance"}
EXCHANGES = (
    Exchange(dimension="tp", count=4, mb=8.0, ms=0.8),
    Exchange(dimension="dp", op="reduce_scatter", count=2, mb=16.0, ms=1.5),
)
MESH = Traffic(mesh={"dp": 2, "tp": 2}, exchanges=EXCHANGES)
JOB = Cluster(ranks=4, steps=100, traffic=MESH)
DDP = {"bucket_mb": 100.0, "gradient_mb": 80.0, "find_unused_parameters": False, "static_graph": False}


def with_fault(job: Cluster, **link: Any) -> Cluster:
    assert job.traffic is not None
    return replace(job, traffic=replace(job.traffic, faults=(SlowLink(**link),)))


def found_in(job: Cluster) -> list[Finding]:
    return [finding for finding in diagnose(job.run()) if finding.kind in KINDS or finding.severity != "info"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rank", [0, 3])
def test_a_slow_link_is_pinned_on_its_rank_by_two_directions(rank: int, seed: int) -> None:
    (found,) = found_in(with_fault(replace(JOB, seed=seed), ranks=(rank,), times=4.0))
    assert (found.kind, found.ranks, found.phase) == ("comm_straggler", (rank,), "comm")
    assert found.title.startswith(f"Every exchange with rank {rank} is slow: its data, tensor groups take ")
    assert {row["group"] for row in found.evidence["groups"]} == {f"dp{rank % 2}", f"tp{rank // 2 * 2}"}
    assert found.evidence["excess_ms"] == pytest.approx(4 * 0.8 * 3 + 2 * 1.5 * 3, rel=0.1)
    assert found.cost["share"] == pytest.approx(18.6 / 66, abs=0.05)


def test_a_slow_link_in_a_larger_mesh() -> None:
    job = replace(JOB, ranks=16, hosts=4, traffic=replace(MESH, mesh={"dp": 4, "tp": 4}))
    (found,) = found_in(with_fault(job, ranks=(9,), times=4.0))
    assert (found.kind, found.ranks) == ("comm_straggler", (9,))
    assert all(row["siblings"] == 3 for row in found.evidence["groups"])


def test_a_host_whose_groups_are_all_slow() -> None:
    traffic = replace(MESH, mesh={"dp": 3, "tp": 2}, exchanges=EXCHANGES[:1])
    job = replace(JOB, ranks=6, hosts=3, traffic=traffic)
    (found,) = found_in(with_fault(job, ranks=(2, 3), times=5.0))
    assert (found.kind, found.ranks) == ("comm_straggler", (2, 3))
    assert "Every exchange with host node1 is slow" in found.title
    assert found.evidence["hosts"] == ["node1"]


def test_where_only_one_direction_is_slow_the_group_is_named_and_no_rank() -> None:
    (found,) = found_in(with_fault(JOB, ranks=(3,), times=6.0, dimension="tp"))
    assert (found.kind, found.ranks) == ("slow_collective", (2, 3))
    assert found.title.startswith("all_reduce in tensor group tp2 (ranks 2 and 3) takes ")
    assert "times as long as in the other tensor group, for the same 32 MiB." in found.title
    (row,) = found.evidence["groups"]
    assert row["ratio"] == pytest.approx(6.0, rel=0.1)
    assert row["bytes"] == 32 << 20


def test_with_one_group_only_nobody_can_tell_a_link_from_the_network() -> None:
    traffic = Traffic(mesh={"dp": 4}, exchanges=(Exchange(dimension="dp", count=2, mb=16.0, ms=2.0),))
    found = found_in(with_fault(replace(JOB, traffic=traffic), ranks=(3,), times=4.0))
    assert [finding.kind for finding in found] == ["comm_bound"] or not found


def test_a_group_that_has_more_to_send() -> None:
    (found,) = found_in(with_fault(JOB, ranks=(2, 3), times=3.0, bytes_times=3.0, dimension="tp"))
    assert (found.kind, found.ranks) == ("group_imbalance", (2, 3))
    assert "moves 96 MiB a step, 3.0 times as much as in its sibling groups" in found.title


def test_more_bytes_that_cost_nothing_are_not_told() -> None:
    assert found_in(with_fault(JOB, ranks=(2, 3), times=1.1, bytes_times=3.0, dimension="tp")) == []


def test_a_network_that_becomes_slow() -> None:
    everyone = range(4)
    (found,) = found_in(with_fault(JOB, ranks=everyone, times=4.0, dimension="dp", steps=range(60, 100)))
    assert (found.kind, found.ranks, found.phase) == ("slow_collective", (), "comm")
    assert found.steps is not None and abs(found.steps[0] - 60) <= 2 and found.steps[1] == 99
    evidence = {key: found.evidence[key] for key in ("group_kind", "op", "groups_slow")}
    assert evidence == {"group_kind": "data", "op": "reduce_scatter", "groups_slow": 2}
    assert found.evidence["before_ms"] == pytest.approx(3.0, rel=0.15)
    assert found.evidence["after_ms"] == pytest.approx(12.0, rel=0.15)


def test_a_network_that_was_slow_for_a_while() -> None:
    (found,) = found_in(with_fault(JOB, ranks=range(4), times=6.0, dimension="dp", steps=range(40, 70)))
    assert found.kind == "slow_collective"
    assert " in steps " in found.title


def test_more_to_send_from_a_step_on_is_no_slow_network() -> None:
    fault: dict[str, Any] = {"ranks": range(4), "times": 4.0, "bytes_times": 4.0, "dimension": "dp"}
    found = found_in(with_fault(JOB, **fault, steps=range(60, 100)))
    assert "slow_collective" not in [finding.kind for finding in found]


def test_slow_exchanges_on_a_machine_that_became_slow_are_not_the_networks() -> None:
    faults = tuple(slow_at(rank, phase, 15.0, range(60, 100)) for rank in range(4) for phase in ("forward", "backward"))
    job = with_fault(replace(JOB, faults=faults), ranks=range(4), times=4.0, dimension="dp", steps=range(60, 100))
    assert "slow_collective" not in [finding.kind for finding in found_in(job)]


def test_a_late_rank_is_the_stragglers_and_not_the_networks() -> None:
    (found,) = found_in(replace(JOB, faults=(slow_at(2, "forward", 25.0),)))
    assert (found.kind, found.ranks) == ("compute_straggler", (2,))


def test_a_late_rank_and_a_slow_link_are_two_things() -> None:
    job = with_fault(replace(JOB, faults=(slow_at(0, "forward", 25.0),)), ranks=(3,), times=4.0)
    assert {(finding.kind, finding.ranks) for finding in found_in(job)} == {
        ("compute_straggler", (0,)),
        ("comm_straggler", (3,)),
    }


# -- overlap and bounds -----------------------------------------------------------------------------------------------


def ddp_job(comm_ms: float, hidden_ms: float, **facts: Any) -> Cluster:
    return Cluster(ranks=2, steps=60, comm_ms=comm_ms, ddp_hidden_ms=hidden_ms, facts={"ddp": {**DDP, **facts}})


def test_one_bucket_hides_nothing() -> None:
    (found,) = found_in(ddp_job(20.0, 1.0))
    assert (found.kind, found.ranks, found.phase) == ("low_overlap", (), "comm")
    assert found.title.startswith("Only 5% of DDP's all-reduce is hidden behind the computation: 20.0 ms of every step")
    assert found.advice[0] == (
        "80 MiB of gradients in buckets of up to 100 MiB leave nothing to send while backward still runs: "
        "DistributedDataParallel(bucket_cap_mb=20)."
    )
    # Of 21 ms a quarter is left, and one ms beyond the 20 of computing gradients.
    assert found.cost["if_fixed"]["step_ms"] == pytest.approx(58.2 - (20.0 - 21.0 / 4), abs=0.5)
    assert found.evidence["bytes_per_step"] == 80 << 20


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters=True walks the graph"),
        ({"find_unused_parameters": True}, "static_graph=True"),
        ({"bucket_sizes_mb": [1.0, 50.0, 29.0], "bucket_mb": 50.0}, "One of 3 buckets holds 50 MiB of 80 MiB: Distr"),
        ({"bucket_sizes_mb": [1.0, 41.0, 38.0], "bucket_mb": 25.0}, "One of 3 buckets holds 41 MiB of 80 MiB (a layer"),
        ({"bucket_sizes_mb": [20.0, 20.0, 20.0, 20.0], "bucket_mb": 25.0}, "bf16_compress_hook"),
    ],
)
def test_the_advice_knows_the_settings(facts: dict[str, Any], expected: str) -> None:
    (found,) = found_in(ddp_job(20.0, 1.0, **facts))
    assert expected in found.advice[0]


def test_accumulated_gradients_are_asked_about() -> None:
    run = ddp_job(20.0, 1.0).run()
    (found,) = diagnose(edited(run, lambda _, steps: steps["micro_batches"].fill(4)))
    assert any(line.startswith("4 backward passes make a step: unless all but the last") for line in found.advice)


@pytest.mark.parametrize(
    ("comm_ms", "hidden_ms", "facts"),
    [
        (6.0, 18.0, {}),  # most of it is hidden
        (3.0, 0.5, {}),  # too little to matter
        (20.0, 1.0, {"gradient_mb": 2.0}),  # latency: no bucket would help
        (20.0, 1.0, {"gradient_mb": None}),  # nobody knows how much there is to send
        (20.0, 1.0, {"bucket_sizes_mb": [1.0, 79.0], "bucket_mb": 25.0}),  # one layer, and it comes last
    ],
    ids=["hidden", "short", "small", "unknown", "one-layer"],
)
def test_overlap_that_is_well_or_cannot_be_helped(comm_ms: float, hidden_ms: float, facts: dict[str, Any]) -> None:
    assert "low_overlap" not in [finding.kind for finding in found_in(ddp_job(comm_ms, hidden_ms, **facts))]


def test_waiting_for_a_late_rank_is_no_lack_of_overlap() -> None:
    (found,) = found_in(replace(ddp_job(2.0, 18.0), faults=(slow_at(1, "forward", 30.0),)))
    assert (found.kind, found.ranks) == ("compute_straggler", (1,))


def test_a_network_too_slow_for_any_overlap_bounds_the_job() -> None:
    first, *others = found_in(ddp_job(60.0, 5.0))
    assert (first.kind, first.severity) == ("comm_bound", "warning")
    assert ", mostly in all_reduce (DDP) of 80 MiB." in first.title
    (row,) = first.evidence["exchanges"]
    assert (row["kind"], row["op"], row["bytes_per_step"]) == ("data", "all_reduce (DDP)", 80 << 20)
    assert row["bytes_per_second"] == pytest.approx((80 << 20) / 0.060, rel=0.01)
    assert [other.kind for other in others] == ["low_overlap"]
    # What overlap would save is not counted again as the network's.
    assert first.cost["share"] + others[0].cost["share"] == pytest.approx(60.0 / 98.2, abs=0.02)


def test_what_bounds_a_mesh_is_named_by_group_and_operation() -> None:
    slow = tuple(replace(exchange, ms=4 * exchange.ms) for exchange in EXCHANGES)
    (found,) = found_in(replace(JOB, traffic=replace(MESH, exchanges=slow)))
    assert found.kind == "comm_bound"
    first, *_ = found.evidence["exchanges"]
    assert (first["kind"], first["op"], first["bytes_per_step"]) == ("tensor", "all_reduce", 32 << 20)
    assert first["ms_per_step"] == pytest.approx(12.8, rel=0.15)
    assert {row["kind"] for row in found.evidence["exchanges"]} == {"tensor", "data"}


def test_sharded_parameters_that_are_gathered_all_at_once() -> None:
    gathers = Exchange(dimension="dp", op="all_gather", count=2, mb=40.0, ms=10.0, hidden_ms=1.0)
    scatters = Exchange(dimension="dp", op="reduce_scatter", mb=40.0, ms=10.0, hidden_ms=1.0)
    phases = {"forward": 20.0, "backward": 40.0, "optimizer": 3.0}
    traffic = Traffic(mesh={"dp": 4}, exchanges=(gathers, scatters))
    (found,) = found_in(Cluster(ranks=4, steps=60, phases_ms=phases, traffic=traffic))
    assert found.kind == "low_overlap"
    assert found.advice[0] == "All parameters are gathered in 2 pieces a step: fully_shard() each block, then the root."
    hidden = tuple(replace(exchange, hidden_ms=9.0) for exchange in (gathers, scatters))
    assert found_in(Cluster(ranks=4, steps=60, phases_ms=phases, traffic=replace(traffic, exchanges=hidden))) == []


# -- silence ----------------------------------------------------------------------------------------------------------

HEALTHY = {
    "even": JOB,
    "noisy": replace(JOB, noise=0.1, traffic=replace(MESH, noise=0.3, work_ms=1.0)),
    "tails": replace(JOB, tail=0.01, traffic=replace(MESH, noise=0.5)),
    "wandering": replace(JOB, drift=0.05, traffic=replace(MESH, noise=0.2)),
    "larger": replace(JOB, ranks=16, steps=60, traffic=replace(MESH, mesh={"dp": 4, "tp": 4})),
    "short": replace(JOB, steps=14),
    "ddp": ddp_job(3.0, 12.0),
}


@pytest.mark.few(3)
@pytest.mark.seeds
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_jobs_are_silent(name: str) -> None:
    found = [(seed, finding.kind) for seed in seeds(20) for finding in found_in(replace(HEALTHY[name], seed=seed))]
    assert [pair for pair in found if pair[1] in KINDS] == []


def test_too_few_steps_that_were_kept_one_by_one_say_nothing() -> None:
    job = with_fault(replace(JOB, steps=200), ranks=(3,), times=6.0, dimension="tp")
    run = job.run()
    few = tuple(
        replace(
            rank, collectives=None if rank.collectives is None else rank.collectives[rank.collectives["step"] >= 112]
        )
        for rank in run.ranks
    )
    kinds = [finding.kind for finding in diagnose(replace(run, ranks=few))]
    assert "slow_collective" not in kinds and "comm_straggler" not in kinds


# -- NCCL: the times are the device's -------------------------------------------------------------------------------

NCCL = replace(JOB, device_timed=True, traffic=replace(MESH, backend="nccl", device=True))


@pytest.mark.parametrize(
    ("link", "kind", "ranks"),
    [
        ({"ranks": (3,), "times": 4.0}, "comm_straggler", (3,)),
        ({"ranks": (3,), "times": 6.0, "dimension": "tp"}, "slow_collective", (2, 3)),
        ({"ranks": (2, 3), "times": 3.0, "bytes_times": 3.0, "dimension": "tp"}, "group_imbalance", (2, 3)),
        ({"ranks": (0, 1, 2, 3), "times": 4.0, "dimension": "dp", "steps": range(60, 100)}, "slow_collective", ()),
    ],
)
def test_nccl_by_the_times_of_the_device(link: dict[str, Any], kind: str, ranks: tuple[int, ...]) -> None:
    (found,) = found_in(with_fault(NCCL, **link))
    assert (found.kind, found.ranks) == (kind, ranks)


def test_nccl_without_a_fault_is_healthy_and_a_slow_rank_is_no_slow_link() -> None:
    assert [found.kind for found in found_in(NCCL)] == []
    assert [found.kind for found in found_in(replace(NCCL, faults=(slow_at(3, "forward", 10.0),)))] == [
        "compute_straggler"
    ]


@pytest.mark.parametrize("sharded", [True, False])
def test_nccl_hides_little(sharded: bool) -> None:
    exchanges = (
        (
            Exchange(dimension="dp", op="all_gather", count=2, mb=64.0, ms=6.0),
            Exchange(dimension="dp", op="reduce_scatter", mb=64.0, ms=6.0),
        )
        if sharded
        else (Exchange(dimension="dp", mb=256.0, ms=18.0),)
    )
    traffic = Traffic(mesh={"dp": 4}, exchanges=exchanges, backend="nccl", device=True)
    facts = {} if sharded else {"ddp": {"bucket_mb": 1000.0, "bucket_sizes_mb": [256.0], "buckets": 1}}
    (found,) = found_in(replace(NCCL, traffic=traffic, facts=facts))
    assert found.kind == "low_overlap"
    assert found.evidence["exposed_ms"] == pytest.approx(18.0, rel=0.05)
    assert found.evidence["exchange_ms"] == pytest.approx(18.0, rel=0.05)
    assert found.evidence["op"] == ("all_gather and reduce_scatter" if sharded else "all_reduce (DDP)")


def test_nccl_that_is_hidden_is_not_accused() -> None:
    """The kernels take long beside the computation, and nobody waits for them."""
    traffic = Traffic(
        mesh={"dp": 4},
        exchanges=(
            Exchange(dimension="dp", op="all_gather", count=2, mb=64.0, ms=6.0, hidden_ms=5.9),
            Exchange(dimension="dp", op="reduce_scatter", mb=64.0, ms=6.0, hidden_ms=5.9),
        ),
        backend="nccl",
        device=True,
    )
    assert "low_overlap" not in [found.kind for found in found_in(replace(NCCL, traffic=traffic))]
