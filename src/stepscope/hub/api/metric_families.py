"""The table of everything that ``/metrics`` shows: names, labels and help.

``docs/prometheus.md`` has the same table and ``deploy/grafana`` draws it; ``make grafana`` writes both.  Names follow
the conventions of Prometheus: base units, ``_total`` for counters, ``_ratio`` from 0 to 1.  Every family of a run has
the label ``run``.
"""

from __future__ import annotations

from stepscope.hub.api.responses import Family
from stepscope.hub.live.figures import LAST_STEPS, WORST

__all__ = ["FAMILIES", "SECTIONS"]


def _of_run(name: str, about: str, *labels: str) -> Family:
    return Family(name=f"stepscope_{name}", labels=("run", *labels), about=about)


def _of_node(name: str, about: str) -> Family:
    return _of_run(f"node_{name}", about, "node", "host")


def _of_hub(name: str, about: str, *labels: str) -> Family:
    return Family(name=name, labels=labels, about=about)


_STEPS = f"across ranks, last {LAST_STEPS} steps."
_SPREAD = "min, p50 or max over the job."

SECTIONS: dict[str, tuple[Family, ...]] = {
    "Run": (
        _of_run("run_info", "An active or open run.", "status"),
        _of_run("run_judged_timestamp_seconds", "When the figures of a run were made."),
        _of_run("run_start_timestamp_seconds", "When the run was started."),
        _of_run("run_step", "Last step completed by all live ranks."),
        _of_run("run_attempt", "Restarts of an elastic job so far."),
        _of_run("run_last_step_timestamp_seconds", "When the newest step of any rank ended."),
        _of_run("run_checkpoint_timestamp_seconds", "When the last checkpoint was written inside a step."),
        _of_run("noted_value", "Newest value of a number that the script noted, such as the loss.", "name"),
    ),
    "Ranks": (
        _of_run("ranks", "Ranks that completed a step."),
        _of_run("ranks_live", "Live ranks."),
        _of_run("ranks_expected", "World size of the job."),
        _of_run("ranks_hung", "Live ranks that make no progress while the job hangs."),
        _of_run("ranks_blocking", "Hung ranks for which the others wait."),
        _of_run("ranks_by_state", "Ranks by the state of their process.", "state"),
        _of_run("rank_memory_bytes", f"Memory of a rank's process without mapped files: {_SPREAD}", "stat"),
        _of_run("rank_cpu_wait_ratio", f"Share of time in which a rank waited for a processor: {_SPREAD}", "stat"),
        _of_run("records_lost", "Records that were overwritten before they could be read."),
    ),
    "Steps and phases": (
        _of_run("step_duration_seconds", f"Step duration: p50, p95 or max {_STEPS}", "stat"),
        _of_run("step_work_seconds", f"Step duration without waiting for peers: p50, p95 or max {_STEPS}", "stat"),
        _of_run("phase_seconds", f"Time per phase and step: p50, p95 or max {_STEPS}", "phase", "stat"),
        _of_run("phase_worst_rank_seconds", "Mean time per step of the rank with most of a phase.", "phase", "rank"),
        _of_run("worst_rank_work_seconds", f"Mean work per step of the {WORST} ranks with the most work.", "rank"),
        _of_run("phase_device_seconds", "Mean time per phase and step on the devices, where it was timed.", "phase"),
        _of_run("step_device_max_seconds", f"Longest step on a device of the last {LAST_STEPS} steps."),
    ),
    "Throughput": (
        _of_run("samples_per_second", "Training samples of the job, from sampled steps."),
        _of_run("tokens_per_second", "Training tokens of the job, from sampled steps."),
        _of_run("device_flops_per_second", "Model FLOPs per second of one device."),
        _of_run("mfu_ratio", "Model FLOPs per second relative to the peak of the device."),
        _of_run("goodput_ratio", "Share of useful training, over all attempts."),
        _of_run("goodput_seconds", "Time of a run so far, by part of the ledger.", "part"),
    ),
    "Memory and GPUs": (
        _of_run("device_memory_bytes", "Memory of torch's allocator: p50 or max over ranks.", "kind", "stat"),
        _of_run("gpus", "GPUs with a sample in the last minute."),
        _of_run("gpus_throttled", "GPUs that report a reason for a lower clock."),
        _of_run("gpu_utilization_ratio", f"Share of time in which a GPU ran a kernel: {_SPREAD}", "stat"),
        _of_run("gpu_memory_used_bytes", f"Memory in use on a GPU: {_SPREAD}", "stat"),
        _of_run("gpu_memory_used_ratio", f"Share of a GPU's memory in use: {_SPREAD}", "stat"),
        _of_run("gpu_temperature_celsius", f"Temperature of a GPU: {_SPREAD}", "stat"),
        _of_run("gpu_power_watts", f"Power of a GPU: {_SPREAD}", "stat"),
        _of_run("gpu_clock_hertz", f"Clock of a GPU's processors: {_SPREAD}", "stat"),
    ),
    "Hosts and network": (
        _of_run("host_cpu_ratio", f"CPU usage over all cores of a host: {_SPREAD}", "stat"),
        _of_run("host_memory_available_bytes", f"Available memory of a host: {_SPREAD}", "stat"),
        _of_run("host_memory_available_ratio", f"Share of a host's memory that is available: {_SPREAD}", "stat"),
        _of_run("host_swap_used_bytes", f"Swap in use on a host: {_SPREAD}", "stat"),
        _of_run("host_network_receive_bytes_per_second", f"Received on all interfaces but loopback: {_SPREAD}", "stat"),
        _of_run("host_network_transmit_bytes_per_second", f"Sent on all interfaces but loopback: {_SPREAD}", "stat"),
        _of_run("host_infiniband_receive_bytes_per_second", f"Received over InfiniBand: {_SPREAD}", "stat"),
        _of_run("host_infiniband_transmit_bytes_per_second", f"Sent over InfiniBand: {_SPREAD}", "stat"),
        _of_run("host_network_faults_per_second", f"Network errors and dropped packets: {_SPREAD}", "stat"),
        _of_run("host_tcp_retransmits_per_second", f"TCP segments sent again: {_SPREAD}", "stat"),
        _of_run("host_disk_read_bytes_per_second", f"Read from disks: {_SPREAD}", "stat"),
        _of_run("host_disk_written_bytes_per_second", f"Written to disks: {_SPREAD}", "stat"),
        _of_run("host_cpu_pressure_ratio", f"Share of time in which a task waited for a CPU: {_SPREAD}", "stat"),
        _of_run("host_io_pressure_ratio", f"Share of time in which a task waited for a disk: {_SPREAD}", "stat"),
        _of_run("host_memory_pressure_ratio", f"Share of time in which a task waited for memory: {_SPREAD}", "stat"),
    ),
    "Findings, incidents, captures": (
        _of_run("findings", "Current findings.", "kind", "severity"),
        _of_run("finding_ranks", "Ranks named in findings.", "kind", "severity"),
        _of_run("finding_cost_ratio", "Largest share of the step time that a finding costs.", "kind", "severity"),
        _of_run("incidents", "Incidents of a run so far.", "state", "severity"),
        _of_run("captures", "Captures of a run so far.", "state"),
    ),
    "Communication": (
        _of_run("communication_device_steps", "Analyzed steps whose collectives were timed on the device."),
        _of_run("communication_missed_steps", "Analyzed steps overwritten before their collectives could be read."),
        _of_run("exchange_bytes", "Bytes per step and rank.", "group", "kind", "op"),
        _of_run(
            "exchange_seconds",
            "Communication time per step: exposed, hidden, transfer, waiting for a rank, skew.",
            *("group", "kind", "op", "part"),
        ),
        _of_run(
            "exchange_bytes_per_second",
            "Transfer bandwidth, as nccl-tests define it.",
            *("group", "kind", "op", "bandwidth"),
        ),
        _of_run(
            "exchange_last_arrivals",
            f"Compared collectives in which a rank arrived last; the {WORST} ranks waited for longest.",
            *("group", "kind", "rank"),
        ),
    ),
    "Nodes of an open run": (
        _of_run("nodes", "Nodes of a run."),
        _of_run("nodes_heard", "Nodes that sent data in the last minute."),
        _of_node("ranks_live", "Running ranks on a node."),
        _of_node("clock_offset_seconds", "How far a node's clock is ahead of the hub's."),
        _of_node("round_trip_seconds", "Round trip used to measure the clock offset."),
        _of_node("last_heard_timestamp_seconds", "When a node last sent data."),
        _of_node("frames_total", "Frames received from a node."),
        _of_node("rows_total", "Records received from a node."),
        _of_node("received_bytes_total", "Bytes of frames received from a node."),
        _of_node("duplicates_total", "Parts that a node resent."),
        _of_node("refused_total", "Frames from a node that were refused."),
        _of_node("cpu_ratio", "CPU usage over all cores."),
        _of_node("memory_available_bytes", "Available memory."),
        _of_node("network_receive_bytes_per_second", "Received on all interfaces but loopback."),
        _of_node("network_transmit_bytes_per_second", "Sent on all interfaces but loopback."),
        _of_node("network_errors_per_second", "Network interface errors."),
        _of_node("network_drops_per_second", "Packets dropped by network interfaces."),
        _of_node("tcp_retransmits_per_second", "TCP segments sent again."),
        _of_node("infiniband_receive_bytes_per_second", "Received over InfiniBand."),
        _of_node("infiniband_transmit_bytes_per_second", "Sent over InfiniBand."),
        _of_node("rank_memory_bytes", "Memory of all ranks of a node, without mapped files."),
        _of_node("gpu_utilization_min_ratio", "Utilization of the least used GPU of a node."),
        _of_node("gpu_utilization_p50_ratio", "Utilization of the median GPU of a node."),
        _of_node("gpu_memory_used_max_ratio", "Share of the memory in use on the fullest GPU of a node."),
        _of_node("gpu_temperature_max_celsius", "Temperature of the hottest GPU of a node."),
        _of_node("gpu_power_watts", "Power of all GPUs of a node."),
        _of_node("gpus_throttled", "GPUs of a node that report a reason for a lower clock."),
    ),
    "Hub": (
        _of_hub("stepscope_hub_info", "This hub.", "version"),
        _of_hub("stepscope_hub_stream_clients", "Clients that stream a run."),
        _of_hub("stepscope_hub_stream_dropped_total", "Clients that were refused or dropped.", "reason"),
        _of_hub("stepscope_hub_wrong_tokens_total", "Requests with a wrong token."),
        _of_hub("stepscope_hub_refusals_total", "Refused requests.", "reason"),
        _of_hub("stepscope_hub_frames_total", "Frames received since the hub started."),
        _of_hub("stepscope_hub_bytes_total", "Bytes of frames received."),
        _of_hub("stepscope_hub_rows_total", "Records received."),
        _of_hub("stepscope_hub_duplicates_total", "Parts received more than once."),
        _of_hub("stepscope_hub_gaps_total", "Frames that skipped earlier data."),
        _of_hub("stepscope_hub_joins_total", "Joins by agents."),
        _of_hub("process_cpu_seconds_total", "CPU time used by the hub."),
        _of_hub("process_resident_memory_bytes", "Resident memory of the hub."),
        _of_hub("process_start_time_seconds", "When the hub started."),
        _of_hub("process_open_fds", "Open files and connections."),
    ),
}
FAMILIES = tuple(family for families in SECTIONS.values() for family in families)
