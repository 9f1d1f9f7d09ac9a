"""The fleet document: what ``stepscope fleet --json`` prints and the HTTP API serves (docs/fleet-reference.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stepscope.fleet.changes import change_rows
from stepscope.fleet.columns import Fleet, GpuEvent
from stepscope.fleet.hosts import host_rows
from stepscope.fleet.hours import (
    cause_rows,
    group_rows,
    host_hours_rows,
    known_hours,
    lost,
    rounded_hours,
    time_rows,
    useful_share,
)
from stepscope.fleet.links import link_rows
from stepscope.records.text import count_text, hours_text, percent_text

__all__ = ["MOST_RUNS", "SCHEMA", "fleet_document", "suspect_hosts"]

SCHEMA = 1
MOST_RUNS = 100
"""Runs listed per row."""
MOST_EVENTS = 100


def fleet_document(
    fleet: Fleet,
    *,
    generated_wall_ns: int,
    since_wall_ns: int | None = None,
    limit: int = 20,
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """The document; ``limit``: how many runs are listed per row."""
    hours = known_hours(fleet)
    total = hours.sum(axis=0)
    causes = cause_rows(fleet, limit)
    started = fleet.started_ns
    return {
        "schema": SCHEMA,
        "kind": "fleet",
        "since_wall_ns": since_wall_ns,
        "first_wall_ns": int(started.min()) if len(started) else None,
        "last_wall_ns": int(started.max()) if len(started) else None,
        "generated_wall_ns": generated_wall_ns,
        "problems": list(problems),
        "totals": {
            "runs": len(fleet.ids),
            "active_runs": fleet.active,
            "unread_runs": fleet.unread,
            "jobs": len(np.unique(fleet.job)),
            "hosts": len(fleet.names.get("host", ())),
            "gpus": fleet.gpus,
            "users": len(np.unique(fleet.user)),
            "gpu_hours": rounded_hours(total.sum()),
            "useful_share": useful_share(total),
            "lost_gpu_hours": rounded_hours(float(lost(total))),
            "headline": _headline(fleet, causes),
        },
        "causes": causes,
        "over_time": time_rows(fleet, limit),
        "by_job": group_rows(fleet, "job", limit),
        "by_team": group_rows(fleet, "team", limit, unnamed="no tag"),
        "by_user": group_rows(fleet, "user", limit, unnamed="unknown"),
        "by_host": host_hours_rows(fleet, limit),
        "hosts": host_rows(fleet, limit),
        "links": link_rows(fleet, limit),
        "gpu_events": _event_rows(fleet, limit),
        "changes": change_rows(fleet, limit),
    }


def suspect_hosts(document: Mapping[str, Any]) -> list[str]:
    """Hosts that jobs should avoid: suspects, and those whose network is slow with every partner."""
    hosts = [row["host"] for row in document["hosts"] if row["suspect"]]
    hosts += [row["hosts"][0] for row in document["links"] if row["kind"] == "slow_network"]
    return list(dict.fromkeys(hosts))


def _headline(fleet: Fleet, causes: Sequence[Mapping[str, Any]]) -> str:
    total = sum(row["gpu_hours"] for row in causes)
    if not total:
        return f"{count_text(len(fleet.ids), 'run')}; no hours are known."
    lost_share = 1 - (useful_share(known_hours(fleet).sum(axis=0)) or 0.0)
    most = max(causes[1:], key=lambda row: row["gpu_hours"])
    text = f"{percent_text(lost_share)} of {hours_text(total)} GPU hours were not useful training"
    return f"{text}; most of that: {most['name']} ({percent_text(most['share'])})." if most["gpu_hours"] else f"{text}."


# -- GPU events -------------------------------------------------------------------------------------------------------


def _event_rows(fleet: Fleet, limit: int) -> list[dict[str, Any]]:
    """One row for each GPU and kind of event, the newest first."""
    groups: dict[tuple[Any, ...], list[GpuEvent]] = {}
    for event in fleet.gpu_events:
        groups.setdefault((event.event, event.host, event.gpu_uuid or event.gpu_index), []).append(event)
    rows = [_event_row(fleet, events, limit) for events in groups.values()]
    return sorted(rows, key=lambda row: -row["last_wall_ns"])[:MOST_EVENTS]


def _event_row(fleet: Fleet, events: Sequence[GpuEvent], limit: int) -> dict[str, Any]:
    last = events[-1]
    runs = list(dict.fromkeys(event.run for event in reversed(events)))
    reasons = sorted({reason for event in events for reason in event.reasons})
    shares = [event.throttled_share for event in events if event.throttled_share is not None]
    where = last.host if last.gpu_index is None else f"GPU {last.gpu_index} of {last.host}"
    what = "was throttled" if last.event == "throttled" else "reported a hardware error"
    why = f" ({', '.join(reasons)})" if reasons else ""
    return {
        "host": last.host,
        "gpu_uuid": last.gpu_uuid,
        "gpu_index": last.gpu_index,
        "gpu_name": last.gpu_name,
        "kind": last.event,
        "reasons": reasons,
        "title": f"{where} {what} in {count_text(len(runs), 'run')}{why}.",
        "throttled_share": round(float(np.median(shares)), 4) if shares else None,
        "first_wall_ns": int(fleet.started_ns[events[0].run]),
        "last_wall_ns": int(fleet.started_ns[last.run]),
        "run_count": len(runs),
        "runs": [fleet.ids[run] for run in runs[:limit]],
    }
