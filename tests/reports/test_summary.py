"""summary.json: its keys, its figures, and that any run has one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, Fault, slow_at
from fakes.records import records_of, with_records
from fakes.traffic import Exchange, SlowLink, Traffic
from summary_consistency import contradictions

from stepscope.records.hang import HangRecord
from stepscope.records.identity import FACTS_FORM
from stepscope.records.series import RankError, RunData
from stepscope.reports import render_text, summarize
from stepscope.reports.finding_text import KINDS, finding_document, finding_price
from stepscope.reports.summary import status_of

KEYS = [
    *("schema", "run", "status", "status_text", "status_severity", "exit_code", "world_size", "ranks"),
    *("time_account", "goodput", "attempt_ends", "advice_after_failure"),
    *("steps", "step_time", "throughput", "clock", "phases"),
    *("communication", "memory", "host"),
    *(
        "facts",
        "facts_differ",
        "settings",
        "metrics",
        "training_log",
        "verdict",
        "findings",
        "errors",
        "hangs",
        "attempts",
        "nodes",
        "history",
        "withdrawn",
        "notices",
    ),
    "logs",
]
BY_NAME = {
    "phases",
    "median_ms_by_rank",
    "excess_ms_by_phase",
    "opportunities",
    "exit_codes",
    "reasons",
    "git",
    "metrics",
}
"""Objects whose keys are names out of the run."""
GIB = 1 << 30


def test_ranks_that_do_not_wait_for_one_another_have_one_step_time() -> None:
    """Two jobs of one rank each, one of them slower: the price of a finding and the table speak of the same step."""
    fast, slow = (
        Cluster(ranks=1, steps=80, seed=seed, phases_ms={"input": ms}).run() for seed, ms in ((0, 20.0), (1, 25.0))
    )
    other = replace(slow.ranks[0], rank=1, identity=replace(slow.ranks[0].identity, rank=1, world_size=2))
    run = replace(fast, ranks=(replace(fast.ranks[0], identity=replace(fast.ranks[0].identity, world_size=2)), other))
    summary = summarize(run)
    assert summary["step_time"]["mean_ms"] == pytest.approx(25.0, rel=0.02)
    assert summary["steps"]["per_second"] == pytest.approx(40.0, rel=0.02)
    assert contradictions(summary, render_text(summary)) == []


def test_sampled_steps_do_not_count_in_percentiles_and_maxima() -> None:
    sampled = tuple(range(10, 100, 10))
    cost = tuple(slow_at(rank, "forward", 60.0, range(step, step + 1)) for step in sampled for rank in range(2))
    plain, with_sampling = (
        Cluster(ranks=2, steps=100),
        Cluster(ranks=2, steps=100, faults=cost, sampled_steps=sampled),
    )
    before, after = (summarize(cluster.run())["step_time"] for cluster in (plain, with_sampling))
    assert after["max_ms"] < 60 < before["max_ms"] + 60
    assert after["max_step"] not in sampled
    assert (after["p90_ms"], after["p99_ms"]) == pytest.approx((before["p90_ms"], before["p99_ms"]), rel=0.02)


def host_sample(second: int, cpu_percent: Any = 50.0) -> dict[str, Any]:
    return {
        "wall_ns": ANCHOR_WALL_NS + second * 10**9,
        "node": "node0",
        "kind": "host",
        "cpu_percent": cpu_percent,
        "cpu_count": 8,
        "load1": 1.5,
        "mem_total": 64 * GIB,
        "mem_available": (40 - second) * GIB,
        "swap_used": 0,
        "net_rx_bps": 100.0 * second,
    }


def process_sample(rank: int, rss: int) -> dict[str, Any]:
    return {"wall_ns": 1, "node": "node0", "kind": "process", "pid": 1000 + rank, "rank": rank, "rss": rss}


def gpu_sample(index: int, util: float, reasons: list[str], second: int = 2) -> dict[str, Any]:
    return {
        "wall_ns": ANCHOR_WALL_NS + second * 10**9,
        "node": "node0",
        "kind": "gpu",
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "util_percent": util,
        "mem_used": 10 * GIB,
        "mem_total": 141 * GIB,
        "throttle_reasons": reasons,
    }


MESH = Traffic(
    mesh={"dp": 2, "tp": 2},
    exchanges=(
        Exchange(dimension="tp", count=4, mb=8.0, ms=0.8),
        Exchange(dimension="dp", op="reduce_scatter", mb=16.0, ms=2.0),
    ),
)
RUNS = {
    "straggler": Cluster(faults=(slow_at(2, "forward", 30.0),)),
    "input": Cluster(phases_ms={"input": 40.0, "forward": 10.0, "mine": 1.0}, samples=(host_sample(0),)),
    "healthy": Cluster(ranks=1, device_timed=True, samples=(gpu_sample(0, 90.0, ["hw_thermal"]), process_sample(0, 5))),
    "crash": Cluster(
        deaths=(Death(rank=1, step=50), Death(rank=0, step=51, state="exception")),
        errors=(RankError(rank=0, pid=1000, type="RuntimeError", message="Connection reset by peer"),),
    ),
    "mesh": Cluster(traffic=replace(MESH, faults=(SlowLink(ranks=(3,), times=5.0),))),
    "grown": Cluster(traffic=replace(MESH, faults=(SlowLink(ranks=range(4), times=6.0, steps=range(50, 100)),))),
    "imbalance": Cluster(
        traffic=replace(MESH, faults=(SlowLink(ranks=(2, 3), times=5.0, bytes_times=5.0, dimension="tp"),))
    ),
    "overlap": Cluster(comm_ms=40.0, ddp_hidden_ms=1.0, facts={"ddp": {"gradient_mb": 80.0, "bucket_mb": 100.0}}),
    "short": Cluster(steps=4),
    "empty": Cluster(ranks=0, steps=0),
}


def names_in(document: Any, inside: str = "") -> set[str]:
    if isinstance(document, list):
        return {name for item in document for name in names_in(item)}
    if not isinstance(document, dict):
        return set()
    own = set() if inside in BY_NAME else set(document)
    return own | {name for key, value in document.items() for name in names_in(value, key)}


@pytest.mark.parametrize("name", RUNS)
def test_no_summary_contradicts_itself(name: str) -> None:
    summary = summarize(RUNS[name].run())
    assert contradictions(summary, render_text(summary)) == []


def test_contradictions_are_seen() -> None:
    summary = summarize(RUNS["straggler"].run())
    text = render_text(summary)
    summary["findings"][0]["cost"]["share"] = 0.9
    assert any("90.0% of the training time, but" in line for line in contradictions(summary, text))
    summary["verdict"]["title"] = "Something else."
    assert "the verdict is not the first finding" in contradictions(summary, text)


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_the_whole_document(name: str) -> None:
    summary = summarize(RUNS[name].run(), logs=["logs/rank-0.log"])
    assert list(summary) == KEYS
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def with_facts(*facts: dict[str, Any]) -> RunData:
    run = Cluster(ranks=len(facts)).run()
    return replace(run, ranks=tuple(replace(rank, facts=fact) for rank, fact in zip(run.ranks, facts, strict=True)))


def test_facts_are_those_of_the_lowest_rank_that_has_any() -> None:
    loader = {"num_workers": 2, "prefetch_factor": None, "length": 10, "set_epoch_missing": True}
    other = {"num_workers": 4, "prefetch_factor": 2, "length": 9, "set_epoch_missing": False}
    document = {"loader": loader, "threads": 8, "ddp": {"gradient_mb": 4.0, "static_graph": True}}
    rest = {"loader": other, "threads": 1, "ddp": {"gradient_mb": 3.0, "static_graph": True}, "mesh": {"names": []}}
    summary = summarize(with_facts({}, document, rest, {"threads": 8}))
    assert summary["facts"] == document
    assert summary["facts_differ"] == ["loader.num_workers", "loader.prefetch_factor", "threads"]
    alike = summarize(with_facts(document, document, {}))
    assert (alike["facts"], alike["facts_differ"]) == (document, [])
    assert (summarize(with_facts({}))["facts"], summarize(with_facts({}))["facts_differ"]) == ({}, [])


@pytest.mark.parametrize(
    ("by", "whose"),
    [
        ("transformers", " of Hugging Face Trainer"),
        ("lightning", " of Lightning's Trainer"),
        ("deepspeed", " of the DeepSpeed engine"),
        ("optimizer", " by the optimizer's own count"),
    ],
)
def test_which_steps_of_the_training_they_are_after_a_resume(by: str, whose: str) -> None:
    summary = summarize(with_facts({"global_step": {"by": by, "first": 500}}))
    first, last = summary["steps"]["first"], summary["ranks"][0]["last_step"]
    text = f"resumed steps {first}–{last} here are global steps {500 + first}–{500 + last}{whose} "
    assert text in " ".join(render_text(summary).split())


def test_from_the_beginning_the_steps_are_the_same() -> None:
    assert "resumed" not in render_text(summarize(with_facts({"global_step": {"by": "lightning", "first": 0}})))


@pytest.mark.parametrize(
    ("counted", "message"),
    [
        (
            {"by": "lightning", "first": 240, "last": 439, "at": 99},
            (
                "resumed step 0 here is global step 240 and step 99 is global step 439 of Lightning's Trainer, "
                "which counts the steps of each optimizer "
            ),
        ),
        (
            {"by": "lightning", "first": 0, "last": 199, "at": 99},
            "counted step 99 here is global step 199 of Lightning's Trainer, which counts the steps of each optimizer ",
        ),
        (
            {"by": "optimizer", "first": 50, "last": 524, "at": 99},
            "resumed step 0 here is global step 50 and step 99 is global step 524 by the optimizer's own count ",
        ),
    ],
)
def test_both_numbers_of_a_step_where_the_framework_counts_otherwise(counted: dict[str, Any], message: str) -> None:
    assert message in " ".join(render_text(summarize(with_facts({"global_step": counted}))).split())


def progress(by: str, numbers: list[list[int]], *epochs: list[int]) -> dict[str, Any]:
    return {"progress": {"by": by, "numbers": numbers, "epochs": list(epochs)}}


@pytest.mark.parametrize(
    ("facts", "resumed", "about"),
    [
        (
            {
                "global_step": {"by": "transformers", "first": 500},
                **progress("transformers", [[0, 501]], [0, 2], [50, 3]),
                "evaluations": [
                    {"name": "eval", "count": 3, "ms": 1250.0, "after": 60},
                    {"name": "test", "count": 1, "ms": 41.0, "after": 100},
                ],
            },
            "resumed steps 0–99 here are global steps 501–600 of Hugging Face Trainer ",
            "trainer: Hugging Face, logged as steps 501–600, epochs 2–3, eval 3 times (1.25 s), test once (41.0 ms)",
        ),
        # Lightning's loggers count from 0, too.
        (progress("lightning", [[0, 0]], [0, 0]), "", "trainer: Lightning, epoch 0"),
        (
            {"global_step": {"by": "optimizer", "first": 40}, **progress("accelerate", [[0, 41]])},
            "resumed steps 0–99 here are global steps 41–140 as the script logs them with Accelerate ",
            "trainer: Accelerate, logged as steps 41–140",
        ),
        # Two trainings in one process: no range of numbers stands for both.
        (progress("transformers", [[0, 1], [60, 1]], [0, 0]), "", "trainer: Hugging Face, epoch 0"),
        (progress("transformers", [[0, 0]]), "", None),
    ],
)
def test_steps_epochs_and_evaluations_as_the_framework_counts_them(
    facts: dict[str, Any], resumed: str, about: str | None
) -> None:
    summary = summarize(with_facts(facts))
    text = " ".join(render_text(summary).split())
    assert summary["settings"] == ([] if about is None else [about])
    assert resumed in text and ("resumed" in text) == bool(resumed)
    assert about is None or about.removeprefix("trainer: ").replace(",", "") in text.replace(" ·", "")


def test_findings_have_the_steps_and_epochs_of_the_framework() -> None:
    run = Cluster(ranks=2, faults=(Fault(rank=1, phase="forward", ms=20),)).run()
    facts = progress("transformers", [[0, 501]], [0, 2], [50, 3])
    counted = replace(run, ranks=tuple(replace(rank, facts=facts) for rank in run.ranks))
    bare, found = summarize(run)["findings"][0], summarize(counted)["findings"][0]
    first, last = found["steps"]
    assert found["evidence"] == {**bare["evidence"], "logged_steps": [first + 501, last + 501], "epochs": [2, 3]}
    assert {**found, "evidence": bare["evidence"]} == bare
    assert finding_document(found, over=True)["text"]["facts"][-2:] == [
        f"logged as steps {501 + first}–600",
        "epochs 2–3",
    ]


def test_one_of_several_optimizers_counts_otherwise_from_the_beginning() -> None:
    text = render_text(summarize(with_facts({"global_step": {"by": "optimizer", "first": 0, "last": 599, "at": 99}})))
    assert "counted" not in text


FSDP = {
    "version": 2,
    "units": 25,
    "parameters": 1 << 30,
    "largest_share": 0.12,
    "strategy": "full_shard",
    "resharded_units": 24,
    "param_dtype": "bfloat16",
    "reduce_dtype": "float32",
    "cpu_offload": False,
    "forward_prefetch": False,
    "backward_prefetch": "implicit",
}


@pytest.mark.parametrize(
    ("fsdp", "message"),
    [
        (
            FSDP,
            (
                "FSDP2: 25 units, largest 12% of the parameters, resharded after forward, bf16 parameters, fp32 "
                "reduction, no offload"
            ),
        ),
        (
            {**FSDP, "units": 1, "largest_share": 1.0, "resharded_units": 0, "param_dtype": "float32"},
            "FSDP2: 1 unit, kept after forward, fp32 parameters, fp32 reduction, no offload",
        ),
        (
            {**FSDP, "resharded_units": 20, "forward_prefetch": True, "backward_prefetch": "explicit"},
            (
                "FSDP2: 25 units, largest 12% of the parameters, 20 of them resharded after forward, bf16 parameters, "
                "fp32 reduction, explicit forward and backward prefetch, no offload"
            ),
        ),
        (
            {**FSDP, "version": 1, "strategy": "hybrid_shard", "resharded_units": 25, "backward_prefetch": None},
            (
                "FSDP1: 25 units, largest 12% of the parameters, replicated across shards (hybrid), resharded after "
                "forward, bf16 parameters, fp32 reduction, no backward prefetch, no offload"
            ),
        ),
        (
            {"version": 1, "units": 2, "strategy": "no_shard", "resharded_units": 0, "cpu_offload": True},
            "FSDP1: 2 units, not sharded, offloaded to the CPU",
        ),
    ],
)
def test_how_the_model_is_sharded(fsdp: dict[str, Any], message: str) -> None:
    summary = summarize(with_facts({"fsdp": fsdp}, {"fsdp": fsdp}))
    assert summary["settings"] == [message]
    label, _, about = message.partition(": ")
    shown = " ".join(render_text(summary).split()).partition(f" {label} ")[2].partition(" whole run ")[0]
    assert shown.replace(" · ", " ") == about.replace(", ", " ")


@pytest.mark.parametrize("facts", [{}, {"fsdp": {"version": 2}}, {"ddp": {"bucket_mb": 25.0}}], ids=str)
def test_a_model_that_is_not_sharded(facts: dict[str, Any]) -> None:
    assert summarize(with_facts(facts))["settings"] == []


def test_every_fact_is_in_the_docs(root: Path) -> None:
    section = (root / "docs/schema.md").read_text().partition("### facts")[2].partition("\n### ")[0]
    documented = set(re.findall(r"`([a-z0-9_]+)`", section))
    for key, form in FACTS_FORM.items():
        assert {key, *(form if isinstance(form, dict) else ())} <= documented


def test_every_key_is_in_the_docs(root: Path) -> None:
    pages = "".join((root / "docs" / f"{name}.md").read_text() for name in ("schema", "diagnosis", "goodput"))
    documented = set(re.findall(r"`([a-z0-9_]+)`", pages))
    given = {key for cluster in RUNS.values() for key in names_in(summarize(cluster.run()))}
    assert given - documented == set()


def test_every_kind_is_in_the_docs(root: Path) -> None:
    text = (root / "docs/schema.md").read_text()
    assert [kind for kind in KINDS if f"**`{kind}`**" not in text] == []
    given = {finding["kind"] for cluster in RUNS.values() for finding in summarize(cluster.run())["findings"]}
    assert given <= KINDS.keys()


def test_what_is_exchanged_is_told_by_group_operation_and_rank() -> None:
    traffic = replace(MESH, noise=0.0, work_ms=0.0)
    facts = {"ddp": {"group": "default_pg"}}
    late = (slow_at(3, "forward", 5.0),)
    job = Cluster(steps=40, noise=0.0, traffic=traffic, ddp_hidden_ms=3.0, faults=late, facts=facts)
    table = summarize(job.run())["communication"]
    assert table["groups_left_out"] == 0
    rows = {(row["description"], row["name"]): row for row in table["groups"]}
    assert list(rows) == [
        *[("mesh_tp", "tp2"), ("mesh_dp", "dp0"), ("mesh_dp", "dp1"), ("mesh_tp", "tp0")],
        ("default_pg", ""),
    ]
    tensor = rows["mesh_tp", "tp2"]
    assert {key: tensor[key] for key in ("kind", "backend", "size", "ranks", "timed")} == {
        "kind": "tensor",
        "backend": "gloo",
        "size": 2,
        "ranks": [2, 3],
        "timed": True,
    }
    per_s = pytest.approx((32 << 20) / 0.0032)
    assert tensor["ops"] == [
        {
            "op": "all_reduce",
            "count": 4.0,
            "bytes": 32 << 20,
            "exposed_ms": 5.7,
            "overlapped_ms": 0.0,
            "device": False,
            "transfer_ms": 3.2,
            "wait_ms": None,
            "skew_ms": 0.0,
            "algorithm_bytes_per_s": per_s,
            "bus_bytes_per_s": per_s,
        }
    ]
    assert table["measured"] is None
    assert tensor["arrivals"] == {
        "steps": 32,
        "collectives": 128,
        "transfer_ms": 3.2,
        "skew_ms": 0.0,
        "ranks": [
            {"rank": 3, "wait_ms": 0.0, "last": 32, "late_ms": 5.0},
            {"rank": 2, "wait_ms": 5.0, "last": 0, "late_ms": 0.0},
        ],
    }
    (own,) = rows["default_pg", ""]["ops"]
    assert own == {
        "op": "all_reduce (DDP)",
        "count": None,
        "bytes": None,
        "exposed_ms": pytest.approx(1.0, abs=0.001),
        "overlapped_ms": pytest.approx(3.0, abs=0.001),
        "device": False,
        **dict.fromkeys(("transfer_ms", "wait_ms", "skew_ms", "algorithm_bytes_per_s", "bus_bytes_per_s")),
    }


def test_what_only_orders_streams_has_no_times() -> None:
    run = Cluster(steps=40, traffic=replace(MESH, backend="nccl")).run()
    on_device = tuple(replace(rank, identity=replace(rank.identity, device="cuda")) for rank in run.ranks)
    rows = summarize(replace(run, ranks=on_device))["communication"]["groups"]
    assert {row["arrivals"] for row in rows} == {None}
    assert {(op["exposed_ms"], op["overlapped_ms"]) for row in rows for op in row["ops"]} == {(None, None)}
    assert all(op["bytes"] for row in rows for op in row["ops"])


def test_one_rank_exchanges_nothing() -> None:
    assert summarize(RUNS["healthy"].run())["communication"] is None


def test_figures_of_a_noiseless_run_are_exact() -> None:
    meta = {"end": {"exit_code": 0, "status": "finished", "wall_ns": ANCHOR_WALL_NS + 9 * 10**9}}
    summary = summarize(Cluster(ranks=4, steps=21, noise=0.0, faults=(slow_at(2, "forward", 30.0),), meta=meta).run())
    assert (summary["status"], summary["exit_code"], summary["world_size"]) == ("finished", 0, 4)
    assert summary["run"]["duration_s"] == 10.0
    assert summary["run"]["hosts"] == ["node0"]
    assert summary["steps"] == {
        "total": 21,
        "compared": 21,
        "steady": 20,
        "left_out": 0,
        "first": 0,
        "last": 20,
        "per_second": pytest.approx(1000 / 69, abs=1e-3),
        "seconds": pytest.approx(21 * 0.069 + 0.2, abs=1e-3),
        "warmup": {"count": 1, "seconds": pytest.approx(0.269, abs=1e-3), "reasons": {"first": 1}, "steps": [0]},
    }
    time = summary["step_time"]
    assert {time[key] for key in ("mean_ms", "min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")} == {69.0}
    assert list(summary["phases"]) == ["input", "forward", "backward", "comm", "optimizer", "other"]
    assert summary["phases"]["forward"] == {
        "share": pytest.approx(17.5 / 69, abs=1e-4),
        "mean_ms": 17.5,
        "median_ms": 10.0,
        "worst_ms": 40.0,
        "worst_rank": 2,
        "steps": 20,
        "device": None,
    }
    assert [row["step_ms"] for row in summary["ranks"]] == [69.0] * 4
    assert [row["comm_ms"] for row in summary["ranks"]] == [31.0, 31.0, 1.0, 31.0]
    assert summary["verdict"]["kind"] == "compute_straggler"
    assert summary["verdict"]["price"] == (
        "43% of the training time (600 ms); without it a step takes 39.0 ms instead of 69.0 ms on average, "
        "1.77× as fast."
    )


def test_device_times_stand_beside_host_times() -> None:
    summary = summarize(Cluster(ranks=2, noise=0.0, device_timed=True, comm_measured=False).run())
    forward = summary["phases"]["forward"]
    assert (forward["median_ms"], forward["device"]["median_ms"]) == (1.0, 10.0)
    assert sum(row["device"]["share"] for row in summary["phases"].values()) == pytest.approx(1.0, abs=1e-3)


def test_memory_by_rank() -> None:
    run = Cluster(ranks=2, samples=tuple(process_sample(1, rss) for rss in (3, 9, 5))).run()
    steps, device = records_of(run.ranks[0])
    steps["allocated"][::10], steps["reserved"][::10], steps["peak_allocated"][::10] = 7, 8, np.arange(10)
    run = replace(run, ranks=(with_records(run.ranks[0], steps, device), run.ranks[1]))
    memory = summarize(run)["memory"]
    assert memory["device_peak"] == {"bytes": 9, "rank": 0, "steps": [81, 90]}
    assert memory["rss_peak"] == {"bytes": 9, "rank": 1}
    assert memory["own_peak"] is None
    document = {"device_allocated": 7, "device_reserved": 8, "device_reserved_max": 8, "device_peak": 9}
    room = ("device_peak_steps", "device_total", "device_free", "device_free_from")
    empty = dict.fromkeys((*document, *room, "rss_first", "rss_last", "rss_peak", "own_peak"))
    assert memory["ranks"] == [
        {"rank": 0, **empty, **document, "device_peak_steps": [81, 90]},
        {"rank": 1, **empty, "rss_first": 3, "rss_last": 5, "rss_peak": 9},
    ]
    text = render_text(summarize(run))
    assert "memory    process peak 9 B (rank 1)\n" in text
    assert "GPU mem   allocated 9 B at peak (steps 81–90) · reserved 8 B (rank 0)\n" in text


def test_memory_of_processes_is_told_as_the_page_draws_it() -> None:
    """Pages of mapped files count for the kernel, not for who looks for what a process holds."""
    levels = ((900, 800), (700, 100), (500, 500))
    samples = tuple({**process_sample(1, rss), "rss_file": of_files} for rss, of_files in levels)
    summary = summarize(Cluster(ranks=2, samples=samples).run())
    assert (summary["memory"]["rss_peak"], summary["memory"]["own_peak"]) == (
        {"bytes": 900, "rank": 1},
        {"bytes": 600, "rank": 1},
    )
    assert "memory    process peak 600 B (rank 1), without mapped files\n" in render_text(summary)


def test_hosts_and_gpus() -> None:
    hosts = tuple(host_sample(second, 10.0 * second) for second in range(4))
    gpus = (gpu_sample(10, 50.0, []), gpu_sample(2, 80.0, ["hw_thermal"]), gpu_sample(2, 90.0, [], second=3))
    host = summarize(Cluster(samples=hosts + gpus).run())["host"]
    (node,) = host["nodes"]
    assert (node["samples"], node["cpu_percent"]) == (2, {"median": 25.0, "max": 30.0})
    assert node["mem_available_min"] == 37 * GIB
    assert node["disk_read_bps"] is None
    assert [gpu["index"] for gpu in host["gpus"]] == [2, 10]
    assert host["gpus"][0]["util_percent"] == {"median": 85.0, "max": 90.0}
    assert host["gpus"][0]["throttle_reasons"] == ["hw_thermal"]
    assert host["gpus"][0]["throttled_share"] == 0.5
    assert host["samples"] == 7


@pytest.mark.parametrize("junk", [None, "x", float("nan"), float("inf"), True, [], {}])
def test_junk_in_samples_is_no_number(junk: Any) -> None:
    lines = ({"kind": "host", "cpu_percent": junk, "mem_total": junk}, {"kind": junk}, {"kind": "gpu", "name": None})
    json.dumps(summarize(Cluster(samples=lines).run()), allow_nan=False)


def ended(status: str | None, code: int | None = None) -> dict[str, Any]:
    return {"end": {"exit_code": code, "status": status, "wall_ns": ANCHOR_WALL_NS}}


@pytest.mark.parametrize(
    ("cluster", "alive", "status"),
    [
        (Cluster(meta=ended("finished", 0)), False, "finished"),
        (Cluster(meta=ended("interrupted", 130)), False, "interrupted"),
        (Cluster(meta=ended("failed", 1)), False, "failed"),
        (Cluster(meta=ended("failed", 1), deaths=(Death(rank=1, step=5),)), False, "crashed"),
        (
            Cluster(meta=ended("failed", 1), errors=(RankError(rank=1, pid=1001, type="ValueError", message=""),)),
            False,
            "failed",
        ),
        (Cluster(), False, "finished"),
        (Cluster(deaths=(Death(rank=1, step=5),)), False, "crashed"),
        (Cluster(deaths=(Death(rank=1, step=5, state="exception"),)), False, "failed"),
        (Cluster(unfinished={0: 10}), True, "running"),
        (Cluster(ranks=0, steps=0), True, "running"),
        (Cluster(ranks=0, steps=0), False, "crashed"),
    ],
)
def test_status(cluster: Cluster, alive: bool, status: str) -> None:
    assert status_of(cluster.run(), alive=alive) == status


def killed(code: int) -> tuple[RankError, ...]:
    return (RankError(rank=None, pid=9, type="ChildFailedError", message="", exit_codes={1: code}),)


def raised(type_name: str, message: str = "") -> tuple[RankError, ...]:
    return (RankError(rank=1, pid=1001, type=type_name, message=message, wall_ns=ANCHOR_WALL_NS),)


DIED = (Death(rank=1, step=5),)
CRASHED = ended("crashed", 137)


@pytest.mark.parametrize(
    ("cluster", "text", "severity"),
    [
        (Cluster(meta=ended("finished", 0)), "finished", "info"),
        (Cluster(meta=ended("interrupted", 130)), "interrupted", "warning"),
        (Cluster(meta=ended("failed", 3)), "exit code 3", "critical"),
        (Cluster(meta=ended("failed", 1), deaths=DIED), "vanished", "critical"),
        (Cluster(meta=ended("failed", 1), deaths=DIED, errors=killed(-9)), "killed (SIGKILL)", "critical"),
        (Cluster(meta=ended("failed", 1), deaths=DIED, errors=killed(4)), "exit code 4", "critical"),
        (Cluster(ranks=1, meta=CRASHED, deaths=(Death(rank=0, step=5),)), "killed (SIGKILL)", "critical"),
        (Cluster(meta=ended("failed", 1), errors=raised("ValueError")), "exception", "critical"),
        (Cluster(meta=ended("failed", 1), errors=raised("OutOfMemoryError")), "out of memory", "critical"),
        (Cluster(meta=ended("failed", 1), errors=raised("MemoryError")), "out of memory", "critical"),
        (Cluster(meta=ended("finished", 0), errors=raised("ValueError")), "exception, exit code 0", "critical"),
        (Cluster(meta=ended("finished", 0), deaths=DIED), "finished", "info"),
        (Cluster(meta=ended("failed", 1), errors=killed(-6)), "finished, then SIGABRT", "warning"),
    ],
)
def test_how_it_ended_is_said_in_words(cluster: Cluster, text: str, severity: str) -> None:
    summary = summarize(cluster.run())
    assert (summary["status_text"], summary["status_severity"]) == (text, severity)


@pytest.mark.parametrize(
    ("over", "status", "code", "text"),
    [
        (None, None, None, "hung"),
        ("aborted", "failed", 1, "hung (aborted)"),
        ("ended", "interrupted", 130, "hung (interrupted)"),
        ("ended", "failed", 1, "hung, killed (SIGKILL)"),
    ],
)
def test_a_job_that_hung_is_not_said_to_have_failed(over: Any, status: Any, code: Any, text: str) -> None:
    hang = HangRecord(
        number=1,
        host="node0",
        kind="hang_host",
        title="Rank 1 is stuck.",
        declared_wall_ns=ANCHOR_WALL_NS + 10**12,
        stopped_wall_ns=ANCHOR_WALL_NS + 9 * 10**11,
        threshold_s=10.0,
        ranks=(),
        over=over,
        over_wall_ns=None if over is None else ANCHOR_WALL_NS + 2 * 10**12,
    )
    late = replace(killed(-9)[0], wall_ns=ANCHOR_WALL_NS + 2 * 10**12)
    meta, died = ({}, {}) if status is None else (ended(status, code), {"deaths": (Death(rank=1, step=50),)})
    run = Cluster(meta=meta, errors=(late,) if status else (), unfinished={} if status else {1: 50}, **died).run()
    ranks = tuple(replace(rank, ended_wall_ns=late.wall_ns) if rank.state == "vanished" else rank for rank in run.ranks)
    summary = summarize(replace(run, hangs=(hang,), ranks=ranks), alive=status is None)
    assert (summary["status_text"], summary["status_severity"]) == (text, "critical")


def test_early_in_a_run_the_verdict_is_how_many_steps_are_still_needed() -> None:
    run = Cluster(steps=5, unfinished=dict.fromkeys(range(4), 5)).run()
    early = summarize(run, alive=True)
    assert (early["verdict"]["title"], early["verdict"]["advice"]) == (
        "Collecting: 4 of 10 steps (1 more set aside as warm-up).",
        [],
    )
    assert summarize(run)["verdict"]["title"].startswith("Only 4 steady steps to judge by")


def test_the_first_failure_leads_the_errors_and_launchers_come_last() -> None:
    errors = (
        RankError(rank=None, pid=9, type="ChildFailedError", message="", wall_ns=1, exit_codes={2: 1}),
        RankError(rank=0, pid=1000, type="RuntimeError", message="Connection closed by peer", wall_ns=2),
        RankError(rank=2, pid=1002, type="ValueError", message="bad", wall_ns=3, traceback="Traceback …", step=7),
    )
    rows = summarize(Cluster(errors=errors).run())["errors"]
    assert [(row["rank"], row["type"], row["victim"]) for row in rows] == [
        (2, "ValueError", False),
        (0, "RuntimeError", True),
        (None, "ChildFailedError", False),
    ]


def test_notices_say_what_is_missing() -> None:
    first = Cluster(ranks=2, steps=30).series()
    second = Cluster(ranks=3, steps=20, attempt=1, missing={1: (5,)}).series()
    second = (replace(second[0], hook_failures=2), second[1], replace(second[2], steps=second[2].steps.part(slice(0))))
    run = RunData(
        name="x",
        path="runs/x",
        meta={},
        ranks=(*first, *second[:2], second[2]),
        notices=("The agent died.",),
        events=({"event": "warning", "message": "disk full"}, {"event": "warning", "message": "disk full"}),
    )
    assert summarize(run)["notices"] == [
        "The agent died.",
        "Disk full.",
        "Rank 2 recorded no step and is not compared.",
        "Comparisons leave out 1 step that not every live rank completed.",
        "A Stepscope hook failed 2 times and was skipped; times may be missing.",
    ]


def test_so_far_is_said_of_a_run_that_goes_on_only() -> None:
    running = summarize(Cluster(unfinished={0: 60}, faults=(slow_at(2, "forward", 30.0),)).run(), alive=True)
    assert " so far);" in running["verdict"]["price"]


@pytest.mark.parametrize(
    ("saved", "over", "says"),
    [
        (40, True, "1.50 s of training is lost: the last checkpoint seen was in step 40."),
        (40, False, "1.50 s of training is lost: the last checkpoint seen was in step 40."),
        (None, True, "1.50 s of training is lost: no checkpoint was seen."),
        (None, False, "at least 1.50 s of training is lost: no checkpoint in the last steps."),
    ],
)
def test_a_crash_is_priced_in_the_same_words_while_the_job_goes_on(saved: int | None, over: bool, says: str) -> None:
    cost = {"share": 0.3, "seconds": 1.5}
    assert finding_price("rank_crashed", cost, {"checkpoint_step": saved}, over=over) == says
    assert finding_price("rank_crashed", cost, {}, over=True) == "30% of the training time (1.50 s)."


def test_a_trivial_loss_has_no_price() -> None:
    crash = Cluster(ranks=1, steps=12, warmup_ms=0.0, deaths=(Death(rank=0, step=12),))
    assert summarize(crash.run())["verdict"]["price"] is None


def test_errors_stand_under_their_attempts() -> None:
    first = Cluster(ranks=2, steps=30, deaths=(Death(rank=1, step=20, state="exception"),))
    second = Cluster(ranks=2, steps=20, attempt=1, deaths=(Death(rank=1, step=9, state="exception"),)).run()
    errors = (
        RankError(rank=1, pid=1001, type="KeyError", message="'first'", wall_ns=ANCHOR_WALL_NS + 1),
        RankError(rank=1, pid=11_001, type="ValueError", message="second", wall_ns=ANCHOR_WALL_NS + 2),
    )
    summary = summarize(replace(second, ranks=(*first.series(), *second.ranks), errors=errors))
    assert [(row["attempt"], row["type"]) for row in summary["errors"]] == [(1, "ValueError"), (0, "KeyError")]
    assert summary["verdict"]["title"] == "Rank 1 raised ValueError: second (in step 9, in backward)."
    assert [row["end"] for row in summary["attempts"]] == [
        "rank 1 raised KeyError: 'first' (in step 20, in backward)",
        "rank 1 raised ValueError: second (in step 9, in backward)",
    ]


@pytest.mark.parametrize(
    ("event", "why"), [("agent_start", "the agent stopped and was restarted"), ("note", "the agent was delayed")]
)
def test_a_gap_in_the_samples_is_told(event: str, why: str) -> None:
    samples = tuple(host_sample(second) for second in (0, 1, 4, 12, 13))
    events = ({"event": event, "wall_ns": ANCHOR_WALL_NS + 11 * 10**9},)
    run = replace(Cluster(samples=samples).run(), events=events)
    assert summarize(run)["notices"] == [f"For 8 s there are no samples of host node0: {why}."]


def on_all(ranks: int, phase: str, ms: float, steps: range | None = None, *, ramp: bool = False) -> tuple[Fault, ...]:
    return tuple(slow_at(rank, phase, ms, steps, ramp=ramp) for rank in range(ranks))


LATER = range(50, 100)
ONE_CAUSE = {
    "input from a step on": (Cluster(ranks=2, faults=on_all(2, "input", 30.0, LATER)), "change_point"),
    "input that grows": (Cluster(ranks=2, faults=on_all(2, "input", 40.0, ramp=True)), "drift"),
    "between steps from a step on": (Cluster(ranks=1, faults=on_all(1, "other", 30.0, LATER)), "change_point"),
    "between steps that grows": (Cluster(ranks=1, faults=on_all(1, "other", 40.0, ramp=True)), "drift"),
    "inside the step from a step on": (Cluster(ranks=1, faults=on_all(1, "inside", 30.0, LATER)), "change_point"),
    "the optimizer from a step on": (Cluster(ranks=2, faults=on_all(2, "optimizer", 30.0, LATER)), "change_point"),
    "the optimizer for a while": (
        Cluster(ranks=2, faults=on_all(2, "optimizer", 60.0, range(30, 70))),
        "throughput_drop",
    ),
    "a rank from a step on": (Cluster(faults=(slow_at(1, "forward", 30.0, LATER),)), "compute_straggler"),
    "a rank up to a step": (
        Cluster(
            steps=200, faults=(slow_at(1, "forward", 30.0, range(150)), *on_all(4, "optimizer", 6.0, range(150, 200)))
        ),
        "compute_straggler",
    ),
    "evaluation and what is beside it": (
        Cluster(
            ranks=2,
            steps=200,
            faults=(*on_all(2, "eval", 300.0, range(20, 200, 20)), *on_all(2, "other", 60.0, range(20, 200, 20))),
        ),
        "between_steps",
    ),
    "checkpoints of one rank": (
        Cluster(ranks=2, steps=200, faults=(slow_at(0, "checkpoint", 500.0, range(50, 200, 50)),)),
        "between_steps",
    ),
    "input that is always slow and becomes slower": (
        Cluster(ranks=1, phases_ms={"input": 40.0, "forward": 10.0}, faults=on_all(1, "input", 20.0, LATER)),
        "input_bound",
    ),
}


@pytest.mark.parametrize("name", ONE_CAUSE)
def test_one_cause_is_one_finding(name: str) -> None:
    cluster, kind = ONE_CAUSE[name]
    summary = summarize(cluster.run())
    assert summary["findings"][0]["kind"] == kind
    warned = [finding["kind"] for finding in summary["findings"] if finding["severity"] != "info"]
    assert len(warned) == (2 if name.startswith("input that is always") else 1), warned
    assert contradictions(summary, render_text(summary)) == []


def test_one_cause_told_twice_is_seen() -> None:
    summary = summarize(ONE_CAUSE["input that grows"][0].run())
    grown = summary["findings"][0]
    summary["findings"].append({**grown, "kind": "input_bound", "title": "Training waits for input."})
    assert any(
        "one cause is told twice" in line for line in contradictions(summary, render_text(summary), measured=True)
    )
    grown["title"] = "From step 136 on, steps take 24.1 ms instead of 39.2 ms (+-39%)."
    assert any("an odd number" in line for line in contradictions(summary, render_text(summary), measured=True))


def test_the_last_numbers_that_the_script_noted() -> None:
    run = Cluster(ranks=2, steps=40).run()
    pids = [series.identity.pid for series in run.ranks]
    noted = [
        (pids[0], 3, {"loss": 9.0}),
        (pids[0], 7, {"loss": 2.0, "lr": 3e-9}),
        (pids[1], 7, {"loss": 1.0, "x": "y"}),
    ]
    notes = [{"event": "note", "pid": pid, "step": step, "values": values} for pid, step, values in noted]
    notes += [{"event": "note", "pid": 1, "step": 9, "values": {"loss": 0.0}}, {"event": "note", "pid": pids[0]}]
    assert summarize(replace(run, events=(*run.events, *notes)))["metrics"] == {
        "loss": {"last": 1.5, "step": 7},
        "lr": {"last": 3e-9, "step": 7},
    }


def test_a_learning_rate_is_listed_once_whatever_the_script_calls_it() -> None:
    run = Cluster(ranks=1, steps=40).run()
    pid = run.ranks[0].identity.pid
    seen = {"event": "seen", "pid": pid, "step": 8, "values": {"lr": 0.2, "loss": 3.0}}
    note = {"event": "note", "pid": pid, "step": 7, "values": {"train/learning_rate": 0.1}}
    assert set(summarize(replace(run, events=(*run.events, seen)))["metrics"]) == {"lr", "loss"}
    assert set(summarize(replace(run, events=(*run.events, seen, note)))["metrics"]) == {"train/learning_rate", "loss"}
