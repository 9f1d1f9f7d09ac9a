"""Live findings: the same verdicts as on the whole run, also among many ranks, and never from thin air."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from fakes.load_rows import LoadJob, LoadRanks
from hang_jobs import Job
from hub_feed import FedRows, sidecar_of, taken_of

from stepscope.diagnosis import diagnose
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.rules import Pace, RuleLoop, keep_up, run_data_of, select, snapshot
from stepscope.records.series import RankSeries
from stepscope.store.live.failures import write_hang
from stepscope.store.live.ring_files import RingSidecar


def introduce(live: LiveRun, series: tuple[RankSeries, ...]) -> None:
    for rank_series in series:
        live.ring(RingSidecar.from_dict(sidecar_of(rank_series, state="running")), node="0")


async def followed(live: LiveRun, series: tuple[RankSeries, ...], upto: int, every: int = 20) -> LiveRun:
    """Looked at every so many steps."""
    rule_loop = RuleLoop(live)
    introduce(live, series)
    for first in range(0, upto, every):
        live.rows(taken_of(series, range(first, first + every)))
        await rule_loop.evaluate()
    return live


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fault",
    [slow_at(3, "forward", 5.0), slow_at(11, "input", 8.0), slow_at(0, "backward", 5.0), slow_at(7, "optimizer", 5.0)],
)
def test_live_findings_name_the_rank_that_the_whole_run_names(fault: object) -> None:
    cluster = Cluster(ranks=12, steps=80, faults=(fault,))  # type: ignore[arg-type]
    whole = [finding for finding in diagnose(cluster.run()) if finding.severity != "info"]
    live = asyncio.run(followed(LiveRun(), cluster.series(), 80))
    shown = [finding for finding in live.judged.findings if finding.severity != "info"]
    assert [(finding.kind, finding.ranks, finding.phase) for finding in shown] == [
        (finding.kind, finding.ranks, finding.phase) for finding in whole
    ]
    assert whole
    assert (live.judged.ranks, live.judged.of_ranks, live.judged.step) == (12, 12, 79)
    assert live.judged.first_step == 0


def test_wrong_numbers_lead_the_live_findings() -> None:
    cluster = Cluster(ranks=4, steps=80, faults=(slow_at(2, "forward", 30.0),))
    live = LiveRun()
    pid = cluster.series()[0].identity.pid
    for step in range(40, 80):
        values = {"loss": "nan"}
        live.noted.health.append({"event": "note", "rank": 0, "pid": pid, "step": step, "values": values})
    asyncio.run(followed(live, cluster.series(), 80))
    assert [(found.kind, found.severity) for found in live.judged.findings[:2]] == [
        ("loss_nan", "critical"),
        ("compute_straggler", "critical"),
    ]


def test_while_the_job_stands_still_a_rank_is_not_just_running(tmp_path: Path) -> None:
    hang = Job(ranks=3, sequence=7).alone(1).hang()
    series = Cluster(ranks=3, steps=20).series()

    async def work() -> list[tuple[list[str], list[str | None], int]]:
        live = LiveRun(run_dir=tmp_path)
        rule_loop = RuleLoop(live)
        introduce(live, series)
        live.rows(taken_of(series, range(20)))
        seen = []
        for known in (None, hang, replace(hang, over="recovered", over_wall_ns=hang.declared_wall_ns)):
            if known is not None:
                write_hang(tmp_path, known)
            await rule_loop.evaluate()
            ranks = live.ranks()
            seen.append((ranks["state"], ranks["standing"], live.info()["still_ranks"]))
        return seen

    running, nothing = ["running"] * 3, [None] * 3
    stood = ["waits in all_reduce", "hung", "waits in all_reduce"]
    assert asyncio.run(work()) == [(running, nothing, 0), (running, stood, 3), (running, nothing, 0)]


def test_samples_reach_the_rules_under_the_name_of_their_host() -> None:
    live = asyncio.run(followed(LiveRun(), Cluster(ranks=2, steps=20).series(), 20))
    node = live.registry.nodes[0]
    sample = b'{"wall_ns":1,"node":"a-host","kind":"host","cpu_percent":50.0,"swap_used":null}'
    live.lines("samples.jsonl", [sample], node=node, offset_ns=0)
    data = run_data_of(snapshot(live, select(live)))
    assert data.samples == ({"wall_ns": 1, "node": "a-host", "kind": "host", "cpu_percent": 50.0},)


def test_device_times_and_memory_reach_the_rules() -> None:
    cluster = Cluster(
        ranks=4, steps=60, device_timed=True, faults=(slow_at(2, "backward", 6.0),), allocated_mb=800.0, memory_every=4
    )
    live = asyncio.run(followed(LiveRun(), cluster.series(), 60))
    assert live.judged.findings[0].ranks == (2,)
    data = run_data_of(snapshot(live, select(live)))
    for own, recorded in zip(data.ranks, cluster.series(), strict=True):
        assert (own.steps["step"] == recorded.steps["step"]).all()
        for name in ("wall_ns", "between_ns", "allocated", "reserved", "peak_allocated"):
            assert np.allclose(own.steps[name], recorded.steps[name], rtol=2e-7)
        for name in recorded.steps.table.phases:
            assert np.allclose(own.steps.phase(name), recorded.steps.phase(name), rtol=2e-7)
            assert np.allclose(own.steps.device(name), recorded.steps.device(name))
        assert (own.steps["start_ns"] == recorded.steps["start_ns"]).all()
        assert (own.steps["flags"] == recorded.steps["flags"]).all()
        assert own.identity == recorded.identity


def test_a_silent_rank_does_not_stop_the_judging() -> None:
    now = 0.0
    cluster = Cluster(ranks=8, steps=80, faults=(slow_at(5, "forward", 6.0),))
    series = cluster.series()

    async def main() -> LiveRun:
        nonlocal now
        live = LiveRun(clock=lambda: now)
        rule_loop = RuleLoop(live)
        introduce(live, series)
        live.rows(taken_of(series, range(5)))
        for first in range(5, 80, 15):
            now += 11.0
            live.rows(taken_of(series[:7], range(first, first + 15)))
            await rule_loop.evaluate()
        return live

    live = asyncio.run(main())
    assert live.judged.ranks == 7
    assert live.judged.findings[0].ranks == (5,)


def many(agents: int, slow_rank: int | None) -> LiveRun:
    """200 ranks each, 30 steps."""
    job = LoadJob(agents=agents, ranks_per_agent=200, slow_rank=slow_rank)
    pool = job.pool_ns()
    live = LiveRun()
    nodes = [LoadRanks(job, node, pool) for node in range(job.agents)]
    about = RingSidecar.from_dict(nodes[0].sidecars()[0])
    for node, ranks in enumerate(nodes):
        for local in range(job.ranks_per_agent):
            identity = replace(about.identity, host=ranks.host, pid=100 + local, rank=node * 200 + local)
            live.ring(replace(about, identity=identity, pid=100 + local), node=str(node))

    async def main() -> None:
        rule_loop = RuleLoop(live)
        for first in range(0, 30, 10):
            for ranks in nodes:
                table = ranks.table.copy()
                table["rows"], table["live_step"] = 10, first + 10
                slots = ranks.rows(first, first + 10).view(np.uint8).reshape(-1, 256)
                live.rows(FedRows(slots=slots, table=table))
            await rule_loop.evaluate()

    asyncio.run(main())
    return live


@pytest.mark.soak  # near: the same with fewer ranks
def test_one_slow_rank_among_twenty_thousand_is_named() -> None:
    live = many(100, 13_337)
    assert [finding.ranks for finding in live.judged.findings] == [(13_337,)]
    assert live.judged.findings[0].phase == "backward"
    assert (live.judged.ranks, live.judged.of_ranks) == (512, 20_000)
    chosen = select(live)
    assert len(chosen) == 512
    assert (select(live) == chosen).all()
    shown = live.registry.of["shown"][live.ring_of[chosen]]
    assert (np.diff(shown) > 0).all()
    assert np.diff(shown).max() < 200  # the sample is even


def test_nobody_among_thousands_is_named_when_all_are_alike() -> None:
    """The worst of many are judged, and the worst of many are always somewhat worse."""
    assert many(25, None).judged.findings == ()


def test_a_rule_that_fails_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    series = Cluster(ranks=2, steps=20).series()
    monkeypatch.setattr("stepscope.hub.live.rules.evaluate", lambda *_: 1 // 0)

    async def main() -> LiveRun:
        live = LiveRun()
        introduce(live, series)
        live.rows(taken_of(series, range(10)))
        pace = Pace(least_s=0.0, most_s=0.0, share=1.0, tick_s=0.01)
        keeping = asyncio.create_task(keep_up(live, loop=RuleLoop(live, unattended=pace)))
        while not live.judged.failed:
            await asyncio.sleep(0.01)
        live.rows(taken_of(series, range(10, 20)))
        while live.frontier < 19:
            await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        return live

    assert "ZeroDivisionError" in asyncio.run(main()).info()["judged"]["failed"]


def test_keeping_up_takes_in_and_looks_until_it_is_cancelled() -> None:
    series = Cluster(ranks=2, steps=20).series()

    async def main() -> LiveRun:
        live = LiveRun()
        introduce(live, series)
        fed = iter([range(10), range(10, 20)])

        def poll() -> None:
            steps = next(fed, None)
            if steps is not None:
                live.rows(taken_of(series, steps))

        keeping = asyncio.create_task(keep_up(live, poll=poll))
        while live.frontier < 19:
            await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        return live

    assert asyncio.run(main()).info()["rows"] == 40
