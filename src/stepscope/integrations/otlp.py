"""OpenTelemetry: metrics, log records and short spans to any collector, as OTLP over HTTP (protobuf).

    otlp:http://host:4318          /v1/metrics, /v1/logs and /v1/traces below it
    OTEL_EXPORTER_OTLP_ENDPOINT    the same, for ``otlp`` alone
    OTEL_EXPORTER_OTLP_HEADERS     such as ``api-key=…``: secrets stay out of the command line

One resource per run and host.  The number of series is bounded: phases and median or worst rank, never ranks, and the
GPUs of the first nodes.  Names are those of the semantic conventions where these have one (``hw.gpu.*``, ``hw.power``,
``hw.temperature``, ``host.*``, ``process.*``, ``vcs.*``), else ``stepscope.*``.

Findings are log records when they appear and when they are over.  Hangs and captures, once they are over, are spans of
one trace per run.  No span covers a whole run, because a killed job would never send it.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from stepscope import __version__
from stepscope.errors import ExportError, UsageError
from stepscope.integrations.exporter import Exporter
from stepscope.integrations.run_feed import (
    PREFIX,
    FindingChange,
    GpuRow,
    Row,
    RunAbout,
    Stretch,
    Telemetry,
    finding_line,
)
from stepscope.integrations.summary_figures import summary_figures

__all__ = ["make_exporter"]

ENDPOINT, HEADERS, COMPRESSION = (f"OTEL_EXPORTER_OTLP_{name}" for name in ("ENDPOINT", "HEADERS", "COMPRESSION"))
TRIES = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
TIMEOUT_S = 10.0
RETRIED = (429, 502, 503, 504)
"""Answers after which OTLP asks clients to try again."""
NOT_OFFERED = (400, 404, 405, 501)
"""Answers to logs and traces of a backend that takes metrics only: VictoriaMetrics (400), Prometheus (404)."""
LARGEST_ANSWER = 1 << 20
SEVERITY_NUMBERS: Mapping[str, Any] = {"info": 9, "warning": 13, "critical": 17}
"""INFO, WARN and ERROR of the logs data model."""
GIB = float(1 << 30)
FIGURES = {
    "memory/allocated_gib": ("stepscope.memory.allocated", "By", GIB),
    "memory/peak_gib": ("stepscope.memory.peak", "By", GIB),
    "throughput/samples_per_s": ("stepscope.throughput.samples", "{sample}/s", 1.0),
    "throughput/tokens_per_s": ("stepscope.throughput.tokens", "{token}/s", 1.0),
    "throughput/tflops_per_device": ("stepscope.throughput.flops", "{flop}/s", 1e12),
    "throughput/mfu": ("stepscope.mfu", "1", 1.0),
}
"""Name, unit, and what a value is multiplied with."""
HW_GAUGES = {
    "util_percent": ("hw.gpu.utilization", "1", 0.01),
    "temperature_c": ("hw.temperature", "Cel", 1.0),
    "power_w": ("hw.power", "W", 1.0),
}
HW_SUMS = {"mem_used": "hw.gpu.memory.usage", "mem_total": "hw.gpu.memory.limit"}
"""Of what the conventions count as a sum over GPUs, in bytes."""
VENDORS = ("NVIDIA", "AMD", "Intel")
ANSWERS: Mapping[str, tuple[type[Message], str]] = {
    "/v1/metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
    "/v1/logs": (ExportLogsServiceResponse, "rejected_log_records"),
    "/v1/traces": (ExportTraceServiceResponse, "rejected_spans"),
}
"""By path: the message that answers, and its field with the number of what was refused."""


def make_exporter(where: str) -> Exporter:
    return _Otlp(where or os.environ.get(ENDPOINT, ""), os.environ)


class _Otlp:
    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not the URL of a collector; use the form http://HOST:4318")
        self._url = url.rstrip("/")
        self._headers = dict(_headers(environ.get(HEADERS, "")))
        self._gzip = environ.get(COMPRESSION, "") == "gzip"
        self._run = RunAbout(name="", command="", world_size=0, created_wall_ns=0)
        self._not_offered: list[str] = []
        self._opener = urllib.request.build_opener(_NoRedirects)

    @property
    def where(self) -> str:
        missing = [path.rpartition("/")[2] for path in self._not_offered]
        return f"{self._url} (takes no {', no '.join(missing)})" if missing else self._url

    def begin(self, run: RunAbout) -> None:
        self._run = run

    def write_rows(self, rows: Sequence[Row]) -> None:
        points: dict[tuple[str, str], list[NumberDataPoint]] = {}
        for row in rows:
            wall_ns = row.wall_ns or time.time_ns()
            for name, value in row.values.items():
                metric, unit, scale, attributes = _metric_of(name.removeprefix(PREFIX))
                point = NumberDataPoint(
                    time_unix_nano=wall_ns, as_double=value * scale, attributes=_attributes(attributes)
                )
                points.setdefault((metric, unit), []).append(point)
            step = NumberDataPoint(time_unix_nano=wall_ns, as_int=row.step)
            points.setdefault(("stepscope.step", "{step}"), []).append(step)
        metrics = [
            Metric(name=name, unit=unit, gauge=Gauge(data_points=found)) for (name, unit), found in points.items()
        ]
        self._send_metrics({self._host: metrics})

    def write_finding(self, change: FindingChange) -> None:
        self._send_log(
            finding_line(change),
            change.severity if change.state == "opened" else "info",
            change.wall_ns,
            {
                "event.name": f"stepscope.finding.{change.state}",
                "stepscope.finding.kind": change.kind,
                "stepscope.finding.number": change.number,
                "stepscope.step": change.step,
                "stepscope.ranks": ",".join(map(str, change.ranks[:64])),
                "url.full": self._run.page,
            },
        )

    def write_telemetry(self, telemetry: Telemetry) -> None:
        by_host: dict[str, list[GpuRow]] = {}
        for row in telemetry.gpus:
            by_host.setdefault(row.host or self._host, []).append(row)
        if by_host:
            self._send_metrics({host: _gpu_metrics(rows, self._run) for host, rows in by_host.items()})
        if telemetry.stretches:
            self._send_spans(telemetry.stretches)

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        figures = {name.replace("/", "."): value for name, value in summary_figures(status, summary).items()}
        text = f"The run is over: {status}."
        attributes = {"event.name": "stepscope.run.ended", "url.full": self._run.page, **figures}
        self._send_log(text, "info", 0, attributes)

    def close(self) -> None: ...

    # -- sending --

    @property
    def _host(self) -> str:
        return self._run.settings.get("host", platform.node())

    def _resource(self, host: str) -> Resource:
        run = self._run
        attributes = {
            "service.name": "stepscope",
            "service.version": __version__,
            "service.instance.id": f"{run.name}-{run.created_wall_ns // 1_000_000_000}@{host}",
            "host.name": host,
            "process.command_line": run.command,
            "process.runtime.name": "cpython",
            "process.runtime.version": run.settings.get("python", ""),
            "vcs.ref.head.revision": run.settings.get("commit", ""),
            "vcs.ref.head.name": run.settings.get("branch", ""),
            "stepscope.run": run.name,
            "stepscope.ranks": run.world_size,
        }
        return Resource(attributes=_attributes(attributes))

    def _send_metrics(self, by_host: Mapping[str, Sequence[Metric]]) -> None:
        resources = [
            ResourceMetrics(
                resource=self._resource(host), scope_metrics=[ScopeMetrics(scope=_scope(), metrics=metrics)]
            )
            for host, metrics in by_host.items()
        ]
        self._post("/v1/metrics", ExportMetricsServiceRequest(resource_metrics=resources))

    def _send_log(self, text: str, severity: str, wall_ns: int, attributes: Mapping[str, Any]) -> None:
        record = LogRecord(
            time_unix_nano=wall_ns or time.time_ns(),
            observed_time_unix_nano=time.time_ns(),
            severity_number=SEVERITY_NUMBERS.get(severity, SEVERITY_NUMBERS["info"]),
            severity_text=severity,
            event_name=str(attributes.get("event.name", "")),
            body=AnyValue(string_value=text),
            attributes=_attributes(attributes),
        )
        scope = ScopeLogs(scope=_scope(), log_records=[record])
        logs = ResourceLogs(resource=self._resource(self._host), scope_logs=[scope])
        self._post("/v1/logs", ExportLogsServiceRequest(resource_logs=[logs]))

    def _send_spans(self, stretches: Sequence[Stretch]) -> None:
        run = f"{self._run.name}-{self._run.created_wall_ns}"
        spans = [
            Span(
                trace_id=_digest(run, 16),
                span_id=_digest(f"{run}-{stretch.name}-{stretch.begin_wall_ns}", 8),
                name=f"stepscope.{stretch.name}",
                kind=Span.SpanKind.SPAN_KIND_INTERNAL,
                start_time_unix_nano=stretch.begin_wall_ns,
                end_time_unix_nano=stretch.end_wall_ns,
                attributes=_attributes({**stretch.attributes, "stepscope.title": stretch.title}),
                status=Status(code=Status.StatusCode.STATUS_CODE_ERROR, message=stretch.title)
                if stretch.failed
                else Status(),
            )
            for stretch in stretches
        ]
        scope = ScopeSpans(scope=_scope(), spans=spans)
        found = ResourceSpans(resource=self._resource(self._host), scope_spans=[scope])
        self._post("/v1/traces", ExportTraceServiceRequest(resource_spans=[found]))

    def _post(self, path: str, message: Message) -> None:
        """Send.  ExportError if the collector refuses; ConnectionError if it does not answer after some tries."""
        if path in self._not_offered:
            return
        body = message.SerializeToString()
        headers = {**self._headers, "Content-Type": "application/x-protobuf"}
        if self._gzip:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        why, pause_s = "", FIRST_PAUSE_S
        for attempt in range(TRIES):
            if attempt:
                time.sleep(min(pause_s, LONGEST_PAUSE_S))
                pause_s *= 2
            request = urllib.request.Request(f"{self._url}{path}", data=body, headers=headers)
            try:
                with self._opener.open(request, timeout=TIMEOUT_S) as response:
                    _check_answer(path, response.read(LARGEST_ANSWER))
                    return
            except urllib.error.HTTPError as error:
                why = f"HTTP status {error.code}"
                if 300 <= error.code < 400:
                    why += ", a redirect, which is not followed; set the final address"
                if error.code in NOT_OFFERED and path != "/v1/metrics":
                    self._not_offered.append(path)
                    return
                if error.code not in RETRIED:
                    raise ExportError(f"{self._url}{path} did not take it: {why}") from None
                pause_s = max(pause_s, _seconds(error.headers.get("Retry-After")))
            except OSError as error:
                why = str(getattr(error, "reason", error))
        raise ConnectionError(f"{self._url}{path} did not take it: {why}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead the headers with a key to another host, and would turn the POST into a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check_answer(path: str, data: bytes) -> None:
    """ExportError if the collector took only a part."""
    kind, field = ANSWERS[path]
    try:
        partial: Any = kind.FromString(data).partial_success
    except DecodeError:  # an answer in another form than the request, which some proxies give
        return
    if getattr(partial, field):
        raise ExportError(f"{path}: {getattr(partial, field)} were refused: {partial.error_message[:200]}")


def _seconds(text: str | None) -> float:
    """``Retry-After``, unless it is a date."""
    return float(text) if text is not None and text.isdigit() else 0.0


def _metric_of(name: str) -> tuple[str, str, float, dict[str, str]]:
    """Name, unit, factor and attributes of a figure.  Durations are in seconds, as conventions ask for."""
    if name in FIGURES:
        return (*FIGURES[name], {})
    rank = "worst" if name.endswith("_worst_ms") else "median"
    base = name.removesuffix("_ms").removesuffix("_worst")
    if base.startswith("phase/"):
        return "stepscope.phase.duration", "s", 1e-3, {"phase": base.removeprefix("phase/"), "rank": rank}
    return f"stepscope.{base}.duration", "s", 1e-3, {"rank": rank}


def _gpu_metrics(rows: Sequence[GpuRow], run: RunAbout) -> list[Metric]:
    gauges: dict[tuple[str, str], list[NumberDataPoint]] = {}
    sums: dict[str, list[NumberDataPoint]] = {}
    for row in rows:
        vendor = next((vendor for vendor in VENDORS if vendor.casefold() in row.model.casefold()), "")
        about = {"hw.id": row.uuid or f"gpu-{row.index}", "hw.type": "gpu", "hw.name": f"GPU {row.index}"}
        attributes = _attributes({**about, "hw.model": row.model, "hw.vendor": vendor})

        def point(value: float, wall_ns: int = row.wall_ns, known: list[KeyValue] = attributes) -> NumberDataPoint:
            return NumberDataPoint(time_unix_nano=wall_ns, as_double=value, attributes=known)

        for name, (metric, unit, scale) in HW_GAUGES.items():
            if name in row.values:
                gauges.setdefault((metric, unit), []).append(point(row.values[name] * scale))
        for name, metric in HW_SUMS.items():
            if name in row.values:
                total = point(row.values[name])
                total.start_time_unix_nano = run.created_wall_ns
                sums.setdefault(metric, []).append(total)
        if row.values.get("mem_total"):
            share = row.values.get("mem_used", 0.0) / row.values["mem_total"]
            gauges.setdefault(("hw.gpu.memory.utilization", "1"), []).append(point(share))
    return [
        *(Metric(name=name, unit=unit, gauge=Gauge(data_points=found)) for (name, unit), found in gauges.items()),
        *(
            Metric(
                name=name,
                unit="By",
                sum=Sum(
                    data_points=found,
                    aggregation_temporality=AGGREGATION_TEMPORALITY_CUMULATIVE,
                    is_monotonic=False,
                ),
            )
            for name, found in sums.items()
        ),
    ]


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def _headers(text: str) -> Iterable[tuple[str, str]]:
    """``a=b,c=d``, percent-encoded, as the variable's specification says."""
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if equals and name.strip():
            name, value = unquote(name.strip()), unquote(value.strip())
            if not f"{name}{value}".isascii() or not f"{name}{value}".isprintable():  # http.client would quote it
                raise UsageError(f"{HEADERS}: a header has a character that HTTP does not allow, such as a newline")
            yield name, value


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in values.items() if value != ""]


def _value(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=str(value))


def _scope() -> InstrumentationScope:
    return InstrumentationScope(name="stepscope", version=__version__)
