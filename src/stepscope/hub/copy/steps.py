"""The steps of a run for its copy, asked for a stretch at a time: all at once they would be a million objects."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from stepscope.hub.api.steps import MOST_BINS
from stepscope.hub.copy.asking import Asker
from stepscope.hub.copy.packing import Blobs, rounded
from stepscope.hub.copy.plan import Plan

__all__ = ["add_steps"]

STRETCHES = 16
MS = 1_000_000
MEMORY_DIGITS = 5
_PLAIN = ("first", "last", "steps", "ranks")


async def add_steps(ask: Asker, plan: Plan, blobs: Blobs, answers: dict[str, Any], left_out: list[str]) -> None:
    """``worst`` becomes columns: ``names``, and by bin ``rank``, ``step`` and a blob of [bin, place, name]."""
    outline = await ask.document("steps", bins=1, worst=0)
    if not outline.get("first"):
        answers["steps"] = outline
        return
    names, timed = list(outline["mean_ns"]), list(outline["device_mean_ns"])
    edges = np.linspace(outline["first"][0], outline["last"][-1] + 1, STRETCHES + 1).astype(int).tolist()
    whole: dict[str, Any] = {name: [] for name in (*_PLAIN, "start_wall_ns")}
    memory: dict[str, list[Any]] = {name: [] for name in outline["memory_bytes"]}
    quantiles, means, on_device, worst = [], [], [], []
    # The hub never has more bins than that in all; of fewer, each stretch has its share.
    bins = MOST_BINS if plan.step_bins >= MOST_BINS else max(1, plan.step_bins // STRETCHES)
    seen: dict[str, list[Any]] = {"rank": [], "step": []}
    for first, last in pairwise(edges):
        begin = max(first, whole["last"][-1] + 1 if whole["last"] else first)
        if begin > last - 1:
            continue
        found = await ask.document("steps", first=begin, last=last - 1, bins=bins, worst=plan.worst)
        for name in _PLAIN:
            whole[name] += found[name]
        whole["start_wall_ns"] += [start // MS * MS for start in found["start_wall_ns"]]
        for name in memory:
            memory[name] += rounded(found["memory_bytes"][name], MEMORY_DIGITS)
        quantiles.append(np.array([found["ns"][name] for name in names], np.float32))
        means.append(np.array([found["mean_ns"][name] for name in names], np.float32))
        on_device.append(np.array([found["device_mean_ns"][name] for name in timed], np.float32))
        worst.append(_worst(found["worst"], names, plan.worst))
        for key, rows in seen.items():
            rows += [[one[key] for one in ranks] for ranks in found["worst"]]
    by_quantile = np.concatenate(quantiles, axis=1)
    mean = np.concatenate(means, axis=1)
    device = np.concatenate(on_device, axis=1) if timed else np.zeros(0, np.float32)
    answers["steps"] = {
        **outline,
        **whole,
        "memory_bytes": memory,
        "ns": {name: blobs.times(by_quantile[at]) for at, name in enumerate(names)},
        "mean_ns": {name: blobs.times(mean[at]) for at, name in enumerate(names)},
        "device_mean_ns": {name: blobs.times(device[at]) for at, name in enumerate(timed)},
        "worst": {"names": names, "places": plan.worst, **seen, "values": blobs.times(np.concatenate(worst))},
    }
    widest = max(whole["steps"])
    if widest > 1:
        left_out.append(f"Steps are in {len(whole['first']):,} bins of up to {widest:,} steps.")


def _worst(rows: list[list[dict[str, Any]]], names: list[str], places: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.full((len(rows), places, len(names)), np.nan, np.float32)
    for at, ranks in enumerate(rows):
        for place, one in enumerate(ranks):
            found[at, place] = [one[name] for name in names]
    return found
