"""The table of what is exchanged: what is rare or seen seldom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepscope.diagnosis import build_window
from stepscope.reports.communication import communication_table
from stepscope.reports.text_communication import communication_lines
from stepscope.testing.cluster import Cluster
from stepscope.testing.traffic import Exchange, Traffic

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
    assert line.split()[:3] == ["TENSOR_MODE…", "×2", "reduce_scatter"]


@pytest.mark.parametrize(("facts", "called"), [({"group": "default_pg"}, "default_pg"), ({}, "data")])
def test_the_exchange_of_ddp_has_the_name_of_its_group(facts: dict[str, str], called: str) -> None:
    """As hangs call it, which know it from the Flight Recorder."""
    ddp = {"gradient_mb": 48.0, "bucket_mb": 25.0, **facts}
    table = communication_table(build_window(Cluster(ranks=2, steps=40, ddp_hidden_ms=1.0, facts={"ddp": ddp}).run()))
    assert table is not None
    assert [(row["name"], row["description"]) for row in table["groups"]] == [("", facts.get("group", ""))]
    assert communication_lines(table, 80)[1].split()[:3] == [called, "all_reduce", "(DDP)"]
