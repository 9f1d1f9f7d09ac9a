"""The page of a run as one file: the page with the answers to all its requests packed inside.

The launcher writes it at the end of a run (``write_copy`` in ``app.py``), and a hub makes it for a reader who downloads
it.  The answers come from the functions that answer a reader of the API.

They are thinned according to a plan until the file is small enough for mail; what was left out is listed.
Documents have the form described in docs/api.md, except that columns of times become blobs, which the page restores
(``web/src/api/copy-bytes.ts``).  The page cuts, sorts and joins bins when it needs less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stepscope import __version__
from stepscope.errors import RunError
from stepscope.hub.api.incidents import incident_document_of, incidents_of_run
from stepscope.hub.api.responses import json_body
from stepscope.hub.api.runs import (
    collectives_document,
    findings_of,
    hangs_document,
    list_files,
    read_piece,
    run_document,
    summary_document,
)
from stepscope.hub.api.samples import WHO, events_document, nodes_document, samples_document, stacks_document
from stepscope.hub.api.steps import (
    MOST_BINS,
    HeatMap,
    Statistic,
    heat_map,
    metrics_document,
    rank_document,
    ranks_document,
    sampled_layers,
    steps_document,
)
from stepscope.hub.open_run import OpenRun
from stepscope.page.assets import explain_unbuilt, is_built, pack, report_file
from stepscope.records.finding import SEVERITIES
from stepscope.records.paths import log_path
from stepscope.records.redaction import Redactor
from stepscope.records.text import Progress, count_text, no_progress
from stepscope.reports.finding_text import findings_document
from stepscope.store.catalog import run_entry
from stepscope.store.documents import read_meta

__all__ = ["MOST_BYTES", "Blobs", "copy_of", "plans", "rounded"]


# -- packing ----------------------------------------------------------------------------------------------------------
# Compact numbers; ``page/assets.py`` describes the container for them and the documents. Its JSON is
# ``{"schema", "run", …, "answers": {resource: document}, "maps": {…}, "files": {…}}``.
#
# Times are stored as logarithms in steps of a quarter of a percent: the error is at most an eighth of a percent for any
# size, invisible in charts and in figures of three digits.  A code is a u16: 0 means unknown and 1 means zero.  All low
# bytes come before all high bytes, which compresses better.

STEP = 0.0025
"""The difference between two codes, in the natural logarithm."""
UNKNOWN, ZERO, FIRST = 0, 1, 2
MOST_CODE = 0xFFFF


class Blobs:
    """The blobs that follow the JSON, in order."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.length = 0

    def put(self, data: bytes) -> list[int]:
        """Add a blob; return its offset and length."""
        place = [self.length, len(data)]
        self._parts.append(data)
        self.length += len(data)
        return place

    def times(self, values: ArrayLike) -> dict[str, Any]:
        """Encode a flattened array; negative values become zero.  ``least``: the value of the first code."""
        flat = np.asarray(values, np.float64).reshape(-1)
        known = flat[np.isfinite(flat) & (flat > 0)]
        least = float(known.min()) if known.size else 1.0
        with np.errstate(invalid="ignore", divide="ignore"):
            codes = np.round(np.log(flat / least) / STEP) + FIRST
        codes[~(flat > 0)] = ZERO
        codes[~np.isfinite(flat)] = UNKNOWN
        kept = np.minimum(codes, MOST_CODE).astype("<u2")
        planes = kept.view(np.uint8).reshape(-1, 2).T
        return {"times": self.put(np.ascontiguousarray(planes).tobytes()), "least": least, "step": STEP}

    def join(self) -> bytes:
        return b"".join(self._parts)


def rounded(values: Sequence[Any], digits: int = 4) -> list[Any]:
    """Round to this many digits; integers stay integers, and None stays None."""
    numbers: NDArray[np.float64] = np.array([np.nan if value is None else value for value in values], np.float64)
    known = np.isfinite(numbers) & (numbers != 0)
    unit = np.ones(len(numbers))
    unit[known] = 10.0 ** (np.floor(np.log10(np.abs(numbers[known]))) - digits + 1)
    whole = np.array([type(value) is int for value in values], bool)
    unit[whole] = np.maximum(unit[whole], 1.0)
    short = np.round(numbers / unit) * unit
    made: list[Any] = []
    for value, number, integer in zip(values, short.tolist(), whole.tolist(), strict=True):
        made.append(None if value is None else int(number) if integer else float(f"{number:.{digits}g}"))
    return made


