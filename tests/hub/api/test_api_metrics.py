"""What Prometheus is told, read by the real one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.traffic import Exchange, Traffic

from stepscope.diagnosis import build_window
from stepscope.hub.api.metrics import WORST, _communication
from stepscope.hub.api.responses import LONGEST_LABEL, Exposition
from stepscope.hub.live.live_run import Judged
from stepscope.reports.tables import communication_table

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
    assert found['stepscope_ranks_still{run="demo"}'] == 0
    assert 0.06 < found['stepscope_step_duration_seconds{run="demo",stat="p50"}'] < 0.08
    assert found['stepscope_phase_seconds{run="demo",phase="forward",stat="max"}'] > 0.03
    assert found['stepscope_findings{run="demo",kind="compute_straggler",severity="critical"}'] == 1
    assert found['stepscope_finding_ranks{run="demo",kind="compute_straggler",severity="critical"}'] == 1
    assert found['stepscope_nodes{run="demo"}'] == 2
    assert found['stepscope_node_cpu_percent{run="demo",node="node1",host="node1"}'] == 40
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_cpu_seconds_total"] > 0
    worst = [name for name in found if name.startswith("stepscope_worst_rank_work_seconds")]
    assert 'rank="3"' in worst[0]
    assert len(worst) <= WORST


def test_promtool_finds_nothing_to_say(hub: Any) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's prometheus) is not installed")
    for run in ("demo", "plain"):
        hub.get(f"/api/v1/runs/{run}")
    text = hub.get("/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_whatever_a_label_holds_stays_a_label() -> None:
    page = Exposition()
    page.family("a", "gauge", "Two\nlines \\ and a slash.")
    hostile = 'x"} 1\nb{c="\\ \r\x00\u2028\ud800' + "y" * 500
    page.sample("a", 1, name=hostile)
    page.sample("a", None, name="missing")
    page.sample("a", float("nan"), name="nan")
    page.sample("a", 2**63)
    page.family("empty", "counter", "Nothing.")
    lines = page.text().splitlines()
    assert lines[0] == "# HELP a Two\\nlines \\\\ and a slash."
    assert lines[1] == "# TYPE a gauge"
    label = re.fullmatch(r'a\{name="((?:[^"\\\n]|\\.)*)"\} 1.0', lines[2])
    assert label is not None
    assert label[1].startswith('x\\"} 1\\nb{c=\\"\\\\ ���')
    assert len(label[1]) <= 2 * LONGEST_LABEL
    assert [line.partition(" ")[0] for line in lines[3:]] == ["a"]
    assert float(lines[3].partition(" ")[2]) == 2**63


def test_prometheus_scrapes_it(hub: Any, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed")
    hub.get("/api/v1/runs/demo")
    token = tmp_path / "token"
    token.write_text(READER)
    token.chmod(0o600)
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "stepscope",
                "authorization": {"credentials_file": str(token)},
                "static_configs": [{"targets": [f"127.0.0.1:{hub.port}"]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    words = [
        prometheus,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        address = _address(process, tmp_path / "log")
        query = urllib.parse.urlencode({"query": 'stepscope_run_step{run="demo"}'})
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while not found and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=10) as answer:
                    found = json.loads(answer.read())["data"]["result"]
            except urllib.error.HTTPError as error:
                assert error.code == 503  # it listens before it is ready
                error.close()
            time.sleep(0.2)
        assert [row["value"][1] for row in found] == ["599"]
        assert found[0]["metric"]["job"] == "stepscope"
    finally:
        process.terminate()
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens: the kernel chose the port."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        said = re.search(r"Listening on\W.*?address=(\S+)", log.read_text())
        if said:
            return said[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_what_the_ranks_exchange_is_told_by_group_and_operation() -> None:
    exchange = Exchange(dimension="dp", mb=4.0, ms=2.0)
    traffic = Traffic(mesh={"dp": 2}, exchanges=(exchange,), noise=0.0, backend="nccl", device=True)
    nccl = Cluster(ranks=2, steps=40, noise=0.0, device_timed=True, traffic=traffic)
    table = communication_table(build_window(nccl.run()))
    page = Exposition()
    run: Any = SimpleNamespace(id="r", document=None, live=SimpleNamespace(judged=Judged(communication=table)))
    _communication(page, run)
    found = Series(page.text())
    who = 'run="r",group="dp0",kind="data",op="all_reduce"'
    assert found['stepscope_communication_device_steps{run="r"}'] == 40
    assert found['stepscope_communication_missed_steps{run="r"}'] == 0
    assert found[f"stepscope_exchange_bytes{{{who}}}"] == 4 << 20
    assert found[f'stepscope_exchange_seconds{{{who},part="transfer"}}'] == pytest.approx(0.002, rel=0.01)
    speed = (4 << 20) / 0.002
    assert found[f'stepscope_exchange_bytes_per_second{{{who},bandwidth="bus"}}'] == pytest.approx(speed, rel=0.01)
    assert 'stepscope_exchange_last_arrivals{run="r",group="dp0",kind="data",rank="0"}' in found
