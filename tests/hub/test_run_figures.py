"""The figures of a run for Prometheus: copied in the event loop, made elsewhere, and as ``judged.json``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_messages import incident
from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from fakes.samples import with_samples

from stepscope.hub.live.figures import (
    LAST_STEPS,
    CaptureCount,
    IncidentCount,
    RunFigures,
    copy_figures,
    figures_of,
    read_judged,
    write_judged,
)
from stepscope.hub.live.latest_samples import MOST_LINES, SampleColumns, Spread, latest_samples
from stepscope.hub.live.lines import Lines
from stepscope.hub.live.live_run import Judged, LiveRun
from stepscope.hub.past_run import past_run
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.store.paths import JUDGED, SAMPLES


def served(cluster: Cluster, **samples: Any) -> LiveRun:
    run = with_samples(cluster, **samples)
    return past_run(replace(run, meta={"created_wall_ns": ANCHOR_WALL_NS}))


def figures(live: LiveRun, **more: Any) -> RunFigures:
    return figures_of(live, status="running", wall_ns=5, findings=(), throughput=None, **more)


def test_the_slowest_rank_of_each_phase_is_named() -> None:
    found = figures(served(Cluster(ranks=8, steps=300, faults=(slow_at(3, "forward", 30.0), slow_at(6, "input", 9.0)))))
    worst = {each.phase: (each.rank, each.seconds) for each in found.worst_phases}
    assert worst["forward"] == (3, pytest.approx(0.040, rel=0.1))
    assert worst["input"] == (6, pytest.approx(0.011, rel=0.1))
    assert "comm" not in worst  # who is there longest waits for the others
    assert [rank.rank for rank in found.worst_ranks][:2] == [3, 6]
    assert found.worst_ranks[0].seconds == pytest.approx(0.068, rel=0.1)


def test_means_are_over_the_last_steps_alone() -> None:
    early = slow_at(2, "backward", 500.0, range(40))
    found = figures(served(Cluster(ranks=4, steps=40 + LAST_STEPS, noise=0.0, faults=(early,))))
    assert [each.seconds for each in found.worst_ranks] == [pytest.approx(0.038, rel=0.01)] * 4


def test_memory_devices_and_samples_are_spreads() -> None:
    cluster = Cluster(ranks=4, steps=80, hosts=2, device_timed=True, backend="nccl", allocated_mb=100.0)
    used = {"util_percent": lambda rank, at: [10.0 * rank] * len(at), "throttle_reasons": ["power cap"]}
    found = figures(served(cluster, gpu=used, every_s=0.5))
    assert found.memory_bytes["allocated"] == 100 << 20
    assert found.device_seconds["forward"] > 0
    spreads = {spread.name: spread for spread in found.spreads}
    assert spreads["gpu_utilization_ratio"] == Spread(
        name="gpu_utilization_ratio", min=0.0, p50=pytest.approx(0.15), max=pytest.approx(0.3), count=4
    )
    assert spreads["host_cpu_ratio"].count == 2
    assert (found.gpus, found.gpus_throttled) == (4, 4)


def test_hangs_deaths_and_checkpoints_are_counted() -> None:
    cluster = Cluster(
        ranks=4,
        steps=60,
        faults=(slow_at(0, "checkpoint", 50.0, range(30, 31)),),
        deaths=(Death(rank=2, step=50),),
        unfinished={0: 50, 1: 50, 3: 50},
    )
    live = served(cluster)
    live.judge(Judged(standing={1: "hung", 0: "waits", 3: "waits in all_reduce"}))
    order = CaptureOrder(id="step-5", ranks=(0,), at_step=5, steps=4)
    capture = CaptureRecord(order=order, state="done", requested_wall_ns=7, reason="finding")
    over = replace(incident(), number=2, state="resolved")
    found = figures(live, incidents=(incident(), over, over), captures=(capture, capture))
    assert (found.still_ranks, found.blocking_ranks) == (3, 1)
    assert found.states == {"running": 3, "vanished": 1}
    assert found.last_step_wall_ns is not None
    assert found.checkpoint_wall_ns is not None
    assert found.created_wall_ns < found.checkpoint_wall_ns < found.last_step_wall_ns
    assert set(found.incidents) == {
        IncidentCount(state="open", severity="critical", incidents=1),
        IncidentCount(state="resolved", severity="critical", incidents=2),
    }
    assert found.captures == (CaptureCount(state="done", captures=2),)


def test_a_copy_does_not_change_with_the_model() -> None:
    live = served(Cluster(ranks=2, steps=50))
    live.noted.add(3, {"loss": 2.0})
    copy = copy_figures(live)
    before = copy.figures(status="running", wall_ns=5, findings=(), throughput=None)
    live.noted.add(4, {"loss": 1.0})
    live.planes.clear()
    live.received.put(SAMPLES, [b'{"kind":"host","wall_ns":1,"cpu_percent":99}'], node="node0", offset_ns=0)
    live.judge(Judged(standing={0: "hung"}))
    assert copy.figures(status="running", wall_ns=5, findings=(), throughput=None) == before
    assert before.noted == {"loss": 2.0}


def test_judged_json_is_read_back_and_bounded(tmp_path: Path) -> None:
    finding = {"kind": "input_bound", "severity": "warning", "ranks": [1, 2], "cost": {"share": 0.3}}
    live = served(Cluster(ranks=2, steps=50, device_timed=True, backend="nccl", allocated_mb=10.0))
    found = figures_of(live, status="running", wall_ns=5, findings=[finding, finding], throughput={"mfu": 0.4})
    assert (found.findings[0].findings, found.findings[0].ranks, found.findings[0].cost) == (2, 4, 0.3)
    write_judged(tmp_path, found)
    assert read_judged(tmp_path) == found
    document = json.loads((tmp_path / JUDGED).read_text())
    for name, value in (
        ("noted", {f"name {number}": 1.0 for number in range(65)}),
        ("spreads", document["spreads"] * 10),
        ("worst_ranks", document["worst_ranks"] * 9),
        ("gpus", "many"),
    ):
        (tmp_path / JUDGED).write_text(json.dumps({**document, name: value}))
        assert read_judged(tmp_path) is None, name


def test_the_newest_sample_of_each_source_is_taken() -> None:
    lines, second = Lines(), 10**9

    def gpu(at: int, index: int, used: object) -> bytes:
        return json.dumps({"wall_ns": at, "node": "a", "kind": "gpu", "index": index, "util_percent": used}).encode()

    def host(at: int, **more: object) -> bytes:
        return json.dumps({"wall_ns": at, "node": "a", "kind": "host", **more}).encode()

    now = 1000 * second
    rows = [gpu(now - second, 0, 1), host(now - second, cpu_percent=1), gpu(now - second, 1, 2)]
    rows += [host(now, cpu_percent=50, mem_total=None), gpu(now, 0, 30), gpu(now, 1, "all"), gpu(now, 1, 40)]
    rows += [b'{"kind":"probe","peer":"b"}', b"{", b'"host"', gpu(now, 0, 35)]
    lines.put(SAMPLES, rows, node="0", offset_ns=0)
    lines.put(SAMPLES, [host(now + 5 * second, cpu_percent=10)], node="1", offset_ns=5 * second)
    lines.put(SAMPLES, [host(now - 61 * second, cpu_percent=99)], node="2", offset_ns=0)  # a node that is gone
    found = latest_samples(lines.newest(SAMPLES, MOST_LINES))
    assert found["0"].host is not None
    assert found["0"].host.cpu_percent == 50
    assert {index: gpu.util_percent for index, gpu in found["0"].gpus.items()} == {0: 35, 1: 40}
    assert found["2"].host is None
    (spread,) = (spread for spread in SampleColumns(found).spreads() if spread.name == "host_cpu_ratio")
    assert (spread.min, spread.max, spread.count) == (0.1, 0.5, 2)
