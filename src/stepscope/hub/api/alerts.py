"""Acknowledging incidents of a run and silencing its alerts, for whoever may change runs (``api/auth.py``).

The hub only appends what was requested to the run's file (``alerts/requests.py``); the engine of the run's own hub
takes it from there within seconds, wherever the request came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepscope.alerts.incident_file import read_incidents
from stepscope.alerts.requests import Silence, acknowledge, add_silence, end_silence, run_silences
from stepscope.hub.api.resource import Query, Resource, change_run, read_body
from stepscope.hub.api.responses import ApiError
from stepscope.records.dataclass_json import encoded
from stepscope.records.run_clock import now_of
from stepscope.store.documents import read_meta

__all__ = ["CHANGE_RESOURCES", "RESOURCES"]


class _Acknowledgment(msgspec.Struct, forbid_unknown_fields=True):
    by: str = ""


class _NewSilence(msgspec.Struct, forbid_unknown_fields=True):
    seconds: float
    kind: str = ""
    host: str = ""
    why: str = ""
    by: str = ""


async def _silences(query: Query) -> Mapping[str, Any]:
    found = await asyncio.to_thread(run_silences, query.run.path)
    now_ns = now_of(query.run.meta())
    return {"silences": [encoded(silence) for silence in found if silence.until_wall_ns > now_ns]}


async def _acknowledge(query: Query) -> Mapping[str, Any]:
    body = await read_body(query, _Acknowledgment, '{"by": TEXT}, or {}')
    number = _number(query.request.path_params["number"])

    def change(run_dir: Path) -> Mapping[str, Any]:
        if number not in {incident.number for incident in read_incidents(run_dir)}:
            raise ApiError(404, "there is no such incident")
        by = query.signed(body.by)
        acknowledge(run_dir, [number], by=by, wall_ns=_now_ns(run_dir))
        return {"acknowledged": number, "by": by}

    return await change_run(query, change)


async def _add_silence(query: Query) -> Mapping[str, Any]:
    form = '{"seconds": NUMBER, "kind": TEXT, "host": TEXT, "why": TEXT, "by": TEXT}; only seconds is needed'
    body = await read_body(query, _NewSilence, form)
    if not 0 < body.seconds < 1e9:
        raise ApiError(400, f"the body must be {form}")

    def change(run_dir: Path) -> Mapping[str, Any]:
        now_ns = _now_ns(run_dir)
        silence = Silence(
            id="",
            until_wall_ns=now_ns + int(body.seconds * 1e9),
            kind=body.kind,
            host=body.host,
            why=body.why,
            by=query.signed(body.by),
        )
        document: dict[str, Any] = encoded(add_silence(run_dir, silence, wall_ns=now_ns))
        return document

    return await change_run(query, change)


async def _end_silence(query: Query) -> Mapping[str, Any]:
    silence_id = query.request.path_params["silence"]

    def change(run_dir: Path) -> Mapping[str, Any]:
        if not end_silence(run_dir, silence_id, by=query.who, wall_ns=_now_ns(run_dir)):
            raise ApiError(404, "there is no such silence")
        return {"ended": silence_id}

    return await change_run(query, change)


def _now_ns(run_dir: Path) -> int:
    """Now, by the clock of the run."""
    return now_of(read_meta(run_dir))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/silences",
        about="The silences of a run that are in force.",
        answer=_silences,
    ),
)
CHANGE_RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/incidents/{number}/acknowledge",
        about="Acknowledge an incident; `by`: who.",
        answer=_acknowledge,
        method="POST",
        path_parameters={"number": "number of the incident"},
        role="alerts",
    ),
    Resource(
        path="/api/v1/runs/{run}/silences",
        about="Silence the alerts of a run for some seconds: all, those of a kind, or those on a host.",
        answer=_add_silence,
        method="POST",
        role="alerts",
    ),
    Resource(
        path="/api/v1/runs/{run}/silences/{silence}",
        about="End a silence of a run.",
        answer=_end_silence,
        method="DELETE",
        path_parameters={"silence": "its id"},
        role="alerts",
    ),
)
