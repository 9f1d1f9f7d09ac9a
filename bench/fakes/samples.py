"""The agent's samples in step with a synthetic cluster: one a second for every host, process and GPU.

    cluster = Cluster(ranks=2, steps=100)
    run = with_samples(cluster, rss_mb=lambda rank, seconds: 400 + 50 * seconds, host={"cpu_percent": 99.0})

A value is a number for all, or a function of (which one, seconds since the start) that gives one for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes.cluster import ANCHOR_WALL_NS, MIB, Cluster, gpu_uuid
from stepscope.records.series import RunData

__all__ = ["GPU", "HOST", "with_samples"]

Value = Any | Callable[[int, NDArray[np.float64]], Any]

HOST: Mapping[str, Any] = {
    "cpu_percent": 40.0,
    "own_cpu_percent": 38.0,
    "cpu_count": 16,
    "load1": 6.0,
    "procs_running": 6,
    "cpu_pressure": 0.02,
    "memory_pressure": 0.0,
    "mem_total": 64 << 30,
    "mem_available": 40 << 30,
    "swap_used": 0,
}
GPU: Mapping[str, Any] = {
    "name": "Synthetic 80GB",
    "util_percent": 97,
    "mem_used": 30 << 30,
    "mem_total": 80 << 30,
    "temperature_c": 55,
    "power_w": 400.0,
    "power_limit_w": 700.0,
    "sm_clock_mhz": 1980,
    "throttle_reasons": [],
}


def with_samples(
    cluster: Cluster,
    *,
    rss_mb: Value = 400.0,
    host: Mapping[str, Value] | None = None,
    gpu: Mapping[str, Value] | None = None,
    process: Mapping[str, Value] | None = None,
    every_s: float = 1.0,
    first_s: float = 0.5,
) -> RunData:
    """The cluster's run with samples of all hosts and processes, and of each rank's GPU where its device is timed."""
    run = cluster.run()
    end_s = max((_end_s(series.steps) for series in run.ranks), default=0.0)
    seconds = np.arange(first_s, end_s, every_s)
    lines: list[dict[str, Any]] = []
    nodes = list(dict.fromkeys(series.identity.host for series in run.ranks))
    for index, node in enumerate(nodes):
        lines += _lines(node, seconds, index, {"kind": "host", **HOST, **(host or {})})
    for series in run.ranks:
        own = {
            "kind": "process",
            "pid": series.identity.pid,
            "rank": series.rank,
            "cpu_percent": 90.0,
            **(process or {}),
        }
        own["rss"] = partial(_resident, rss_mb)
        lines += _lines(series.identity.host, seconds, series.rank, own)
        if series.identity.device == "cuda":
            device = {"kind": "gpu", "index": series.identity.local_rank, "uuid": f"GPU-{gpu_uuid(series.rank)}"}
            lines += _lines(series.identity.host, seconds, series.rank, {**device, **GPU, **(gpu or {})})
    lines.sort(key=lambda line: int(line["wall_ns"]))
    return replace(run, samples=(*run.samples, *lines))


def _end_s(steps: Any) -> float:
    return float(steps["start_ns"][-1] + steps["wall_ns"][-1] - steps["start_ns"][0]) / 1e9 if len(steps) else 0.0


def _lines(node: str, seconds: NDArray[np.float64], which: int, values: Mapping[str, Value]) -> list[dict[str, Any]]:
    columns = {key: _values(value, which, seconds) for key, value in values.items()}
    return [
        {
            "wall_ns": ANCHOR_WALL_NS + int(at * 1e9),
            "node": node,
            **{key: of[index] for key, of in columns.items()},
        }
        for index, at in enumerate(seconds)
    ]


def _values(value: Value, which: int, seconds: NDArray[np.float64]) -> list[Any]:
    """One for each sample, as JSON has them."""
    if not callable(value):
        return [value] * len(seconds)
    found = value(which, seconds)
    if isinstance(found, np.ndarray):
        found = found.tolist()
    return found if isinstance(found, list) else [found] * len(seconds)


def _resident(rss_mb: Value, which: int, seconds: NDArray[np.float64]) -> list[Any]:
    return [int(level * MIB) for level in _values(rss_mb, which, seconds)]
