"""The incidents of a run and everything around one of them (``incidents/``).

A finished run is loaded for it once; of an active run the last steps are used, as its rules do.  One document is made
at a time, in a thread, and stays until a file that it is made from changes.  What other runs of the folder show stays
for a minute, also if this run has new steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepscope.hub.api.auth import ONLY_RUN
from stepscope.hub.api.resource import Parameter, Query, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.open_run import OpenRun, stamp_of
from stepscope.records.series import RunData
from stepscope.store.paths import ALERT_REQUESTS, FINDING_HISTORY, INCIDENTS, META, SENT, SUMMARY

if TYPE_CHECKING:
    from stepscope.incidents.document import Incidents
    from stepscope.incidents.read import OtherRuns

__all__ = ["INCIDENT_RESOURCES", "incident_document_of", "incidents_of_run"]

MOST_KEPT = 40
"""Documents of one run that are kept for the next request: more than a copy of the run has (``report_copy.py``)."""
OTHERS_S = 60.0
"""How long what was read of other runs is used: up to 128 MiB and a few processes of git (``incidents/read.py``)."""
_FILES = (META, SUMMARY, INCIDENTS, FINDING_HISTORY, SENT, ALERT_REQUESTS)


@dataclass
class _Made:
    """What was made for one run from its files as of ``stamp``."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stamp: tuple[Any, ...] = ()
    loaded: Incidents | None = None
    documents: dict[tuple[int, bool, bool], dict[str, Any]] = field(default_factory=dict)
    other_runs: Callable[[], OtherRuns] | None = None
    others_until_s: float = 0.0

    async def incidents(self, run: OpenRun) -> Incidents:
        """Load the run, unless that was done for this ``stamp``."""
        if self.loaded is None:
            now_s = time.monotonic()
            others = self.other_runs if now_s < self.others_until_s else None
            self.loaded = await _load(run, others)
            if others is None:
                self.other_runs, self.others_until_s = self.loaded.other_runs, now_s + OTHERS_S
        return self.loaded


_MADE: WeakKeyDictionary[OpenRun, _Made] = WeakKeyDictionary()


async def incidents_of_run(run: OpenRun) -> dict[str, Any]:
    """The list, from the recorded incidents or the findings alone: the steps are not read for it."""
    from stepscope.incidents.document import incidents_in

    summary = await run.summary()
    nothing = RunData(name=run.name, path=str(run.path), meta=dict(run.meta()), ranks=())
    found = await asyncio.to_thread(incidents_in, run.path, nothing, summary, over=run.over)
    return found.list()


async def incident_document_of(
    run: OpenRun, number: int, *, logs: bool = True, others: bool = True
) -> dict[str, Any] | None:
    """One incident; None if no incident has that number."""
    made = _MADE.setdefault(run, _Made())
    async with made.lock:
        stamp = (run.over, run.live.judged.step if not run.over else 0, *(stamp_of(run.path / name) for name in _FILES))
        if made.stamp != stamp:
            made.stamp, made.loaded, made.documents = stamp, None, {}
        key = (number, logs, others)
        if key not in made.documents:
            incidents = await made.incidents(run)
            document = await asyncio.to_thread(incidents.document, number, logs=logs, others=others)
            if document is None:
                return None
            if len(made.documents) >= MOST_KEPT:
                made.documents.clear()
            made.documents[key] = document
        return made.documents[key]


async def _load(run: OpenRun, other_runs: Callable[[], OtherRuns] | None) -> Incidents:
    from stepscope.incidents.document import incidents_in  # only hubs that are asked for it load it

    summary = await run.summary()
    if run.recorded is not None:
        data = run.recorded
    elif run.over and not run.leaving:
        data = await asyncio.to_thread(_data_on_disk, run)
    else:
        await run.sampled()
        from stepscope.hub.live.rules import MOST_JUDGED, run_data_of, select, snapshot

        data = await asyncio.to_thread(run_data_of, snapshot(run.live, select(run.live, MOST_JUDGED)))
    return await asyncio.to_thread(incidents_in, run.path, data, summary, over=run.over, other_runs=other_runs)


def _data_on_disk(run: OpenRun) -> RunData:
    from stepscope.store.load import load_run  # loads DuckDB, which hubs of live runs do not need

    return load_run(run.path).data


async def _list(query: Query) -> Mapping[str, Any]:
    return {**await incidents_of_run(query.run), "may": _may(query)}


async def _incident(query: Query) -> Mapping[str, Any]:
    from stepscope.incidents.text import incident_markdown  # only hubs that are asked for it load it

    text = query.request.path_params["number"]
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ApiError(400, "the number of an incident must be a whole number")
    state = query.request.scope.get("state", {})
    # A token for one run does not show what happened in others.
    others = state.get(ONLY_RUN) is None
    document = await incident_document_of(query.run, int(text), others=others)
    if document is None:
        raise ApiError(404, "there is no such incident")
    if query.values["form"] == "markdown":
        return {"markdown": await asyncio.to_thread(incident_markdown, document)}
    return {**document, "may": _may(query)}


def _may(query: Query) -> list[str]:
    """What this reader may do besides reading: acknowledge and silence incidents of a run that is active."""
    return ["acknowledge", "silence"] if "alerts" in query.roles and not query.run.over else []


INCIDENT_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/incidents",
        about="The incidents of a run: one per cause, with state, onset and cost.",
        answer=_list,
    ),
    Resource(
        path="/api/v1/runs/{run}/incidents/{number}",
        about="One incident: evidence, onset, impact, logs, samples and stacks around it, changes since the last good "
        "run, earlier incidents, timeline; each statement with its source.",
        answer=_incident,
        parameters=(
            Parameter(
                name="form",
                about="`markdown`: the same as text, in the key `markdown`",
                kind="choice",
                default="document",
                choices=("document", "markdown"),
            ),
        ),
        path_parameters={"number": "number of the incident, from 1"},
    ),
)
