"""Memory and machine: what the ranks held and what the hosts and GPUs did, from records and samples.

Figures of hosts and GPUs are statistics over the steady steps; without a sample of those they are None, and never of
imports, start-up or warm-up instead.  What a host or a GPU *has* (cores, memory, its name) is from any sample, and so
are the extremes of a host's memory: a machine that runs out of it while a model is loaded ends the run as well.
Round trips are over the whole run too: they are few, and start-up does not change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import Window
from stepscope.diagnosis.placed import gpus_in_use
from stepscope.diagnosis.samples import extremes, number, numbers, of_kind
from stepscope.diagnosis.steady import in_steady_steps, spaced
from stepscope.records.series import RankSeries
from stepscope.reports.tables import finite

__all__ = ["host_table", "memory_table"]

Lines = Sequence[Mapping[str, Any]]

HOST_RATES = ("net_rx_bps", "net_tx_bps", "net_errors_ps", "net_drops_ps", "disk_read_bps", "disk_write_bps")
DEVICE_LEVELS = ("device_allocated", "device_reserved", "device_reserved_max", "device_peak", "device_peak_steps")
ENOUGH_SAMPLES = 10
"""About a second apart: from here on a median needs no more of them."""
GPU_LEVELS = ("util_percent", "mem_util_percent", "temperature_c", "power_w", "sm_clock_mhz", "mem_clock_mhz")


def memory_table(current: Sequence[RankSeries], samples: Lines, gpus: Lines) -> dict[str, Any]:
    """Per rank: device memory at the last step and at its peak, and what is left of it; resident memory of the process,
    first, last, peak, and its peak without mapped files.  ``gpus``: the rows of the host's table."""
    by_pid: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for line in of_kind(samples, "process"):
        if number(line, "rss"):  # a process that is just ending has none
            by_pid.setdefault((line.get("node"), line.get("pid")), []).append(line)
    gpu_of_rank = {rank: gpu for gpu in gpus for rank in gpu["ranks"]}
    rows = []
    for series in current:
        lines = by_pid.get((series.identity.host, series.identity.pid), [])
        device = _device_memory(series)
        room = _device_room(series, device["device_reserved_max"], gpu_of_rank.get(series.rank))
        rows.append({"rank": series.rank, **device, **room, **_resident(lines)})
    return {
        "device_peak": _largest(rows, "device_peak", steps="device_peak_steps"),
        "rss_peak": _largest(rows, "rss_peak"),
        "own_peak": _largest(rows, "own_peak"),
        "ranks": rows,
    }


def host_table(window: Window, samples: Lines) -> dict[str, Any]:
    hosts = _grouped(of_kind(samples, "host"), "node")
    probes = _grouped(of_kind(samples, "probe"), "node")
    return {
        "nodes": [_node_row(window, key, hosts[key], probes.get(key, [])) for key in sorted(hosts, key=_order)],
        "gpus": _gpu_rows(window, samples),
        "samples": len(samples),
    }


def _device_memory(series: RankSeries) -> dict[str, Any]:
    """Of the steps at whose end the allocator was read."""
    read = series.steps[series.steps["reserved"] > 0]
    if not len(read):
        return dict.fromkeys(DEVICE_LEVELS)
    return {
        "device_allocated": int(read["allocated"][-1]),
        "device_reserved": int(read["reserved"][-1]),
        "device_reserved_max": int(read["reserved"].max()),
        "device_peak": int(read["peak_allocated"].max()),
        "device_peak_steps": _peak_steps(read),
    }


def _peak_steps(read: NDArray[Any]) -> list[int | None]:
    """In which steps the highest peak was reached, the first and the last of them.

    The allocator knows its peak since the process began.  Where a read shows a higher one than the read before, it was
    reached in the steps between the two; the peak of any other step is only known not to be higher.  None for the
    first: the first read shows it already, so it may be from before the first step.
    """
    at = int(read["peak_allocated"].argmax())
    return [int(read["step"][at - 1]) + 1 if at else None, int(read["step"][at])]


def _device_room(series: RankSeries, reserved: int | None, gpu: Mapping[str, Any] | None) -> dict[str, Any]:
    """What nobody uses of the rank's device at the fullest; without samples, what its own allocator does not hold.

    Samples come now and then: what the allocator held between them was in use as well.
    """
    total = (gpu or {}).get("mem_total") or series.identity.device_bytes or None
    used = (gpu or {}).get("mem_used_max")
    taken = reserved if used is None else max(used, reserved or 0)
    if total is None or taken is None:
        return {"device_total": total, "device_free": None, "device_free_from": None}
    source = "allocator" if used is None else "nvml"
    return {"device_total": total, "device_free": max(total - taken, 0), "device_free_from": source}


def _resident(lines: Lines) -> dict[str, int | None]:
    if not lines:
        return {"rss_first": None, "rss_last": None, "rss_peak": None, "own_peak": None}
    whole = numbers(lines, "rss")
    levels = [(number(line, "rss") or 0.0, number(line, "rss_file")) for line in lines]
    own = [max(rss - of_files, 0.0) for rss, of_files in levels if of_files is not None]
    own += extremes(lines, "own", "max")
    return {
        "rss_first": int(whole[0]),
        "rss_last": int(whole[-1]),
        "rss_peak": int(max(extremes(lines, "rss", "max"))),
        "own_peak": int(max(own)) if own else None,
    }


