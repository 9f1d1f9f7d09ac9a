"""Where the time goes: phases that bound the step on all ranks alike.

So far ``input_bound``.  Shares are of the sum over steps, not of a median step: workers that fall behind make every
fourth step wait four times as long, and the median step would know nothing of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice import for_input
from stepscope.diagnosis.robust import longest, lower_median
from stepscope.diagnosis.samples import during, numbers, of_kind
from stepscope.diagnosis.units import ms_text, share_text
from stepscope.diagnosis.view import View, cost_of
from stepscope.diagnosis.window import last_attempt
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.records.slot import FLAG_EPOCH_START

__all__ = ["find_input_bound"]

Floats = NDArray[np.float64]
BUSY_PROCESS_PERCENT = 80.0
"""Of one core: a training process that takes more hardly ever waits for workers."""
BUSY_CPU_PERCENT = 90.0
"""Median over the run at which a host's CPUs are called saturated."""


@dataclass(frozen=True, kw_only=True)
class _Input:
    share: float
    """Of the median rank's time."""
    mean_ns: float
    """Per step, of the same rank."""
    epoch_starts_count: bool
    by_rank: Floats
    used: NDArray[np.bool_]


def find_input_bound(run: RunData, view: View) -> list[Finding]:
    if len(view.steps) < thresholds.MIN_STEPS or "input" not in view.phases:
        return []
    seen = _measure(view)
    if seen.share < thresholds.INPUT_SHARE or seen.mean_ns < thresholds.INPUT_FLOOR_NS:
        return []
    if _stretches_bound(view, seen.used) < thresholds.BOTTLENECK_SHARE:
        return []
    cost = cost_of(view, _saved(view, seen.used))
    return [
        Finding(
            kind="input_bound",
            severity="critical" if seen.share >= thresholds.INPUT_CRITICAL_SHARE else "warning",
            title=(
                f"Training waits for input: {ms_text(seen.mean_ns / 1e6)} of every step, "
                f"{share_text(cost['share'])} of the time."
            ),
            phase="input",
            steps=(int(view.steps[0]), int(view.steps[-1])),
            cost=cost,
            evidence=_evidence(view, seen),
            advice=_advice(run, view, seen),
            confidence=0.95 if len(view.steps) >= 3 * thresholds.MIN_STEPS else 0.8,
        )
    ]


def _measure(view: View) -> _Input:
    starts = _epoch_starts(view)
    epoch_starts_count = bool(starts.mean() > thresholds.EPOCH_STARTS_SHARE)
    used: NDArray[np.bool_] = np.ones(len(view.steps), np.bool_) if epoch_starts_count else ~starts
    longest = np.argsort(view.step_ns)[::-1][: int(np.ceil(thresholds.STALLS_SHARE * len(view.steps)))]
    if not epoch_starts_count:
        used[longest] = False
    input_ns, wall_ns = view.phase("input")[:, used], view.wall_ns[:, used]
    totals = np.nansum(wall_ns, axis=1)
    there = totals > 0
    by_rank = np.where(there, np.nansum(input_ns, axis=1) / np.where(there, totals, 1.0), np.nan)
    share = lower_median(by_rank[there]) if there.any() else 0.0
    counts = np.maximum((~np.isnan(input_ns)).sum(axis=1), 1)
    means = np.nansum(input_ns, axis=1) / counts
    mean_ns = lower_median(means[there]) if there.any() else 0.0
    return _Input(share=share, mean_ns=mean_ns, epoch_starts_count=epoch_starts_count, by_rank=by_rank, used=used)


def _epoch_starts(view: View) -> NDArray[np.bool_]:
    return np.asarray(((view.flags & FLAG_EPOCH_START) > 0).any(axis=0), np.bool_)


