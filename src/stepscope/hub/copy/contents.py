"""What a copy of a run has in it: the answers to all that the page asks, thinned out to a plan, and what was left out.

Documents keep the form that docs/api.md gives them; columns of times become blobs (``packing.py``), which the page puts
back (``web/src/api/copy-bytes.ts``).  The page cuts, sorts and joins bins by itself where it asks for less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from stepscope.hub.api.steps import HEAT_TYPE
from stepscope.hub.copy.asking import Asker
from stepscope.hub.copy.files import add_files
from stepscope.hub.copy.packing import Blobs, rounded
from stepscope.hub.copy.plan import Plan
from stepscope.hub.copy.steps import add_steps
from stepscope.hub.views.heat_map import HEAD as HEAT_HEAD
from stepscope.hub.views.sample_series import WHO
from stepscope.records.progress import Progress, unheard

__all__ = ["gather"]

WHOLE = ("", "findings", "summary", "collectives")
"""Asked as they are."""
LONG = {"hangs": "hangs", "nodes": "nodes", "stacks": "stacks"}
"""By resource the list in it that is cut where it is too long."""
MEMORY = ("allocated", "reserved", "peak_allocated")
MOST_ROWS = 512
MOST_COLUMNS = 4096
LEAST_BINS = 64
STAGES = 6
"""That progress is told in: questions, steps, ranks, samples, maps, files."""
MOST_BINS = 512
MEMORY_DIGITS = 5
MEAN_PART = 4
"""Maps of means are looked at less often, and have so much fewer cells."""
MS = 1_000_000
REDACTED_FILES = "This copy is redacted: logs and other files of the run are not here."

Contents = dict[str, Any]


async def gather(ask: Asker, plan: Plan, blobs: Blobs, progress: Progress = unheard, *, files: bool = True) -> Contents:
    """``answers`` by resource, ``maps`` by value, ``files`` by path, ``left_out`` in sentences.

    Without ``files`` there are none in it: nobody can redact what a job printed.
    """
    progress(0, STAGES)
    left_out: list[str] = []
    answers: dict[str, Any] = {name: await ask.document(name) for name in WHOLE}
    _judge(answers)
    for name, key in LONG.items():
        answers[name] = _cut(await ask.document(name), key, name, plan.document_bytes, left_out)
    answers["events"] = await _events(ask, plan, left_out)
    progress(1, STAGES)
    await add_steps(ask, plan, blobs, answers, left_out)
    progress(2, STAGES)
    answers["ranks"] = await ask.document("ranks", limit=plan.rank_rows, order="work")
    _told(left_out, len(answers["ranks"].get("rank", ())), answers["ranks"].get("total", 0), "ranks stand in the table")
    chosen = _chosen(answers, plan.ranks)
    await _ranks(ask, plan, blobs, answers, chosen)
    _told(left_out, len(chosen), answers["ranks"].get("total", 0), "ranks have curves of their own")
    progress(3, STAGES)
    for kind in WHO:
        answers[f"samples/{kind}"] = await _samples(ask, kind, plan, left_out)
    answers["samples/process/last"] = await _log_places(ask, plan)
    progress(4, STAGES)
    maps = await _maps(ask, plan, blobs, answers[""], left_out)
    progress(5, STAGES)
    found = {}
    if files:
        found = await add_files(ask, plan, blobs, answers, chosen, left_out)
    else:
        answers["files"] = {"files": []}
        left_out.append(REDACTED_FILES)
    progress(6, STAGES)
    return {"answers": answers, "maps": maps, "files": found, "left_out": left_out}


def _judge(answers: dict[str, Any]) -> None:
    """A hub shows of a run that goes on what it found at two looks, and here is but one: that of the summary."""
    if answers["findings"].get("live"):
        summary = answers["summary"].get("summary", {})
        said = {"live": False, "verdict": summary.get("verdict"), "findings": summary.get("findings", [])}
        answers["findings"] = said
        answers[""] |= {"verdict": said["verdict"]}


def _told(left_out: list[str], kept: int, of: int, what: str) -> None:
    if kept < of:
        left_out.append(f"{kept:,} of {of:,} {what}.")


def _cut(document: dict[str, Any], key: str, name: str, most: int, left_out: list[str]) -> dict[str, Any]:
    rows = document.get(key, [])
    kept, size = 0, 0
    for row in rows:
        size += len(msgspec.json.encode(row))
        if size > most:
            break
        kept += 1
    _told(left_out, kept, len(rows), f"{name} are here")
    return {**document, key: rows[:kept]}


async def _events(ask: Asker, plan: Plan, left_out: list[str]) -> dict[str, Any]:
    found = await ask.document("events", limit=10_000)
    events = found.get("events", [])
    if len(events) > plan.events:
        first = plan.events // 4
        left_out.append(f"{plan.events:,} of {len(events):,} events are here, the first and the last.")
        events = [*events[:first], *events[first - plan.events :]]
    return {**found, "events": events}


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chosen(answers: dict[str, Any], most: int) -> list[int]:
    """Those that findings name, those that work longest, and an even choice of the rest."""
    by_work: list[int] = answers["ranks"].get("rank", [])
    there = set(by_work)
    named = [rank for finding in answers["findings"].get("findings", []) for rank in finding.get("ranks", [])]
    named = [rank for rank in dict.fromkeys(named) if rank in there]
    wanted = dict.fromkeys([*named[: most // 2], *by_work[: most // 4]])
    rest = sorted(there - set(wanted))
    room = max(0, most - len(wanted))
    spread = rest if len(rest) <= room else [rest[at * len(rest) // room] for at in range(room)]
    return sorted([*wanted, *spread])


async def _ranks(ask: Asker, plan: Plan, blobs: Blobs, answers: dict[str, Any], chosen: Sequence[int]) -> None:
    bins = max(LEAST_BINS, min(MOST_BINS, plan.rank_points // max(1, len(chosen))))
    for rank in chosen:
        found = await ask.document(f"ranks/{rank}", bins=bins)
        if found:
            answers[f"ranks/{rank}"] = _rank(found, blobs)


def _rank(found: dict[str, Any], blobs: Blobs) -> dict[str, Any]:
    steps, past = found["steps"], found["past"]
    return {
        **found,
        "steps": {
            **steps,
            "wall_ns": blobs.times(_floats(steps["wall_ns"])),
            "phase_ns": {name: blobs.times(_floats(column)) for name, column in steps["phase_ns"].items()},
            "device_ns": {name: blobs.times(_floats(column)) for name, column in steps["device_ns"].items()},
            "memory_bytes": {name: rounded(column, MEMORY_DIGITS) for name, column in steps["memory_bytes"].items()},
            "start_wall_ns": [start // MS * MS for start in steps["start_wall_ns"]],
        },
        "past": {
            **past,
            "wall_ns": blobs.times(_floats(past["wall_ns"])),
            "work_ns": blobs.times(_floats(past["work_ns"])),
        },
    }


def _floats(column: Iterable[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in column]


# ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _samples(ask: Asker, kind: str, plan: Plan, left_out: list[str]) -> dict[str, Any]:
    sketch = await ask.document("samples", kind=kind, bins=1, limit=1024)
    series = sketch.get("series", [])
    if not series:
        return sketch
    fields = max(1, *(len(one["values"]) for one in series))
    limit = max(1, min(len(series), plan.sample_values // (fields * LEAST_BINS)))
    bins = max(LEAST_BINS, min(MOST_BINS, plan.sample_values // (fields * limit)))
    found = await ask.document("samples", kind=kind, bins=bins, limit=limit)
    _told(left_out, len(found["series"]), len(found["series"]) + found["left_out"], f"curves of kind “{kind}” are here")
    for one in found["series"]:
        one["values"] = {name: rounded(column) for name, column in one["values"].items()}
    return found


async def _log_places(ask: Asker, plan: Plan) -> dict[str, Any]:
    """How long each log was when: by it the page finds the place of a moment."""
    asked = {"kind": "process", "fields": "log_bytes", "stat": "last"}
    return await ask.document("samples", **asked, bins=MOST_BINS, limit=max(1, plan.sample_values // MOST_BINS))


# ── the map ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _maps(
    ask: Asker, plan: Plan, blobs: Blobs, about: dict[str, Any], left_out: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """By value one map of the whole run; where that is of bins only, another of the steps that are there one by one.

    ``VALUE/mean``: the same of means, where a cell is more than one step of one rank.
    """
    rows = max(1, min(about.get("ranks", 0), MOST_ROWS))
    found = {}
    on_device = [f"device:{name}" for name in (await ask.document("steps", bins=1)).get("device_mean_ns", ())]
    for value in ("work", "wall", *about.get("phases", ()), *on_device, *MEMORY):
        cells = plan.cells if value == "work" else plan.other_cells
        layers = await _layers(ask, blobs, about, value=value, stat="max", rows=rows, cells=cells)
        if layers:
            found[value] = layers
        if any(one["rows"] < about["ranks"] or one["first_steps"] != one["last_steps"] for one in layers):
            cells //= MEAN_PART
            found[f"{value}/mean"] = await _layers(ask, blobs, about, value=value, stat="mean", rows=rows, cells=cells)
    work = found["work"][0] if "work" in found else None
    if work is not None and (work["rows"] < about.get("ranks", 0) or work["first_steps"] != work["last_steps"]):
        left_out.append(f"The map of ranks and steps has {work['rows']:,} × {len(work['first_steps']):,} cells.")
    return found


async def _layers(
    ask: Asker, blobs: Blobs, about: dict[str, Any], *, value: str, stat: str, rows: int, cells: int
) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = []
    shape = {"rank_bins": rows, "step_bins": max(1, min(MOST_COLUMNS, cells // rows))}
    for first in (0, about["info"]["window"]["oldest_step"]):
        reply = await ask.reply("heat", HEAT_TYPE, value=value, stat=stat, first=first, **shape)
        if reply is not None:
            layers.append(_map(reply.data, reply.headers.get("x-stepscope-unit", "ns"), blobs))
        if reply is None or layers[0]["exact"]:
            break
    return layers


def _map(data: bytes, unit: str, blobs: Blobs) -> dict[str, Any]:
    """``pack_heat`` in reverse, with the cells as a blob."""
    _, _, exact, rows, columns = HEAT_HEAD.unpack_from(data)
    edges = np.frombuffer(data, "<u4", 2 * (rows + columns), HEAT_HEAD.size)
    cells = np.frombuffer(data, "<f4", rows * columns, HEAT_HEAD.size + edges.nbytes)
    cuts = np.cumsum([rows, rows, columns])
    first_ranks, last_ranks, first_steps, last_steps = (edge.tolist() for edge in np.split(edges, cuts))
    return {
        "unit": unit,
        "exact": bool(exact),
        "rows": rows,
        "first_ranks": first_ranks,
        "last_ranks": last_ranks,
        "first_steps": first_steps,
        "last_steps": last_steps,
        "cells": blobs.times(cells),
    }
