"""``deploy/grafana``: what is committed is what its description says, and a real Prometheus understands all of it.

Panels about GPUs, NCCL and nodes need a cluster that is not here: the hub serves a synthetic run in memory that has all
of it, through the code that serves real ones.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from alert_messages import incident
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples
from fakes.traffic import Exchange, Traffic
from real_prometheus import program, prometheus
from waiting import until

from stepscope.alerts.incident_file import append_incident
from stepscope.diagnosis import build_window
from stepscope.hub.api.auth import Readers
from stepscope.hub.api.metric_families import FAMILIES
from stepscope.hub.app import make_app
from stepscope.hub.live.live_run import Judged, LiveRun
from stepscope.hub.past_run import past_run
from stepscope.hub.runs import Runs
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.records.finding import Finding
from stepscope.reports.tables import communication_table
from stepscope.store.captures import make_capture_folder, write_capture
from stepscope.store.create import create_run
from stepscope.store.documents import NodeInfo, read_meta, write_nodes
from tests.hub.run_parts import READER, Hub

FROM_PROMETHEUS = {"up", "scrape_duration_seconds"}
NETWORK = {"net_rx_bps": 5e8, "net_tx_bps": 4e8, "net_errors_ps": 0.0, "net_drops_ps": 1.0, "tcp_retrans_ps": 3.0}
INFINIBAND = {"ib_rx_bps": 2e9, "ib_tx_bps": 2e9, "ib_errors_ps": 0.0}
DISK = {"disk_read_bps": 1e6, "disk_write_bps": 2e6, "io_pressure": 0.1}


@pytest.fixture(scope="module")
def make(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_make", root / "deploy" / "grafana" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def panels(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_what_is_committed_is_what_the_description_says(make: ModuleType) -> None:
    for path, text in make.outputs().items():
        assert path.read_text() == text, f"{path.name} is old: run `make grafana`"


def test_every_series_that_is_asked_for_exists(make: ModuleType) -> None:
    known = {family.name for family in FAMILIES} | FROM_PROMETHEUS
    queries = [
        target["expr"] for made in make.dashboards().values() for panel in panels(made) for target in panel["targets"]
    ]
    queries += [alert.expr for alert in make.ALERTS]
    used = {name for query in queries for name in re.findall(r"\b(?:stepscope|process|scrape)_\w+", query)}
    assert used - known == set()
    drawn = {name for query in queries for name in re.findall(r"\bstepscope_\w+", query)}
    shown = {family.name for family in FAMILIES if "run" in family.labels and "node" not in family.labels}
    undrawn = shown - drawn
    assert undrawn == {  # what the others on the same row already say, or what only explains a figure
        *("stepscope_ranks", "stepscope_ranks_expected", "stepscope_ranks_blocking", "stepscope_records_lost"),
        *("stepscope_run_start_timestamp_seconds", "stepscope_finding_ranks", "stepscope_nodes"),
        *("stepscope_nodes_heard", "stepscope_gpu_memory_used_bytes", "stepscope_host_memory_available_bytes"),
        *("stepscope_host_swap_used_bytes", "stepscope_exchange_bytes", "stepscope_communication_device_steps"),
        "stepscope_communication_missed_steps",
    }


def test_panels_fit_and_do_not_overlap(make: ModuleType) -> None:
    for made in make.dashboards().values():
        taken: set[tuple[int, int]] = set()
        for panel in made["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= make.WIDTH
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not taken & cells, panel["title"]
            taken |= cells
        assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])


def test_docs_that_alerts_name_exist(make: ModuleType, root: Path) -> None:
    for alert in make.ALERTS:
        page, _, heading = alert.docs.partition("#")
        text = (root / page).read_text()
        headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
        assert not heading or heading in headings, alert.docs


def test_promtool_accepts_rules_and_configuration(root: Path) -> None:
    promtool, grafana = program("promtool"), root / "deploy" / "grafana"
    for words in (
        ["check", "rules", str(grafana / "rules.yml")],
        ["check", "config", "--syntax-only", str(grafana / "prometheus.yml")],
        ["test", "rules", str(root / "tests" / "deploy" / "rules_test.yml")],
    ):
        done = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_unit_test(make: ModuleType, root: Path) -> None:
    document = yaml.safe_load((root / "tests" / "deploy" / "rules_test.yml").read_text())
    tested: dict[str, set[bool]] = {}
    for test in document["tests"]:
        for case in test["alert_rule_test"]:
            tested.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert tested == {alert.name: {True, False} for alert in make.ALERTS}


# -- a real Prometheus ------------------------------------------------------------------------------------------------


class ServedRun:
    """A run that has everything: two hosts of four GPUs each, a slow rank, NCCL timed on the device."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = create_run(folder / "runs", "night", ["train.py"], sessions=folder / "sessions").run_dir
        exchange = Exchange(dimension="dp", mb=4.0, ms=2.0)
        traffic = Traffic(mesh={"dp": 8}, exchanges=(exchange,), noise=0.0, backend="nccl", device=True)
        cluster = Cluster(
            ranks=8,
            steps=120,
            hosts=2,
            device_timed=True,
            backend="nccl",
            allocated_mb=100.0,
            traffic=traffic,
            faults=(slow_at(3, "forward", 30.0), slow_at(0, "checkpoint", 50.0, range(60, 61))),
            unfinished=dict.fromkeys(range(8), 120),
        )
        run = with_samples(cluster, host={**NETWORK, **INFINIBAND, **DISK}, process={"cpu_wait": 0.01}, every_s=0.5)
        self.live: LiveRun = past_run(replace(run, meta=read_meta(self.run_dir)))
        self.live.run_dir = self.run_dir
        for step in range(100):
            self.live.noted.add(step, {"loss": 1.0 / (step + 1)})
        self.healthy = Judged(
            communication=communication_table(build_window(run)),
            throughput={"samples_per_second": 900.0, "tokens_per_second": 9e5, "tflops": 400.0, "mfu": 0.4},
            goodput={"goodput": 0.9, "parts": {"training": 90.0, "start_up": 10.0}},
            evaluations=1,
        )
        straggler = Finding(
            kind="compute_straggler",
            severity="critical",
            title="Rank 3 is slow.",
            ranks=(3,),
            cost={"share": 0.4},
        )
        self.ill = replace(
            self.healthy,
            findings=(straggler,),
            standing={3: "hung", **dict.fromkeys((0, 1, 2), "waits in all_reduce")},
        )
        self.live.judge(self.ill)
        wall_ns = time.time_ns()
        write_nodes(
            self.run_dir,
            [
                NodeInfo(
                    node=node,
                    host=host,
                    spool=f"{node:032x}",
                    offset_ns=5,
                    rtt_ns=200_000,
                    joined_wall_ns=wall_ns,
                    heard_wall_ns=wall_ns,
                )
                for node, host in enumerate(("node0", "node1"))
            ],
        )
        append_incident(self.run_dir, incident())
        order = CaptureOrder(id="step-5", ranks=(0, 1), at_step=5, steps=4)
        make_capture_folder(self.run_dir, "step-5")
        write_capture(self.run_dir, CaptureRecord(order=order, state="done", requested_wall_ns=7, reason="finding"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServedRun, Hub]]:
    run = ServedRun(tmp_path)
    hub = Hub(lambda: make_app(Runs.of_live(run.run_dir, run.live), Readers(READER)))
    yield run, hub
    hub.close()


