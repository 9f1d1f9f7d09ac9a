"""The nodes of a job in the summary: who was there, whose clock is off, who was lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes.cluster import Cluster

from stepscope.records.series import RunData
from stepscope.reports.sections import node_items, nodes_table
from stepscope.reports.summary import summarize
from stepscope.reports.summary_text import render_text


def node(number: int, **more: Any) -> dict[str, Any]:
    known = {"node": number, "host": f"node{number}", "spool": f"{number:032x}", "address": f"10.0.0.{number}"}
    clock = {"offset_ns": 1_500_000, "rtt_ns": 200_000, "joined_wall_ns": 5, "heard_wall_ns": 9}
    counts = {"duplicates": 0, "refused": 0, "replaced_by": ""}
    sent = {"here": False, "series": [(0, 2 * number), (0, 2 * number + 1)]}
    return {**known, **clock, **counts, **sent, "bye": {"exit_code": 0, "status": "finished"}, **more}


def run_of(*nodes: dict[str, Any], hosts: int) -> RunData:
    run = Cluster(ranks=2 * hosts, hosts=hosts, steps=40).run()
    return replace(run, meta={**run.meta, "host": "node0", "end": {"exit_code": 0, "status": "finished"}}, nodes=nodes)


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith(("node", "…"))]


def test_one_node_is_not_told() -> None:
    summary = summarize(run_of(hosts=1))
    assert summary["nodes"] == []
    assert lines_of(render_text(summary)) == []


def test_a_line_a_node() -> None:
    ahead = node(1, offset_ns=300_200_000_000)
    lost = node(2, bye=None, refused=3)
    run = run_of(ahead, lost, hosts=3)
    own, first, second = nodes_table(run, alive=False)
    assert (own["node"], own["host"], own["ranks"], own["status"], own["lost"]) == (0, "node0", 2, "finished", False)
    assert first == {
        "node": 1,
        "host": "node1",
        "address": "10.0.0.1",
        "ranks": 2,
        "first_rank": 2,
        "last_rank": 3,
        "steps": 40,
        "clock_offset_ms": 300_200.0,
        "clock_error_ms": 0.1,
        "joined_wall_ns": 5,
        "heard_wall_ns": 9,
        "status": "finished",
        "lost": False,
        "replaced_by": None,
        "duplicates": 0,
        "refused": 0,
    }
    assert (second["status"], second["lost"], second["refused"]) == (None, True, 3)
    assert lines_of(render_text(summarize(run))) == [
        "node 0    node0 · ranks 0–1 · 40 steps",
        "node 1    node1 · ranks 2–3 · 40 steps · clock 5 min ahead (± 100 µs)",
        "node 2    node2 · ranks 4–5 · 40 steps · lost · 3 frames refused",
    ]


def test_node_0_is_told_once_though_its_own_agent_joined_too() -> None:
    rows = nodes_table(run_of(node(0, here=True, series=[]), node(1), hosts=2), alive=False)
    assert [(row["node"], row["ranks"], row["address"]) for row in rows] == [(0, 2, "10.0.0.0"), (1, 2, "10.0.0.1")]


def test_two_nodes_of_one_host_have_their_own_ranks() -> None:
    rows = nodes_table(run_of(node(1, host="node0"), hosts=2), alive=False)
    assert [(row["host"], row["first_rank"], row["last_rank"]) for row in rows] == [("node0", 0, 1), ("node0", 2, 3)]


def test_nobody_is_lost_while_the_run_goes_on() -> None:
    assert [row["lost"] for row in nodes_table(run_of(node(1, bye=None), hosts=2), alive=True)] == [False, False]


def test_a_node_that_was_replaced() -> None:
    gone = node(1, host="old", series=[], spool="a" * 32, bye=None, replaced_by="b" * 32, offset_ns=None, rtt_ns=None)
    rows = nodes_table(run_of(gone, node(1, spool="b" * 32, joined_wall_ns=7), hosts=2), alive=False)
    assert [(row["host"], row["ranks"], row["replaced_by"]) for row in rows] == [
        ("node0", 2, None),
        ("old", 0, "node1"),
        ("node1", 2, None),
    ]
    assert node_items(rows)[1] == ("node 1", ["old", "lost", "replaced by node1"])


def test_of_many_the_odd_ones_are_named() -> None:
    nodes = [node(n, bye=None if 40 <= n < 50 else {"status": "finished"}) for n in range(1, 2000)]
    rows = nodes_table(run_of(*nodes, hosts=2), alive=False)
    assert len(rows) == 1024
    items = node_items(rows)
    assert [label for label, _ in items] == [*(f"node {n}" for n in range(40, 48)), "", "nodes"]
    assert items[8][1] == ["… and 2 more with lost data or other problems"]
    assert items[9][1] == ["1,014 others", "40 steps", "clocks within 1.50 ms"]
