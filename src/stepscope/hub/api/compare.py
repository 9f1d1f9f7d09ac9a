"""Several runs next to each other (the first is the baseline, the others are compared with it), and sweeps.

``stepscope.comparison`` judges, and the texts are those of ``stepscope compare``; a page only draws them.  Reading
whole runs takes time and memory: one comparison is made at a time, in a thread, and the last few are kept.

Sweeps: a list of those next to the runs of a hub, and the page of each (``comparison/sweep.py``).

A sweep is a folder with ``sweep.json`` and ``result.json``: one of ``sweeps/`` next to a served folder, or the folder
that a served ``runs`` is in.  Its files may come from anyone, so every value is checked, and a damaged result is listed
as such.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import unquote

import msgspec

from stepscope.errors import StepscopeError
from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.open_run import CHECK_S, READING_SHARE
from stepscope.hub.runs import Runs, changed_of
from stepscope.records.text import bytes_text, ms_text
from stepscope.store.catalog import run_entry
from stepscope.store.file_io import read_document
from stepscope.store.paths import META, SWEEP_RESULT, SWEEP_STATE, SWEEPS

if TYPE_CHECKING:
    from stepscope.comparison.inputs import Input

__all__ = ["compare_runs", "resource", "resources"]

MOST_RUNS = 8
KEPT = 16
ALIKE = 0.02
"""A smaller difference of peak memory does not count: it is one number without a spread."""
LOOKS = {"slower": "worse", "faster": "better", "same": "alike", "cannot_tell": "alike"}


@dataclass(frozen=True, kw_only=True)
class _Made:
    stamp: tuple[Any, ...] | None
    """Of the files of all runs; None if one of them is still active."""
    due_s: float
    """Not made again before that, however often it is requested."""
    document: dict[str, Any]


def resource() -> Resource:
    kept: OrderedDict[tuple[Path, ...], _Made] = OrderedDict()
    making = asyncio.Lock()

    async def answer(query: Query) -> Mapping[str, Any]:
        wanted = [unquote(one) for one in query.values["runs"] or ()]
        if not 2 <= len(wanted) <= MOST_RUNS or len(set(wanted)) < len(wanted):
            raise ApiError(400, f"runs takes 2 to {MOST_RUNS} different runs, separated by commas")
        paths = tuple([await _path_of(query, one) for one in wanted])
        async with making:
            made = await asyncio.to_thread(_made, kept.get(paths), paths)
        kept[paths] = made
        kept.move_to_end(paths)
        while len(kept) > KEPT:
            kept.popitem(last=False)
        rows = zip(wanted, paths, made.document["runs"], strict=True)
        named = [{"id": one, "folder": query.runs.folder_of(path), **row} for one, path, row in rows]
        return {**made.document, "runs": named}

    return Resource(
        path="/api/v1/compare",
        about="Runs compared with the first of them: by how much each is slower or faster, where, and what changed.",
        answer=answer,
        parameters=(
            Parameter(
                name="runs",
                about="2 to 8 runs, separated by commas, each percent-encoded",
                kind="texts",
                many=MOST_RUNS,
            ),
        ),
    )


async def _path_of(query: Query, one: str) -> Path:
    path = await query.runs.where(one)
    if path is None or not (path / META).is_file():
        raise ApiError(404, "there is no such run")
    return path


def _made(known: _Made | None, paths: Sequence[Path]) -> _Made:
    stamp = tuple(changed_of(path) for path in paths)
    began_s = time.monotonic()
    if known is not None and (known.stamp == stamp or began_s < known.due_s):
        return known
    document = compare_runs(paths)
    took_s = time.monotonic() - began_s
    over = all(row["over"] for row in document["runs"])
    due_s = began_s + max(CHECK_S, took_s / READING_SHARE)
    return _Made(stamp=stamp if over else None, due_s=due_s, document=document)


# -- the document -----------------------------------------------------------------------------------------------------


def compare_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """Compare each run with the first.  ``rows``, ``settings``: one value or cell for each run."""
    from stepscope.comparison import compare_inputs, read_input  # only those who compare need it
    from stepscope.comparison.repeats import read_repeats, repeats_text
    from stepscope.comparison.text import sentences_of

    runs = [_run_row(path) for path in paths]
    inputs: list[Input | None] = []
    for path, row in zip(paths, runs, strict=True):
        try:
            inputs.append(read_input(path))
        except (StepscopeError, OSError) as error:
            inputs.append(None)
            row["problem"] = str(error)
    read = [one for one in inputs if one is not None]
    repeats = read_repeats(read[0], read[1:]) if inputs[0] is not None and len(read) > 1 else []
    count = len(inputs)
    everything = _on_one_clock([*inputs, *repeats])
    inputs, repeats = everything[:count], [one for one in everything[count:] if one is not None]
    shown = f"{repeats_text(read[0], repeats)}; its column shows the mean of all." if repeats else ""
    documents: list[dict[str, Any] | None] = [None]
    base = inputs[0]
    for one, row in zip(inputs[1:], runs[1:], strict=True):
        document = None
        if base is not None and one is not None:
            try:
                document = compare_inputs([base, *repeats], one, unfinished=True)
                document["notices"] += [shown] if shown else []
            except StepscopeError as error:
                row["problem"] = str(error)
        documents.append(document)
    for document, row in zip(documents, runs, strict=True):
        if document is not None:
            sentences = sentences_of(document)
            sentences["notices"] += [notice for one in (runs[0], row) for notice in _unfinished(one)]
            row["comparison"] = {**sentences, "findings": _findings(document)}
    clocks = {document["clock"] for document in documents if document is not None}
    return {
        "clock": clocks.pop() if clocks else None,
        "runs": runs,
        "rows": [*_time_rows(documents), *_memory_rows(documents)],
        "settings": _settings(documents),
    }


def _run_row(path: Path) -> dict[str, Any]:
    entry = run_entry(path)
    row = entry.to_dict()
    del row["path"]
    return {**row, "label": path.name, "over": entry.status != "running", "problem": None, "comparison": None}


def _unfinished(row: Mapping[str, Any]) -> Iterator[str]:
    """A sentence about a run that did not finish, or not yet; the engine says it about an interrupted one."""
    if not row["over"]:
        yield f"{row['label']} is still running; its steps so far are compared."
    elif row["status"] not in ("finished", "interrupted"):
        yield f"{row['label']} did not finish ({row['status_text']}); the steps that it completed are compared."


def _on_one_clock(inputs: Sequence[Input | None]) -> list[Input | None]:
    """Columns of one table must be by the same clock: that of the devices, if all runs have it."""
    read = [one for one in inputs if one is not None]
    shared = [clock for clock in (read[0].clocks if read else ()) if all(clock in one.clocks for one in read)]
    if not shared:
        return list(inputs)
    return [None if one is None else replace(one, measured={shared[0]: one.on(shared[0])}) for one in inputs]


def _findings(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]] | None:
    from stepscope.comparison.text import price_text

    found = document["findings"]
    if found is None:
        return None
    return {name: [{**row, "price": price_text(row)} for row in found[name]] for name in ("new", "gone", "kept")}


# -- rows of the table ------------------------------------------------------------------------------------------------
# A cell: ``value`` and ``text``; ``change`` in words and ``look`` (better, worse, alike: within what chance can do) if
# it is compared.  None: not known.

Documents = Sequence[Mapping[str, Any] | None]
Cell = dict[str, Any] | None


def _time_rows(documents: Documents) -> Iterator[dict[str, Any]]:
    from stepscope.comparison.comparison import percent_text
    from stepscope.comparison.text import change_text, interval_words

    def step(document: Mapping[str, Any]) -> tuple[Cell, Cell]:
        words = {"change": interval_words(document), "look": LOOKS[document["verdict"]]}
        times = document["step_ms"]
        return _cell(times["before"], ms_text), {**(_cell(times["after"], ms_text) or {}), **words}

    yield _row("Step time", "mean step", documents, step)
    for name in dict.fromkeys(name for document in documents if document for name in document["percentiles_ms"]):

        def percentile(document: Mapping[str, Any], name: str = name) -> tuple[Cell, Cell]:
            row = document["percentiles_ms"].get(name)
            if row is None:
                return None, None
            change = {"change": percent_text(row["after"] / row["before"] - 1)} if row["before"] else {}
            return _cell(row["before"], ms_text), {**(_cell(row["after"], ms_text) or {}), **change}

        yield _row("Step time", name, documents, percentile)
    names = dict.fromkeys(row["phase"] for document in documents if document for row in document["phases"])
    for name in names:

        def phase(document: Mapping[str, Any], name: str = name) -> tuple[Cell, Cell]:
            row = next((row for row in document["phases"] if row["phase"] == name), None)
            if row is None:
                return None, None
            look = "alike" if not row["real"] else "worse" if row["change_ms"] > 0 else "better"
            after = {**(_cell(row["after_ms"], ms_text) or {}), "change": change_text(row), "look": look}
            return _cell(row["before_ms"], ms_text), after

        yield _row("Phases", name, documents, phase)


def _memory_rows(documents: Documents) -> Iterator[dict[str, Any]]:
    from stepscope.comparison.comparison import MEMORY_WORDS, percent_text

    for name, words in MEMORY_WORDS.items():

        def memory(document: Mapping[str, Any], name: str = name) -> tuple[Cell, Cell]:
            row = document["memory"].get(name)
            if row is None:
                return None, None
            look = "alike" if abs(row["change"]) < ALIKE else "worse" if row["change"] > 0 else "better"
            change = {"change": percent_text(row["change"]), "look": look}
            return _cell(row["before"], bytes_text), {**(_cell(row["after"], bytes_text) or {}), **change}

        if any(document is not None and name in document["memory"] for document in documents):
            yield _row("Peak memory", words, documents, memory)


def _row(section: str, name: str, documents: Documents, cells_of: Any) -> dict[str, Any]:
    """``cells_of(document)``: the cells of the baseline and of the run."""
    pairs = [cells_of(document) if document is not None else (None, None) for document in documents]
    first = next((before for before, _ in pairs if before is not None), None)
    return {"section": section, "name": name, "cells": [first, *(after for _, after in pairs[1:])]}


def _cell(value: float | None, text: Any) -> Cell:
    return None if value is None else {"value": value, "text": text(value), "change": None, "look": None}


def _settings(documents: Documents) -> list[dict[str, Any]]:
    """What differs between the runs, what matters most first; a run without a comparison has no values."""
    found: dict[str, dict[str, Any]] = {}
    for at, document in enumerate(documents):
        for row in document["context"] if document is not None else ():
            about = {name: row[name] for name in ("label", "kind", "matters")}
            known = found.setdefault(row["name"], {**about, "values": [row["before"]] * len(documents)})
            known["values"][at] = row["after"]
    return list(found.values())


# -- sweeps -----------------------------------------------------------------------------------------------------------

MOST_SWEEPS = 100
"""The newest are listed."""
MOST_VARIANTS = 200
RESULT_BYTES = 4 << 20
RUNS_FOLDER = "runs"
DAMAGED = "its result cannot be read"


# -- result.json ------------------------------------------------------------------------------------------------------

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e15)]


class _Settings(msgspec.Struct):
    args: list[str] = []
    env: dict[str, str] = {}
    options: list[str] = []


class _Trial(msgspec.Struct):
    round: int
    run: str
    status: str


class _Variant(msgspec.Struct):
    variant: Name
    status: Annotated[str, msgspec.Meta(max_length=1000)]
    front: Literal["front", "near", "dominated", "none"]
    better: Name | None
    speed: Positive | None
    speed_interval: tuple[Positive, Positive] | None
    step_ms: Positive | None
    memory: Annotated[int, msgspec.Meta(gt=0, lt=1 << 60)] | None
    memory_of: Literal["device", "host"] | None
    settings: _Settings
    trials: list[_Trial]

    def __post_init__(self) -> None:
        figures = (self.speed, self.speed_interval, self.step_ms)
        if any((figure is None) != (self.speed is None) for figure in figures):
            raise ValueError("a speed without its interval")
        if self.front != "none" and (self.speed is None or self.memory is None):
            raise ValueError("on the front without figures")


class _Result(msgspec.Struct):
    schema: Literal[1]
    kind: Literal["sweep"]
    name: Name
    unit: Literal["samples/s", "steps/s"]
    rounds: int
    complete: bool
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    front: list[Name]
    variants: Annotated[list[_Variant], msgspec.Meta(max_length=MOST_VARIANTS)]

    def __post_init__(self) -> None:
        on_front = {row.variant for row in self.variants if row.front == "front"}
        if set(self.front) != on_front or len({row.variant for row in self.variants}) < len(self.variants):
            raise ValueError("another front than its variants have")


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    folder: Path
    id: str
    changed_ns: int
    result: _Result | None
    """None: it cannot be read."""


# -- where they are ---------------------------------------------------------------------------------------------------


def _sweeps_of(runs: Runs) -> list[_Sweep]:
    """The sweeps of a hub, the newest first, each once."""
    found: dict[Path, int] = {}
    for folder in runs.folders():
        for place in _places(folder.absolute()):
            with suppress(OSError):
                if (place / SWEEP_STATE).is_file():
                    found[place.resolve()] = (place / SWEEP_RESULT).stat().st_mtime_ns
    newest = sorted(found.items(), key=lambda item: -item[1])[:MOST_SWEEPS]
    return [
        _Sweep(folder=place, id=runs.id_of(place), changed_ns=changed_ns, result=_read(place))
        for place, changed_ns in newest
    ]


def _places(folder: Path) -> Iterator[Path]:
    """Folders that may be sweeps."""
    if folder.name == RUNS_FOLDER:
        yield folder.parent
    with suppress(OSError):
        yield from (place for place in (folder.parent / SWEEPS).iterdir() if not place.is_symlink())


def _read(place: Path) -> _Result | None:
    try:
        return msgspec.json.decode(read_document(place / SWEEP_RESULT, most=RESULT_BYTES), type=_Result)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None


# -- answers ----------------------------------------------------------------------------------------------------------


def resources() -> Iterable[Resource]:
    return (
        Resource(
            path="/api/v1/sweeps",
            about="The sweeps next to the served runs, newest first, each with what it found in one sentence.",
            answer=_list,
        ),
        Resource(
            path="/api/v1/sweeps/{sweep}",
            about="A sweep as the page draws it: speed and memory of its variants, the front, and what failed.",
            answer=_one,
            path_parameters={"sweep": "ID of the sweep"},
        ),
    )


async def _list(query: Query) -> Mapping[str, Any]:
    return {"sweeps": await asyncio.to_thread(_rows, query.runs)}


def _rows(runs: Runs) -> list[dict[str, Any]]:
    return [_sweep_row(runs, sweep) for sweep in _sweeps_of(runs)]


def _sweep_row(runs: Runs, sweep: _Sweep) -> dict[str, Any]:
    about = {"id": sweep.id, "folder": runs.folder_of(sweep.folder), "changed_wall_ns": sweep.changed_ns}
    if sweep.result is None:
        return {**about, "name": sweep.folder.name, "problem": DAMAGED}
    page = _page(sweep.result)
    return {
        **about,
        "name": page["name"],
        "problem": None,
        "title": page["verdict"]["title"],
        "variants": len(sweep.result.variants),
        "failed": len(page["parts"][0]["failed"]),
        "complete": sweep.result.complete,
    }


async def _one(query: Query) -> Mapping[str, Any]:
    wanted = query.request.path_params["sweep"]
    sweeps = await asyncio.to_thread(_sweeps_of, query.runs)
    sweep = next((one for one in sweeps if one.id == wanted), None)
    if sweep is None:
        raise ApiError(404, "there is no such sweep")
    if sweep.result is None:
        raise ApiError(409, DAMAGED)
    return await asyncio.to_thread(_page, sweep.result, _runs_of(query.runs, sweep))


def _page(result: _Result, runs: Mapping[str, str] | None = None) -> dict[str, Any]:
    from stepscope.comparison.sweep import sweep_page  # only those who ask for sweeps need it

    return sweep_page(msgspec.to_builtins(result), runs)


def _runs_of(runs: Runs, sweep: _Sweep) -> dict[str, str]:
    """By variant: the ID of its last run, if this hub serves the sweep's runs."""
    folder = sweep.folder / RUNS_FOLDER
    served = next((one for one in runs.folders() if one.resolve() == folder), None)
    if served is None or sweep.result is None:
        return {}
    return {
        row.variant: runs.id_of(served / row.trials[-1].run)
        for row in sweep.result.variants
        if row.trials and row.trials[-1].run
    }