def _largest(rows: Iterable[Mapping[str, Any]], key: str, *, steps: str | None = None) -> dict[str, Any] | None:
    """The rank that needs most of it."""
    known = [row for row in rows if row[key] is not None]
    if not known:
        return None
    row = max(known, key=lambda row: (row[key], -row["rank"]))
    return {"bytes": row[key], "rank": row["rank"], **({"steps": row[steps]} if steps else {})}


def _node_row(window: Window, key: tuple[Any, ...], lines: Lines, probes: Lines) -> dict[str, Any]:
    available = extremes(lines, "mem_available", "min")
    own = [row for row, host in enumerate(window.hosts) if (host,) == key]
    steady = _of_steady_steps(window, own, lines)
    return {
        "node": str(key[0]),
        "samples": len(steady),
        "cpu_count": _last_int(lines, "cpu_count"),
        "cpu_percent": _levels(steady, "cpu_percent"),
        "load1": _levels(steady, "load1"),
        "mem_total": _last_int(lines, "mem_total"),
        "mem_available_min": int(min(available)) if available else None,
        "swap_used_max": _max_int(lines, "swap_used"),
        **{key: _levels(steady, key) for key in HOST_RATES},
        "net_speed_bps": _last_int(lines, "net_speed_bps"),
        "retransmit_share": _share(numbers(steady, "tcp_retrans_ps"), numbers(steady, "tcp_out_ps")),
        "rtt_us": _levels(probes, "rtt_us_p50"),
        "probe_loss_share": _share(numbers(probes, "lost"), numbers(probes, "sent")),
    }


def _of_steady_steps(window: Window, rows: Sequence[int], lines: Lines) -> Lines:
    """Those of steady steps of these ranks; of any rank, where there are none here."""
    known = [number(line, "wall_ns") for line in lines]
    wall_ns = np.array([np.nan if at is None else at for at in known], np.float64)
    there = np.flatnonzero(in_steady_steps(window, rows or range(len(window.ranks)), wall_ns))
    spans_s = np.array([number(lines[at], "span_s") or 0.0 for at in there.tolist()], np.float64)
    far_apart = there[spaced(wall_ns[there], spans_s)]
    # In a short run every sample counts; in a longer one those of its first seconds must not outweigh the rest.
    return [lines[at] for at in (far_apart if len(far_apart) >= ENOUGH_SAMPLES else there)]


def _share(part: Sequence[float], whole: Sequence[float]) -> float | None:
    return finite(sum(part) / sum(whole)) if sum(whole) > 0 else None


def _gpu_rows(window: Window, samples: Lines) -> list[dict[str, Any]]:
    groups = _grouped(of_kind(samples, "gpu"), "node", "index", "uuid")
    ordered = [groups[key] for key in sorted(groups, key=_order)]
    whose = [tuple(_name(lines[-1].get(key)) for key in ("node", "uuid", "index", "name")) for lines in ordered]
    used = gpus_in_use(window.identities, whose)
    on_host: dict[Any, list[int]] = {}
    for row, host in enumerate(window.hosts):
        on_host.setdefault(host, []).append(row)
    return [
        _gpu_row(window, lines, used.get(key), on_host.get(key[0], []))
        for lines, key in zip(ordered, whose, strict=True)
    ]


def _gpu_row(window: Window, lines: Lines, rows: Sequence[int] | None, on_host: Sequence[int]) -> dict[str, Any]:
    """``rows``: of the window, the ranks on it; None: no rank of the job is known to use it."""
    last = lines[-1]
    steady = _of_steady_steps(window, rows or on_host, lines)
    reasons = [line.get("throttle_reasons") for line in steady]
    throttled = [reason for reason in reasons if isinstance(reason, list) and reason]
    return {
        "node": last.get("node"),
        "index": last.get("index"),
        "uuid": last.get("uuid"),
        "name": last.get("name"),
        "in_use": rows is not None,
        "ranks": [window.ranks[row] for row in rows or ()],
        "samples": len(steady),
        **{key: _levels(steady, key) for key in GPU_LEVELS},
        "power_limit_w": finite(number(last, "power_limit_w")),
        "mem_used_max": _max_int(steady, "mem_used"),
        "mem_total": _last_int(lines, "mem_total"),
        "throttle_reasons": sorted({str(name) for reason in throttled for name in reason}),
        "throttled_share": finite(len(throttled) / len(steady)) if steady else None,
    }


def _levels(lines: Lines, key: str) -> dict[str, float | None] | None:
    values = numbers(lines, key)
    if not values:
        return None
    return {"median": finite(float(np.median(values)), 2), "max": finite(max(extremes(lines, key, "max")), 2)}


def _last_int(lines: Lines, key: str) -> int | None:
    values = numbers(lines, key)
    return int(values[-1]) if values else None


def _max_int(lines: Lines, key: str) -> int | None:
    values = extremes(lines, key, "max")
    return int(max(values)) if values else None


def _grouped(lines: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(str(line.get(key)) for key in keys), []).append(line)
    return groups


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((len(part), part) for part in key)


def _name(value: Any) -> str | int | None:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None
