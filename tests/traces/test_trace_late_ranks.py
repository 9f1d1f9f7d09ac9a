"""Who is late to collectives and why, on jobs into which that was put; and that nobody is named who is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.traces import MadeTrace
from trace_jobs import MadeJob

from stepscope.records.finding import Finding
from stepscope.reports.finding_text import price_text
from stepscope.traces.across_ranks.arrivals import arrivals_of
from stepscope.traces.across_ranks.replay import like_peers
from stepscope.traces.collective_calls import OPS, ProcessGroup
from stepscope.traces.findings import analyze_job
from stepscope.traces.job import JobAnalysis
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.rank_analysis import analyze_rank
from stepscope.traces.rules.communication import _overlap_advice, _shards

MS = 1_000_000
OF_TP = "of the tensor-parallel group"


def job_of(**about: Any) -> JobAnalysis:
    return analyze_job([analyze_rank(made.trace(), rank) for rank, made in enumerate(MadeJob(**about).ranks())])


def of_rank(late: int, value: float) -> Callable[[int, int, int], float]:
    return lambda rank, step, layer: value if rank == late else 0.0


@cache
def jitter(mean: float, seed: int = 1) -> Callable[[int, int, int], float]:
    """Every rank is slow now and then, none more than others."""
    drawn = random.Random(seed)
    values = [drawn.expovariate(1 / mean) for _ in range(8 * 9 * 28)]
    return lambda rank, step, layer: values[(rank * 9 + step) * 28 + layer]


def straggler(job: JobAnalysis) -> Finding:
    """The first finding, and the only one about communication."""
    about = [each.kind for each in job.findings if each.phase == "comm" or each.kind.startswith("collective")]
    assert about == ["collective_straggler"]
    assert job.verdict == job.findings[0].title
    return job.findings[0]


def cause(finding: Finding, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = finding.evidence["causes"][str(rank)]
    return found


# -- why a rank is late ---------------------------------------------------------------------------------------------


def test_slower_kernels() -> None:
    job = job_of(slower=of_rank(3, 100))
    finding = straggler(job)
    assert (finding.ranks, finding.severity) == ((3,), "critical")
    assert finding.title == (
        f"Rank 3 comes last to 84 of 84 collectives {OF_TP}; the others wait 5.60 ms of each 17.4 ms step (32%) "
        "for it; its kernels "
        "take 5.60 ms a step longer than its peers' (gemm_bf16 300 µs instead of 200 µs, 50% longer)."
    )
    assert cause(finding, 3) == {
        "cause": "slower_kernels",
        "excess_ms": 16.8,
        "kernel": "gemm_bf16",
        "kernel_ns": 300_000,
        "peers_kernel_ns": 200_000,
        "same_shapes": None,
    }
    # 56 kernels of 100 µs; without them a step is as long as a healthy one.
    assert finding.cost["seconds"] == 0.0168
    assert finding.cost["if_fixed"]["step_ms"] == pytest.approx(job_of().ranks[0].pace.step_ns / MS, rel=1e-3)
    assert "record_shapes=True" in finding.advice[1]


def test_the_same_shapes_leave_only_the_device() -> None:
    finding = straggler(job_of(slower=of_rank(3, 100), dims=lambda rank: [[4096, 4096], [4096, 4096]]))
    assert (cause(finding, 3)["cause"], cause(finding, 3)["same_shapes"]) == ("slower_kernels", True)
    assert finding.advice == (
        "Check the device of rank 3: clocks, power limit, temperature (nvidia-smi -q -d PERFORMANCE), sharing.",
    )


def test_larger_inputs() -> None:
    dims = [[4096, 4096], [4096, 4096]]
    finding = straggler(
        job_of(slower=of_rank(3, 100), dims=lambda rank: [[6144, 4096], dims[1]] if rank == 3 else dims)
    )
    assert cause(finding, 3)["cause"] == "more_work"
    assert finding.title.endswith(
        "; it has 5.60 ms a step more to compute than its peers: aten::mm of [[6144, 4096], [4096, 4096]], not "
        "[[4096, 4096], [4096, 4096]]."
    )


def test_more_kernels() -> None:
    finding = straggler(job_of(more=lambda rank, step, layer: int(rank == 3)))
    assert cause(finding, 3)["cause"] == "more_work"
    assert finding.title.endswith("; it has 5.60 ms a step more to compute than its peers: 84 kernels a step, not 56.")
    assert "sequence length" in finding.advice[0]


def test_a_host_that_launches_late() -> None:
    finding = straggler(job_of(host=of_rank(3, 600)))
    assert finding.title == (
        f"Rank 3 comes last to 84 of 84 collectives {OF_TP}; the others wait 5.87 ms of each 17.6 ms step (33%) "
        "for it; its device "
        "waits 5.87 ms a step longer than its peers' for the host to launch kernels."
    )
    found = cause(finding, 3)
    assert found["cause"] == "host"
    # Nothing is queued there, and the others' hosts are far ahead.
    assert found["launch_delay_ns"] <= 200_000 < MS < found["peers_launch_delay_ns"]
    assert found["mean_queue"] < 2 < 20 < found["peers_mean_queue"]


def test_input_is_late_once_a_step() -> None:
    finding = straggler(job_of(load=lambda rank, step, layer: 4000.0 if rank == 3 else 500.0))
    assert (finding.ranks, finding.phase) == ((3,), "input")
    assert finding.title == (
        f"Rank 3 comes last to 3 of 3 collectives {OF_TP}, those with nearly all of the waiting; the others wait 3.50 "
        "ms of each 15.8 ms step (22%) for it; it spends 3.50 ms a step more than its peers in the DataLoader."
    )
    assert cause(finding, 3) == {"cause": "input", "excess_ms": 10.5}
    assert finding.cost["seconds"] == 0.0105
    assert "DataLoader workers" in finding.advice[0]


def test_gaps_before_queued_kernels() -> None:
    finding = straggler(job_of(held=of_rank(3, 200)))
    assert cause(finding, 3)["cause"] == "gaps"
    assert finding.title.endswith("; its device idles 5.53 ms a step longer than its peers' before kernels that are "
                                  "already queued.")  # fmt: skip


def test_no_single_cause_is_named_where_there_is_none() -> None:
    job = job_of(slower=of_rank(3, 40), held=of_rank(3, 70), host=of_rank(3, 300), load=of_rank(3, 1500))
    finding = straggler(job)
    assert finding.ranks == (3,)
    assert finding.title.endswith("; no single cause in the traces explains it.")
    assert cause(finding, 3) == {"cause": None, "excess_ms": None}
    assert "--perfetto" in finding.advice[0]


@pytest.mark.parametrize("noise", [0.0, 6.0])
def test_ten_per_cent(noise: float) -> None:
    small = jitter(noise) if noise else of_rank(0, 0)
    finding = straggler(job_of(slower=lambda rank, step, layer: 20.0 * (rank == 3) + small(rank, step, layer)))
    assert (finding.ranks, finding.severity) == ((3,), "warning")
    assert cause(finding, 3)["cause"] == "slower_kernels"
    assert finding.cost["share"] == pytest.approx(0.087 if not noise else 0.055, abs=0.005)


# -- several late ranks ---------------------------------------------------------------------------------------------


def test_two_late_ranks_that_are_last_in_turn() -> None:
    """Two of eight ranks last in 60 of 84 collectives, waiting 50 times the transfer: as a real trace had it."""

    def slower(rank: int, step: int, layer: int) -> float:
        at = step * 28 + layer
        by_chance = jitter(6.0)(rank, step, layer)
        if at % 7 < 5:
            return {2: 300.0, 5: 150.0}.get(rank if at % 2 else 7 - rank, 0.0) + by_chance
        return 100.0 * (rank == (0, 1, 3, 4, 6, 7)[at % 6]) + by_chance

    job = job_of(slower=slower, transfer=8.0)
    finding = straggler(job)
    assert (finding.ranks, finding.severity) == ((2, 5), "critical")
    assert finding.title.startswith(
        f"Ranks 2 and 5 come last to 60 of 84 collectives {OF_TP}; the others wait 12.0 ms of each 25.3 ms step "
        "(47%) for them (50 "
        "times as much waiting as transfer); rank 2: its kernels take "
    )
    assert finding.title.endswith("; rank 5 likewise.")
    assert (finding.evidence["group_kind"], finding.evidence["mostly_waiting"]) == ("tensor", True)
    assert not any("bucket" in line for each in job.findings for line in each.advice)
    # Fixing one of them alone would gain less.
    alone_ns = like_peers(job.ranks, job.collectives, parse_change("rank:2=peers")).gain_ns
    both = like_peers(job.ranks, job.collectives, parse_change("rank:2=peers"), (5,)).gain_ns
    assert alone_ns < finding.cost["seconds"] * 1e9 <= both


def test_two_late_ranks_of_which_one_is_always_just_before() -> None:
    job = job_of(slower=lambda rank, step, layer: {2: 300.0, 5: 301.0}.get(rank, 0.0))
    finding = straggler(job)
    assert sorted(finding.ranks) == [2, 5]
    assert finding.cost["seconds"] == pytest.approx(0.301 * 56 * 3 / 1000, rel=0.01)


def test_two_late_ranks_for_two_reasons() -> None:
    finding = straggler(job_of(slower=of_rank(2, 100), host=of_rank(5, 605)))
    assert [cause(finding, rank)["cause"] for rank in (2, 5)] == ["slower_kernels", "host"]
    assert "; rank 2: its kernels take 5.60 ms a step longer" in finding.title
    assert finding.title.endswith("; rank 5: its device waits 6.01 ms a step longer than its peers' for the host to "
                                  "launch kernels.")  # fmt: skip


def test_another_rank_is_late_from_the_middle_on() -> None:
    finding = straggler(job_of(steps=6, slower=lambda rank, step, layer: 100.0 * (rank == (1 if step < 3 else 5))))
    assert finding.ranks == (1, 5)
    assert finding.title.startswith(
        f"Ranks 1 and 5 come last to 168 of 168 collectives {OF_TP} (rank 1 at first, rank 5 from about step 3 on); "
    )


def test_a_single_bad_step_is_said_to_be_one() -> None:
    finding = straggler(job_of(steps=6, slower=lambda rank, step, layer: 300.0 * (rank == 1 and step == 2)))
    assert finding.title.startswith(
        f"Rank 1 comes last to 26 of 26 collectives {OF_TP} in step 2, where nearly all of the waiting is; the others "
        "wait 16.8 ms in all (19% of all steps) for it"
    )
    assert finding.confidence == 0.6


# -- nobody is late -------------------------------------------------------------------------------------------------


def test_a_healthy_job() -> None:
    assert job_of().findings == ()
    assert job_of(slower=jitter(3.0)).findings == ()


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(1, 6))
def test_jitter_accuses_nobody(seed: int) -> None:
    job = job_of(slower=jitter(150.0, seed))
    finding, *others = job.findings
    # One that had more than its share of bad luck is told beside it, at most.
    assert [(each.kind, each.severity) for each in others] in ([], [("slow_rank", "info")])
    assert (finding.kind, finding.severity, finding.ranks) == ("collective_jitter", "warning", ())
    assert "every rank comes last about equally often (rank " in finding.title
    assert finding.title.endswith(": this is jitter, and no rank is to blame.")
    assert "overlap" not in job.verdict
    assert str(price_text(finding.cost)).startswith("at most ")
    waited = sorted(job.collectives.wait_ns.values())
    assert finding.cost["most_seconds"] <= waited[len(waited) // 2] / 1e9


def test_a_rank_for_each_step_in_turn_is_jitter() -> None:
    (finding,) = job_of(steps=8, slower=lambda rank, step, layer: 100.0 * (rank == step % 8)).findings
    assert (finding.kind, finding.ranks) == ("collective_jitter", ())


def test_most_ranks_late_is_no_reason_to_name_one() -> None:
    assert job_of(slower=lambda rank, step, layer: 100.0 * (rank < 5)).findings == ()


# -- groups ---------------------------------------------------------------------------------------------------------

TENSOR = ((0, 1, 2, 3), (4, 5, 6, 7))
DATA = ((0, 4), (1, 5), (2, 6), (3, 7))


def test_who_waited_in_one_group_is_not_late_in_the_next() -> None:
    # Ranks 4, 5 and 7 come last to their data-parallel groups because they waited for rank 6.
    job = job_of(steps=8, groups=TENSOR, gradients=DATA, slower=of_rank(6, 100))
    finding = straggler(job)
    assert finding.ranks == (6,)
    assert finding.title.startswith(f"Rank 6 comes last to 224 of 224 collectives {OF_TP} of ranks 4, 5, 6 and 7; ")
    between = [each for each in arrivals_of(job.ranks, job.collectives) if each.group.kind == "data"]
    assert [each.intervals.counts.any() for each in between] == [False] * 4


@pytest.mark.parametrize(
    ("description", "kind", "first"),
    [
        ("mesh_tp", "tensor", "Exchanges within layers hide only behind other work"),
        ("mesh_dp", "data", "DDP: smaller buckets"),
        ("", "unknown", "If gradients are exchanged"),
    ],
)
def test_advice_on_transfer_fits_the_group(description: str, kind: str, first: str) -> None:
    (finding,) = job_of(transfer=100.0, description=description).findings
    assert (finding.kind, finding.evidence["group_kind"]) == ("low_overlap", kind)
    assert finding.advice[0].startswith(first)
    assert (kind == "tensor") == ("bucket" not in " ".join(finding.advice))


@pytest.mark.parametrize(
    ("ops", "shards"),
    [
        (("all_gather", "all_gather", "reduce_scatter"), True),
        (("all_gather", "reduce_scatter", "reduce_scatter", "all_reduce"), True),  # HSDP
        (("all_reduce", "broadcast"), False),
        (("all_reduce", "all_reduce", "all_gather", "reduce_scatter"), None),
        (("all_gather",), None),
        ((), None),
    ],
)
def test_advice_on_data_parallel_groups_is_for_what_they_exchange(ops: tuple[str, ...], shards: bool | None) -> None:
    """No buckets and no ``no_sync()`` where there are shards; a tensor-parallel group beside it says nothing."""
    every = [("data", op) for op in ops] + [("tensor", "all_reduce")] * 5
    exchanges = SimpleNamespace(
        groups=(SimpleNamespace(kind="data"), SimpleNamespace(kind="tensor")),
        op=np.array([OPS.index(op) for _, op in every]),
        group=np.array([int(kind == "tensor") for kind, _ in every]),
        start_ns=np.zeros(len(every), np.int64),
        end_ns=np.full(len(every), 10, np.int64),
    )
    view: Any = SimpleNamespace(
        analyses=(), job=SimpleNamespace(ranks=(SimpleNamespace(exchanges=exchanges),), collectives=())
    )
    assert _shards(view, "data") is shards
    advice = " ".join(_overlap_advice(view, "data"))
    assert ("bucket_cap_mb" in advice, "no_sync()" in advice) == (not shards, not shards)
    assert ("fully_shard()" in advice) == (shards is not False)


def test_waiting_is_no_part_of_low_overlap() -> None:
    job = job_of(transfer=100.0, slower=of_rank(3, 50))
    late, low = job.findings
    assert [late.kind, low.kind] == ["collective_straggler", "low_overlap"]
    # 28 transfers of 100 µs; ranks wait for as long again.
    assert (low.evidence["exposed_ms_per_step"], low.evidence["waited_ms_per_step"]) == (2.8, 2.8)
    assert low.cost["most_seconds"] == pytest.approx(0.0084)
    assert low.title.endswith("nothing is computed, besides 2.80 ms of waiting for each other.")


def test_a_group_with_ranks_that_are_not_traced() -> None:
    made = MadeJob(slower=of_rank(3, 100)).ranks()[:6]
    job = analyze_job([analyze_rank(each.trace(), rank) for rank, each in enumerate(made)])
    finding = job.findings[0]
    assert (finding.kind, finding.ranks, finding.confidence) == ("collective_straggler", (3,), 0.6)
    assert str(price_text(finding.cost)).startswith("at most 32% of the time")


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("tp:0", "tensor"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("mesh_dp_shard_cp", "data"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "unknown"),
        ("default_pg", "unknown"),
        ("", "unknown"),
    ],
)
def test_kinds_of_groups(description: str, kind: str) -> None:
    assert ProcessGroup(description=description).kind == kind


# -- pipelines ------------------------------------------------------------------------------------------------------


def pipeline(stages: int = 4, micro: int = 4, steps: int = 3) -> JobAnalysis:
    """One forward after the other; a stage waits in its receive; all stages reduce one number at the end of a step."""
    made = [MadeTrace(rank=rank, world_size=stages) for rank in range(stages)]
    ranks = list(range(stages))
    everybody = {"Process Group Name": "0", "Process Group Ranks": str(ranks), "Group size": stages}
    stage = {**everybody, "Process Group Name": "1", "Process Group Description": "mesh_pp"}
    now = 0.0
    for step in range(steps + 1):
        free, ends = [now] * stages, [[0.0] * stages for _ in range(micro)]
        for at in range(micro):
            for rank, own in enumerate(made):
                start = free[rank]
                if rank:
                    arrives = max(start, ends[at][rank - 1]) + 20
                    about: dict[str, Any] = {"Collective name": "recv", **stage}
                    own.launched("ncclDevKernel_SendRecv()", at=start - 1, start=start, dur=arrives - start,
                                 stream=20, **about)  # fmt: skip
                    start = arrives
                own.launched("gemm", at=start - 1, start=start, dur=1000)
                free[rank] = ends[at][rank] = start + 1000
        done = max(free) + 50
        for rank, own in enumerate(made):
            about = {"Collective name": "allreduce", **everybody}
            own.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", at=free[rank] - 1, start=free[rank],
                         dur=done - free[rank], stream=21, **about)  # fmt: skip
            own.step(step, now, done - now)
        now = done
    return analyze_job([analyze_rank(each.trace(), rank) for rank, each in enumerate(made)])


def test_waiting_between_pipeline_stages_is_the_bubble() -> None:
    # The last stage comes last to every all-reduce, as the schedule has it.
    job = pipeline(steps=10)
    assert job.collectives.last_counts == {0: 0, 1: 0, 2: 0, 3: 10}
    (finding,) = job.findings
    assert (finding.kind, finding.severity, finding.ranks) == ("pipeline_bubble", "info", ())
    assert finding.title.startswith("Pipeline stages wait for each other 3.12 ms of each 7.17 ms step (44%): ")
    assert finding.title.endswith("that is the bubble of the schedule, not a late rank.")
    assert price_text(finding.cost) is None
