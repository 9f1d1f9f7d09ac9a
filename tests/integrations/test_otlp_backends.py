"""OTLP through a real collector, and into a real backend whose queries return the values.

Rotel is a collector that pip installs.  VictoriaMetrics takes OTLP since 1.92: Debian 13 has it, Debian 12 an older
one, with which the test is skipped.  Debian builds its Prometheus without OTLP.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stepscope.integrations.exporter import Outcome
from stepscope.integrations.run_feed import PREFIX, GpuRow, News, RunAbout, Stretch, Telemetry
from tests.support.loopback_receiver import Received, Reply, closed_port, loopback_receiver

pytest.importorskip("opentelemetry.proto")
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import until

from stepscope.integrations.otlp import make_exporter

ExportRun = Callable[..., tuple[Outcome, ...]]
SECOND_NS = 1_000_000_000


@contextmanager
def server(command: Sequence[str | Path], ready: str, log: Path) -> Iterator[None]:
    """A server that answers at ``ready``, whatever its answer, until the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(ready, timeout=5).close()
                break
            except urllib.error.HTTPError as error:
                if error.code != 503:  # not yet ready
                    break
            except OSError:
                pass
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def answer(url: str, **parameters: object) -> str:
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}?{query}", timeout=30) as response:
        return str(response.read().decode())


# -- a collector ------------------------------------------------------------------------------------------------------


def test_a_collector_passes_everything_on(export_run: ExportRun, news: News, tmp_path: Path) -> None:
    """Rotel decodes the requests, batches them and sends them on; what arrives behind it is what was sent."""
    package = find_spec("rotel")
    if package is None or package.origin is None:
        pytest.skip("rotel is not installed")
    agent = Path(package.origin).with_name("rotel-agent")
    port = closed_port()
    with loopback_receiver() as behind:
        behind.otherwise = lambda _: Reply(body=b"")
        command: list[str | Path] = [agent, "start", "--otlp-http-endpoint", f"127.0.0.1:{port}", "--exporter", "otlp"]
        command += ["--otlp-grpc-endpoint", f"127.0.0.1:{closed_port()}", "--otlp-exporter-protocol", "http"]
        command += ["--otlp-exporter-endpoint", behind.url]
        with server(command, f"http://127.0.0.1:{port}/", tmp_path / "log"):
            (outcome,) = export_run([f"otlp:http://127.0.0.1:{port}"])
            assert outcome.problem == ""
            exporter = make_exporter(f"http://127.0.0.1:{port}")
            exporter.begin(about())
            exporter.write_telemetry(telemetry())  # type: ignore[attr-defined]
            behind.wait_for(
                lambda: {"/v1/metrics", "/v1/logs", "/v1/traces"} <= {each.path for each in behind.accepted}
            )
            behind.wait_for(lambda: len(logs_of(behind.accepted)) == 2 and "hw.power" in points_of(behind.accepted))
    points = points_of(behind.accepted)
    steps = sorted(point.as_int for point in points["stepscope.step"])
    assert steps == list(range(200))
    worst = {
        point.time_unix_nano: point.as_double
        for point in points["stepscope.phase.duration"]
        if {(pair.key, pair.value.string_value) for pair in point.attributes}
        == {("phase", "forward"), ("rank", "worst")}
    }
    assert worst == {
        row.wall_ns: pytest.approx(row.values[f"{PREFIX}phase/forward_worst_ms"] / 1e3) for row in news.rows
    }
    assert {record.event_name for record in logs_of(behind.accepted)} <= {
        "stepscope.finding.opened",
        "stepscope.run.ended",
        "",  # a collector with an older protocol drops the field; the attribute has it, too
    }
    (span,) = spans_of(behind.accepted)
    assert (span.name, span.end_time_unix_nano - span.start_time_unix_nano) == ("stepscope.hang", 30 * SECOND_NS)


def body_of(request: Received) -> bytes:
    packed = {name.lower(): value for name, value in request.headers.items()}.get("content-encoding") == "gzip"
    return gzip.decompress(request.body) if packed else request.body


def points_of(requests: Sequence[Received]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in requests:
        if each.path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body_of(each)).resource_metrics:
                for metric in resource.scope_metrics[0].metrics:
                    data = metric.gauge if metric.WhichOneof("data") == "gauge" else metric.sum
                    found.setdefault(metric.name, []).extend(data.data_points)
    return found


