"""Write the dashboards, the alerting rules and the table of series from one description: ``make grafana``.

    run.json, runs.json     dashboards for Grafana 11 and later: one run, many runs
    rules.yml               alerting rules for Prometheus
    docs/prometheus.md, docs/prometheus-series.md    their tables of alerts and series, between the marks

Everything here is understood by Prometheus 2.42.  Series and their help come from ``hub/api/metric_families.py``.  One
test runs this and compares, another sends every query to a real Prometheus (``tests/deploy/test_grafana.py``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from stepscope.hub.api.metric_families import SECTIONS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = {"alerts": "docs/prometheus.md", "series": "docs/prometheus-series.md"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of a dashboard."""


# -- dashboards -------------------------------------------------------------------------------------------------------

Kind = Literal["timeseries", "stat", "table"]


@dataclass(frozen=True)
class Panel:
    title: str
    queries: tuple[tuple[str, str], ...]
    """PromQL and legend."""
    unit: str = "short"
    kind: Kind = "timeseries"
    about: str = ""
    width: int = 8
    height: int = 8
    stacked: bool = False
    top: float | None = None
    """The upper end of the axis."""
    needs: str = ""
    """What a run must have for this: ``gpu``, ``nodes`` or ``nccl``; empty: every run has it."""


def _stat(title: str, query: str, unit: str = "short", *, legend: str = "", about: str = "", width: int = 3) -> Panel:
    return Panel(title, ((query, legend),), unit, "stat", about, width, 4)


def _spread(title: str, family: str, unit: str, about: str = "", *, needs: str = "", top: float | None = None) -> Panel:
    query = f'stepscope_{family}{{run="$run"}}'
    return Panel(title, ((query, "{{stat}}"),), unit, about=about, needs=needs, top=top)


def _by_host(
    title: str, family: str, unit: str, about: str = "", *, needs: str = "", top: float | None = None
) -> Panel:
    query = f'topk(10, stepscope_node_{family}{{run="$run", host=~"$host"}})'
    return Panel(title, ((query, "{{host}}"),), unit, about=about, needs=needs, top=top)