# -- plan -------------------------------------------------------------------------------------------------------------
# How much of a run goes into a copy: as much as its size allows.
#
# A plan aims at a size suitable for mail (``MOST_BYTES``).  What takes the most room is known in advance: bins of
# steps, cells of the map, curves of ranks and machines, logs.  If the file is still too large, the next plan has half
# of everything.

MOST_BYTES = 3_000_000
"""The limit for the whole file."""
_COARSEST = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    step_bins: int
    worst: int
    """Worst ranks for each bin of steps."""
    cells: int
    """Cells in the map that the page shows first: ``work``, on the devices if they are timed."""
    other_cells: int
    """Cells in the map of each other value."""
    ranks: int
    """Ranks with separate curves."""
    rank_points: int
    """Points in all those curves together, for each phase."""
    rank_rows: int
    """Rows in the table of ranks."""
    sample_values: int
    """Values for each kind of samples."""
    events: int
    log_bytes: int
    """Bytes from the start and from the end of one log."""
    all_log_bytes: int
    layer_modules: int
    """Modules of the model, for each rank whose layers are included."""
    layer_ranks: int
    document_bytes: int
    """Bytes of a document that cannot be thinned: hangs, stacks, nodes."""


def plans() -> list[Plan]:
    """Return all plans, the largest first."""
    return [_plan(part) for part in (1, 2, 4, 8, 16, _COARSEST)]


