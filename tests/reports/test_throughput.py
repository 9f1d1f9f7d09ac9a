"""Samples, tokens and floating-point operations per second: what is added up over ranks, and what is not said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.records import records_of, with_records
from layer_samples import model, sampled

from stepscope.diagnosis.engine.window import replicas_of
from stepscope.records.collectives import GroupKind, ProcessGroup
from stepscope.records.layers import LayerRecords
from stepscope.records.series import RunData
from stepscope.records.steps import FLAG_SAMPLED
from stepscope.records.throughput import Work, named_rates, peak_of, read_work
from stepscope.reports import render_text, summarize
from stepscope.store.live.logs import training_line, training_summary

STEPS = range(11, 100, 10)
GPT = Work(flops=10**12, samples=8, tokens=4096)
DDP = {"ddp": {"bucket_mb": 25.0}, "autocast": "bfloat16", "model": {"dtype": "float32"}}
H100 = "NVIDIA H100 80GB HBM3"


def layers(ranks: int, work: Callable[[int, int], Work | None], steps: Iterable[int] = STEPS) -> LayerRecords:
    """Samples every ten steps of 40 ms."""
    found = sampled(model("embed", "head"), ranks=ranks, steps=steps)
    note_events = (
        replace(sample, wall_ns=sample.step * 40_000_000, work=work(sample.rank, sample.step))
        for sample in found.samples
    )
    return replace(found, samples=tuple(note_events))


def job(
    ranks: int = 2,
    work: Callable[[int, int], Work | None] = lambda _rank, _step: GPT,
    facts: Mapping[str, Any] = DDP,
    device: str = "",
    groups: Callable[[int], tuple[ProcessGroup, ...]] = lambda _rank: (),
    **how: Any,
) -> RunData:
    """Steps of exactly 40 ms."""
    phases = {"forward": 12.0, "backward": 20.0, "optimizer": 8.0, "other": 0.0}
    run = Cluster(ranks=ranks, steps=100, phases_ms=phases, comm_ms=0.0, noise=0.0, facts=facts, **how).run()
    kind = "cuda" if device else "cpu"
    series = [
        replace(rank, identity=replace(rank.identity, device=kind, device_name=device), groups=groups(rank.rank))
        for rank in run.ranks
    ]
    return replace(run, ranks=tuple(series), layers=layers(ranks, work))


def group(slot: int, *ranks: int, kind: GroupKind, description: str) -> ProcessGroup:
    return ProcessGroup(
        slot=slot, name=f"{slot}.{ranks[0]}", description=description, kind=kind, ranks=ranks, size=len(ranks)
    )


def throughput(run: RunData) -> dict[str, Any]:
    found = summarize(run)["throughput"]
    assert found is not None
    return found


def speed_line(run: RunData) -> str:
    lines = [line.strip() for line in render_text(summarize(run), width=200).splitlines()]
    return next((line for line in lines if line.startswith("speed ")), "")


# -- figures ----------------------------------------------------------------------------------------------------------


def test_data_parallel_ranks_add_up() -> None:
    run = job(device=H100)
    found = throughput(run)
    assert {name: found[name] for name in ("samples_per_second", "tokens_per_second", "tflops", "mfu", "step_ms")} == {
        "samples_per_second": 400.0,
        "tokens_per_second": 204800.0,
        "tflops": 25.0,
        "mfu": round(25 / 989.4, 4),
        "step_ms": 40.0,
    }
    assert found["per_step"] == {"flops": 2 * 10**12, "samples": 16, "tokens": 8192}
    assert (found["samples"], found["peak_tflops"], found["peak_dtype"]) == (9, 989.4, "bf16")
    assert (found["logged"], found["all_sampled"]) == ({}, False)
    assert found["curve"] == {
        "step": list(STEPS)[1:],
        "samples_per_second": [400.0] * 8,
        "tokens_per_second": [204800.0] * 8,
        "tflops": [25.0] * 8,
        "mfu": [0.025268] * 8,
    }
    assert speed_line(run) == (
        "speed     400 samples/s · 204,800 tokens/s · 25.0 TFLOP/s per GPU (3% of the bf16 peak)"
    )


def test_a_short_batch_now_and_then_does_not_count() -> None:
    def work(_rank: int, step: int) -> Work:
        return Work(samples=3 if step == 91 else 8)

    run = job(work=work)
    found = throughput(run)
    assert (found["samples_per_second"], found["tokens_per_second"], found["tflops"]) == (400.0, None, None)
    assert found["curve"] == {"step": list(STEPS)[1:], "samples_per_second": [400.0] * 7 + [150.0]}
    assert speed_line(run) == "speed     400 samples/s"


def test_sampled_steps_and_evaluations_are_not_the_time_of_a_step() -> None:
    run = job(ranks=1, facts={})
    (series,) = run.ranks
    steps, device = records_of(series)
    steps["flags"][list(STEPS)] |= FLAG_SAMPLED
    steps["wall_ns"][list(STEPS)] += 30_000_000
    steps["phase_ns"][list(STEPS), series.phase_names.index("forward")] += 30_000_000
    steps["wall_ns"][50] += 10**9
    steps["phase_ns"][50, series.phase_names.index("eval")] += 10**9
    run = replace(run, ranks=(with_records(series, steps, device),))
    found = throughput(run)
    assert (found["step_ms"], found["samples_per_second"], found["all_sampled"]) == (40.0, 200.0, False)
    assert found["curve"]["samples_per_second"] == [200.0] * 8
    steps["flags"] |= FLAG_SAMPLED
    run = replace(run, ranks=(with_records(series, steps, device),))
    found = throughput(run)
    assert found["all_sampled"] is True
    assert found["step_ms"] == pytest.approx(40 + 30 * 9 / 99, abs=0.01)
    assert speed_line(run).endswith("of sampled steps, which take longer than others")


def test_without_work_in_the_samples_nothing_is_said() -> None:
    run = job(work=lambda _rank, _step: None)
    assert summarize(run)["throughput"] is None
    assert speed_line(run) == ""
    assert summarize(Cluster(ranks=2, steps=40).run())["throughput"] is None


@pytest.mark.parametrize(
    ("critic", "per_step"),
    [
        (Work(flops=10**12, samples=8), {"flops": 4 * 10**12, "samples": 16, "tokens": None}),
        (Work(flops=10**12, samples=16, tokens=4096), {"flops": 4 * 10**12, "samples": None, "tokens": 8192}),
        (Work(samples=8), {"flops": None, "samples": 16, "tokens": None}),
    ],
)
def test_several_models_add_their_operations_and_agree_on_samples(critic: Work, per_step: dict[str, Any]) -> None:
    run = job()
    (tree,) = run.layers.models.values()
    both = [
        replace(sample, model=name, work=work)
        for sample in run.layers.samples
        for name, work in (("generator", GPT), ("critic", critic))
    ]
    models = LayerRecords(models=dict.fromkeys(("generator", "critic"), tree), samples=tuple(both))
    assert throughput(replace(run, layers=models))["per_step"] == per_step


# -- what ranks have in common ----------------------------------------------------------------------------------------


def tensor_and_data(rank: int) -> tuple[ProcessGroup, ...]:
    """2 x 2: ranks 0 and 1 hold one replica, 2 and 3 the other."""
    first = rank // 2 * 2
    return (
        group(1, first, first + 1, kind="tensor", description="mesh_tp"),
        group(2, rank % 2, rank % 2 + 2, kind="data", description="mesh_dp"),
    )


MESH = {"mesh": {"names": ["dp", "tp"], "shape": [2, 2]}}


def test_ranks_of_one_replica_count_their_samples_once() -> None:
    run = job(4, facts=MESH, groups=tensor_and_data)
    assert replicas_of(run.ranks) == [[0, 1], [2, 3]]
    found = throughput(run)
    assert (found["samples_per_second"], found["tokens_per_second"], found["tflops"]) == (400.0, 204800.0, 25.0)
    assert found["per_step"] == {"flops": 4 * 10**12, "samples": 16, "tokens": 8192}
    assert speed_line(run) == "speed     400 samples/s · 204,800 tokens/s · 25.0 TFLOP/s per rank"


def test_a_stage_without_tokens_takes_those_of_the_first() -> None:
    def pipeline(rank: int) -> tuple[ProcessGroup, ...]:
        return (group(1, 0, 1, kind="pipeline", description="mesh_pp"),)

    facts = {"mesh": {"names": ["pp"], "shape": [2]}, "pipeline": True}
    run = job(2, work=lambda rank, _: replace(GPT, tokens=None) if rank else GPT, facts=facts, groups=pipeline)
    found = throughput(run)
    assert found["per_step"] == {"flops": 2 * 10**12, "samples": 8, "tokens": 4096}
    lacking = job(2, work=lambda rank, _: None if rank else GPT, facts=facts, groups=pipeline)
    found = throughput(lacking)
    assert (found["tflops"], found["per_step"]["flops"]) == (None, None)  # stages differ


def test_parts_of_a_sequence_say_nothing_about_its_tokens() -> None:
    def parts(rank: int) -> tuple[ProcessGroup, ...]:
        return (group(1, 0, 1, kind="context", description="mesh_cp"),)

    run = job(2, facts={"mesh": {"names": ["cp"], "shape": [2]}}, groups=parts)
    assert throughput(run)["per_step"] == {"flops": 2 * 10**12, "samples": 8, "tokens": None}


@pytest.mark.parametrize(
    ("facts", "groups"),
    [
        ({}, lambda _rank: ()),  # ranks of which nothing is known
        (MESH, lambda _rank: ()),  # the groups of the mesh were not seen
        ({"mesh": {"names": [], "shape": [4]}}, lambda _rank: ()),  # tensor parallelism on a mesh without names
        ({"mesh": {"names": ["a", "b"], "shape": [2, 2]}}, lambda _rank: ()),
        ({"mesh": {"names": ["dp"], "shape": [4]}}, tensor_and_data),
        ({**DDP, "pipeline": True}, lambda _rank: ()),
        ({}, lambda _rank: (ProcessGroup(slot=1, name="1", kind="tensor", ranks=(), size=2),)),
    ],
)
def test_if_it_is_not_clear_who_shares_samples_only_operations_are_counted(
    facts: Mapping[str, Any], groups: Callable[[int], tuple[ProcessGroup, ...]]
) -> None:
    found = throughput(job(4, facts=facts, groups=groups))
    assert (found["samples_per_second"], found["tokens_per_second"], found["tflops"]) == (None, None, 25.0)


def test_several_kinds_of_evidence_that_ranks_split_the_data() -> None:
    plain: list[Mapping[str, Any]] = [
        {"fsdp": {"version": 2}, "mesh": {"names": [], "shape": [4]}},
        {"mesh": {"names": ["dp_shard"], "shape": [4]}, "fsdp": {"version": 2}},
        {"loader": {"distributed_sampler": True}},
    ]
    for facts in plain:
        assert replicas_of(job(4, facts=facts).ranks) == [[0], [1], [2], [3]]
    both = "TENSOR_AND_DATA_PARALLEL_GROUP"

    def megatron(rank: int) -> tuple[ProcessGroup, ...]:
        return (*tensor_and_data(rank), group(3, 0, 1, 2, 3, kind="tensor", description=both))

    assert replicas_of(job(4, facts={}, groups=megatron).ranks) == [[0, 1], [2, 3]]
    assert replicas_of(job(4).ranks[:3]) is None  # not all ranks are here
    assert replicas_of(()) is None
    assert replicas_of(job(1, facts={}).ranks) == [[0]]


@pytest.mark.parametrize(
    ("samples", "total"),
    [([8, 8, 4, 4], 12), ([8, 7, 4, 4], None), ([8, None, 4, None], 12), ([8, 8, None, None], None)],
)
def test_ranks_that_disagree_about_shared_samples_are_not_added(samples: list[int | None], total: int | None) -> None:
    run = job(4, lambda rank, _: Work(flops=10**12, samples=samples[rank]), facts=MESH, groups=tensor_and_data)
    found = throughput(run)
    assert found["per_step"] == {"flops": 4 * 10**12, "samples": total, "tokens": None}
    assert ("samples_per_second" in found["curve"]) == (total is not None)


def test_a_rank_that_was_not_sampled_in_a_step_did_what_it_usually_does() -> None:
    run = job(work=lambda rank, step: None if rank and step in (21, 31) else GPT)
    assert throughput(run)["curve"]["samples_per_second"] == [400.0] * 8
    lacking = job(work=lambda rank, _: None if rank else GPT)
    found = throughput(lacking)
    assert (found["samples_per_second"], found["tflops"], found["per_step"]["flops"]) == (None, 25.0, None)


# -- peaks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "facts", "peak", "dtype"),
    [
        (H100, {}, 989.4, "bf16"),  # nothing is known about the dtype
        (H100, {"model": {"dtype": "float16"}}, 989.4, "fp16"),
        (H100, {"model": {"dtype": "float32"}, "fsdp": {"param_dtype": "bfloat16"}}, 989.4, "bf16"),
        (H100, {"model": {"dtype": "float32"}, "tf32": False}, 66.9, "fp32"),
        (H100, {"model": {"dtype": "float32"}, "tf32": True}, 494.7, "tf32"),
        (H100, {"model": {"dtype": "float64"}}, None, None),
        ("Tesla V100-SXM2-32GB", {"model": {"dtype": "float32"}, "tf32": True}, None, None),
        ("", {}, None, None),
        ("Somebody's new device", {}, None, None),
    ],
)
def test_the_peak_is_that_of_the_dtype(device: str, facts: Mapping[str, Any], peak: float, dtype: str) -> None:
    found = throughput(job(1, facts=facts, device=device))
    assert (found["peak_tflops"], found["peak_dtype"]) == (peak, dtype)
    assert found["mfu"] == (None if peak is None else round(25 / peak, 4))


def test_no_utilization_that_cannot_be() -> None:
    """More than the peak, a part of a device, and convolutions, which may use TF32."""
    fp32 = {"model": {"dtype": "float32"}}
    fast = job(1, work=lambda *_: Work(flops=10**13), facts=fp32, device=H100)
    assert (throughput(fast)["tflops"], throughput(fast)["mfu"], throughput(fast)["peak_tflops"]) == (250.0, None, None)
    assert "mfu" not in throughput(fast)["curve"]
    assert peak_of("NVIDIA A100-SXM4-80GB MIG 3g.40gb") is None
    assert peak_of("NVIDIA H200 NVL") == peak_of("NVIDIA H100 NVL")
    run = job(1, facts=fp32, device=H100)
    (tree,) = run.layers.models.values()
    convolution = replace(tree, modules=(*tree.modules[:-1], replace(tree.modules[-1], type="Conv2d")))
    run = replace(run, layers=replace(run.layers, models={tree.id: convolution}))
    assert throughput(run)["mfu"] is None
    mixed = job(2, device=H100)
    other = replace(mixed.ranks[1], identity=replace(mixed.ranks[1].identity, device_name="NVIDIA A100-SXM4-80GB"))
    found = throughput(replace(mixed, ranks=(mixed.ranks[0], other)))
    assert (found["peak_tflops"], found["mfu"]) == (650.7, round(25 / 650.7, 4))


# -- what the script says itself --------------------------------------------------------------------------------------


def test_what_the_script_notes_is_shown_instead() -> None:
    run = job(device=H100)
    pid = run.ranks[0].identity.pid
    noted = {"event": "note", "pid": pid, "rank": 0, "step": 90, "values": {"train/tokens_per_sec": 190_000.0}}
    run = replace(run, events=(noted,))
    found = throughput(run)
    assert (found["samples_per_second"], found["tokens_per_second"], found["tflops"]) == (400.0, None, 25.0)
    assert found["logged"] == {"tokens_per_second": "train/tokens_per_sec"}
    assert "tokens_per_second" not in found["curve"]
    assert speed_line(run) == (
        "speed     train/tokens_per_sec 1.9e+05 (noted by the script) · 400 samples/s · "
        "25.0 TFLOP/s per GPU (3% of the bf16 peak)"
    )


def test_what_the_framework_logs_has_a_line_of_its_own() -> None:
    run = job(device=H100)
    line = training_line("step: 90  loss:  7.1  memory:  1.90GiB(2.4%)  tps: 95,000  tflops: 24.10  mfu: 2.40%")
    assert line is not None
    run = replace(run, training_log={**training_summary([line]), "rank": 0, "step": 89})
    found = throughput(run)
    assert (found["tokens_per_second"], found["tflops"], found["mfu"]) == (None, None, None)
    assert found["logged"] == dict.fromkeys(("tokens_per_second", "tflops", "mfu"), "torchtitan")
    assert speed_line(run) == "speed     400 samples/s"


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("train_samples_per_second", ("samples_per_second",)),
        ("images/s", ("samples_per_second",)),
        ("tokens per second", ("tokens_per_second",)),
        ("perf/tps", ("tokens_per_second",)),
        ("tokens_s", ("tokens_per_second",)),
        ("TFLOPs", ("tflops",)),
        ("mfu", ("mfu",)),
        ("train/throughput", ("samples_per_second", "tokens_per_second")),
        ("tokens_per_step", ()),
        ("samples_seen", ()),
        ("loss", ()),
        ("steps_per_second", ()),
        ("train_steps_per_second", ()),
    ],
)
def test_names_of_rates(name: str, rates: tuple[str, ...]) -> None:
    assert named_rates(name) == rates


# -- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "work"),
    [
        ({"flops": 7, "samples": 2, "tokens": 6}, Work(flops=7, samples=2, tokens=6)),
        ({"flops": 7, "new": 1}, Work(flops=7)),
        ({"flops": 1 << 63, "samples": 2}, Work(samples=2)),
        ({"flops": 7.0, "samples": True, "tokens": -1}, None),
        ({"flops": 0}, None),
        ([7], None),
        (None, None),
    ],
)
def test_foreign_work_is_checked(raw: Any, work: Work | None) -> None:
    assert read_work(raw) == work
    assert work is None or read_work(work.plain()) == work
