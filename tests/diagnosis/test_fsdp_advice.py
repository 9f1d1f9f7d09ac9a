"""Advice about FSDP and DDP: only beside findings that show that it matters, and only about what is not yet done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.traffic import Exchange, Traffic

from stepscope.diagnosis import diagnose
from stepscope.diagnosis.engine.settings import (
    fsdp_bytes_advice,
    fsdp_memory_advice,
    fsdp_offload_advice,
    fsdp_prefetch_advice,
    fsdp_units_advice,
    unused_parameters_advice,
)
from stepscope.records.finding import Finding

WELL = {
    "version": 2,
    "units": 25,
    "parameters": 1 << 30,
    "largest_share": 0.12,
    "strategy": "full_shard",
    "resharded_units": 0,
    "param_dtype": "bfloat16",
    "reduce_dtype": "bfloat16",
    "cpu_offload": False,
    "forward_prefetch": True,
    "backward_prefetch": "explicit",
}
WELL1 = {**WELL, "version": 1, "strategy": "shard_grad_op", "backward_prefetch": "backward_pre"}
GIB = 1 << 30


@pytest.mark.parametrize("fsdp", [WELL, WELL1, {}, {"version": 2}, {"units": "many", "largest_share": None}], ids=str)
def test_nothing_is_advised_of_what_is_well_or_not_known(fsdp: dict[str, Any]) -> None:
    assert list(fsdp_units_advice(fsdp)) == list(fsdp_bytes_advice(fsdp)) == list(fsdp_offload_advice(fsdp)) == []
    if fsdp in (WELL, WELL1):
        assert list(fsdp_prefetch_advice(fsdp)) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {**WELL, "units": 1, "largest_share": 1.0},
            (
                "FSDP has a single unit of all 1,073,741,824 parameters: nothing can compute while they are gathered "
                "(2.0 GiB). Call fully_shard() on each block, then on the model."
            ),
        ),
        (
            {**WELL1, "units": 5, "largest_share": 0.75},
            (
                "One of 5 FSDP units has 75% of the parameters (1.5 GiB): hardly anything can compute while it is "
                "gathered. Pass an auto_wrap_policy that wraps each block (ModuleWrapPolicy)."
            ),
        ),
    ],
)
def test_wrapping(settings: dict[str, Any], expected: str) -> None:
    assert list(fsdp_units_advice(settings)) == [expected]
    assert list(fsdp_units_advice({**settings, "strategy": "no_shard"})) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {**WELL, "param_dtype": "float32", "reduce_dtype": "float32"},
            (
                "Parameters are gathered in float32 (4.0 GiB): MixedPrecisionPolicy(param_dtype=torch.bfloat16) "
                "halves the bytes."
            ),
        ),
        (
            {**WELL1, "reduce_dtype": "float32"},
            (
                "Gradients are reduced in float32 (4.0 GiB): MixedPrecision(reduce_dtype=torch.bfloat16) halves the "
                "bytes, but sums are less exact."
            ),
        ),
        (
            {**WELL, "resharded_units": 24},
            (
                "Parameters are freed after forward and gathered again for backward (2.0 GiB): "
                "reshard_after_forward=False saves the second gather, if they fit into memory."
            ),
        ),
        (
            {**WELL1, "resharded_units": 25},
            (
                "Parameters are freed after forward and gathered again for backward (2.0 GiB): "
                "ShardingStrategy.SHARD_GRAD_OP saves the second gather, if they fit into memory."
            ),
        ),
    ],
)
def test_fewer_bytes(settings: dict[str, Any], expected: str) -> None:
    assert list(fsdp_bytes_advice(settings)) == [expected]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {**WELL, "forward_prefetch": False},
            "set_modules_to_forward_prefetch() and …_backward_prefetch() fetch the next layers while one computes.",
        ),
        (
            {**WELL1, "backward_prefetch": None},
            "backward_prefetch=None: BackwardPrefetch.BACKWARD_PRE gathers the next unit while one computes.",
        ),
        (
            {**WELL1, "forward_prefetch": False},
            "forward_prefetch=False: with True the next unit is gathered while one computes.",
        ),
    ],
)
def test_prefetch(settings: dict[str, Any], expected: str) -> None:
    assert list(fsdp_prefetch_advice(settings)) == [expected]
    assert list(fsdp_prefetch_advice({**settings, "units": 1})) == []  # there is no next one


def test_offload() -> None:
    assert list(fsdp_offload_advice({**WELL, "cpu_offload": True})) == [
        (
            "FSDP keeps parameters on the CPU (2.0 GiB): they are copied to the device in every step, gradients "
            "back, and the optimizer runs on the CPU. If memory allows, turn the offload off."
        )
    ]


def test_a_full_device() -> None:
    single = {**WELL, "units": 1, "largest_share": 1.0}
    assert list(fsdp_memory_advice(single, 24 * GIB)) == [
        (
            "FSDP gathers 100% of the parameters at once (2.0 GiB), since a single unit has them. "
            "Call fully_shard() on each block, then on the model."
        )
    ]
    assert list(fsdp_memory_advice(WELL, 24 * GIB)) == [
        "FSDP keeps all parameters gathered from forward to backward (2.0 GiB): reshard_after_forward=True frees them."
    ]
    assert (
        list(fsdp_memory_advice(single, 80 * GIB)) == list(fsdp_memory_advice(WELL, 80 * GIB)) == []
    )  # not what fills it
    assert list(fsdp_memory_advice({**WELL, "resharded_units": 24}, 24 * GIB)) == []
    assert list(fsdp_memory_advice({**single, "strategy": "no_shard"}, 24 * GIB)) == []
    assert list(fsdp_memory_advice({}, 24 * GIB)) == []


# -- beside findings --------------------------------------------------------------------------------------------------


def sharded(hidden_ms: float, fsdp: dict[str, Any], op_ms: float = 10.0) -> Cluster:
    gathers = Exchange(dimension="dp", op="all_gather", count=2, mb=40.0, ms=op_ms, hidden_ms=hidden_ms)
    scatters = Exchange(dimension="dp", op="reduce_scatter", mb=40.0, ms=op_ms, hidden_ms=hidden_ms)
    phases = {"forward": 20.0, "backward": 40.0, "optimizer": 3.0}
    traffic = Traffic(mesh={"dp": 4}, exchanges=(gathers, scatters))
    return Cluster(ranks=4, steps=60, phases_ms=phases, traffic=traffic, facts={"fsdp": fsdp} if fsdp else {})


def advice_of(cluster: Cluster, kind: str) -> tuple[str, ...]:
    found: list[Finding] = diagnose(cluster.run())
    return next(finding.advice for finding in found if finding.kind == kind)


PLAIN = {**WELL, "forward_prefetch": False, "backward_prefetch": "implicit"}


def test_an_exposed_exchange() -> None:
    single = {**PLAIN, "units": 1, "largest_share": 1.0, "param_dtype": "float32", "reduce_dtype": "float32"}
    first, second = advice_of(sharded(1.0, single), "low_overlap")
    assert first.startswith("FSDP has a single unit of all 1,073,741,824 parameters: ")
    assert second.startswith("Parameters are gathered in float32 (4.0 GiB): ")
    first, second = advice_of(sharded(1.0, {**PLAIN, "resharded_units": 24}), "low_overlap")
    assert first.startswith("set_modules_to_forward_prefetch() and …")
    assert second.startswith("Parameters are freed after forward and gathered again")
    (last,) = advice_of(sharded(1.0, WELL), "low_overlap")
    assert last == "Larger blocks need fewer exchanges: wrap several layers together."


def test_a_hidden_exchange_is_no_reason_for_advice() -> None:
    single = {**PLAIN, "units": 1, "largest_share": 1.0, "param_dtype": "float32"}
    kinds = [finding.kind for finding in diagnose(sharded(9.0, single).run())]
    assert not {"low_overlap", "comm_bound"} & set(kinds)


def test_a_job_bound_by_the_network() -> None:
    narrow = {**PLAIN, "reduce_dtype": "float32", "resharded_units": 24}
    lines = advice_of(sharded(1.0, narrow, op_ms=60.0), "comm_bound")
    assert [line.partition(" (")[0] for line in lines[:2]] == [
        "Gradients are reduced in float32",
        "Parameters are freed after forward and gathered again for backward",
    ]
    assert not any("bf16_compress_hook" in line or "no_sync" in line for line in lines)  # DDP's


def test_a_job_bound_by_tensor_parallelism_hears_nothing_of_fsdp() -> None:
    wide = {**PLAIN, "param_dtype": "float32", "reduce_dtype": "float32"}
    reduces = Exchange(dimension="tp", op="all_reduce", mb=40.0, ms=60.0, hidden_ms=0.0)
    phases = {"forward": 20.0, "backward": 40.0, "optimizer": 3.0}
    traffic = Traffic(mesh={"dp": 2, "tp": 2}, exchanges=(reduces,))
    bound = Cluster(ranks=4, steps=60, phases_ms=phases, traffic=traffic, facts={"fsdp": wide})
    assert not any("float32" in line for line in advice_of(bound, "comm_bound"))


def test_an_optimizer_on_the_cpu() -> None:
    slow = Cluster(phases_ms={"forward": 10.0, "backward": 10.0, "optimizer": 30.0})
    offloaded = replace(slow, facts={"fsdp": {**WELL, "cpu_offload": True}})
    assert advice_of(offloaded, "optimizer_bound")[0].startswith("FSDP keeps parameters on the CPU (2.0 GiB): ")
    assert not any("CPU" in line for line in advice_of(replace(slow, facts={"fsdp": WELL}), "optimizer_bound"))


# -- DDP --------------------------------------------------------------------------------------------------------------

SEARCHING = {"find_unused_parameters": True, "static_graph": False}
WALKS = "find_unused_parameters=True walks the graph before each backward and delays the buckets"


@pytest.mark.parametrize(
    ("ddp", "expected"),
    [
        ({}, []),
        ({"find_unused_parameters": False}, []),
        ({**SEARCHING, "unused": "varying", "iterations": 1000}, []),
        (
            {**SEARCHING, "unused": "none", "iterations": 1000},
            [f"{WALKS}; all parameters took part in each of 1,000 backward passes, so drop it."],
        ),
        (
            {**SEARCHING, "unused": "same", "iterations": 1000},
            [f"{WALKS}; the unused parameters never change, so static_graph=True avoids the walk."],
        ),
        (
            SEARCHING,
            [f"{WALKS}: drop it if all parameters are used (if the unused ones never change: static_graph=True)."],
        ),
        ({**SEARCHING, "static_graph": True}, [f"{WALKS}: drop it if all parameters are used."]),
    ],
    ids=["unknown", "off", "varying", "none", "same", "not-yet", "static"],
)
def test_unused_parameters(ddp: dict[str, Any], expected: list[str]) -> None:
    assert list(unused_parameters_advice(ddp)) == expected
