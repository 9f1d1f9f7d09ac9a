"""Several runs side by side: the first is the baseline, and each of the others is compared with it.

``stepscope.compare`` judges, and the texts are those of ``stepscope compare``; a page only draws them.  Reading whole
runs takes time and memory: one comparison is made at a time, in a thread, and the last few are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from stepscope.errors import StepscopeError
from stepscope.hub.api.resource import Asked, Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.runs import CHECK_S, READING_SHARE, changed_of
from stepscope.records.text import bytes_text, ms_text
from stepscope.store.catalog import run_entry
from stepscope.store.paths import META

if TYPE_CHECKING:
    from stepscope.compare.inputs import Input

__all__ = ["compare_runs", "resource"]

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

    async def answer(asked: Asked) -> Mapping[str, Any]:
        wanted = [unquote(one) for one in asked.values["runs"] or ()]
        if not 2 <= len(wanted) <= MOST_RUNS or len(set(wanted)) < len(wanted):
            raise ApiError(400, f"runs takes 2 to {MOST_RUNS} different runs, separated by commas")
        paths = tuple([await _path_of(asked, one) for one in wanted])
        async with making:
            made = await asyncio.to_thread(_made, kept.get(paths), paths)
        kept[paths] = made
        kept.move_to_end(paths)
        while len(kept) > KEPT:
            kept.popitem(last=False)
        rows = zip(wanted, paths, made.document["runs"], strict=True)
        named = [{"id": one, "folder": asked.runs.folder_of(path), **row} for one, path, row in rows]
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


async def _path_of(asked: Asked, one: str) -> Path:
    path = await asked.runs.where(one)
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
    from stepscope.compare import compare_inputs, read_input  # only those who compare need it
    from stepscope.compare.text import sentences_of

    runs = [_run_row(path) for path in paths]
    inputs: list[Input | None] = []
    for path, row in zip(paths, runs, strict=True):
        try:
            inputs.append(read_input(path))
        except (StepscopeError, OSError) as error:
            inputs.append(None)
            row["problem"] = str(error)
    inputs = _on_one_clock(inputs)
    documents: list[dict[str, Any] | None] = [None]
    base = inputs[0]
    for one, row in zip(inputs[1:], runs[1:], strict=True):
        document = None
        if base is not None and one is not None:
            try:
                document = compare_inputs([base], one, unfinished=True)
            except StepscopeError as error:
                row["problem"] = str(error)
        documents.append(document)
    for document, row in zip(documents, runs, strict=True):
        if document is not None:
            said = sentences_of(document)
            said["notices"] += [notice for one in (runs[0], row) for notice in _unfinished(one)]
            row["comparison"] = {**said, "findings": _findings(document)}
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
    from stepscope.compare.text import price_text

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
    from stepscope.compare.comparison import percent_text
    from stepscope.compare.text import change_text, interval_words

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
    from stepscope.compare.comparison import MEMORY_WORDS, percent_text

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