def _common_input(view: View, used: NDArray[np.bool_]) -> Floats:
    """[S]; the input wait of the median rank, step by step (the lower middle one)."""
    ordered = np.sort(view.phase("input")[:, used], axis=0)  # nan last
    counts = (~np.isnan(ordered)).sum(axis=0)
    return np.asarray(ordered[np.maximum(counts - 1, 0) // 2, np.arange(ordered.shape[1])], np.float64)


def _stretches_bound(view: View, used: NDArray[np.bool_]) -> float:
    """The share of stretches of the run that are bound by input by themselves."""
    input_ns, step_ns = _common_input(view, used), view.step_ns[used]
    stretches = np.array_split(np.arange(len(step_ns)), min(thresholds.WANDER_BLOCKS, len(step_ns)))
    bound = [input_ns[at].sum() >= thresholds.INPUT_SHARE * step_ns[at].sum() for at in stretches]
    return float(np.mean(bound))


def _saved(view: View, used: NDArray[np.bool_]) -> Floats:
    """[S]; what would be saved if the data were there: with waits measured, by replay; else the median rank's input."""
    if view.comm_measured:
        input_ns = view.phase("input")
        saved = longest(view.work_ns) - longest(view.work_ns - input_ns)
    else:
        saved = _common_input(view, np.ones(len(view.steps), np.bool_))
    return np.where(used, saved, 0.0)


def _evidence(view: View, seen: _Input) -> dict[str, Any]:
    finite = seen.by_rank[~np.isnan(seen.by_rank)]
    return {
        "clock": view.clock,
        "input_share": round(seen.share, 4),
        "input_ms_per_step": round(seen.mean_ns / 1e6, 3),
        "lowest_share": round(float(finite.min()), 4),
        "highest_share": round(float(finite.max()), 4),
        "step_ms": round(view.median_step_ns / 1e6, 3),
        "steps_used": int(seen.used.sum()),
        "epoch_starts_included": seen.epoch_starts_count,
    }


def _advice(run: RunData, view: View, seen: _Input) -> tuple[str, ...]:
    common = _common_input(view, seen.used)
    starts = _epoch_starts(view)[seen.used]
    at_starts = float(common[starts].sum() / common.sum()) if common.sum() else 0.0
    hosts = list(during(of_kind(run.samples, "host"), *_training_period(run)))
    cpu = numbers(hosts, "cpu_percent")
    return for_input(
        every_step=bool(np.median(common) >= common.mean() / 2),
        epoch_starts=at_starts >= thresholds.EXPLAINS_SHARE,
        main_busy=_main_busy(run),
        cpu_saturated=bool(cpu) and float(np.median(cpu)) >= BUSY_CPU_PERCENT,
        cores=_cores_each(run, numbers(hosts, "cpu_count")),
        on_device=view.clock == "device",
    )


def _main_busy(run: RunData) -> bool | None:
    """Whether the training processes themselves were busy all the time; None without samples of them."""
    pids = {(series.identity.host, series.identity.pid) for series in last_attempt(run.ranks)}
    lines = during(of_kind(run.samples, "process"), *_training_period(run))
    used = numbers((line for line in lines if (line.get("node"), line.get("pid")) in pids), "cpu_percent")
    return float(np.median(used)) >= BUSY_PROCESS_PERCENT if used else None


def _cores_each(run: RunData, counts: list[float]) -> int | None:
    """Cores of the smallest host by the ranks on the fullest one."""
    ranks = Counter(series.identity.host for series in last_attempt(run.ranks))
    return max(1, int(min(counts)) // max(ranks.values())) if counts and ranks else None


def _training_period(run: RunData) -> tuple[int, int]:
    """From the first step to the last, on the wall clock: imports and start-up load the CPUs in their own way."""
    starts, ends = [], []
    for series in last_attempt(run.ranks):
        if len(series.steps):
            offset = series.anchor_wall_ns - series.anchor_mono_ns
            starts.append(int(series.steps["start_ns"][0]) + offset)
            ends.append(int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1]) + offset)
    return min(starts, default=0), max(ends, default=0)