def _plan(part: int) -> Plan:
    return Plan(
        step_bins=4096 // part,
        worst=4 if part == 1 else 2,
        cells=(1 << 18) // part,
        other_cells=(1 << 16) // part,
        ranks=64 // part,
        rank_points=12_288 // part,
        rank_rows=4096 // part,
        sample_values=80_000 // part,
        events=2000 // part,
        log_bytes=(64 << 10) // part,
        all_log_bytes=(2 << 20) // part,
        layer_modules=1000 // part,
        layer_ranks=max(1, 8 // part),
        document_bytes=(1 << 20) // part,
    )


# -- steps ------------------------------------------------------------------------------------------------------------
# The steps are collected one stretch at a time: all at once they would be a million objects.

STRETCHES = 16
MS = 1_000_000
MEMORY_DIGITS = 5
_PLAIN = ("first", "last", "steps", "ranks")


def add_steps(run: OpenRun, plan: Plan, blobs: Blobs, answers: dict[str, Any], left_out: list[str]) -> None:
    """Add the steps; ``worst`` becomes ``names``, and by bin ``rank``, ``step`` and a blob [bin, place, name]."""
    outline = steps_document(run, bins=1, worst=0)
    if not outline.get("first"):
        answers["steps"] = outline
        return
    names, timed = list(outline["mean_ns"]), list(outline["device_mean_ns"])
    edges = np.linspace(outline["first"][0], outline["last"][-1] + 1, STRETCHES + 1).astype(int).tolist()
    whole: dict[str, Any] = {name: [] for name in (*_PLAIN, "start_wall_ns")}
    memory: dict[str, list[Any]] = {name: [] for name in outline["memory_bytes"]}
    quantiles, means, on_device, slowest, worst = [], [], [], [], []
    # The hub never has more than MOST_BINS in total; a smaller number is divided among the stretches.
    bins = MOST_BINS if plan.step_bins >= MOST_BINS else max(1, plan.step_bins // STRETCHES)
    seen: dict[str, list[Any]] = {"rank": [], "step": []}
    for first, last in pairwise(edges):
        begin = max(first, whole["last"][-1] + 1 if whole["last"] else first)
        if begin > last - 1:
            continue
        found = steps_document(run, first=begin, last=last - 1, bins=bins, worst=plan.worst)
        for name in _PLAIN:
            whole[name] += found[name]
        whole["start_wall_ns"] += [start // MS * MS for start in found["start_wall_ns"]]
        for name in memory:
            memory[name] += rounded(found["memory_bytes"][name], MEMORY_DIGITS)
        quantiles.append(np.array([found["ns"][name] for name in names], np.float32))
        means.append(np.array([found["mean_ns"][name] for name in names], np.float32))
        on_device.append(np.array([found["device_mean_ns"][name] for name in timed], np.float32))
        slowest += found["device_slowest_ns"]
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
        "device_slowest_ns": blobs.times(_floats(slowest)),
        "worst": {"names": names, "places": plan.worst, **seen, "values": blobs.times(np.concatenate(worst))},
    }
    widest = max(whole["steps"])
    if widest > 1:
        left_out.append(f"Steps are grouped into {len(whole['first']):,} bins of up to {widest:,} steps.")


def _worst(rows: list[list[dict[str, Any]]], names: list[str], places: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.full((len(rows), places, len(names)), np.nan, np.float32)
    for at, ranks in enumerate(rows):
        for place, one in enumerate(ranks):
            found[at, place] = [one[name] for name in names]
    return found


# -- files ------------------------------------------------------------------------------------------------------------
# A copy contains the start and the end of some logs, the errors, and the summary.

ALWAYS = ("summary.txt", "logs/main.log")
MOST_ERRORS = 64
OTHERS = {"logs/": "more log", "errors/": "more error", "flight/": "Flight Recorder dump"}
"""Folders whose omitted files are listed, and the name for such a file."""


def add_files(
    run: OpenRun, plan: Plan, blobs: Blobs, answers: dict[str, Any], chosen: Sequence[int], left_out: list[str]
) -> dict[str, Any]:
    """Return ``size`` and ``pieces`` by path; a piece is its offset in the file, and the place of its bytes."""
    answers["files"] = {"files": [asdict(entry) for entry in list_files(run.path)]}
    sizes = {entry["path"]: entry["size"] for entry in answers["files"]["files"]}
    attempt = answers["steps"].get("attempt", 0)
    logs = [log_path(run.path, rank=rank, attempt=attempt).relative_to(run.path).as_posix() for rank in chosen]
    errors = [path for path in sizes if path.startswith("errors/")][:MOST_ERRORS]
    wanted = [path for path in dict.fromkeys((*ALWAYS, *errors, *logs)) if path in sizes]
    share = max(1024, plan.all_log_bytes // max(1, 2 * len(wanted)))
    most = min(plan.log_bytes, share)
    found, cut = {}, 0
    for path in wanted:
        size = sizes[path]
        if size <= 2 * most:
            read = [read_piece(run.path, path, offset=0, tail=None, most=2 * most)]
        else:
            read = [read_piece(run.path, path, offset=0, tail=None, most=most)]
            read.append(read_piece(run.path, path, offset=None, tail=most, most=most))
        cut += len(read) > 1
        pieces = [[piece.offset, *blobs.put(piece.data)] for piece in read if piece is not None]
        found[path] = {"size": size, "pieces": pieces}
    if cut:
        left_out.append(f"Only the first and last {most // 1024:,} kB of {cut:,} files are included.")
    for folder, what in OTHERS.items():
        if rest := sum(path.startswith(folder) for path in sizes if path not in found):
            left_out.append(f"Not included: {count_text(rest, what)}.")
    return found


# -- contents ---------------------------------------------------------------------------------------------------------

MEMORY = ("allocated", "reserved", "peak_allocated")
MOST_ROWS = 512
MOST_COLUMNS = 4096
LEAST_BINS = 64
STAGES = 6
"""The stages of progress: documents, steps, ranks, samples, maps, files."""
CURVE_BINS = 512
MEAN_PART = 4
"""Maps of means are used less often, and have fewer cells by this factor."""
MOST_INCIDENTS = 20
REDACTED_FILES = "This copy is redacted: it has no logs or other files of the run."

Contents = dict[str, Any]


async def gather(
    run: OpenRun,
    plan: Plan,
    blobs: Blobs,
    progress: Progress = no_progress,
    *,
    files: bool = True,
    others: bool = True,
) -> Contents:
    """Return ``answers`` by resource, ``maps`` by value, ``files`` by path, and ``left_out`` in sentences.

    Without ``files`` no file is included: a job's output cannot be redacted.  Without ``others`` the incidents say
    nothing about other runs of the folder.
    """
    progress(0, STAGES)
    left_out: list[str] = []
    answers: dict[str, Any] = {
        # Where it was served does not matter here.
        "": run_document(run) | {"id": run.name, "folder": None, "reopen": None, "reading": False},
        "findings": findings_of(run),
        "findings/history": {"history": run.finding_history()},
        "summary": await summary_document(run),
        "collectives": await collectives_document(run),
        "metrics": metrics_document(run),
    }
    _judge(answers)
    long = {"hangs": await hangs_document(run), "nodes": await nodes_document(run), "stacks": stacks_document(run)}
    for name, document in long.items():
        answers[name] = _cut(document, name, plan.document_bytes, left_out)
    answers["events"] = _events(run, plan, left_out)
    await _incidents(run, plan, answers, left_out, logs=files, others=others)
    progress(1, STAGES)
    add_steps(run, plan, blobs, answers, left_out)
    progress(2, STAGES)
    by = "device:work" if answers[""].get("clock") == "device" else "work"
    answers["ranks"] = ranks_document(run, limit=plan.rank_rows, order=by)
    _count_left_out(left_out, len(answers["ranks"]["rank"]), answers["ranks"]["total"], "ranks are in the table")
    chosen = _chosen(answers, plan.ranks)
    _ranks(run, plan, blobs, answers, chosen)
    _count_left_out(left_out, len(chosen), answers["ranks"]["total"], "ranks have their own curves")
    progress(3, STAGES)
    for kind in WHO:
        answers[f"samples/{kind}"] = await _samples(run, kind, plan, left_out)
    answers["samples/process/last"] = await _log_places(run, plan)
    await _model_layers(run, plan, answers, left_out)
    progress(4, STAGES)
    maps = _maps(run, plan, blobs, answers[""], left_out)
    progress(5, STAGES)
    found = {}
    if files:
        found = add_files(run, plan, blobs, answers, chosen, left_out)
    else:
        answers["files"] = {"files": []}
        left_out.append(REDACTED_FILES)
    progress(6, STAGES)
    return {"answers": answers, "maps": maps, "files": found, "left_out": left_out}


async def _incidents(
    run: OpenRun, plan: Plan, answers: dict[str, Any], left_out: list[str], *, logs: bool, others: bool
) -> None:
    """Add the list and as many incidents as there is room for, the most severe first; without ``logs`` no lines."""
    listed = await incidents_of_run(run)
    answers["incidents"] = listed
    rows = sorted(listed["incidents"], key=lambda row: (-SEVERITIES.index(row["severity"]), row["number"]))
    size, included = 0, 0
    for row in rows[:MOST_INCIDENTS]:
        document = await incident_document_of(run, row["number"], logs=logs, others=others)
        size += 0 if document is None else len(json_body(document))
        if document is None or size > plan.document_bytes:
            break
        answers[f"incidents/{row['number']}"] = document
        included += 1
    _count_left_out(left_out, included, len(rows), "incidents have their own page")


def _judge(answers: dict[str, Any]) -> None:
    """Replace live findings by the summary's: a hub shows what two evaluations agree on, and here there is only one."""
    if answers["findings"].get("live"):
        summary = answers["summary"].get("summary", {})
        over = answers[""].get("over") is True
        found = findings_document(summary.get("findings"), summary.get("verdict"), live=False, over=over)
        answers["findings"] = found
        answers[""] |= {"verdict": found["verdict"]}


def _count_left_out(left_out: list[str], included: int, of: int, what: str) -> None:
    if included < of:
        left_out.append(f"{included:,} of {of:,} {what}.")


def _cut(document: dict[str, Any], name: str, most: int, left_out: list[str]) -> dict[str, Any]:
    """Shorten the list ``name`` of a document to so many bytes."""
    rows = document[name]
    kept, size = 0, 0
    for row in rows:
        size += len(json_body(row))
        if size > most:
            break
        kept += 1
    _count_left_out(left_out, kept, len(rows), f"{name} are included")
    return {**document, name: rows[:kept]}


def _events(run: OpenRun, plan: Plan, left_out: list[str]) -> dict[str, Any]:
    found = events_document(run, limit=10_000)
    events = found["events"]
    if len(events) > plan.events:
        first = plan.events // 4
        left_out.append(f"{plan.events:,} of {len(events):,} events are included, the first and the last.")
        events = [*events[:first], *events[first - plan.events :]]
    return {**found, "events": events}


# -- ranks -----------------------------------------------------------------------------------------------------------


def _chosen(answers: dict[str, Any], most: int) -> list[int]:
    """Choose the ranks named in findings, those that work longest, and an even sample of the rest."""
    by_work: list[int] = answers["ranks"].get("rank", [])
    there = set(by_work)
    named = [rank for finding in answers["findings"].get("findings", []) for rank in finding.get("ranks", [])]
    named = [rank for rank in dict.fromkeys(named) if rank in there]
    wanted = dict.fromkeys([*named[: most // 2], *by_work[: most // 4]])
    rest = sorted(there - set(wanted))
    room = max(0, most - len(wanted))
    spread = rest if len(rest) <= room else [rest[at * len(rest) // room] for at in range(room)]
    return sorted([*wanted, *spread])


def _ranks(run: OpenRun, plan: Plan, blobs: Blobs, answers: dict[str, Any], chosen: Sequence[int]) -> None:
    bins = max(LEAST_BINS, min(CURVE_BINS, plan.rank_points // max(1, len(chosen))))
    for rank in chosen:
        answers[f"ranks/{rank}"] = _rank(rank_document(run, rank, bins=bins), blobs)


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


# -- samples ---------------------------------------------------------------------------------------------------------


async def _samples(run: OpenRun, kind: str, plan: Plan, left_out: list[str]) -> dict[str, Any]:
    sketch = await samples_document(run, kind=kind, bins=1, limit=1024)
    series = sketch.get("series", [])
    if not series:
        return sketch
    fields = max(1, *(len(one["values"]) for one in series))
    limit = max(1, min(len(series), plan.sample_values // (fields * LEAST_BINS)))
    bins = max(LEAST_BINS, min(CURVE_BINS, plan.sample_values // (fields * limit)))
    found = await samples_document(run, kind=kind, bins=bins, limit=limit)
    _count_left_out(
        left_out,
        len(found["series"]),
        len(found["series"]) + found["left_out"],
        f"curves of kind “{kind}” are included",
    )
    for one in found["series"]:
        one["values"] = {name: rounded(column) for name, column in one["values"].items()}
    return found


async def _log_places(run: OpenRun, plan: Plan) -> dict[str, Any]:
    """Return the length of each log over time, from which the page finds the place of a moment."""
    limit = max(1, plan.sample_values // CURVE_BINS)
    return await samples_document(run, kind="process", fields=("log_bytes",), stat="last", bins=CURVE_BINS, limit=limit)


# -- layers of the model ---------------------------------------------------------------------------------------------


async def _model_layers(run: OpenRun, plan: Plan, answers: dict[str, Any], left_out: list[str]) -> None:
    """Add the last sample of the fullest rank, and of some other ranks as ``layers/RANK``."""
    fullest = answers["layers"] = await sampled_layers(run, modules=plan.layer_modules)
    if fullest.get("rank") is None:
        return
    others = [rank for rank in fullest["ranks"] if rank != fullest["rank"]]
    found = {
        rank: await sampled_layers(run, rank=rank, modules=plan.layer_modules)
        for rank in others[: plan.layer_ranks - 1]
    }
    found = {fullest["rank"]: fullest, **found}
    ranks, samples = fullest["ranks"], fullest["samples"]
    for rank, document in found.items():
        document |= {"ranks": sorted(found), "steps": [document["step"]]}
        if document is not fullest:
            answers[f"layers/{rank}"] = document
    _count_left_out(left_out, len(found), len(ranks), "ranks have their layers included")
    if samples > 1:
        left_out.append(f"Of {samples:,} samples of the layers, the last one is included.")


# -- maps ------------------------------------------------------------------------------------------------------------


def _maps(
    run: OpenRun, plan: Plan, blobs: Blobs, about: dict[str, Any], left_out: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return one map of the whole run by value, and if that is in bins, another of the steps kept individually.

    ``VALUE/mean``: the same with means, if a cell is more than one step of one rank.
    """
    rows = max(1, min(about["ranks"], MOST_ROWS))
    found = {}
    timed = list(steps_document(run, bins=1)["device_mean_ns"])
    on_device = [f"device:{name}" for name in ("work", "wall", *timed)] if timed else []
    first = "device:work" if about["clock"] == "device" else "work"
    for value in ("work", "wall", *about["phases"], *on_device, *MEMORY):
        cells = plan.cells if value == first else plan.other_cells
        layers = _layers(run, blobs, about, value=value, stat="max", rows=rows, cells=cells)
        if layers:
            found[value] = layers
        if any(layer["rows"] < about["ranks"] or layer["first_steps"] != layer["last_steps"] for layer in layers):
            cells //= MEAN_PART
            found[f"{value}/mean"] = _layers(run, blobs, about, value=value, stat="mean", rows=rows, cells=cells)
    work = found[first][0] if first in found else None
    if work is not None and (work["rows"] < about["ranks"] or work["first_steps"] != work["last_steps"]):
        left_out.append(f"The rank × step map has {work['rows']:,} × {len(work['first_steps']):,} cells.")
    return found


def _layers(
    run: OpenRun, blobs: Blobs, about: dict[str, Any], *, value: str, stat: Statistic, rows: int, cells: int
) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = []
    shape = rows, max(1, min(MOST_COLUMNS, cells // rows))
    for first in (0, about["info"]["window"]["oldest_step"]):
        heat = heat_map(run.live, value, stat, None, (first, None), shape)
        if heat is not None:
            layers.append(_map(heat, blobs))
        if heat is None or layers[0]["exact"]:
            break
    return layers


def _map(heat: HeatMap, blobs: Blobs) -> dict[str, Any]:
    edges = {name: getattr(heat, name).tolist() for name in ("first_ranks", "last_ranks", "first_steps", "last_steps")}
    head = {"unit": heat.unit, "exact": heat.exact, "rows": len(heat.first_ranks)}
    return {**head, **edges, "cells": blobs.times(heat.cells)}


# -- the file ---------------------------------------------------------------------------------------------------------

SCHEMA = 1


async def copy_of(
    run: OpenRun,
    *,
    most_bytes: int = MOST_BYTES,
    wall_ns: int,
    redact: bool = False,
    others: bool = True,
    progress: Progress = no_progress,
) -> bytes:
    """Return the page of a run with its data inside; ``wall_ns``: the creation time that it states.

    ``others``: with what incidents say about other runs of the folder; a redacted copy has none of that.  RunError if
    the page was not built.
    """
    if not is_built():
        raise RunError(explain_unbuilt())
    made, report = b"", progress
    for plan in plans():
        blobs = Blobs()
        contents = await gather(run, plan, blobs, report, files=not redact, others=others and not redact)
        report = no_progress  # a second plan requests less of the same, and a progress bar never goes back
        made = await asyncio.to_thread(_packed, run, contents, blobs, wall_ns, redact=redact)
        if len(made) <= most_bytes:
            break
    return made


def _packed(run: OpenRun, contents: Contents, blobs: Blobs, wall_ns: int, *, redact: bool) -> bytes:
    name = str(contents["answers"][""].get("name") or run.name)
    document = _head(run, name, wall_ns) | contents
    if redact:
        document = Redactor(read_meta(run.path), document).document(document)
    return report_file(title=document["name"], data=pack(json_body(document), blobs.join())) or b""


def _head(run: OpenRun, name: str, wall_ns: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run": run.name,
        "name": name,
        "made_wall_ns": wall_ns,
        "stepscope": __version__,
        "over": run.over,
        "row": _row(run),
    }


def _row(run: OpenRun) -> dict[str, Any]:
    """Return the run as it appears in the list of runs."""
    shown = run_entry(run.path).to_dict()
    return {"id": run.name, **{name: value for name, value in shown.items() if name != "path"}}