def at_once(rules: dict[str, Any]) -> dict[str, Any]:
    """The same rules, evaluated every second and without their waiting times."""
    quick = copy.deepcopy(rules)
    for group in quick["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["for"] = "0s"
    return quick


def test_every_panel_has_data_and_alerts_fire_and_resolve(
    make: ModuleType, root: Path, served: tuple[ServedRun, Hub], tmp_path: Path
) -> None:
    run, hub = served
    (tmp_path / "token").write_text(READER)
    config = yaml.safe_load((root / "deploy" / "grafana" / "prometheus.yml").read_text())
    scrape = config["scrape_configs"][0]
    scrape.pop("scrape_interval")
    scrape["authorization"]["credentials_file"] = str(tmp_path / "token")
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{hub.port}"]}]
    ours = {"scrape_configs": [scrape]}
    expected = {"StepscopeHung", "StepscopeStraggler", "StepscopeCriticalFinding"}
    with prometheus(tmp_path / "prometheus", ours, rules=at_once(make.rules())) as server:
        until(lambda: expected <= server.firing())
        until(lambda: len(server.query("stepscope_run_step[1m]")[0]["values"]) > 2)  # what a rate needs
        empty = []
        for made in json.loads(json.dumps(make.dashboards())).values():
            for panel in panels(made):
                for target in panel["targets"]:
                    query = target["expr"].replace("$run", "night").replace("$host", ".*")
                    if not server.query(query):
                        empty.append((panel["title"], query))
        assert empty == []
        for variable in ("stepscope_run_info", 'stepscope_node_ranks_live{run="night"}'):
            assert server.query(variable)
        hub.in_loop(lambda: run.live.judge(run.healthy))
        until(lambda: not expected & server.firing())


def test_prometheus_reaches_the_service_of_the_manifests(root: Path) -> None:
    """Its page always has TLS: by default with a certificate that it makes itself."""
    deploy = root / "deploy"
    (scrape,) = yaml.safe_load((deploy / "grafana" / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    manifests = yaml.safe_load_all((deploy / "kubernetes" / "base" / "hub.yaml").read_text())
    (page,) = (each for each in manifests if each["kind"] == "Deployment")
    (container,) = page["spec"]["template"]["spec"]["containers"]
    assert {container[probe]["httpGet"]["scheme"] for probe in ("readinessProbe", "livenessProbe")} == {"HTTPS"}
    assert (scrape["scheme"], scrape["tls_config"]) == ("https", {"insecure_skip_verify": True})


def test_hubs_in_kubernetes_are_found_by_their_annotations(
    root: Path, served: tuple[ServedRun, Hub], tmp_path: Path
) -> None:
    """Debian's Prometheus cannot ask Kubernetes: the labels that it would get come from a file, and are relabeled."""
    config = yaml.safe_load((root / "deploy" / "grafana" / "prometheus-kubernetes.yml").read_text())
    (scrape,) = config["scrape_configs"]
    del scrape["kubernetes_sd_configs"], scrape["authorization"], scrape["scrape_interval"]
    about = {
        "__meta_kubernetes_service_name": "stepscope",
        "__meta_kubernetes_namespace": "training",
        "__meta_kubernetes_service_annotation_stepscope_io_port": "7070",
    }
    found = {**about, "__meta_kubernetes_service_annotation_stepscope_io_scrape": "true"}
    scrape["static_configs"] = [{"targets": ["a:1"], "labels": found}, {"targets": ["b:1"], "labels": about}]
    with prometheus(tmp_path / "prometheus", {"scrape_configs": [scrape]}) as server:
        targets = until(lambda: (server.get("targets") or {}).get("activeTargets"))
    assert [target["labels"] for target in targets] == [
        {"instance": "stepscope.training.svc:7070", "job": "stepscope", "namespace": "training"}
    ]
