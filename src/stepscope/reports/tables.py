"""The tables of a summary: ranks, steps, step time, phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import Window
from stepscope.diagnosis.robust import mean_rank, medians
from stepscope.diagnosis.window import last_attempt
from stepscope.hangs.standing import standing_of
from stepscope.records.phases import BUILTIN_PHASES
from stepscope.records.series import ALIVE, RankSeries, RunData

__all__ = ["PHASE_ORDER", "finite", "phases_table", "ranks_table", "step_time_table", "steps_table"]

Floats = NDArray[np.float64]

PHASE_ORDER = ("input", "h2d", "forward", "backward", "comm", "optimizer", "", "eval", "checkpoint", "other")
"""As they come in a step; "" stands for the user's own."""
WARMUP_SHOWN = 32


def ranks_table(run: RunData, window: Window) -> list[dict[str, Any]]:
    """One row per process of the last attempt, by rank."""
    work = window.wall_ns[:, window.steady] if len(window.ranks) else window.wall_ns
    wall_ms = dict(zip(window.ranks, medians(work) / 1e6, strict=True))
    comm_ms: dict[int, float] = {}
    if "comm" in window.phases:
        comm = window.phase_ns[window.phases.index("comm")][:, window.steady]
        comm_ms = dict(zip(window.ranks, medians(comm) / 1e6, strict=True))
    standing = standing_of(run.hangs)
    return [
        {
            "rank": series.rank,
            "host": series.identity.host,
            "pid": series.identity.pid,
            "local_rank": series.identity.local_rank,
            "state": series.state,
            "standing": standing.get(series.rank) if series.state in ALIVE else None,
            "device": series.identity.device,
            "device_name": series.identity.device_name,
            "device_index": series.identity.device_index,
            "device_timed": series.identity.device_timed,
            "backend": series.identity.backend,
            "torch": series.identity.torch,
            "steps": len(series.steps),
            "last_step": int(series.steps["step"][-1]) if len(series.steps) else None,
            "step_ms": finite(wall_ms.get(series.rank)),
            "comm_ms": finite(comm_ms.get(series.rank)),
            "lost": series.lost,
            "torn": series.torn,
            "hook_failures": series.hook_failures,
        }
        for series in last_attempt(run.ranks)
    ]


def steps_table(current: Sequence[RankSeries], window: Window) -> dict[str, Any]:
    step_ns = mean_rank(window.wall_ns)
    steady = window.steady
    steady_s = float(step_ns[steady].sum()) / 1e9
    reasons = Counter(apart.reason for apart in window.warmup)
    return {
        "total": max((len(series.steps) for series in current), default=0),
        "compared": len(window.steps),
        "steady": int(steady.sum()),
        "left_out": window.left_out,
        "first": int(window.steps[0]) if len(window.steps) else None,
        "last": int(window.steps[-1]) if len(window.steps) else None,
        "per_second": finite(int(steady.sum()) / steady_s) if steady_s > 0 else None,
        "seconds": finite(float(step_ns.sum()) / 1e9),
        "warmup": {
            "count": len(window.warmup),
            "seconds": finite(float(step_ns[~steady].sum()) / 1e9),
            "reasons": dict(sorted(reasons.items())),
            "steps": [apart.step for apart in window.warmup[:WARMUP_SHOWN]],
        },
    }


def step_time_table(window: Window) -> dict[str, Any]:
    """Percentiles over the steady steps; a step is as long as its ranks' mean, which are equal in lockstep."""
    lengths = mean_rank(window.wall_ns)[window.steady] / 1e6
    if not len(lengths):
        return dict.fromkeys(("mean_ms", "min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "max_step"))
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99))
    return {
        "mean_ms": finite(lengths.mean()),
        "min_ms": finite(lengths.min()),
        "p50_ms": finite(p50),
        "p90_ms": finite(p90),
        "p99_ms": finite(p99),
        "max_ms": finite(lengths.max()),
        "max_step": int(window.steps[window.steady][int(lengths.argmax())]),
    }


def phases_table(window: Window) -> dict[str, dict[str, Any]]:
    """By phase, in the order of a step: its share, the median rank, the worst rank; host and device time."""
    steady = window.steady
    if not steady.any():
        return {}
    device_ns = window.device_ns
    total_ns = float(np.nansum(window.wall_ns[:, steady]))
    device_total_ns = 0.0 if device_ns is None else float(np.nansum(device_ns[:, :, steady]))
    table = {}
    for name in sorted(window.phases, key=_place):
        row = window.phases.index(name)
        figures = _phase_row(window.ranks, window.phase_ns[row][:, steady], total_ns)
        device = None
        if device_ns is not None and device_total_ns:
            device = _phase_row(window.ranks, device_ns[row][:, steady], device_total_ns)
        table[name] = {**figures, "device": device}
    return table


def _phase_row(ranks: Sequence[int], values: Floats, total_ns: float) -> dict[str, Any]:
    by_rank = medians(values)
    there = ~np.isnan(by_rank)
    worst = int(np.nanargmax(by_rank)) if there.any() else None
    spent_ns = float(np.nansum(values))
    count = int((~np.isnan(values)).sum())
    return {
        "share": finite(spent_ns / total_ns) if total_ns else None,
        "mean_ms": finite(spent_ns / count / 1e6) if count else None,
        "median_ms": finite(np.median(by_rank[there]) / 1e6) if there.any() else None,
        "worst_ms": finite(by_rank[worst] / 1e6) if worst is not None else None,
        "worst_rank": ranks[worst] if worst is not None and len(ranks) > 1 else None,
        "steps": int((values > 0).any(axis=0).sum()),
    }


def _place(name: str) -> int:
    return PHASE_ORDER.index(name if name in BUILTIN_PHASES else "")


def finite(value: float | np.floating[Any] | None, digits: int = 4) -> float | None:
    """A number that JSON can hold: rounded, and None instead of nan."""
    if value is None or not np.isfinite(value):
        return None
    return round(float(value), digits)
