"""Each rule on figures or traces made up for it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace

from stepscope.judge.finding_cost import finding_order
from stepscope.records.finding import Finding
from stepscope.reports.finding_text import WHOLE_TRACE, kind_name, price_text
from stepscope.traces.across_ranks.arrivals import match
from stepscope.traces.device.dominant import KernelUse
from stepscope.traces.device.figures import Pace
from stepscope.traces.device.work import StreamIdle, Temporal
from stepscope.traces.findings import analyze_job, find, verdict_of
from stepscope.traces.host.interpreter import Contention
from stepscope.traces.host.optimizers import OptimizerUse
from stepscope.traces.host.stalls import Pause, SyncPlace
from stepscope.traces.job import JobAnalysis
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.model.window import Step
from stepscope.traces.rank_analysis import RankAnalysis, analyze_rank
from stepscope.traces.rulebook import RULES

MS = 1_000_000
GIB = 1 << 30
STEP_MS = 100
STEPS = 4
DEVICES = ({"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "totalGlobalMem": 80 * GIB},)
EMPTY = analyze_rank(MadeTrace(rank=0).trace(), 0)


def idle_of_cause(host: float = 0, kernel: float = 0, other: float = 0, sync: float = 0) -> StreamIdle:
    """Milliseconds."""
    return StreamIdle(
        host_wait_ns=round(host * MS),
        kernel_wait_ns=round(kernel * MS),
        other_ns=round(other * MS),
        sync_ns=round(sync * MS),
    )


def rank_of(
    rank: int = 0,
    *,
    steps: int = STEPS,
    step_ms: float = STEP_MS,
    stepped: bool = True,
    comm: float = 0,
    overlap: float = 0,
    compute: float | None = None,
    exposed_memory: float = 0,
    idle: StreamIdle | None = None,
    device: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    tables: tuple[Table, ...] = (),
    on_device: bool = True,
) -> RankAnalysis:
    """A healthy rank, unless told otherwise; times are milliseconds of all steps together."""
    idle = idle or idle_of_cause()
    whole_ns = round(steps * step_ms * MS)
    idle_ns = idle.host_wait_ns + idle.kernel_wait_ns + idle.other_ns
    comm_ns, overlap_ns, memory_ns = round(comm * MS), round(overlap * MS), round(exposed_memory * MS)
    rest_ns = whole_ns - idle_ns - (comm_ns - overlap_ns) - memory_ns
    times = Temporal(
        span_ns=whole_ns,
        idle_ns=idle_ns,
        compute_ns=rest_ns if compute is None else round(compute * MS),
        comm_ns=comm_ns,
        memory_ns=memory_ns,
        overlap_ns=overlap_ns,
        exposed_comm_ns=comm_ns - overlap_ns,
        exposed_memory_ns=memory_ns,
    )
    length_ns = round(step_ms * MS)
    figures: dict[str, Any] = {
        "device_name": "NVIDIA H100",
        "utilization": (whole_ns - idle_ns) / max(whole_ns, 1),
        "kernel_count": 100 * steps,
        "launch_delay_ns_median": 5 * MS,
        "idle": idle,
    }
    about: dict[str, Any] = {"path": "made.json", "devices": DEVICES}
    found = replace(EMPTY.device, **figures | (device or {}))
    temporal = times if on_device else EMPTY.temporal
    return replace(
        EMPTY,
        rank=rank,
        meta=TraceMeta(**about | (meta or {})),
        steps=tuple(
            Step(
                number=10 + at if stepped else 0,
                name=f"ProfilerStep#{10 + at}" if stepped else "",
                start_ns=at * length_ns,
                end_ns=(at + 1) * length_ns,
            )
            for at in range(steps)
        ),
        pace=Pace(steps=steps, host_ns=steps * length_ns, device_ns=temporal.span_ns, work=temporal, device=found),
        temporal=temporal,
        host=replace(EMPTY.host, **host or {}),
        device=found,
        tables={table.name: table for table in tables},
    )


def job_of(*ranks: RankAnalysis) -> JobAnalysis:
    """Without the critical path, which needs more of a rank than its figures."""
    job = replace(analyze_job([]), ranks=ranks, collectives=match(ranks))
    return replace(job, findings=find(job))


def kinds(job: JobAnalysis) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity) for finding in job.findings]


def only(job: JobAnalysis) -> Finding:
    (finding,) = job.findings
    return finding


def sync(
    wait_ms: float, call: str = "aten::item", source: str | None = "train.py(31): step", count: int = 8
) -> SyncPlace:
    return SyncPlace(call=call, source=source, count=count, wait_ns=round(wait_ms * MS))


# -- nothing --------------------------------------------------------------------------------------------------------


def test_the_largest_certain_gain_of_a_severity_leads() -> None:
    findings = [
        Finding(kind="a", severity="warning", title="", cost={"share": 0.06}, confidence=0.6),
        Finding(kind="b", severity="warning", title="", cost={"share": 0.17}, confidence=0.85),
        Finding(kind="c", severity="warning", title="", cost={"share": 0.18}, confidence=0.7),
        Finding(kind="d", severity="info", title="", cost={"share": 0.5}, confidence=0.9),
        Finding(kind="e", severity="critical", title="", cost={"share": 0.2}, confidence=0.6),
        Finding(kind="f", severity="warning", title="", cost={"share": 0.06}, evidence={"waited_share": 0.4}),
        Finding(
            kind="g", severity="warning", title="", cost={"share": 0.05}, evidence={"waited_share": 0.4}, confidence=0.7
        ),
    ]
    order = [finding.kind for finding in sorted(findings, key=finding_order, reverse=True)]
    assert order == ["e", "f", "b", "c", "a", "g", "d"]


def test_a_healthy_job_gives_no_finding() -> None:
    # Well overlapped, a little of everything, in steps that touch each other.
    healthy = {
        "comm": 100,
        "overlap": 75,
        "exposed_memory": 4,
        "idle": idle_of_cause(host=12, kernel=6, other=2, sync=1),
        "device": {
            "tensor_core_share": 0.97,
            "eligible_fp32_ns": 4 * MS,
            "short_kernel_count": 100,
            "short_kernel_ns": MS,
            "kernel_count": 1000,
            "pageable_copy_ns": 1000,
            "pageable_copy_bytes": 64,
            "low_occupancy": (("flash_fwd_kernel", 0.19, 90 * MS),),
        },
        "host": {
            "loading_ns": 3 * MS,
            "syncs": (sync(60, count=4),),
            "pauses": (Pause(kind="gc", start_ns=0, dur_ns=2 * MS),),
            "compiled_regions": 1,
            "peak_allocated_bytes": 70 * GIB,
            "reserved_at_peak_bytes": 72 * GIB,
            "peak_reserved_bytes": 73 * GIB,
            "device_memory_bytes": 80 * GIB,
            "ddp_backend": "nccl",
        },
    }
    job = job_of(*(rank_of(rank, **healthy) for rank in range(4)))
    assert job.findings == ()
    assert verdict_of(job) == (
        "Nothing stands out: 4 steps of 100 ms on 4 ranks; the device computes 88% of the step, 6% exposed "
        "communication, 5% idle."
    )


def test_nothing_at_all() -> None:
    job = job_of()
    assert job.findings == ()
    assert verdict_of(job) == "The trace contains nothing to analyze."
    job = job_of(rank_of(steps=0, on_device=False))
    assert job.findings == ()
    assert verdict_of(job) == "The trace contains nothing to analyze."


def test_a_few_milliseconds_are_no_evidence() -> None:
    job = job_of(rank_of(steps=1, step_ms=9.9, idle=idle_of_cause(host=4), host={"loading_ns": 4 * MS}))
    assert kinds(job) == [("loader_bound", "info")]
    assert verdict_of(job) == ("Too little data: 1 step of 9.90 ms; the device computes 60% of the step, 40% idle.")
    job = job_of(rank_of(steps=1, step_ms=10, idle=idle_of_cause(host=4), host={"loading_ns": 4 * MS}))
    assert kinds(job) == [("loader_bound", "warning")]


@pytest.mark.parametrize(
    ("steps", "stepped", "severity", "confidence"),
    [(1, True, "warning", 0.6), (2, True, "critical", 0.8), (3, True, "critical", 0.95), (1, False, "warning", 0.5)],
)
def test_how_much_was_seen(steps: int, stepped: bool, severity: str, confidence: float) -> None:
    waits = rank_of(
        steps=steps, stepped=stepped, idle=idle_of_cause(host=50 * steps), host={"loading_ns": 50 * steps * MS}
    )
    finding = only(job_of(waits))
    assert (finding.severity, finding.confidence) == (severity, confidence)
    assert finding.steps == ((10, 9 + steps) if stepped else None)


# -- the host -------------------------------------------------------------------------------------------------------


def test_loader_bound() -> None:
    finding = only(job_of(rank_of(idle=idle_of_cause(host=130), host={"loading_ns": 96 * MS})))
    assert finding.kind == "loader_bound"
    assert finding.severity == "critical"
    assert finding.title == "Training waits for the DataLoader: 24.0 ms of each 100 ms step (24%)."
    assert finding.ranks == ()
    assert finding.phase == "input"
    assert finding.cost == {
        "share": 0.24,
        "seconds": 0.096,
        "rank_hours": 0.0,
        "if_fixed": {"step_ms": 76.0, "speedup": 1.316},
    }
    assert finding.evidence == {
        "loading_share": 0.24,
        "loading_ms_per_step": 24.0,
        "device_waits_ms_per_step": 24.0,
        "worker_processes": None,
        "step_ms": 100.0,
        "steps_used": 4,
    }
    assert "pin_memory=True" in finding.advice[1]


def test_what_is_left_of_the_wait_is_told_by_itself() -> None:
    job = job_of(rank_of(idle=idle_of_cause(host=180), host={"loading_ns": 96 * MS}))
    assert kinds(job) == [("loader_bound", "critical"), ("gpu_idle_host", "warning")]
    assert job.findings[1].title == "The device waits for the host: 21.0 ms of each 100 ms step (21%)."
    # Half of it is its price.
    assert job.findings[1].cost["share"] == 0.105


@pytest.mark.parametrize(
    ("loading", "host", "step_ms"),
    [
        (20, 100, 100),  # exactly five per cent
        (96, 20, 100),  # hidden behind what the device still had to do
        (3.9, 3.9, 10),  # a tenth, but under a millisecond a step
    ],
)
def test_loading_that_costs_nothing(loading: float, host: float, step_ms: float) -> None:
    job = job_of(rank_of(step_ms=step_ms, idle=idle_of_cause(host=host), host={"loading_ns": round(loading * MS)}))
    assert "loader_bound" not in [kind for kind, _ in kinds(job)]


def test_loading_without_a_device() -> None:
    finding = only(job_of(rank_of(on_device=False, host={"loading_ns": 96 * MS})))
    assert (finding.kind, finding.cost["share"]) == ("loader_bound", 0.24)
    assert "__getitem__" in finding.advice[1]


@pytest.mark.parametrize(
    ("workers", "advice"),
    [(False, "Set num_workers: it is 0"), (True, "Use more workers"), (None, "Raise num_workers")],
)
def test_advice_knows_whether_workers_load(workers: bool | None, advice: str) -> None:
    host = {"loading_ns": 96 * MS, "loading_workers": workers}
    assert only(job_of(rank_of(on_device=False, host=host))).advice[0].startswith(advice)


def test_a_loader_of_some_per_cent_is_told() -> None:
    job = job_of(rank_of(on_device=False, host={"loading_ns": 39 * MS}))
    assert kinds(job) == [("loader_bound", "info")]
    assert verdict_of(job) == ("Nothing stands out: 4 steps of 100 ms, all of it on the host, 10% in the DataLoader.")
    assert kinds(job_of(rank_of(on_device=False, host={"loading_ns": 40 * MS}))) == [("loader_bound", "warning")]


def test_loading_of_one_rank_names_it() -> None:
    slow = rank_of(2, idle=idle_of_cause(host=100), host={"loading_ns": 96 * MS})
    finding = only(job_of(rank_of(0), rank_of(1), slow))
    assert finding.ranks == (2,)
    assert finding.title == "Training waits for the DataLoader on rank 2: 24.0 ms of each 100 ms step (24%)."


def test_gc_pauses() -> None:
    pauses = tuple(Pause(kind="gc", start_ns=at * 100 * MS, dur_ns=(6 + at) * MS) for at in range(4))
    finding = only(job_of(rank_of(idle=idle_of_cause(host=30), host={"pauses": pauses})))
    assert (finding.kind, finding.severity) == ("gc_pauses", "warning")
    assert finding.title == (
        "Python's garbage collector stops training: 4 collections, the longest 9.00 ms; 7.50 ms of each 100 ms "
        "step (8%)."
    )
    assert finding.evidence["paused_ms_per_step"] == 7.5
    hidden = rank_of(idle=idle_of_cause(host=8), host={"pauses": pauses})
    assert job_of(hidden).findings == ()


def test_recompiles() -> None:
    host = {"compile_ns": 60 * MS, "recompiles": 2}
    finding = only(job_of(rank_of(idle=idle_of_cause(host=60), host=host)))
    assert (finding.kind, finding.severity) == ("recompiles", "warning")
    assert finding.title == (
        "torch.compile still compiles in the traced steps: 2 recompilations, 15.0 ms of each 100 ms step (15%)."
    )
    first = only(job_of(rank_of(idle=idle_of_cause(host=60), host={"compile_ns": 60 * MS})))
    assert first.title == "torch.compile still compiles in the traced steps: 15.0 ms of each 100 ms step (15%)."
    assert job_of(rank_of(idle=idle_of_cause(host=8), host=host)).findings == ()


def test_graph_breaks() -> None:
    finding = only(job_of(rank_of(host={"graph_breaks": 3, "compiled_regions": 4})))
    assert (finding.kind, finding.severity) == ("graph_breaks", "info")
    assert finding.title == (
        "The compiled model is cut into pieces: 3 graph breaks in a step, after each of which Python runs again."
    )
    assert job_of(rank_of(host={"graph_breaks": 0, "compiled_regions": 4})).findings == ()


def test_host_sync() -> None:
    syncs = (sync(50), sync(10, "cudaDeviceSynchronize", None, 4))
    finding = only(job_of(rank_of(idle=idle_of_cause(host=48, sync=8), host={"syncs": syncs})))
    assert (finding.kind, finding.severity) == ("host_sync", "warning")
    assert finding.title == (
        "The host waits for the device 3 times a step, mostly in aten::item at train.py(31): step, and the device then "
        "runs dry: 12.0 ms of each 100 ms step (12%)."
    )
    assert finding.evidence["places"][0] == {
        "call": "aten::item",
        "source": "train.py(31): step",
        "count": 8,
        "wait_ms": 50.0,
    }
    assert finding.evidence["wait_ms_per_step"] == 15.0
    assert finding.cost["share"] == 0.12
    assert finding.advice[1] == "Begin at train.py(31): step."


def test_a_host_that_is_ahead_may_wait_as_long_as_it_likes() -> None:
    assert job_of(rank_of(idle=idle_of_cause(host=20), host={"syncs": (sync(350),)})).findings == ()


def test_gpu_idle_sync_where_no_call_is_known() -> None:
    finding = only(job_of(rank_of(idle=idle_of_cause(host=50, sync=50))))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("gpu_idle_sync", "warning", 0.125)
    assert job_of(rank_of(idle=idle_of_cause(host=20, sync=20))).findings == ()


def test_launch_bound() -> None:
    device = {
        "kernel_count": 4 * 4200,
        "short_kernel_count": 4 * 3900,
        "launch_delay_ns_median": 6_000,
        "mean_queue": 0.6,
    }
    job = job_of(rank_of(idle=idle_of_cause(host=232), device=device))
    finding = only(job)
    assert (finding.kind, finding.severity) == ("launch_bound", "critical")
    assert finding.title == (
        "The device waits for launches 58.0 ms of each 100 ms step (58%): 4,200 kernels a step of 10.0 µs on "
        "average are over before the "
        "host has launched the next."
    )
    assert finding.cost["share"] == 0.29
    assert finding.evidence["kernels_per_step"] == 4200
    assert finding.evidence["short_kernel_share"] == 0.9286
    assert verdict_of(job) == finding.title
    # Delays: most kernels were queued for long, so it is something else that the device waits for now and then.
    other = job_of(rank_of(idle=idle_of_cause(host=232), device=device | {"launch_delay_ns_median": 30_000}))
    assert kinds(other) == [("gpu_idle_host", "critical")]
    # As are few kernels.
    few = job_of(rank_of(idle=idle_of_cause(host=396), device=device | {"kernel_count": 396}))
    assert kinds(few) == [("gpu_idle_host", "critical")]


def test_a_hole_of_the_main_thread_is_named() -> None:
    device = {"kernel_count": 4 * 4200, "launch_delay_ns_median": 6_000}
    columns = ("step", "start_ns", "dur_ns", "inside", "source", "after", "before")
    holes = table_of(
        "holes", "", columns, [(10 + at, 0, 20 * MS, None, "train.py(9): log", None, None) for at in range(4)]
    )
    finding = only(job_of(rank_of(idle=idle_of_cause(host=100), device=device, tables=(holes,))))
    assert finding.kind == "gpu_idle_host"
    assert finding.title == (
        "The device waits for the host: 25.0 ms of each 100 ms step (25%), mostly in train.py(9): log."
    )


def test_gpu_idle_host() -> None:
    device = {"idle_before": (("aten::copy_", 60 * MS), ("aten::mm", 20 * MS))}
    finding = only(job_of(rank_of(idle=idle_of_cause(host=80), device=device)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("gpu_idle_host", "warning", 0.1)
    assert finding.title == (
        "The device waits for the host: 20.0 ms of each 100 ms step (20%), mostly before aten::copy_."
    )
    assert job_of(rank_of(idle=idle_of_cause(host=39.9))).findings == ()


# -- what the host does without need ------------------------------------------------------------------------------


def test_gil_contention() -> None:
    contention = Contention(shared_ns=160 * MS, threads=2, place="data.py(7): decode")
    finding = only(job_of(rank_of(on_device=False, host={"contention": contention})))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("gil_contention", "warning", 0.2)
    assert finding.title == (
        "2 other threads run Python while the training thread does: 40.0 ms of each 100 ms step (40%), mostly in "
        "data.py(7): decode. Only one of them can hold the GIL."
    )
    shorter = replace(contention, shared_ns=79 * MS)
    assert job_of(rank_of(on_device=False, host={"contention": shorter})).findings == ()
    # A device that never waits for the host does not lose the time.
    assert job_of(rank_of(host={"contention": contention})).findings == ()


def test_unfused_optimizer() -> None:
    use = OptimizerUse(
        name="AdamW.step", host_ns=120 * MS, operators=4 * 900, kernels=4 * 900, kernel_ns=60 * MS, together=False
    )
    finding = only(job_of(rank_of(host={"optimizer": use})))
    assert (finding.kind, finding.severity, finding.phase) == ("unfused_optimizer", "warning", "optimizer")
    assert finding.title == (
        "AdamW.step updates each parameter for itself, with 900 calls a step: 15.0 ms of each 100 ms step (15%)."
    )
    for healthy in (replace(use, together=True), replace(use, operators=396, kernels=396), replace(use, kernel_ns=MS)):
        assert job_of(rank_of(host={"optimizer": healthy})).findings == ()


def test_ranks_with_the_same_optimizer_are_not_told_apart_by_how_long_it_takes() -> None:
    def titles(*ranks: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        """Calls and milliseconds in a step, by rank."""
        uses = [
            OptimizerUse(
                name="AdamW", host_ns=0, operators=4 * calls, kernels=4 * calls, kernel_ns=4 * ms * MS, together=False
            )
            for calls, ms in ranks
        ]
        job = job_of(*(rank_of(rank, host={"optimizer": use}) for rank, use in enumerate(uses)))
        return [(finding.title, finding.ranks) for finding in job.findings]

    assert titles((390, 15), (390, 9)) == []
    assert titles((390, 15), (390, 9), (390, 12)) == [
        ("AdamW updates each parameter for itself, with 390 calls a step: 12.0 ms of each 100 ms step (12%).", ())
    ]
    title = (
        "AdamW updates each parameter for itself on rank 0, with 390 calls a step: 15.0 ms of each 100 ms step (15%)."
    )
    assert titles((390, 15), (20, 9)) == [(title, (0,))]


def test_host_copies() -> None:
    columns = ("operator", "calls", "host_self_ns")
    table = table_of("operators", "", columns, [("aten::copy_", 40, 100 * MS), ("aten::mm", 40, 200 * MS)])
    lines = table_of(
        "operators_by_source", "", ("operator", "source", "host_self_ns"), [("aten::copy_", "train.py(9): to", 90 * MS)]
    )
    finding = only(job_of(rank_of(on_device=False, tables=(table, lines))))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("host_copies", "warning", 0.125)
    assert finding.title == (
        "Copying tensors on the host (aten::copy_) takes 25.0 ms of each 100 ms step (25%), mostly from "
        "train.py(9): to."
    )
    assert job_of(rank_of(tables=(table, lines))).findings == ()


# -- dominant kernels -------------------------------------------------------------------------------------------------


def use(name: str, class_: str, ms: float, **about: Any) -> KernelUse:
    values: dict[str, Any] = {
        "occupancy": 0.12,
        "blocks_per_sm": 4.0,
        "limit": "registers",
        "registers": 168,
        "shared_bytes": 0,
    }
    return KernelUse(name=name, class_=class_, count=40, total_ns=round(ms * MS), **{**values, **about})


def test_low_occupancy_names_what_limits_it() -> None:
    kernels = (use("rope_kernel", "elementwise", 80), use("sm90_gemm", "gemm", 200), use("flash_fwd", "attention", 90))
    finding = only(job_of(rank_of(device={"dominant": kernels})))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("low_occupancy", "warning", 0.1)
    assert finding.title == (
        "rope_kernel keeps 12% of the device's threads busy, because each thread uses 168 registers; such kernels take "
        "20.0 ms of each 100 ms step (20%)."
    )
    assert [row["name"] for row in finding.evidence["kernels"]] == ["rope_kernel"]
    assert job_of(rank_of(device={"dominant": (use("rope", "elementwise", 80, occupancy=0.3),)})).findings == ()
    assert job_of(rank_of(device={"dominant": (use("rope", "elementwise", 80, occupancy=None),)})).findings == ()
    assert job_of(rank_of(device={"dominant": (use("rope", "elementwise", 39),)})).findings == ()


def test_the_limit_is_what_allows_the_fewest_blocks() -> None:
    device: dict[str, int | str] = {
        "id": 0,
        "regsPerMultiprocessor": 65536,
        "sharedMemPerMultiprocessor": 233472,
        "maxThreadsPerMultiprocessor": 2048,
    }

    def limit(blocks: float, threads: int, registers: int, shared: int) -> tuple[str, int | None]:
        made = MadeTrace(rank=0, header={"deviceProperties": [device]})
        made.step(0, 0, 200)
        made.step(1, 200, 200)
        about = {"blocks per SM": blocks, "warps per SM": blocks * threads / 32, "est. achieved occupancy %": 10}
        about |= {"registers per thread": registers, "shared memory": shared}
        made.launched("norm_kernel", at=1, start=10, dur=100, **about)
        (found,) = analyze_rank(made.trace(), 0).device.dominant
        return found.limit, found.registers

    assert limit(40, 256, 168, 0) == ("registers", 168)
    assert limit(40, 256, 32, 120_000) == ("shared memory", 32)
    assert limit(40, 1024, 16, 0) == ("threads", 16)
    assert limit(0.5, 256, 32, 0) == ("blocks", 32)
    for impossible in (int("9" * 400), 1 << 62, 0, -65536, "many"):
        device["regsPerMultiprocessor"] = impossible
        assert limit(40, 256, 168, 120_000) == ("shared memory", 168)


def test_small_batch() -> None:
    kernels = (use("sm80_gemm", "gemm", 80, blocks_per_sm=0.12), use("other_gemm", "gemm", 200))
    finding = only(job_of(rank_of(device={"dominant": kernels})))
    assert (finding.kind, finding.severity) == ("small_batch", "warning")
    assert finding.title == (
        "Matrix products are too small for the device: sm80_gemm has blocks for 12% of the multiprocessors; such "
        "kernels take 20.0 ms of each 100 ms step (20%)."
    )
    assert job_of(rank_of(device={"dominant": (use("gemm", "gemm", 80, blocks_per_sm=1.0),)})).findings == ()


def test_bandwidth_bound() -> None:
    columns = ("class", "count", "total_ns")
    rows = [("elementwise", 400, 150 * MS), ("gemm", 100, 120 * MS), ("normalization", 80, 60 * MS)]
    tiny = ("copy", 100_000, 60 * MS)
    finding = only(job_of(rank_of(tables=(table_of("kernel_classes", "", columns, [*rows, tiny]),))))
    assert (finding.kind, finding.severity) == ("bandwidth_bound", "warning")
    assert finding.title == (
        "The device mostly reads and writes memory: kernels with few operations per byte (elementwise and "
        "normalization) take 52.5 ms of each 100 ms step (52%)."
    )
    assert job_of(rank_of(tables=(table_of("kernel_classes", "", columns, rows[:2]),))).findings == ()


# -- the device -----------------------------------------------------------------------------------------------------


def test_gpu_idle_gaps() -> None:
    finding = only(job_of(rank_of(idle=idle_of_cause(kernel=20, other=60))))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("gpu_idle_gaps", "warning", 0.1)
    assert finding.title == (
        "The device idles between kernels that are already queued: 20.0 ms of each 100 ms step (20%), mostly in "
        "long gaps, in which they wait for another stream or process."
    )
    assert finding.evidence["long_gaps_ms_per_step"] == 15.0
    short = only(job_of(rank_of(idle=idle_of_cause(kernel=60, other=20))))
    assert short.title.endswith("mostly in short gaps.")
    assert short.advice == finding.advice[::-1]
    assert job_of(rank_of(idle=idle_of_cause(kernel=20, other=19.9))).findings == ()


def test_tiny_kernels() -> None:
    device = {"kernel_count": 4 * 3000, "short_kernel_count": 4 * 2400, "short_kernel_ns": 40 * MS}
    finding = only(job_of(rank_of(idle=idle_of_cause(kernel=24), device=device)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("tiny_kernels", "warning", 0.06)
    assert finding.title == (
        "2,400 kernels a step, 80% of all kernels, are shorter than 10 µs; with the gaps between them they take "
        "16.0 ms of each 100 ms step (16%)."
    )
    # Without gaps they cost nothing that is known: told.
    assert kinds(job_of(rank_of(device=device))) == [("tiny_kernels", "info")]
    for change in ({"short_kernel_count": 6000}, {"kernel_count": 2400, "short_kernel_count": 1999}):
        assert job_of(rank_of(device=device | change)).findings == ()
    assert job_of(rank_of(device=device | {"short_kernel_ns": 39 * MS})).findings == ()


def test_pageable_copies() -> None:
    device = {"pageable_copy_ns": 60 * MS, "pageable_copy_bytes": 4 * 150 << 20, "pageable_copy_count": 8}
    finding = only(job_of(rank_of(exposed_memory=40, device=device)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("pageable_copies", "warning", 0.1)
    assert finding.title == (
        "Copies from pageable memory take 15.0 ms a step (150 MiB at 9.8 GiB/s); the device does nothing else for "
        "10.0 ms of each 100 ms step (10%)."
    )
    assert finding.evidence["copies_per_step"] == 2.0
    assert job_of(rank_of(exposed_memory=20, device=device)).findings == ()
    assert job_of(rank_of(exposed_memory=40, device=device | {"pageable_copy_bytes": 4 << 19})).findings == ()


def copied(ms: float, direction: str = "HtoD") -> Table:
    return table_of("copies", "", ("direction", "total_ns"), [(direction, round(ms * MS))])


def test_exposed_copies() -> None:
    finding = only(job_of(rank_of(exposed_memory=80, tables=(copied(70),))))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("exposed_copies", "warning", 0.175)
    assert finding.title == (
        "Copies between host and device that nothing hides take 17.5 ms of each 100 ms step (18%)."
    )
    job = job_of(rank_of(exposed_memory=59, tables=(copied(70),)))
    assert kinds(job) == [("exposed_copies", "info")]
    assert verdict_of(job) == (
        "Nothing stands out: 4 steps of 100 ms; the device computes 85% of the step, 15% exposed copies."
    )
    assert job_of(rank_of(exposed_memory=20, tables=(copied(70),))).findings == ()
    assert job_of(rank_of(exposed_memory=80, tables=(copied(70, "DtoD"),))).findings == ()


def test_a_trace_that_is_mostly_start_up() -> None:
    waits = {"idle": idle_of_cause(host=80), "steps": 1, "step_ms": 400.0, "stepped": False}
    job = job_of(rank_of(host={"longest_call": ("cudaFree", 121 * MS)}, **waits))
    assert kinds(job) == [("start_up", "info"), ("gpu_idle_host", "info")]
    assert verdict_of(job) == (
        "Most of this is start-up: a single cudaFree call takes 121 ms of the 400 ms trace (30%), which has no "
        "profiler steps."
    )
    assert kinds(job_of(rank_of(host={"longest_call": ("cudaFree", 120 * MS)}, **waits))) == [
        ("gpu_idle_host", "warning")
    ]


def test_a_price_is_never_more_than_the_title_says() -> None:
    job = job_of(*(rank_of(rank, idle=idle_of_cause(host=wait)) for rank, wait in enumerate((100, 200, 10, 10))))
    finding = next(each for each in job.findings if each.kind == "gpu_idle_host")
    assert "50.0 ms of each 100 ms step (50%)" in finding.title
    assert (finding.cost["share"], finding.cost["most_share"]) == (0.25, 0.5)
    assert price_text(finding.cost) == (
        "at most 50% of the time (200 ms); a fix typically gains 25%: a step then takes 75.0 ms, 1.33× as fast."
    )


def test_the_price_of_a_trace_without_steps_is_about_the_trace() -> None:
    cost = {"share": 0.25, "seconds": 0.1, "if_fixed": {"step_ms": 300.0, "speedup": 4 / 3}}
    assert price_text(cost, of=WHOLE_TRACE) == (
        "25% of the trace (100 ms); without it the trace takes 300 ms instead of 400 ms, 1.33× as fast."
    )
    assert price_text({**cost, "most_share": 0.5, "most_seconds": 0.2}, of=WHOLE_TRACE) == (
        "at most 50% of the trace (200 ms); a fix typically gains 25%: the trace then takes 300 ms, 1.33× as fast."
    )


@pytest.mark.parametrize(
    ("major", "advice"), [(7, "torch.autocast(dtype=torch.float16)"), (8, "torch.set_float32_matmul_precision")]
)
def test_fp32_matmul(major: int, advice: str) -> None:
    meta = {"devices": ({"name": "some", "computeMajor": major},)}
    device = {"eligible_fp32_ns": 120 * MS, "tensor_core_share": 0.0}
    finding = only(job_of(rank_of(device=device, meta=meta)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("fp32_matmul", "warning", 0.15)
    assert finding.title == (
        "Matrix products and convolutions run in float32 without Tensor Cores: 30.0 ms of each 100 ms step (30%)."
    )
    assert finding.advice[0].startswith(advice)
    assert job_of(rank_of(device={"eligible_fp32_ns": 39 * MS}, meta=meta)).findings == ()


@pytest.mark.parametrize("devices", [({"name": "P100", "computeMajor": 6},), (), ({"name": "unknown"},)])
def test_fp32_on_devices_without_tensor_cores(devices: tuple[dict[str, Any], ...]) -> None:
    assert job_of(rank_of(device={"eligible_fp32_ns": 300 * MS}, meta={"devices": devices})).findings == ()


def test_low_occupancy_attention() -> None:
    device = {"low_occupancy": (("flash_fwd_splitkv_kernel", 0.04, 80 * MS), ("flash_bwd", 0.2, 90 * MS))}
    finding = only(job_of(rank_of(device=device)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("low_occupancy_attention", "warning", 0.1)
    assert finding.title == (
        "Attention keeps few of the device's threads busy: flash_fwd_splitkv_kernel runs at 4% occupancy; such kernels "
        "take 20.0 ms of each 100 ms step (20%)."
    )
    assert finding.confidence == 0.5
    assert job_of(rank_of(device={"low_occupancy": (("flash_fwd", 0.1, 300 * MS),)})).findings == ()
    assert job_of(rank_of(device={"low_occupancy": (("flash_fwd", 0.04, 39 * MS),)})).findings == ()


def test_gpu_underused_is_told_where_nothing_says_why() -> None:
    job = job_of(rank_of(device={"utilization": 0.31}))
    assert kinds(job) == [("gpu_underused", "warning")]
    assert job.findings[0].title == ("The device has nothing to do for 69.0 ms of each 100 ms step (69%).")
    assert job_of(rank_of(device={"utilization": 0.5})).findings == ()
    explained = job_of(
        rank_of(idle=idle_of_cause(host=300), host={"loading_ns": 300 * MS}, device={"utilization": 0.2})
    )
    assert kinds(explained) == [("loader_bound", "critical")]


# -- memory and practices -------------------------------------------------------------------------------------------


def memory(allocated: float, at_peak: float, reserved: float) -> dict[str, int]:
    """GiB, of 80."""
    return {
        "peak_allocated_bytes": round(allocated * GIB),
        "reserved_at_peak_bytes": round(at_peak * GIB),
        "peak_reserved_bytes": round(reserved * GIB),
        "device_memory_bytes": 80 * GIB,
    }


def test_memory_near_limit() -> None:
    job = job_of(rank_of(0, host=memory(60, 61, 61)), rank_of(1, host=memory(74, 75, 75)))
    finding = only(job)
    assert (finding.kind, finding.severity, finding.ranks) == ("memory_near_limit", "warning", (1,))
    assert finding.title == "Device memory is nearly full at the peak on rank 1: 74 GiB of 80 GiB (92%) in use."
    assert kinds(job_of(rank_of(host=memory(78, 79, 79)))) == [("memory_near_limit", "critical")]
    assert job_of(rank_of(host=memory(72, 79, 79))).findings == ()


def test_fragmentation() -> None:
    finding = only(job_of(rank_of(host=memory(40, 64, 64))))
    assert (finding.kind, finding.severity) == ("fragmentation", "warning")
    assert finding.title == ("The allocator holds 64 GiB of device memory at the peak, 24 GiB (38%) of it not in use.")
    # There is room on the device: told.
    assert kinds(job_of(rank_of(host=memory(20, 40, 40)))) == [("fragmentation", "info")]
    assert job_of(rank_of(host=memory(45, 64, 64))).findings == ()
    assert job_of(rank_of(host=memory(0.5, 1.4, 1.4))).findings == ()


def test_data_parallel() -> None:
    finding = only(job_of(rank_of(host={"uses_data_parallel": True})))
    assert (finding.kind, finding.severity) == ("data_parallel", "warning")
    assert "DistributedDataParallel" in finding.advice[0]


@pytest.mark.parametrize(
    ("backend", "world_size", "on_device", "found"),
    [
        ("gloo", 2, True, True),
        ("gloo", 2, False, False),
        ("gloo", 1, True, False),
        ("nccl", 2, True, False),
        ("cpu:gloo,cuda:nccl", 2, True, False),
        (None, 2, True, False),
    ],
)
def test_ddp_without_nccl(backend: str | None, world_size: int, on_device: bool, found: bool) -> None:
    rank = rank_of(host={"ddp_backend": backend}, meta={"world_size": world_size}, on_device=on_device)
    assert kinds(job_of(rank)) == ([("ddp_without_nccl", "warning")] if found else [])


def test_truncated_trace() -> None:
    job = job_of(rank_of(0), rank_of(1, meta={"truncated": "the file ends in the middle of an event"}))
    finding = only(job)
    assert (finding.kind, finding.severity, finding.ranks) == ("truncated_trace", "info", (1,))
    assert finding.title == "The trace of rank 1 ends early: the file ends in the middle of an event."
    assert verdict_of(job).startswith("Nothing stands out: 4 steps of 100 ms on 2 ranks")
    without_steps = rank_of(0, steps=0, meta={"truncated": "cut"}, on_device=False)
    assert kinds(job_of(without_steps)) == [("truncated_trace", "info")]


# -- communication --------------------------------------------------------------------------------------------------


def test_low_overlap() -> None:
    finding = only(job_of(rank_of(0, comm=80, overlap=16), rank_of(1, comm=80, overlap=16)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("low_overlap", "warning", 0.12)
    assert finding.title == (
        "Only 20% of the communication is hidden behind the computation: for 16.0 ms of each 100 ms step (16%) "
        "nothing is computed."
    )
    assert finding.evidence["hidden_share"] == 0.2
    worst = only(job_of(rank_of(0, comm=80, overlap=70), rank_of(1, comm=80, overlap=16)))
    assert worst.ranks == (1,)
    assert job_of(rank_of(comm=50, overlap=10)).findings == ()


def test_exposed_communication() -> None:
    finding = only(job_of(rank_of(0, comm=200, overlap=120), rank_of(1, comm=200, overlap=120)))
    assert (finding.kind, finding.severity, finding.cost["share"]) == ("exposed_communication", "warning", 0.1)
    assert finding.title == "Communication that nothing hides takes 20.0 ms of each 100 ms step (20%)."
    # There is next to nothing to hide it behind.
    assert only(job_of(rank_of(comm=380, overlap=10, compute=20))).kind == "exposed_communication"
    assert job_of(rank_of(comm=200, overlap=160)).findings == ()


def test_slow_rank() -> None:
    job = job_of(*(rank_of(rank, compute=330 if rank == 2 else 250) for rank in range(4)))
    finding = only(job)
    assert (finding.kind, finding.ranks, finding.cost["share"]) == ("slow_rank", (2,), 0.2)
    assert finding.title == "Rank 2 computes 82.5 ms in every step, the median rank 62.5 ms."
    assert finding.evidence["by_rank_ms"] == {"0": 62.5, "1": 62.5, "2": 82.5, "3": 62.5}
    assert job_of(*(rank_of(rank, compute=270 if rank == 2 else 250) for rank in range(4))).findings == ()
    # One step proves nothing, nor do two ranks.
    assert job_of(*(rank_of(rank, steps=1, compute=80 if rank else 60) for rank in range(4))).findings == ()
    assert job_of(*(rank_of(rank, compute=330 if rank else 250) for rank in range(2))).findings == ()


def exchanging(
    rank: int,
    ranks: int,
    late_us: dict[int, float],
    *,
    steps: int = 4,
    each: int = 3,
    spikes: dict[int, tuple[int, float]] | None = None,
) -> RankAnalysis:
    """Ranks compute 2 ms, more if late, and exchange, so many times a step; the last step is left out.

    ``spikes``: by rank, so much later in one step.
    """
    made = MadeTrace(rank=rank, world_size=ranks)
    now = 0.0
    for step in range(steps + 1):
        start = now
        for _ in range(each):
            extra = {late: by for late, (at, by) in (spikes or {}).items() if at == step}
            delays = {late: late_us.get(late, 0) + extra.get(late, 0) for late in late_us.keys() | extra.keys()}
            work = 2000 + delays.get(rank, 0)
            made.launched("gemm", at=now, start=now + 10, dur=work)
            ends = now + 10 + 2000 + max(delays.values(), default=0) + 100
            arrives = now + 10 + work
            made.launched(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                at=now + 5,
                start=arrives,
                dur=ends - arrives,
                stream=20,
            )
            now = ends
        made.step(step, start, now - start)
    return analyze_rank(made.trace(), rank)


def test_collective_straggler() -> None:
    job = job_of(*(exchanging(rank, 4, {2: 500}) for rank in range(4)))
    assert job.findings[0].kind == "collective_straggler"
    finding = job.findings[0]
    assert (finding.ranks, finding.severity) == ((2,), "warning")
    assert finding.title == (
        "Rank 2 comes last to 12 of 12 collectives; the others wait 1.50 ms of each 7.83 ms step (19%) for it; "
        "its kernels take "
        "1.50 ms a step longer than its peers' (gemm 2.50 ms instead of 2.00 ms, 25% longer)."
    )
    assert finding.cost["share"] == round(1.5 / 7.83, 4)
    assert finding.evidence["last_counts"] == {"0": 0, "1": 0, "2": 12, "3": 0}
    assert finding.evidence["waited_ms_per_step"] == 1.5
    # What is waited for it is its doing, not the network's; that it computes longer is said there.
    assert [kind for kind, severity in kinds(job) if severity != "info"] == ["collective_straggler"]
    assert verdict_of(job) == finding.title


def test_no_straggler_among_equals() -> None:
    job = job_of(*(exchanging(rank, 4, {}) for rank in range(4)))
    assert job.findings == ()
    late_by_little = job_of(*(exchanging(rank, 4, {2: 30}) for rank in range(4)))
    assert late_by_little.findings == ()


@pytest.mark.parametrize(("steps", "found"), [(2, False), (3, True)])
def test_few_collectives(steps: int, found: bool) -> None:
    job = job_of(*(exchanging(rank, 4, {2: 5000}, steps=steps, each=1) for rank in range(4)))
    assert ("collective_straggler" in [kind for kind, _ in kinds(job)]) is found


def test_few_collectives_and_uneven_delays_prove_nothing() -> None:
    job = job_of(*(exchanging(rank, 2, {1: 500}, steps=6, each=1, spikes={1: (0, 6000)}) for rank in range(2)))
    assert "collective_straggler" not in [kind for kind, _ in kinds(job)]
    more = job_of(*(exchanging(rank, 2, {1: 500}, steps=8, each=1, spikes={1: (0, 6000)}) for rank in range(2)))
    assert "collective_straggler" in [kind for kind, _ in kinds(more)]


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_knows_every_kind() -> None:
    root = Path(__file__).parents[2]
    traces = root / "src/stepscope/traces"
    sources = "".join(path.read_text() for path in [*(traces / "rules").glob("*.py"), traces / "findings.py"])
    known = {"start_up", *(kind for rule in RULES for kind in rule.kinds)}
    page = (root / "docs/trace-findings.md").read_text()
    assert set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == known
    families = page.partition("| family |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", families)) == known
    assert {kind for kind in known if kind_name(kind) == kind.replace("_", " ")} == set(), "a name for readers"
    keys = set(re.findall(r'^ +"([a-z0-9_]+)": ', sources, re.MULTILINE)) - {
        "share",
        "seconds",
        "rank_hours",
        "if_fixed",
    }
    inner = {"speedup", "call", "source", "count", "wait_ms", "name", "occupancy_share", "total_ms", "idle"}
    inner |= {"blocks", "registers", "threads"}
    assert {key for key in keys - inner if f"`{key}`" not in page} == set()