WORK = "stepscope_step_work_seconds{run=~'$run'"
ONLY_OPEN = "Only for a run that the hub has open: its own hub, or while someone looks at its page."
RUN_ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        _stat("Status", 'stepscope_run_info{run="$run"}', legend="{{status}}"),
        _stat("Step", 'stepscope_run_step{run="$run"}', "none"),
        _stat("Ranks", 'stepscope_ranks_live{run="$run"}', about="Live ranks."),
        _stat("Hung ranks", 'stepscope_ranks_hung{run="$run"}', about="Ranks that make no progress."),
        _stat("Step time", 'stepscope_step_duration_seconds{run="$run", stat="p50"}', "s"),
        _stat("Goodput", 'stepscope_goodput_ratio{run="$run"}', "percentunit", about="Share of useful training."),
        _stat("Restarts", 'stepscope_run_attempt{run="$run"}', "none"),
        _stat("Since the last step", 'time() - stepscope_run_last_step_timestamp_seconds{run="$run"}', "s"),
        Panel(
            "Findings",
            (('stepscope_finding_cost_ratio{run="$run"} and stepscope_findings{run="$run"} > 0', ""),),
            "percentunit",
            "table",
            "What is wrong now, and the share of the step time that it costs.",
            12,
            6,
        ),
        Panel(
            "Cost of findings",
            (('stepscope_finding_cost_ratio{run="$run"}', "{{kind}} ({{severity}})"),),
            "percentunit",
            width=12,
            height=6,
        ),
    ),
    "Steps and phases": (
        Panel("Step time", (('stepscope_step_duration_seconds{run="$run"}', "{{stat}}"),), "s"),
        Panel(
            "Step without waiting",
            (('stepscope_step_work_seconds{run="$run"}', "{{stat}}"),),
            "s",
            about="The slowest rank is the highest here; in the step time all ranks are alike.",
        ),
        Panel(
            "Phases, median rank",
            (('stepscope_phase_seconds{run="$run", stat="p50"}', "{{phase}}"),),
            "s",
            stacked=True,
        ),
        Panel("Phases, slowest rank", (('stepscope_phase_seconds{run="$run", stat="max"}', "{{phase}}"),), "s"),
        Panel(
            "Who is slowest by phase",
            (('stepscope_phase_worst_rank_seconds{run="$run"}', "{{phase}}: rank {{rank}}"),),
            "s",
        ),
        Panel("Ranks with most work", (('stepscope_worst_rank_work_seconds{run="$run"}', "rank {{rank}}"),), "s"),
        Panel(
            "Phases on the devices",
            (('stepscope_phase_device_seconds{run="$run"}', "{{phase}}"),),
            "s",
            about="Mean over the ranks and the steps that were timed there.",
            stacked=True,
            needs="gpu",
        ),
        Panel(
            "Longest step on a device", (('stepscope_step_device_max_seconds{run="$run"}', "max"),), "s", needs="gpu"
        ),
        Panel("Ranks by state", (('stepscope_ranks_by_state{run="$run"}', "{{state}}"),), stacked=True),
    ),
    "Throughput and loss": (
        Panel("Samples per second", (('stepscope_samples_per_second{run="$run"}', "samples/s"),), "none", needs="gpu"),
        Panel("Tokens per second", (('stepscope_tokens_per_second{run="$run"}', "tokens/s"),), "none", needs="gpu"),
        Panel(
            "Model FLOPs utilization", (('stepscope_mfu_ratio{run="$run"}', "MFU"),), "percentunit", top=1, needs="gpu"
        ),
        Panel("FLOP/s per device", (('stepscope_device_flops_per_second{run="$run"}', ""),), "flops", needs="gpu"),
        Panel("Noted values", (('stepscope_noted_value{run="$run"}', "{{name}}"),), "none", about="Such as the loss."),
        Panel(
            "Time of the run by part",
            (('stepscope_goodput_seconds{run="$run"} > 0', "{{part}}"),),
            "s",
            stacked=True,
        ),
    ),
    "Memory and GPUs": (
        Panel(
            "Memory of torch's allocator",
            (('stepscope_device_memory_bytes{run="$run"}', "{{kind}}, {{stat}}"),),
            "bytes",
            needs="gpu",
        ),
        _spread("GPU memory in use", "gpu_memory_used_ratio", "percentunit", needs="gpu", top=1),
        _spread(
            "GPU utilization", "gpu_utilization_ratio", "percentunit", "Low: input, or waiting.", needs="gpu", top=1
        ),
        _spread("GPU power", "gpu_power_watts", "watt", needs="gpu"),
        _spread("GPU temperature", "gpu_temperature_celsius", "celsius", needs="gpu"),
        _spread("GPU clock", "gpu_clock_hertz", "hertz", needs="gpu"),
        Panel(
            "GPUs with a lowered clock",
            (
                ('stepscope_gpus_throttled{run="$run"}', "lowered"),
                ('stepscope_gpus{run="$run"}', "all"),
            ),
            needs="gpu",
        ),
        _spread("Memory of the ranks' processes", "rank_memory_bytes", "bytes"),
        _spread("Ranks waiting for a processor", "rank_cpu_wait_ratio", "percentunit"),
    ),
    "Hosts and network": (
        _spread("CPU", "host_cpu_ratio", "percentunit", top=1),
        _spread("Available memory", "host_memory_available_ratio", "percentunit", top=1),
        Panel(
            "Waiting for CPU, disk, memory",
            (
                ('stepscope_host_cpu_pressure_ratio{run="$run", stat="max"}', "CPU"),
                ('stepscope_host_io_pressure_ratio{run="$run", stat="max"}', "disk"),
                ('stepscope_host_memory_pressure_ratio{run="$run", stat="max"}', "memory"),
            ),
            "percentunit",
            about="Of the worst host.",
        ),
        Panel(
            "Network, busiest host",
            (
                ('stepscope_host_network_receive_bytes_per_second{run="$run", stat="max"}', "received"),
                ('stepscope_host_network_transmit_bytes_per_second{run="$run", stat="max"}', "sent"),
                ('stepscope_host_infiniband_receive_bytes_per_second{run="$run", stat="max"}', "InfiniBand received"),
                ('stepscope_host_infiniband_transmit_bytes_per_second{run="$run", stat="max"}', "InfiniBand sent"),
            ),
            "Bps",
        ),
        Panel(
            "Network faults, worst host",
            (
                ('stepscope_host_network_faults_per_second{run="$run", stat="max"}', "errors and drops"),
                ('stepscope_host_tcp_retransmits_per_second{run="$run", stat="max"}', "TCP sent again"),
            ),
            "cps",
        ),
        Panel(
            "Disks, busiest host",
            (
                ('stepscope_host_disk_read_bytes_per_second{run="$run", stat="max"}', "read"),
                ('stepscope_host_disk_written_bytes_per_second{run="$run", stat="max"}', "written"),
            ),
            "Bps",
        ),
    ),
    "Communication": (
        Panel(
            "Communication that blocks",
            (('stepscope_exchange_seconds{run="$run", part="exposed"}', "{{group}} {{op}}"),),
            "s",
            about=ONLY_OPEN,
            needs="nccl",
        ),
        Panel(
            "Bus bandwidth",
            (('stepscope_exchange_bytes_per_second{run="$run", bandwidth="bus"}', "{{group}} {{op}}"),),
            "Bps",
            about=ONLY_OPEN,
            needs="nccl",
        ),
        Panel(
            "Who arrives last",
            (('stepscope_exchange_last_arrivals{run="$run"}', "{{group}}: rank {{rank}}"),),
            about=ONLY_OPEN,
            needs="nccl",
        ),
    ),
    "Nodes": (
        _by_host("CPU by host", "cpu_ratio", "percentunit", ONLY_OPEN, top=1),
        _by_host("Available memory by host", "memory_available_bytes", "bytes", ONLY_OPEN),
        _by_host("Memory of the ranks by host", "rank_memory_bytes", "bytes", ONLY_OPEN),
        _by_host("Least used GPU by host", "gpu_utilization_min_ratio", "percentunit", ONLY_OPEN, needs="gpu", top=1),
        _by_host("Hottest GPU by host", "gpu_temperature_max_celsius", "celsius", ONLY_OPEN, needs="gpu"),
        _by_host("GPUs with a lowered clock by host", "gpus_throttled", "short", ONLY_OPEN, needs="gpu"),
        Panel(
            "Silence of nodes",
            (
                (
                    'topk(10, time() - stepscope_node_last_heard_timestamp_seconds{run="$run", host=~"$host"})',
                    "{{host}}",
                ),
            ),
            "s",
            about="Time since a node last sent data over the network.",
            needs="nodes",
        ),
        _by_host("Network errors by host", "network_errors_per_second", "cps", ONLY_OPEN),
        _by_host("Round trip to the hub", "round_trip_seconds", "s", ONLY_OPEN, needs="nodes"),
    ),
    "Incidents and captures": (
        Panel(
            "Incidents", (('stepscope_incidents{run="$run"}', "{{state}} ({{severity}})"),), needs="incident", width=12
        ),
        Panel("Captures", (('stepscope_captures{run="$run"}', "{{state}}"),), needs="capture", width=12),
    ),
}
RUNS_ROWS: dict[str, tuple[Panel, ...]] = {
    "All runs": (
        _stat("Active runs", 'count(stepscope_run_info{status="running", run=~"$run"})', "none", width=4),
        _stat("Hung runs", 'count(stepscope_ranks_hung{run=~"$run"} > 0) or vector(0)', "none", width=4),
        _stat("Live ranks", 'sum(stepscope_ranks_live{run=~"$run"})', "none", width=4),
        _stat(
            "Runs with a critical finding",
            'count(sum by (run) (stepscope_findings{run=~"$run", severity="critical"}) > 0) or vector(0)',
            "none",
            width=4,
        ),
        _stat("Mean goodput", 'avg(stepscope_goodput_ratio{run=~"$run"})', "percentunit", width=4),
        _stat(
            "Oldest figures",
            'max(time() - stepscope_run_judged_timestamp_seconds{run=~"$run"})',
            "s",
            about="A hub writes the figures of its run every 10 seconds.",
            width=4,
        ),
        Panel("Status", (('stepscope_run_info{run=~"$run"}', ""),), "none", "table", width=8),
        Panel(
            "Costliest findings",
            (('topk(20, stepscope_finding_cost_ratio{run=~"$run"})', ""),),
            "percentunit",
            "table",
            width=16,
        ),
    ),
    "Speed": (
        Panel("Step time", (('stepscope_step_duration_seconds{run=~"$run", stat="p50"}', "{{run}}"),), "s"),
        Panel(
            "Slowest rank against the median",
            (
                (
                    f"{WORK}, stat='max'}} / ignoring (stat) {WORK}, stat='p50'}}",
                    "{{run}}",
                ),
            ),
            "none",
            about="Work without waiting: 1 is a job of equal ranks.",
        ),
        Panel("Steps per minute", (('60 * deriv(stepscope_run_step{run=~"$run"}[5m])', "{{run}}"),), "none"),
        Panel("Samples per second", (('stepscope_samples_per_second{run=~"$run"}', "{{run}}"),), "none", needs="gpu"),
        Panel("Tokens per second", (('stepscope_tokens_per_second{run=~"$run"}', "{{run}}"),), "none", needs="gpu"),
        Panel("MFU", (('stepscope_mfu_ratio{run=~"$run"}', "{{run}}"),), "percentunit", top=1, needs="gpu"),
    ),
    "Health": (
        Panel("Goodput", (('stepscope_goodput_ratio{run=~"$run"}', "{{run}}"),), "percentunit", top=1),
        Panel("Hung ranks", (('stepscope_ranks_hung{run=~"$run"}', "{{run}}"),)),
        Panel(
            "Age of the last checkpoint",
            (('time() - stepscope_run_checkpoint_timestamp_seconds{run=~"$run"}', "{{run}}"),),
            "s",
            needs="checkpoint",
        ),
        Panel(
            "Cost of slow ranks",
            (('max by (run) (stepscope_finding_cost_ratio{run=~"$run", kind=~".*straggler"})', "{{run}}"),),
            "percentunit",
        ),
        Panel(
            "GPU utilization, median GPU",
            (('stepscope_gpu_utilization_ratio{run=~"$run", stat="p50"}', "{{run}}"),),
            "percentunit",
            top=1,
            needs="gpu",
        ),
        Panel(
            "GPU memory, fullest GPU",
            (('stepscope_gpu_memory_used_ratio{run=~"$run", stat="max"}', "{{run}}"),),
            "percentunit",
            top=1,
            needs="gpu",
        ),
    ),
    "Hub": (
        Panel(
            "CPU of the hub", (('rate(process_cpu_seconds_total{job="stepscope"}[5m])', "{{instance}}"),), "percentunit"
        ),
        Panel("Memory of the hub", (('process_resident_memory_bytes{job="stepscope"}', "{{instance}}"),), "bytes"),
        Panel("Time of a scrape", (('scrape_duration_seconds{job="stepscope"}', "{{instance}}"),), "s"),
    ),
}


