"""Memory and machine: what the ranks held and what the hosts and GPUs did, from records and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stepscope.diagnosis.samples import number, numbers, of_kind
from stepscope.records.series import RankSeries
from stepscope.reports.tables import finite

__all__ = ["host_table", "memory_table"]

Lines = Sequence[Mapping[str, Any]]

HOST_RATES = ("net_rx_bps", "net_tx_bps", "net_errors_ps", "net_drops_ps", "disk_read_bps", "disk_write_bps")
GPU_LEVELS = ("util_percent", "mem_util_percent", "temperature_c", "power_w", "sm_clock_mhz", "mem_clock_mhz")


def memory_table(current: Sequence[RankSeries], samples: Lines) -> dict[str, Any]:
    """Per rank: device memory at the last step and at its peak; resident memory of the process, first, last, peak,
    and its peak without mapped files."""
    by_pid: dict[tuple[Any, Any], list[tuple[float, float | None]]] = {}
    for line in of_kind(samples, "process"):
        rss = number(line, "rss")
        if rss:  # a process that is just ending has none
            by_pid.setdefault((line.get("node"), line.get("pid")), []).append((rss, number(line, "rss_file")))
    rows = []
    for series in current:
        rss_levels = by_pid.get((series.identity.host, series.identity.pid), [])
        rows.append({"rank": series.rank, **_device_memory(series), **_resident(rss_levels)})
    return {
        "device_peak": _largest(rows, "device_peak"),
        "rss_peak": _largest(rows, "rss_peak"),
        "own_peak": _largest(rows, "own_peak"),
        "ranks": rows,
    }


def host_table(samples: Lines) -> dict[str, Any]:
    hosts = _grouped(of_kind(samples, "host"), "node")
    gpus = _grouped(of_kind(samples, "gpu"), "node", "index", "uuid")
    probes = _grouped(of_kind(samples, "probe"), "node")
    return {
        "nodes": [_node_row(key, lines, probes.get(key, [])) for key, lines in sorted(hosts.items(), key=_key)],
        "gpus": [_gpu_row(lines) for _, lines in sorted(gpus.items(), key=_key)],
        "samples": len(samples),
    }


def _device_memory(series: RankSeries) -> dict[str, int | None]:
    sampled = series.steps[series.steps["reserved"] > 0]
    if not len(sampled):
        return {"device_allocated": None, "device_reserved": None, "device_peak": None}
    return {
        "device_allocated": int(sampled["allocated"][-1]),
        "device_reserved": int(sampled["reserved"][-1]),
        "device_peak": int(sampled["peak_allocated"].max()),
    }


def _resident(levels: Sequence[tuple[float, float | None]]) -> dict[str, int | None]:
    if not levels:
        return {"rss_first": None, "rss_last": None, "rss_peak": None, "own_peak": None}
    whole = [rss for rss, _ in levels]
    own = [max(rss - of_files, 0.0) for rss, of_files in levels if of_files is not None]
    return {
        "rss_first": int(whole[0]),
        "rss_last": int(whole[-1]),
        "rss_peak": int(max(whole)),
        "own_peak": int(max(own)) if own else None,
    }


def _largest(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, int] | None:
    """The rank that needs most of it."""
    known = [row for row in rows if row[key] is not None]
    if not known:
        return None
    row = max(known, key=lambda row: (row[key], -row["rank"]))
    return {"bytes": row[key], "rank": row["rank"]}


def _node_row(key: tuple[Any, ...], lines: Lines, probes: Lines) -> dict[str, Any]:
    available = numbers(lines, "mem_available")
    return {
        "node": str(key[0]),
        "cpu_count": _last_int(lines, "cpu_count"),
        "cpu_percent": _levels(lines, "cpu_percent"),
        "load1": _levels(lines, "load1"),
        "mem_total": _last_int(lines, "mem_total"),
        "mem_available_min": int(min(available)) if available else None,
        "swap_used_max": _max_int(lines, "swap_used"),
        **{key: _levels(lines, key) for key in HOST_RATES},
        "net_speed_bps": _last_int(lines, "net_speed_bps"),
        "retransmit_share": _share(numbers(lines, "tcp_retrans_ps"), numbers(lines, "tcp_out_ps")),
        "rtt_us": _levels(probes, "rtt_us_p50"),
        "probe_loss_share": _share(numbers(probes, "lost"), numbers(probes, "sent")),
    }


def _share(part: Sequence[float], whole: Sequence[float]) -> float | None:
    return finite(sum(part) / sum(whole)) if sum(whole) > 0 else None


def _gpu_row(lines: Lines) -> dict[str, Any]:
    last = lines[-1]
    reasons = [line.get("throttle_reasons") for line in lines]
    throttled = [reason for reason in reasons if isinstance(reason, list) and reason]
    return {
        "node": last.get("node"),
        "index": last.get("index"),
        "uuid": last.get("uuid"),
        "name": last.get("name"),
        **{key: _levels(lines, key) for key in GPU_LEVELS},
        "power_limit_w": finite(number(last, "power_limit_w")),
        "mem_used_max": _max_int(lines, "mem_used"),
        "mem_total": _last_int(lines, "mem_total"),
        "throttle_reasons": sorted({str(name) for reason in throttled for name in reason}),
        "throttled_share": finite(len(throttled) / len(lines)),
    }


def _levels(lines: Lines, key: str) -> dict[str, float | None] | None:
    values = numbers(lines, key)
    if not values:
        return None
    return {"median": finite(float(np.median(values)), 2), "max": finite(max(values), 2)}


def _last_int(lines: Lines, key: str) -> int | None:
    values = numbers(lines, key)
    return int(values[-1]) if values else None


def _max_int(lines: Lines, key: str) -> int | None:
    values = numbers(lines, key)
    return int(max(values)) if values else None


def _grouped(lines: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(str(line.get(key)) for key in keys), []).append(line)
    return groups


def _key(item: tuple[tuple[Any, ...], Any]) -> tuple[Any, ...]:
    return tuple((len(part), part) for part in item[0])
