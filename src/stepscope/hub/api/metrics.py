"""``/metrics``: the active and the open runs and the hub itself, for Prometheus.

The number of series is bounded for any job: only the worst few ranks, and only the first few hundred nodes.  The API
has all ranks and nodes.  An active run that is not open here is shown as its own hub judged it (``judged.json``),
without its nodes and collectives.

The event loop only copies, which takes some milliseconds for 4,096 ranks on 512 nodes; files and samples are read and
the text is written in a thread, so that agents and pages do not wait for a scrape.  Nothing is prepared between
scrapes, because most hubs are never asked for it; sums of steps that did not change since the last scrape are kept.
All figures of a run are of the same moment, because the copy is made without letting anything else run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from stepscope import __version__
from stepscope.alerts.incident_file import read_incidents
from stepscope.goodput import PARTS
from stepscope.hub.api.auth import Readers
from stepscope.hub.api.metric_families import FAMILIES
from stepscope.hub.api.responses import Exposition, labels_text
from stepscope.hub.api.runs import findings_of
from stepscope.hub.api.samples import NodesCopy, copy_nodes
from stepscope.hub.api.stream import Streams
from stepscope.hub.live.figures import STATS, WORST, FigureCopy, RunFigures, copy_figures
from stepscope.hub.live.latest_samples import SPREADS, SampleColumns
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs
from stepscope.records import run_clock
from stepscope.store.captures import CAPTURES_JUDGED, read_captures

if TYPE_CHECKING:
    from stepscope.hub.ingest.endpoints import Agents
    from stepscope.hub.limits import Refusals

__all__ = ["metrics_text"]

MOST_NODES = 512
MOST_GROUPS = 16
"""Process groups, those that block longest."""
HEARD_NS = 60 * 10**9
STALE_S = 60.0
"""Figures of a run that its own hub wrote longer ago are left out: the hub is dead, or its machine gone."""
_EXCHANGE_TIMES = {
    "exposed": "exposed_ms",
    "hidden": "overlapped_ms",
    "transfer": "transfer_ms",
    "wait": "wait_ms",
    "skew": "skew_ms",
}
_RATES = {
    "samples_per_second": ("samples_per_second", 1.0),
    "tokens_per_second": ("tokens_per_second", 1.0),
    "tflops": ("device_flops_per_second", 1e12),
    "mfu": ("mfu_ratio", 1.0),
}
_MEMORY = {
    "allocated_median": ("allocated", "p50"),
    "allocated": ("allocated", "max"),
    "reserved": ("reserved", "max"),
    "peak_allocated": ("peak_allocated", "max"),
}
_NODE_TIMES = {
    "stepscope_node_clock_offset_seconds": "offset_ns",
    "stepscope_node_round_trip_seconds": "rtt_ns",
    "stepscope_node_last_heard_timestamp_seconds": "heard_wall_ns",
}
_NODE_COUNTERS = {
    "stepscope_node_frames_total": "frames",
    "stepscope_node_rows_total": "rows",
    "stepscope_node_received_bytes_total": "bytes",
    "stepscope_node_duplicates_total": "duplicates",
    "stepscope_node_refused_total": "refused",
}
_NODE_SAMPLES = {
    "network_receive_bytes_per_second": "net_rx_bps",
    "network_transmit_bytes_per_second": "net_tx_bps",
    "network_errors_per_second": "net_errors_ps",
    "network_drops_per_second": "net_drops_ps",
    "tcp_retransmits_per_second": "tcp_retrans_ps",
    "infiniband_receive_bytes_per_second": "ib_rx_bps",
    "infiniband_transmit_bytes_per_second": "ib_tx_bps",
    "memory_available_bytes": "mem_available",
}
_AGENT_COUNTERS = ("frames", "bytes", "rows", "duplicates", "gaps", "joins")


@dataclass(frozen=True, kw_only=True)
class _RunCopy:
    """An open run as the event loop copied it; nothing in it changes."""

    id: str
    path: Path
    over: bool
    status: str
    wall_ns: int
    findings: Sequence[Mapping[str, Any]]
    throughput: Mapping[str, Any]
    communication: Mapping[str, Any] | None
    figures: FigureCopy
    nodes: NodesCopy


async def metrics_text(
    runs: Runs, readers: Readers, streams: Streams, ingest: Agents | None, refusals: Refusals | None
) -> str:
    unopened = await runs.judged()
    copies = [_copied(run) for run in runs.live()]
    opened = {run.id for run in copies}  # some of them meanwhile
    judged = [(name, figures) for name, figures in unopened if name not in opened]
    page = Exposition(FAMILIES)
    _hub(page, readers, streams)
    if refusals is not None:
        for reason, count in refusals.by_reason().items():
            page.put("stepscope_hub_refusals_total", count, reason=reason)
    if ingest is not None:
        for name in _AGENT_COUNTERS:
            page.put(f"stepscope_hub_{name}_total", getattr(ingest.figures, name))
    return await asyncio.to_thread(_text, page, copies, judged)


def _copied(run: OpenRun) -> _RunCopy:
    now_ns = run_clock.now_of(run.live.meta)
    document = run.document
    return _RunCopy(
        id=run.id,
        path=run.path,
        over=run.over,
        status=run.status(),
        wall_ns=now_ns,
        findings=findings_of(run)["findings"],
        throughput=run.throughput(),
        communication=run.live.judged.communication if document is None else document.get("communication"),
        figures=copy_figures(run.live),
        nodes=copy_nodes(run),
    )


def _text(page: Exposition, copies: Sequence[_RunCopy], judged: Sequence[tuple[str, RunFigures]]) -> str:
    for run in copies:
        figures = run.figures.figures(
            status=run.status,
            wall_ns=run.wall_ns,
            findings=run.findings,
            throughput=run.throughput,
            incidents=read_incidents(run.path),
            captures=read_captures(run.path, most=CAPTURES_JUDGED),
        )
        _figures(page, run.id, figures, dated=not run.over)
        _communication(page, run.id, run.communication)
        _nodes(page, run)
    for name, figures in judged:
        if run_clock.wall_ns() - figures.wall_ns < STALE_S * 1e9:
            _figures(page, name, figures, dated=True)
            page.put("stepscope_nodes", figures.nodes, run=name)
        else:
            page.put("stepscope_run_info", 1, run=name, status=figures.status)
            page.put("stepscope_run_judged_timestamp_seconds", figures.wall_ns / 1e9, run=name)
    return page.text()


def _figures(page: Exposition, name: str, run: RunFigures, *, dated: bool) -> None:
    """Write what open runs and those that only their own hub has open have in common."""

    def put(family: str, value: float | None, /, **labels: object) -> None:
        page.put(f"stepscope_{family}", value, run=name, **labels)

    put("run_info", 1, status=run.status)
    if dated:
        put("run_judged_timestamp_seconds", run.wall_ns / 1e9)
    put("run_start_timestamp_seconds", run.created_wall_ns / 1e9 if run.created_wall_ns else None)
    put("run_step", run.step)
    put("run_attempt", run.attempt)
    put("run_last_step_timestamp_seconds", _seconds(run.last_step_wall_ns))
    put("run_checkpoint_timestamp_seconds", _seconds(run.checkpoint_wall_ns))
    for noted, value in run.noted.items():
        put("noted_value", _number(value), name=noted)
    _ranks(put, run)
    _times(put, run)
    for key, (family, scale) in _RATES.items():
        value = _number(run.throughput.get(key))
        put(family, None if value is None else value * scale)
    put("goodput_ratio", run.goodput)
    for part in PARTS:
        put("goodput_seconds", _number(run.goodput_seconds.get(part)), part=part)
    for key, (kind, stat) in _MEMORY.items():
        put("device_memory_bytes", _number(run.memory_bytes.get(key)), kind=kind, stat=stat)
    if run.gpus:
        put("gpus", run.gpus)
        put("gpus_throttled", run.gpus_throttled)
    for spread in run.spreads:
        if spread.name in SPREADS:
            for stat in ("min", "p50", "max"):
                put(spread.name, getattr(spread, stat), stat=stat)
    _judgments(put, run)


def _times(put: Any, run: RunFigures) -> None:
    for own in run.steps:
        for stat in STATS:
            put("step_duration_seconds" if own.name == "wall" else "step_work_seconds", getattr(own, stat), stat=stat)
    for own in run.phases:
        for stat in STATS:
            put("phase_seconds", getattr(own, stat), phase=own.name, stat=stat)
    for worst in run.worst_phases:
        put("phase_worst_rank_seconds", worst.seconds, phase=worst.phase, rank=worst.rank)
    for rank in run.worst_ranks:
        put("worst_rank_work_seconds", rank.seconds, rank=rank.rank)
    for phase, seconds in run.device_seconds.items():
        put("phase_device_seconds", _number(seconds), phase=phase)
    put("step_device_max_seconds", run.device_slowest)


def _ranks(put: Any, run: RunFigures) -> None:
    put("ranks", run.ranks)
    put("ranks_live", run.live_ranks)
    put("ranks_hung", run.still_ranks)
    put("ranks_blocking", run.blocking_ranks)
    put("ranks_expected", run.world_size)
    put("records_lost", run.lost)
    for state, count in run.states.items():
        put("ranks_by_state", _number(count), state=state)


def _judgments(put: Any, run: RunFigures) -> None:
    for found in run.findings:
        labels = {"kind": found.kind, "severity": found.severity}
        put("findings", found.findings, **labels)
        put("finding_ranks", found.ranks, **labels)
        put("finding_cost_ratio", found.cost, **labels)
    for incident in run.incidents:
        put("incidents", incident.incidents, state=incident.state, severity=incident.severity)
    for capture in run.captures:
        put("captures", capture.captures, state=capture.state)


def _seconds(wall_ns: int | None) -> float | None:
    return None if wall_ns is None else wall_ns / 1e9


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) else None


def _communication(page: Exposition, run: str, table: Mapping[str, Any] | None) -> None:
    if not table:
        return
    if measured := table.get("measured"):
        page.put("stepscope_communication_device_steps", measured["steps"], run=run)
        page.put("stepscope_communication_missed_steps", measured["missed"], run=run)
    written = set()
    for group in table["groups"][:MOST_GROUPS]:
        who = {"run": run, "group": group["name"] or group["description"], "kind": group["kind"]}
        if tuple(who.values()) in written:
            continue  # if several have no name, only the one that blocks longest
        written.add(tuple(who.values()))
        for op in group["ops"]:
            labels = {**who, "op": op["op"]}
            page.put("stepscope_exchange_bytes", op["bytes"], **labels)
            for part, key in _EXCHANGE_TIMES.items():
                value = op.get(key)
                page.put("stepscope_exchange_seconds", None if value is None else value / 1e3, **labels, part=part)
            for way in ("algorithm", "bus"):
                value = op.get(f"{way}_bytes_per_s")
                page.put("stepscope_exchange_bytes_per_second", value, **labels, bandwidth=way)
        for row in (group["arrivals"] or {"ranks": ()})["ranks"][:WORST]:
            page.put("stepscope_exchange_last_arrivals", row["last"], **who, rank=row["rank"])


def _nodes(page: Exposition, run: _RunCopy) -> None:
    """Write a family after the other: calls for each node and family would take three times as long."""
    heads = run.nodes.heads()
    page.put("stepscope_nodes", len(heads), run=run.id)
    heard = sum(run.wall_ns - node.heard_wall_ns < HEARD_NS for node in run.nodes.joined)
    page.put("stepscope_nodes_heard", heard, run=run.id)
    heads = heads[:MOST_NODES]
    own_run = labels_text({"run": run.id})
    labels = [f"{own_run},{labels_text({'node': head.name, 'host': head.hosts[0]})}" for head in heads]
    page.put_column("stepscope_node_ranks_live", labels, [head.live_ranks for head in heads])
    joined = [head.info for head in heads if head.info is not None]
    own_labels = [own for own, head in zip(labels, heads, strict=True) if head.info is not None]
    for family, key in _NODE_TIMES.items():
        page.put_column(family, own_labels, [_seconds(getattr(info, key)) for info in joined])
    for family, key in _NODE_COUNTERS.items():
        page.put_column(family, own_labels, list(map(attrgetter(key), joined)))
    row_of = run.figures.samples.row_of
    sampled = [(own, row_of[head.name]) for own, head in zip(labels, heads, strict=True) if head.name in row_of]
    _samples(page, [own for own, _ in sampled], np.array([row for _, row in sampled], np.intp), run.figures.samples)


def _samples(page: Exposition, labels: Sequence[str], rows: NDArray[np.intp], samples: SampleColumns) -> None:
    """``rows``: of each node in the samples."""

    def put(family: str, column: NDArray[np.float64]) -> None:
        page.put_column(f"stepscope_node_{family}", labels, column[rows].tolist())

    for family, field in _NODE_SAMPLES.items():
        put(family, samples.of_hosts(field))
    put("cpu_ratio", samples.of_hosts("cpu_percent") / 100)
    put("rank_memory_bytes", samples.memory_of_ranks())
    throttled = np.bincount(samples.gpus.row[samples.throttled], minlength=len(samples.row_of))
    put("gpus_throttled", np.where(samples.gpus.counts > 0, throttled, np.nan))
    used, full = samples.of_gpus("gpu_utilization_ratio"), samples.of_gpus("gpu_memory_used_ratio")
    put("gpu_utilization_min_ratio", used.min)
    put("gpu_utilization_p50_ratio", used.p50)
    put("gpu_memory_used_max_ratio", full.max)
    put("gpu_temperature_max_celsius", samples.of_gpus("gpu_temperature_celsius").max)
    put("gpu_power_watts", samples.of_gpus("gpu_power_watts").sum)


def _hub(page: Exposition, readers: Readers, streams: Streams) -> None:
    own = psutil.Process()
    times = own.cpu_times()
    page.put("stepscope_hub_info", 1, version=__version__)
    page.put("process_cpu_seconds_total", times.user + times.system)
    page.put("process_resident_memory_bytes", own.memory_info().rss)
    page.put("process_start_time_seconds", own.create_time())
    page.put("process_open_fds", own.num_fds())
    page.put("stepscope_hub_stream_clients", streams.clients)
    for reason in ("full", "slow"):
        page.put("stepscope_hub_stream_dropped_total", streams.dropped[reason], reason=reason)
    page.put("stepscope_hub_wrong_tokens_total", readers.refused)