def logs_of(requests: Sequence[Received]) -> list[Any]:
    return [
        record
        for each in requests
        if each.path == "/v1/logs"
        for resource in ExportLogsServiceRequest.FromString(body_of(each)).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


def spans_of(requests: Sequence[Received]) -> list[Any]:
    return [
        span
        for each in requests
        if each.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body_of(each)).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def about() -> RunAbout:
    return RunAbout(
        name="night", command="python train.py", world_size=4, created_wall_ns=SECOND_NS, settings={"host": "node0"}
    )


def telemetry() -> Telemetry:
    """Of two nodes with a GPU each, and of a hang."""
    now_ns = time.time_ns()
    values = {"util_percent": 75.0, "mem_used": 20e9, "mem_total": 80e9, "temperature_c": 61.0, "power_w": 650.0}
    gpus = [
        GpuRow(host=f"node{node}", index=0, uuid=f"GPU-{node}", model="NVIDIA H200", wall_ns=now_ns, values=values)
        for node in (0, 1)
    ]
    hang = Stretch(
        name="hang",
        title="Rank 2 blocks the job.",
        begin_wall_ns=now_ns - 30 * SECOND_NS,
        end_wall_ns=now_ns,
        failed=True,
        attributes={"stepscope.hang.kind": "stuck"},
    )
    return Telemetry(gpus=tuple(gpus), stretches=(hang,))


# -- backends ---------------------------------------------------------------------------------------------------------


def test_victoria_metrics_returns_the_values(export_run: ExportRun, news: News, tmp_path: Path) -> None:
    if shutil.which("victoria-metrics") is None:
        pytest.skip("VictoriaMetrics is not installed")
    url = f"http://127.0.0.1:{closed_port()}"
    command = ["victoria-metrics", f"-httpListenAddr={urllib.parse.urlsplit(url).netloc}", "-retentionPeriod=100y"]
    with server([*command, f"-storageDataPath={tmp_path / 'data'}"], f"{url}/health", tmp_path / "log"):
        if not takes_otlp(url):
            pytest.skip("this VictoriaMetrics is older than 1.92")
        (outcome,) = export_run([f"otlp:{url}/opentelemetry"])
        assert (outcome.problem, outcome.where) == ("", f"{url}/opentelemetry (takes no logs)")
        exporter = make_exporter(f"{url}/opentelemetry")
        exporter.begin(about())
        exporter.write_telemetry(telemetry())  # type: ignore[attr-defined]
        assert exporter.where == f"{url}/opentelemetry (takes no traces)"

        def series(selector: str) -> list[Any]:
            answer(f"{url}/internal/force_flush")
            lines = answer(f"{url}/api/v1/export", **{"match[]": selector}).splitlines()
            return [json.loads(line) for line in lines]

        selector = '{__name__="stepscope.phase.duration",phase="forward",rank="worst"}'
        (found,) = until(lambda: series(selector))
        gpus = until(lambda: series('{"hw.type"="gpu"}'))
    assert found["metric"]["stepscope.run"] == "night"
    assert dict(zip(found["timestamps"], found["values"], strict=True)) == {
        row.wall_ns // 1_000_000: pytest.approx(row.values[f"{PREFIX}phase/forward_worst_ms"] / 1e3)
        for row in news.rows
    }
    values = {(each["metric"]["__name__"], each["metric"]["host.name"]): each["values"] for each in gpus}
    assert values == {
        (name, host): [value]
        for host in ("node0", "node1")
        for name, value in {
            "hw.gpu.utilization": 0.75,
            "hw.gpu.memory.utilization": 0.25,
            "hw.gpu.memory.usage": 20e9,
            "hw.gpu.memory.limit": 80e9,
            "hw.temperature": 61,
            "hw.power": 650,
        }.items()
    }
    assert {(each["metric"]["hw.id"], each["metric"]["hw.vendor"]) for each in gpus} == {
        ("GPU-0", "NVIDIA"),
        ("GPU-1", "NVIDIA"),
    }


def takes_otlp(url: str) -> bool:
    request = urllib.request.Request(f"{url}/opentelemetry/v1/metrics", data=b"")
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        return "unsupported path" not in error.read().decode(errors="replace")
    return True