def dashboard(uid: str, title: str, about: str, rows: dict[str, tuple[Panel, ...]], variables: list[Any]) -> Any:
    return {
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["stepscope"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Stepscope",
                "tags": ["stepscope"],
                "asDropdown": False,
                "includeVars": False,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": variables},
        "panels": list(_placed(rows)),
    }


def _placed(rows: dict[str, tuple[Panel, ...]]) -> Iterator[dict[str, Any]]:
    number = y = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield {"id": number, "gridPos": place, **_drawn(panel)}
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _drawn(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0} if panel.kind == "timeseries" else {"unit": panel.unit}
    if panel.unit == "none" and panel.kind == "timeseries":
        del defaults["min"]  # a loss may be negative
    if panel.top is not None:
        defaults["max"] = panel.top
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "never"}
        if panel.stacked:
            custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
        defaults["custom"] = custom
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        shown = "name" if any(legend for _, legend in panel.queries) else "value"
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "textMode": shown,
            "orientation": "auto",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
        }
    else:
        options = {
            "showHeader": True,
            "cellHeight": "sm",
            "frameIndex": 0,
            "sortBy": [{"displayName": "Value", "desc": True}],
        }
    drawn = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(query, legend, at, panel.kind) for at, (query, legend) in enumerate(panel.queries)],
    }
    if panel.kind == "table":
        hidden = dict.fromkeys(("Time", "__name__", "job"), True)
        drawn["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return drawn


def _target(query: str, legend: str, at: int, kind: Kind) -> dict[str, Any]:
    instant = kind != "timeseries"
    return {
        "refId": chr(ord("A") + at),
        "datasource": DATASOURCE,
        "expr": query,
        "legendFormat": legend,
        "instant": instant,
        "range": not instant,
        "format": "table" if kind == "table" else "time_series",
        "editorMode": "code",
    }


def _variable(name: str, query: str, *, many: bool) -> dict[str, Any]:
    everything: dict[str, Any] = {"includeAll": True, "multi": True, "allValue": ".*", "current": _ALL}
    return {
        "type": "query",
        "name": name,
        "label": name,
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 2,
        "hide": 0,
        **(everything if many else {"includeAll": False, "multi": False}),
    }


_ALL = {"text": ["All"], "value": ["$__all"]}
_DATASOURCE_VARIABLE = {
    "type": "datasource",
    "name": "datasource",
    "label": "Prometheus",
    "query": "prometheus",
    "refresh": 1,
    "hide": 0,
    "multi": False,
    "includeAll": False,
}


def dashboards() -> dict[str, Any]:
    run = dashboard(
        "stepscope-run",
        "Stepscope: one run",
        "Phases, slow ranks, findings, memory, GPUs, network and throughput of one training run.",
        RUN_ROWS,
        [
            _DATASOURCE_VARIABLE,
            _variable("run", "label_values(stepscope_run_info, run)", many=False),
            _variable("host", 'label_values(stepscope_node_ranks_live{run="$run"}, host)', many=True),
        ],
    )
    runs = dashboard(
        "stepscope-runs",
        "Stepscope: all runs",
        "Status, speed and health of all training runs.",
        RUNS_ROWS,
        [_DATASOURCE_VARIABLE, _variable("run", "label_values(stepscope_run_info, run)", many=True)],
    )
    return {"run.json": run, "runs.json": runs}


# -- rules ------------------------------------------------------------------------------------------------------------

RUNNING = 'and on (run, instance) stepscope_run_info{status="running"}'


@dataclass(frozen=True)
class Alert:
    name: str
    expr: str
    lasts: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    about: str
    docs: str


ALERTS = (
    Alert(
        "StepscopeHubDown",
        'up{job="stepscope"} == 0',
        "5m",
        "critical",
        "Prometheus cannot scrape the hub at {{ $labels.instance }}.",
        "The hub is not running, or the token is wrong.",
        "docs/prometheus.md#scrape",
    ),
    Alert(
        "StepscopeRunLost",
        "time() - stepscope_run_judged_timestamp_seconds > 120",
        "1m",
        "critical",
        "Nothing was heard of run {{ $labels.run }} for {{ $value | humanizeDuration }}.",
        "The machine of its first node is gone, or its hub was killed. A run that ended normally is no longer shown.",
        "docs/troubleshooting.md",
    ),
    Alert(
        "StepscopeHung",
        "stepscope_ranks_hung > 0",
        "1m",
        "critical",
        "Run {{ $labels.run }} hangs: {{ $value }} ranks make no progress.",
        "Its page and `stepscope report RUN` say which rank blocks it, and at which line.",
        "docs/hangs.md",
    ),
    Alert(
        "StepscopeNoProgress",
        f"(time() - stepscope_run_last_step_timestamp_seconds > 900) {RUNNING}",
        "1m",
        "warning",
        "Run {{ $labels.run }} has made no step for {{ $value | humanizeDuration }}.",
        "It may evaluate, write a checkpoint or compile; if not, it hangs or waits for its input.",
        "docs/hangs.md",
    ),
    Alert(
        "StepscopeRankDied",
        f'sum without (state) (stepscope_ranks_by_state{{state=~"exception|vanished"}}) > 0 {RUNNING}',
        "1m",
        "critical",
        "{{ $value }} ranks of run {{ $labels.run }} died.",
        "The page shows their last exception and log.",
        "docs/debug-a-hang.md",
    ),
    Alert(
        "StepscopeNotFinite",
        'sum without (kind, severity) (stepscope_findings{kind=~"loss_nan|nan_gradients"}) > 0',
        "1m",
        "critical",
        "The loss or the gradients of run {{ $labels.run }} are NaN or infinite.",
        "Stop the run and restart it from a checkpoint before the first such step, which the finding names.",
        "docs/diagnosis.md",
    ),
    Alert(
        "StepscopeStraggler",
        'max without (kind, severity) (stepscope_finding_cost_ratio{kind=~".*straggler"}) > 0.15',
        "5m",
        "warning",
        "Slow ranks cost run {{ $labels.run }} {{ $value | humanizePercentage }} of its step time.",
        "The finding names the rank, the phase and often the line.",
        "docs/find-a-slow-rank.md",
    ),
    Alert(
        "StepscopeCriticalFinding",
        'stepscope_findings{severity="critical", kind!~"hang.*|loss_nan|nan_gradients"} > 0',
        "5m",
        "warning",
        "Run {{ $labels.run }} has a critical finding: {{ $labels.kind }}.",
        "The page says what it costs and what to do.",
        "docs/diagnosis.md",
    ),
    Alert(
        "StepscopeThroughputDrop",
        'stepscope_step_duration_seconds{stat="p50"} > 1.25 * quantile_over_time(0.5, '
        'stepscope_step_duration_seconds{stat="p50"}[6h])',
        "15m",
        "warning",
        "Steps of run {{ $labels.run }} take {{ $value | humanizeDuration }}, 25% more than usual.",
        "Compared with the median of the last six hours.",
        "docs/find-a-slow-rank.md",
    ),
    Alert(
        "StepscopeGpuMemoryNearLimit",
        'stepscope_gpu_memory_used_ratio{stat="max"} > 0.98',
        "10m",
        "warning",
        "A GPU of run {{ $labels.run }} has {{ $value | humanizePercentage }} of its memory in use.",
        "torch keeps memory that it may need again; a finding memory_creep says whether it grows.",
        "docs/layers.md",
    ),
    Alert(
        "StepscopeHostMemoryLow",
        'stepscope_host_memory_available_ratio{stat="min"} < 0.05',
        "5m",
        "critical",
        "A host of run {{ $labels.run }} has {{ $value | humanizePercentage }} of its memory left.",
        "The kernel will kill a process soon.",
        "docs/troubleshooting.md",
    ),
    Alert(
        "StepscopeGpuIdle",
        f'stepscope_gpu_utilization_ratio{{stat="min"}} < 0.05 {RUNNING}',
        "15m",
        "warning",
        "A GPU of run {{ $labels.run }} has had almost no work for 15 minutes.",
        "See on the page what its rank does: input, evaluation, a checkpoint, or a wait.",
        "docs/find-a-slow-rank.md",
    ),
    Alert(
        "StepscopeCheckpointOld",
        f"(time() - stepscope_run_checkpoint_timestamp_seconds > 4 * 3600) {RUNNING}",
        "5m",
        "warning",
        "The last checkpoint of run {{ $labels.run }} is {{ $value | humanizeDuration }} old.",
        "Only checkpoints count that the training process writes inside its steps.",
        "docs/goodput.md",
    ),
    Alert(
        "StepscopeNodeSilent",
        f"(time() - stepscope_node_last_heard_timestamp_seconds > 90) {RUNNING}",
        "1m",
        "critical",
        "Node {{ $labels.host }} of run {{ $labels.run }} has been silent for {{ $value | humanizeDuration }}.",
        "The node or its network is down.",
        "docs/several-nodes.md",
    ),
    Alert(
        "StepscopeHubRefuses",
        "rate(stepscope_hub_wrong_tokens_total[10m]) > 0.1",
        "15m",
        "info",
        "Someone sends wrong tokens to the hub at {{ $labels.instance }}.",
        "A page with an old token, or someone who guesses; `stepscope audit` shows addresses.",
        "docs/security.md",
    ),
)


def rules() -> dict[str, Any]:
    return {
        "groups": [
            {
                "name": "stepscope",
                "interval": "30s",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.about, "docs": alert.docs},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


# -- files ------------------------------------------------------------------------------------------------------------


def series_table() -> str:
    parts = []
    for title, families in SECTIONS.items():
        rows = "\n".join(
            f"| `{family.name}` | {', '.join(f'`{label}`' for label in family.labels)} | {family.about} |"
            for family in families
        )
        parts.append(f"## {title}\n\n| series | labels | |\n|---|---|---|\n{rows}")
    return "\n\n".join(parts)


def alert_table() -> str:
    rows = "\n".join(
        f"| `{alert.name}` | {alert.severity} | {alert.lasts} | {_sentence(alert.summary)} |" for alert in ALERTS
    )
    return f"| alert | severity | after | |\n|---|---|---|---|\n{rows}"


def _sentence(summary: str) -> str:
    """Without its variables: as a reader of the page sees it."""
    named = re.sub(r"{{ \$labels\.(\w+) }}", r"*\1*", summary)
    return re.sub(r"{{ \$value[^}]*}}", "…", named)


def between_marks(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: written by make grafana -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        sys.exit(f"{PAGES[name]} has no marks for {name}")
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def outputs() -> dict[Path, str]:
    """Every file that is written, with its text."""
    tables = {"alerts": alert_table(), "series": series_table()}
    pages = {ROOT / page: between_marks((ROOT / page).read_text(), name, tables[name]) for name, page in PAGES.items()}
    head = "# Written by make.py: change it there and run `make grafana`.\n"
    text = yaml.safe_dump(rules(), sort_keys=False, width=110, allow_unicode=True)
    found = {HERE / name: json.dumps(made, indent=2) + "\n" for name, made in dashboards().items()}
    return {**found, HERE / "rules.yml": head + text, **pages}


def main(arguments: Sequence[str] = ()) -> None:
    for path, text in outputs().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
