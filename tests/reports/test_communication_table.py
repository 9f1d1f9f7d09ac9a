"""The table of what is exchanged: what is rare or seen seldom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.traffic import Exchange, Traffic

from stepscope.diagnosis import build_window
from stepscope.reports.summary_text import communication_lines, measured_text
from stepscope.reports.tables import communication_table

PAIR = Traffic(mesh={"dp": 2}, exchanges=(Exchange(dimension="dp"),))


def test_a_scalar_now_and_then_keeps_its_bytes() -> None:
    window = build_window(Cluster(ranks=2, steps=40, traffic=PAIR).run())
    assert window.communication is not None
    (flow,) = window.communication.flows
    seldom = replace(window.communication, flows=(replace(flow, count=1 / 11, bytes=4 / 11),))
    table = communication_table(replace(window, communication=seldom))
    assert table is not None
    (op,) = table["groups"][0]["ops"]
    assert (op["count"], op["bytes"]) == (0.0909, 0.3636)
    assert "0.0909 × 4 B" in communication_lines(table, 100)[1]


@pytest.mark.parametrize(("collectives", "shown"), [(5, ""), (7, ""), (8, "r1 100%"), (100, "r1 100%")])
def test_often_last_takes_more_than_a_few(collectives: int, shown: str) -> None:
    op: dict[str, Any] = {"op": "all_reduce", "count": 1.0, "bytes": 8, "exposed_ms": 2.0, "overlapped_ms": 0.0}
    late = {"rank": 1, "wait_ms": 0.0, "last": collectives, "late_ms": 1.0}
    group = {
        "name": "1",
        "kind": "data",
        "description": "dp",
        "ops": [op],
        "arrivals": {"collectives": collectives, "ranks": [late]},
    }
    line = communication_lines({"groups": [group]}, 100)[1]
    assert line.split() == ["dp", "all_reduce", "1", "×", "8", "B", "2.00", "ms", "0", *shown.split()]


def test_a_long_name_makes_room_for_the_operation() -> None:
    op: dict[str, Any] = {"op": "reduce_scatter", "count": 1.0, "bytes": 8, "exposed_ms": 2.0, "overlapped_ms": 0.0}
    group = {"name": "9", "kind": "tensor", "description": "TENSOR_MODEL_PARALLEL_GROUP", "ops": [op], "arrivals": None}
    line = communication_lines({"groups": [group, {**group, "name": "10"}]}, 80)[1]
    assert line.split()[:3] == ["TENSOR_MODEL_PARALLEL_G…", "×2", "reduce_scatter"]


@pytest.mark.parametrize(("facts", "called"), [({"group": "default_pg"}, "default_pg"), ({}, "data")])
def test_the_exchange_of_ddp_has_the_name_of_its_group(facts: dict[str, str], called: str) -> None:
    """As hangs call it, which know it from the Flight Recorder."""
    ddp = {"gradient_mb": 48.0, "bucket_mb": 25.0, **facts}
    table = communication_table(build_window(Cluster(ranks=2, steps=40, ddp_hidden_ms=1.0, facts={"ddp": ddp}).run()))
    assert table is not None
    assert [(row["name"], row["description"]) for row in table["groups"]] == [("", facts.get("group", ""))]
    assert communication_lines(table, 80)[1].split()[:3] == [called, "all_reduce", "(DDP)"]


def nccl(*exchanges: Exchange) -> dict[str, Any]:
    traffic = Traffic(mesh={"dp": 4}, exchanges=exchanges, noise=0.0, work_ms=0.0, backend="nccl", device=True)
    job = Cluster(ranks=4, steps=40, noise=0.0, device_timed=True, comm_ms=0.0, traffic=traffic)
    table = communication_table(build_window(job.run()))
    assert table is not None
    return table


def test_on_nccl_one_exchange_answers_for_what_the_computation_waits() -> None:
    table = nccl(Exchange(dimension="dp", mb=64.0, ms=4.0))
    (op,) = table["groups"][0]["ops"]
    assert (op["device"], op["exposed_ms"], op["overlapped_ms"], op["wait_ms"]) == (True, 4.0, 0.0, 0.0)
    assert (op["transfer_ms"], op["skew_ms"]) == (4.0, 0.0)
    assert op["algorithm_bytes_per_s"] == pytest.approx((64 << 20) / 0.004)
    assert op["bus_bytes_per_s"] == pytest.approx(1.5 * (64 << 20) / 0.004)
    assert table["measured"] == {
        "clock": "device",
        "steps": 40,
        "of": 40,
        "missed": 0,
        "last_unread": 0,
        "exposed_ms": 4.0,
    }
    head = communication_lines(table, 80)[0]
    assert head.split() == ["exchange", "per", "step", "exposed", "hidden"], "no rank is often last"


def test_on_nccl_several_exchanges_have_their_times_and_their_speed() -> None:
    gather = Exchange(dimension="dp", op="all_gather", count=2, mb=64.0, ms=4.0)
    table = nccl(gather, Exchange(dimension="dp", op="reduce_scatter", mb=64.0, ms=4.0))
    ops = {op["op"]: op for op in table["groups"][0]["ops"]}
    assert [(op["exposed_ms"], op["overlapped_ms"]) for op in ops.values()] == [(None, None)] * 2
    assert (ops["all_gather"]["transfer_ms"], ops["reduce_scatter"]["transfer_ms"]) == (8.0, 4.0)
    head, first, second = communication_lines(table, 80)
    assert head.split() == ["exchange", "per", "step", "transfer", "bus"]
    assert first.split() == ["mesh_dp", "all_gather", "2", "×", "64", "MiB", "8.00", "ms", "12", "GiB/s"]
    assert second.split()[:2] == ["mesh_dp", "reduce_scatter"]


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (None, ""),
        ((230, 230, 0, 0), "in 230 of 230 steps."),
        ((212, 230, 18, 0), "in 212 of 230 steps; 18 steps were overwritten before they could be read."),
        (
            (8, 10, 1, 1),
            "in 8 of 10 steps; 1 step was overwritten before it could be read; the last step was not read.",
        ),
    ],
)
def test_how_it_was_measured(measured: tuple[int, int, int, int] | None, message: str) -> None:
    names = ("steps", "of", "missed", "last_unread")
    table = {"groups": [], "measured": dict(zip(names, measured, strict=True)) if measured else None}
    assert measured_text(table) == (
        f"Communication measured on the device (NCCL's Flight Recorder) {message}" if message else ""
    )
