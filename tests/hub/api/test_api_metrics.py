"""What Prometheus is told, read by the real one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.traffic import Exchange, Traffic
from prometheus_client.parser import text_string_to_metric_families
from real_prometheus import program, prometheus
from waiting import until

from stepscope.diagnosis import build_window
from stepscope.hub.api.auth import Readers
from stepscope.hub.api.metric_families import FAMILIES
from stepscope.hub.api.metrics import _communication
from stepscope.hub.api.responses import LONGEST_LABEL, Exposition, Family
from stepscope.hub.app import make_app
from stepscope.hub.live.figures import WORST, RunFigures, figures_of
from stepscope.hub.runs import Runs
from stepscope.reports.tables import communication_table
from tests.hub.run_parts import Hub, record

READER = "reader-token-of-the-tests"


class Series(dict[str, float]):
    """By name and labels, whatever their order."""

    def __init__(self, text: str) -> None:
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        super().__init__({_sorted(name): float(value) for name, _, value in lines})

    def __getitem__(self, name: str) -> float:
        return super().__getitem__(_sorted(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(_sorted(str(name)))


def _sorted(series: str) -> str:
    name, brace, labels = series.partition("{")
    return f"{name}{{{','.join(sorted(labels.removesuffix('}').split(',')))}}}" if brace else name


def test_the_open_runs_and_the_hub_are_told(hub: Any) -> None:
    hub.get("/api/v1/runs/demo")
    answer = hub.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = Series(answer.body.decode())
    assert found['stepscope_run_info{run="demo",status="finished"}'] == 1
    assert found['stepscope_run_step{run="demo"}'] == 599
    assert found['stepscope_ranks{run="demo"}'] == 8
    assert found['stepscope_ranks_live{run="demo"}'] == 0
    assert found['stepscope_ranks_hung{run="demo"}'] == 0
    assert 0.06 < found['stepscope_step_duration_seconds{run="demo",stat="p50"}'] < 0.08
    assert found['stepscope_phase_seconds{run="demo",phase="forward",stat="max"}'] > 0.03
    assert found['stepscope_findings{run="demo",kind="compute_straggler",severity="critical"}'] == 1
    assert found['stepscope_finding_ranks{run="demo",kind="compute_straggler",severity="critical"}'] == 1
    assert found['stepscope_nodes{run="demo"}'] == 2
    assert found['stepscope_node_cpu_ratio{run="demo",node="node1",host="node1"}'] == 0.4
    assert found['stepscope_host_cpu_ratio{run="demo",stat="max"}'] == 0.4
    assert found['stepscope_device_memory_bytes{run="demo",kind="allocated",stat="max"}'] > 50 << 20
    assert found['stepscope_rank_memory_bytes{run="demo",stat="p50"}'] == 400 << 20
    assert found['stepscope_phase_worst_rank_seconds{run="demo",phase="forward",rank="3"}'] > 0.03
    assert found['stepscope_finding_cost_ratio{run="demo",kind="compute_straggler",severity="critical"}'] > 0.1
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_cpu_seconds_total"] > 0
    worst = [name for name in found if name.startswith("stepscope_worst_rank_work_seconds")]
    assert 'rank="3"' in worst[0]
    assert len(worst) <= WORST


class OpenedMeanwhile(Runs):
    """A reader opens the run while the judgments of the hubs of all others are read."""

    async def judged(self) -> list[tuple[str, RunFigures]]:
        run = await self.open("demo")
        assert run is not None
        return [("demo", figures_of(run.live, status="running", wall_ns=5, findings=(), throughput=None))]


def test_a_run_that_is_opened_during_a_scrape_is_listed_once(tmp_path: Path) -> None:
    record(tmp_path, "demo", Cluster(ranks=2, steps=20).run())
    hub = Hub(lambda: make_app(OpenedMeanwhile(tmp_path, single=None), Readers(READER)))
    try:
        text = hub.get("/metrics").body.decode()
    finally:
        hub.close()
    names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert [name for name in names if name.startswith("stepscope_run_info")] == [
        'stepscope_run_info{run="demo",status="finished"}'
    ]
    assert len(names) == len(set(names))


def test_promtool_finds_nothing_to_say(hub: Any) -> None:
    promtool = program("promtool")
    for run in ("demo", "plain"):
        hub.get(f"/api/v1/runs/{run}")
    text = hub.get("/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_whatever_a_label_holds_stays_a_label() -> None:
    page = Exposition(
        [
            Family(name="a", labels=("name",), about="Two\nlines \\ and a slash."),
            Family(name="empty_total", labels=(), about="Nothing."),
        ]
    )
    hostile = 'x"} 1\nb{c="\\ \r\x00\u2028\ud800' + "y" * 500
    page.put("a", 1, name=hostile)
    page.put("a", None, name="missing")
    page.put("a", float("nan"), name="nan")
    page.put("a", 2**63)
    lines = page.text().splitlines()
    assert lines[0] == "# HELP a Two\\nlines \\\\ and a slash."
    assert lines[1] == "# TYPE a gauge"
    label = re.fullmatch(r'a\{name="((?:[^"\\\n]|\\.)*)"\} 1', lines[2])
    assert label is not None
    assert label[1].startswith('x\\"} 1\\nb{c=\\"\\\\ ���')
    assert len(label[1]) <= 2 * LONGEST_LABEL
    assert [line.partition(" ")[0] for line in lines[3:]] == ["a"]
    assert float(lines[3].partition(" ")[2]) == 2**63
    first, second = next(iter(text_string_to_metric_families(page.text()))).samples
    assert first.labels["name"] == hostile[:LONGEST_LABEL].translate(dict.fromkeys((13, 0, 0x2028, 0xD800), "�"))
    assert second.labels == {}


def test_prometheus_scrapes_it(hub: Any, tmp_path: Path) -> None:
    hub.get("/api/v1/runs/demo")
    token = tmp_path / "token"
    token.write_text(READER)
    token.chmod(0o600)
    scrape = {
        "job_name": "stepscope",
        "authorization": {"credentials_file": str(token)},
        "static_configs": [{"targets": [f"127.0.0.1:{hub.port}"]}],
    }
    with prometheus(tmp_path / "prometheus", {"scrape_configs": [scrape]}) as server:
        found = until(lambda: server.query('stepscope_run_step{run="demo"}'))
    assert [row["value"][1] for row in found] == ["599"]
    assert found[0]["metric"]["job"] == "stepscope"


def test_what_the_ranks_exchange_is_told_by_group_and_operation() -> None:
    exchange = Exchange(dimension="dp", mb=4.0, ms=2.0)
    traffic = Traffic(mesh={"dp": 2}, exchanges=(exchange,), noise=0.0, backend="nccl", device=True)
    nccl = Cluster(ranks=2, steps=40, noise=0.0, device_timed=True, traffic=traffic)
    table = communication_table(build_window(nccl.run()))
    page = Exposition(FAMILIES)
    _communication(page, "r", table)
    found = Series(page.text())
    who = 'run="r",group="dp0",kind="data",op="all_reduce"'
    assert found['stepscope_communication_device_steps{run="r"}'] == 40
    assert found['stepscope_communication_missed_steps{run="r"}'] == 0
    assert found[f"stepscope_exchange_bytes{{{who}}}"] == 4 << 20
    assert found[f'stepscope_exchange_seconds{{{who},part="transfer"}}'] == pytest.approx(0.002, rel=0.01)
    speed = (4 << 20) / 0.002
    assert found[f'stepscope_exchange_bytes_per_second{{{who},bandwidth="bus"}}'] == pytest.approx(speed, rel=0.01)
    assert 'stepscope_exchange_last_arrivals{run="r",group="dp0",kind="data",rank="0"}' in found
