"""``/metrics``: the open runs and the hub itself, for Prometheus.

The number of series is bounded for any job: only the worst few ranks, and only the first few hundred nodes.  The API
has all ranks and nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil

from stepscope import __version__
from stepscope.hub.api.auth import Readers
from stepscope.hub.api.responses import Exposition
from stepscope.hub.api.runs import findings_of, status_of
from stepscope.hub.api.samples import NodeNow, nodes_of
from stepscope.hub.api.stream import Streams
from stepscope.hub.open_run import OpenRun
from stepscope.hub.runs import Runs
from stepscope.records import run_clock

if TYPE_CHECKING:
    from stepscope.hub.ingest.endpoints import Agents
    from stepscope.hub.limits import Refusals

__all__ = ["metrics_text"]

LAST_STEPS = 256
WORST = 8
MOST_NODES = 512
MOST_PHASES = 24
MOST_GROUPS = 16
"""Process groups, those that block longest."""
_EXCHANGE_TIMES = {
    "exposed": "exposed_ms",
    "hidden": "overlapped_ms",
    "transfer": "transfer_ms",
    "wait": "wait_ms",
    "skew": "skew_ms",
}
_RATES = {
    "samples_per_second": ("stepscope_samples_per_second", "Training samples of the job, from sampled steps."),
    "tokens_per_second": ("stepscope_tokens_per_second", "Training tokens of the job, from sampled steps."),
    "tflops": ("stepscope_device_tflops", "Model FLOPs per second of one device, in 10^12."),
    "mfu": ("stepscope_mfu_ratio", "Model FLOPs per second relative to the peak of the device."),
}
_STATS = {"p50": 0.5, "p95": 0.95, "max": 1.0}
_NODE_GAUGES = {
    "stepscope_node_clock_offset_seconds": ("offset_ns", 1e9, "How far a node's clock is ahead of the hub's."),
    "stepscope_node_round_trip_seconds": ("rtt_ns", 1e9, "Round trip used to measure the clock offset."),
    "stepscope_node_last_heard_timestamp_seconds": ("heard_wall_ns", 1e9, "When a node last sent data."),
    "stepscope_node_ranks_live": ("live_ranks", 1, "Running ranks on a node."),
}
_NODE_COUNTERS = {
    "stepscope_node_frames_total": ("frames", "Frames received from a node."),
    "stepscope_node_rows_total": ("rows", "Records received from a node."),
    "stepscope_node_received_bytes_total": ("bytes", "Bytes of frames received from a node."),
    "stepscope_node_duplicates_total": ("duplicates", "Parts that a node resent."),
    "stepscope_node_refused_total": ("refused", "Frames from a node that were refused."),
}
_NODE_SAMPLES = {
    "stepscope_node_network_receive_bytes_per_second": (
        "net_rx_bps",
        "Data received on all interfaces except loopback.",
    ),
    "stepscope_node_network_transmit_bytes_per_second": ("net_tx_bps", "Data sent on all interfaces except loopback."),
    "stepscope_node_network_errors_per_second": ("net_errors_ps", "Network interface errors."),
    "stepscope_node_network_drops_per_second": ("net_drops_ps", "Packets dropped by network interfaces."),
    "stepscope_node_tcp_retransmits_per_second": ("tcp_retrans_ps", "TCP segments retransmitted."),
    "stepscope_node_cpu_percent": ("cpu_percent", "CPU usage over all cores."),
    "stepscope_node_memory_available_bytes": ("mem_available", "Available memory."),
}


def metrics_text(
    runs: Runs, readers: Readers, streams: Streams, ingest: Agents | None, refusals: Refusals | None
) -> str:
    page = Exposition()
    for run in runs.live():
        _run(page, run)
        _findings(page, run)
        _communication(page, run)
        _throughput(page, run)
        _nodes(page, run)
    _hub(page, readers, streams)
    if refusals is not None:
        page.family("stepscope_hub_refusals_total", "counter", "Refused requests, by reason.")
        for reason, count in refusals.by_reason().items():
            page.sample("stepscope_hub_refusals_total", count, reason=reason)
    if ingest is not None:
        for name, about in (
            ("frames", "Frames received since the hub started."),
            ("bytes", "Bytes of frames received."),
            ("rows", "Records received."),
            ("duplicates", "Parts received more than once."),
            ("gaps", "Frames that skipped earlier data."),
            ("joins", "Joins by agents."),
        ):
            family = f"stepscope_hub_{name}_total"
            page.family(family, "counter", about)
            page.sample(family, getattr(ingest.figures, name))
    return page.text()


def _run(page: Exposition, run: OpenRun) -> None:
    status = status_of(run)
    name = run.id
    _gauge(page, "stepscope_run_info", "An open run.", 1, run=name, status=status["status"])
    _gauge(page, "stepscope_run_step", "Last step completed by all live ranks.", max(0, status["step"]), run=name)
    _gauge(page, "stepscope_run_attempt", "Restarts of an elastic job so far.", status["attempt"], run=name)
    _gauge(page, "stepscope_ranks", "Ranks that completed a step.", status["ranks"], run=name)
    _gauge(page, "stepscope_ranks_live", "Live ranks.", status["live_ranks"], run=name)
    _gauge(page, "stepscope_ranks_still", "Live ranks that make no progress.", status["still_ranks"], run=name)
    _gauge(page, "stepscope_ranks_expected", "World size of the job.", status["world_size"], run=name)
    steps = run.live.steps(max(0, status["step"] - LAST_STEPS + 1), max(0, status["step"]), bins=1)
    if not steps["first"]:
        return
    places = {stat: steps["quantiles"].index(share) for stat, share in _STATS.items()}
    for what, about in (("wall", "Step duration"), ("work", "Step duration without waiting for peers")):
        family = f"stepscope_step_{'duration' if what == 'wall' else 'work'}_seconds"
        for stat, place in places.items():
            value = steps["ns"][what][0][place] / 1e9
            _gauge(page, family, f"{about}, across ranks, last {LAST_STEPS} steps.", value, run=name, stat=stat)
    for phase in run.live.used_phases()[:MOST_PHASES]:
        for stat, place in places.items():
            value = steps["ns"][phase][0][place] / 1e9
            about = f"Time per phase and step, across ranks, last {LAST_STEPS} steps."
            _gauge(page, "stepscope_phase_seconds", about, value, run=name, phase=phase, stat=stat)
    ranks = run.live.ranks(limit=WORST, order="work")
    for rank, work_ns in zip(ranks["rank"], ranks["mean_ns"]["work"], strict=True):
        about = f"Mean work per step of the {WORST} ranks with the most work."
        _gauge(page, "stepscope_worst_rank_work_seconds", about, work_ns / 1e9, run=name, rank=rank)


def _findings(page: Exposition, run: OpenRun) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for finding in findings_of(run)["findings"]:
        ranks = finding.get("ranks")
        key = str(finding.get("kind")), str(finding.get("severity"))
        counts.setdefault(key, []).append(len(ranks) if isinstance(ranks, list) else 0)
    for (kind, severity), ranks in counts.items():
        labels = {"run": run.id, "kind": kind, "severity": severity}
        _gauge(page, "stepscope_findings", "Current findings.", len(ranks), **labels)
        _gauge(page, "stepscope_finding_ranks", "Ranks named in findings.", sum(ranks), **labels)


def _throughput(page: Exposition, run: OpenRun) -> None:
    table = run.throughput()
    for key, (name, about) in _RATES.items():
        value = table.get(key)
        if type(value) in (int, float):
            _gauge(page, name, about, value, run=run.id)


def _communication(page: Exposition, run: OpenRun) -> None:
    table = run.live.judged.communication if run.document is None else run.document.get("communication")
    if not table:
        return
    if measured := table.get("measured"):
        about = "Analyzed steps whose collectives were timed on the device."
        _gauge(page, "stepscope_communication_device_steps", about, measured["steps"], run=run.id)
        about = "Analyzed steps overwritten in the Flight Recorder before they could be read."
        _gauge(page, "stepscope_communication_missed_steps", about, measured["missed"], run=run.id)
    written = set()
    for group in table["groups"][:MOST_GROUPS]:
        who = {"run": run.id, "group": group["name"] or group["description"], "kind": group["kind"]}
        if tuple(who.values()) in written:
            continue  # if several have no name, only the one that blocks longest
        written.add(tuple(who.values()))
        for op in group["ops"]:
            labels = {**who, "op": op["op"]}
            _gauge(page, "stepscope_exchange_bytes", "Bytes per step and rank.", op["bytes"], **labels)
            for part, key in _EXCHANGE_TIMES.items():
                about = "Communication time per step: exposed, hidden, transfer, waiting for a rank, skew."
                value = op.get(key)
                if value is not None:
                    _gauge(page, "stepscope_exchange_seconds", about, value / 1e3, **labels, part=part)
            for way in ("algorithm", "bus"):
                about = "Transfer bandwidth, as nccl-tests define it."
                value = op.get(f"{way}_bytes_per_s")
                if value is not None:
                    _gauge(page, "stepscope_exchange_bytes_per_second", about, value, **labels, bandwidth=way)
        for one in (group["arrivals"] or {"ranks": ()})["ranks"][:WORST]:
            about = f"Compared collectives in which a rank arrived last; the {WORST} ranks waited for longest."
            _gauge(page, "stepscope_exchange_last_arrivals", about, one["last"], **who, rank=one["rank"])


def _nodes(page: Exposition, run: OpenRun) -> None:
    total, nodes = nodes_of(run, 0, MOST_NODES)
    now_ns = run_clock.now_of(run.live.meta)
    heard = sum(1 for node in run.nodes() if now_ns - node.heard_wall_ns < 60e9)
    _gauge(page, "stepscope_nodes", "Nodes of a run.", total, run=run.id)
    _gauge(page, "stepscope_nodes_heard", "Nodes that sent data in the last minute.", heard, run=run.id)
    for node in nodes:
        labels = {"run": run.id, "node": node.node, "host": node.hosts[0] if node.hosts else ""}
        _node(page, node, labels)


def _node(page: Exposition, node: NodeNow, labels: Mapping[str, str]) -> None:
    for family, (key, per, about) in _NODE_GAUGES.items():
        value = getattr(node, key)
        _gauge(page, family, about, None if value is None else value / per, **labels)
    if node.number is not None:
        for family, (key, about) in _NODE_COUNTERS.items():
            page.family(family, "counter", about)
            page.sample(family, getattr(node, key), **labels)
    for family, (key, about) in _NODE_SAMPLES.items():
        value = node.sample.get(key)
        _gauge(page, family, about, value if isinstance(value, int | float) else None, **labels)


def _hub(page: Exposition, readers: Readers, streams: Streams) -> None:
    own = psutil.Process()
    times = own.cpu_times()
    _gauge(page, "stepscope_hub_info", "This hub.", 1, version=__version__)
    page.family("process_cpu_seconds_total", "counter", "CPU time used by the hub.")
    page.sample("process_cpu_seconds_total", times.user + times.system)
    _gauge(page, "process_resident_memory_bytes", "Resident memory of the hub.", own.memory_info().rss)
    _gauge(page, "process_start_time_seconds", "When the hub started.", own.create_time())
    _gauge(page, "process_open_fds", "Open files and connections.", own.num_fds())
    _gauge(page, "stepscope_hub_stream_clients", "Clients that stream a run.", streams.clients)
    page.family("stepscope_hub_stream_dropped_total", "counter", "Clients that were refused or dropped.")
    for reason in ("full", "slow"):
        page.sample("stepscope_hub_stream_dropped_total", streams.dropped[reason], reason=reason)
    page.family("stepscope_hub_wrong_tokens_total", "counter", "Requests with a wrong token.")
    page.sample("stepscope_hub_wrong_tokens_total", readers.refused)


def _gauge(page: Exposition, name: str, about: str, value: float | None, /, **labels: Any) -> None:
    page.family(name, "gauge", about)
    page.sample(name, value, **labels)
