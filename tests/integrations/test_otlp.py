"""OTLP: what a collector gets, read with the published protocol, and what happens when it refuses."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator

import pytest

from stepscope.integrations.exporter import Outcome
from stepscope.integrations.run_feed import PREFIX, News
from tests.support.loopback_receiver import LoopbackReceiver, Reply, closed_port, loopback_receiver

pytest.importorskip("opentelemetry.proto")
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

ExportRun = Callable[..., tuple[Outcome, ...]]


@pytest.fixture
def collector() -> Iterator[LoopbackReceiver]:
    with loopback_receiver() as receiver:
        receiver.otherwise = lambda _: Reply(body=b"")
        yield receiver


def attributes(pairs: object) -> dict[str, str | int | float]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}  # type: ignore[attr-defined]


def test_a_collector_gets_gauges_and_findings(
    export_run: ExportRun, news: News, collector: LoopbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20secret")
    (outcome,) = export_run([f"otlp:{collector.url}"])
    assert outcome.problem == ""
    assert [request.path for request in collector.accepted] == ["/v1/metrics", "/v1/logs", "/v1/logs"]
    assert {request.headers["Content-Type"] for request in collector.accepted} == {"application/x-protobuf"}
    assert {request.headers["Api-Key"] for request in collector.accepted} == {"a secret"}
    request = ExportMetricsServiceRequest.FromString(collector.accepted[0].body)
    (resource,) = request.resource_metrics
    about = attributes(resource.resource.attributes)
    assert about["process.command_line"] == "python train.py"
    assert re.fullmatch(rf"night-\d+@{re.escape(str(about['host.name']))}", str(about["service.instance.id"]))
    assert (about["service.name"], about["stepscope.run"], about["stepscope.ranks"]) == ("stepscope", "night", 4)
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics["stepscope.step.duration"].unit == "s"
    worst = [
        point
        for point in metrics["stepscope.phase.duration"].gauge.data_points
        if attributes(point.attributes) == {"phase": "forward", "rank": "worst"}
    ]
    assert [point.as_double for point in worst] == pytest.approx(
        [row.values[f"{PREFIX}phase/forward_worst_ms"] / 1e3 for row in news.rows]
    )
    assert [point.time_unix_nano for point in worst] == [row.wall_ns for row in news.rows]
    assert [point.as_int for point in metrics["stepscope.step"].gauge.data_points] == list(range(200))
    series = {
        (metric.name, *sorted(attributes(point.attributes).items()))
        for metric in metrics.values()
        for point in metric.gauge.data_points
    }
    assert len(series) < 40
    logs = [ExportLogsServiceRequest.FromString(each.body) for each in collector.accepted[1:]]
    records = [each.resource_logs[0].scope_logs[0].log_records[0] for each in logs]
    assert [record.event_name for record in records] == ["stepscope.finding.opened", "stepscope.run.ended"]
    assert "Rank 2 is 29.6 ms slower" in records[0].body.string_value
    assert attributes(records[0].attributes)["stepscope.finding.kind"] == "compute_straggler"


def test_a_collector_that_is_busy_is_asked_again(export_run: ExportRun, collector: LoopbackReceiver) -> None:
    collector.replies = [Reply(status=503)]
    (outcome,) = export_run([f"otlp:{collector.url}"])
    assert outcome.problem == ""
    assert [request.path for request in collector.requests[:2]] == ["/v1/metrics", "/v1/metrics"]
    assert collector.requests[0].body == collector.requests[1].body


def test_a_collector_that_refuses_is_given_up(export_run: ExportRun, collector: LoopbackReceiver) -> None:
    collector.otherwise = lambda _: Reply(status=401)
    (outcome,) = export_run([f"otlp:{collector.url}"])
    assert outcome.problem == f"ExportError: {collector.url}/v1/metrics did not take it: HTTP status 401"
    assert len(collector.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(
    export_run: ExportRun, collector: LoopbackReceiver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """It could lead the key to another host, and turn the request into one for a page that says 200."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    with loopback_receiver() as elsewhere:
        location = {"Location": f"{elsewhere.url}/v1/metrics"}
        collector.otherwise = lambda _: Reply(status=status, headers=location)
        (outcome,) = export_run([f"otlp:{collector.url}"])
        assert elsewhere.requests == []
    assert outcome.problem == (
        f"ExportError: {collector.url}/v1/metrics did not take it: "
        f"HTTP status {status}, a redirect, which is not followed; set the final address"
    )
    assert len(collector.requests) == 1


@pytest.mark.parametrize("value", ["secret%0A", "secret%E2%80%A6"])
def test_an_error_does_not_quote_a_header(
    export_run: ExportRun, collector: LoopbackReceiver, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={value}")
    (outcome,) = export_run([f"otlp:{collector.url}"])
    assert "a header has a character that HTTP does not allow" in outcome.problem
    assert "secret" not in outcome.problem and collector.requests == []


def test_a_collector_that_takes_only_a_part_is_reported(export_run: ExportRun, collector: LoopbackReceiver) -> None:
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 3
    answer.partial_success.error_message = "too old"
    collector.otherwise = lambda _: Reply(body=answer.SerializeToString())
    (outcome,) = export_run([f"otlp:{collector.url}"])
    assert outcome.problem == "ExportError: /v1/metrics: 3 were refused: too old"


def test_variables_of_opentelemetry_apply(
    export_run: ExportRun, collector: LoopbackReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint, compression, and a backend that takes metrics only."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    collector.otherwise = lambda request: Reply(body=b"") if request.path == "/v1/metrics" else Reply(status=404)
    (outcome,) = export_run(["otlp"])
    assert (outcome.problem, outcome.where) == ("", f"{collector.url} (takes no logs)")
    assert [request.path for request in collector.requests] == ["/v1/metrics", "/v1/logs"]
    request = ExportMetricsServiceRequest.FromString(gzip.decompress(collector.requests[0].body))
    assert request.resource_metrics[0].scope_metrics[0].metrics


@pytest.mark.soak
def test_a_collector_that_is_down_is_given_up(export_run: ExportRun) -> None:
    """A near relation of ``test_a_collector_that_refuses_is_given_up``; it waits for 7 seconds."""
    (outcome,) = export_run([f"otlp:http://127.0.0.1:{closed_port()}"])
    assert "Connection refused" in outcome.problem
