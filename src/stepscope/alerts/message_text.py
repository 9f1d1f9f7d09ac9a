"""A message in words: what, where, since when, what it costs, what to do.  Every receiver shows these texts.

``message_document`` is the same as data: what a webhook and a command get.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from stepscope.alerts.model import Incident, Message
from stepscope.records.dataclass_json import encoded
from stepscope.records.text import duration_text, named_ranks, number_text, phase_place
from stepscope.reports.finding_text import price_text

__all__ = ["clock_text", "fact_rows", "headline", "iso_time", "message_document", "plain_text", "status_word"]

_STATUS_WORDS = {"firing": "Firing", "updated": "Updated", "resolved": "Resolved"}
RANK_HOURS_FROM = 0.1
MOST_ADVICE = 3
MOST_ALSO = 5
MOST_HOSTS = 4


def status_word(message: Message) -> str:
    """``Firing``, ``Updated``, ``Acknowledged`` or ``Resolved``."""
    if message.status != "resolved" and message.incident.state == "acknowledged":
        return "Acknowledged"
    return _STATUS_WORDS[message.status]


def headline(message: Message) -> str:
    """One line: state, run, and the sentence of the incident."""
    return f"[{status_word(message)}] {message.run}: {message.incident.title}"


def fact_rows(message: Message) -> list[tuple[str, str]]:
    """Label and text of each fact that is known, in the order in which a person on call needs them."""
    incident = message.incident
    rows = [
        ("Where", _where(incident)),
        ("Since", _since(incident)),
        ("Cost", _cost(incident)),
        ("Over", _over(message)),
        ("Acknowledged by", incident.acknowledged_by),
        ("What to do", "\n".join(incident.advice[:MOST_ADVICE]) if message.status != "resolved" else ""),
        ("Also", "\n".join(incident.also[:MOST_ALSO])),
        ("Rule", ", ".join(incident.rules)),
    ]
    return [(label, text) for label, text in rows if text]


def plain_text(message: Message) -> str:
    """The facts as lines, with the link last."""
    lines = [f"{label}: {text}" for label, text in fact_rows(message)]
    return "\n".join([*lines, *([message.link] if message.link else [])])


def _where(incident: Incident) -> str:
    parts = []
    if incident.ranks:
        parts.append(named_ranks(incident.ranks))
    if incident.hosts:
        more = len(incident.hosts) - MOST_HOSTS
        parts.append("on " + ", ".join(incident.hosts[:MOST_HOSTS]) + (f" and {more} more" if more > 0 else ""))
    if incident.phase:
        parts.append(phase_place(incident.phase))
    if incident.line:
        parts.append(f"at {incident.line}")
    return " ".join(parts)


def _since(incident: Incident) -> str:
    step = f"step {incident.since_step}" if incident.since_step is not None else ""
    when = clock_text(incident.since_wall_ns or incident.opened_wall_ns)
    return ", ".join(part for part in (step, when) if part)


def _cost(incident: Incident) -> str:
    try:
        price = price_text(incident.cost, over=incident.state == "resolved", of="the training time")
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
        return ""  # it came from a run directory and is not a cost
    seconds = incident.cost.get("seconds")
    if not price and isinstance(seconds, int | float) and seconds >= 1:
        price = f"{duration_text(seconds, whole=True)} without progress."
    hours = incident.cost.get("rank_hours")
    spent = f"{number_text(hours)} GPU hours" if isinstance(hours, int | float) and hours >= RANK_HOURS_FROM else ""
    return " ".join(part for part in (price or "", f"{spent}." if spent else "") if part)


def _over(message: Message) -> str:
    incident = message.incident
    if message.status != "resolved" or incident.resolved_wall_ns is None:
        return ""
    lasted_ns = incident.resolved_wall_ns - (incident.since_wall_ns or incident.opened_wall_ns)
    step = f" in step {incident.resolved_step}" if incident.resolved_step is not None else ""
    lasted = f"after {duration_text(lasted_ns / 1e9, whole=True)}{step}"
    return f"{lasted}: {incident.resolved_why}" if incident.resolved_why else lasted


def clock_text(wall_ns: int) -> str:
    """``2026-11-18 14:03:22 UTC``; empty if unknown."""
    when = _utc(wall_ns)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else ""


def iso_time(wall_ns: int) -> str:
    """``2026-11-18T14:03:22.250Z``; empty if unknown."""
    when = _utc(wall_ns)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03}Z" if when else ""


def _utc(wall_ns: int) -> datetime | None:
    if not 0 < wall_ns < 1 << 62:
        return None
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    return datetime.fromtimestamp(seconds, tz=timezone.utc).replace(microsecond=rest // 1000)


def message_document(message: Message) -> dict[str, Any]:
    """What a webhook posts and a command reads (docs/alert-settings.md); a part of the interface."""
    incident = message.incident
    return {
        "schema": 1,
        "id": message.id,
        "status": message.status,
        "state": incident.state,
        "kind": incident.kind,
        "topic": incident.topic,
        "severity": incident.severity,
        "title": incident.title,
        "text": plain_text(message),
        "run": message.run,
        "incident": incident.number,
        "dedup_key": message.dedup_key,
        "ranks": list(incident.ranks),
        "phase": incident.phase,
        "hosts": list(incident.hosts),
        "line": incident.line,
        "since_step": incident.since_step,
        "since": iso_time(incident.since_wall_ns or incident.opened_wall_ns),
        "resolved_step": incident.resolved_step,
        "resolved": iso_time(incident.resolved_wall_ns or 0),
        "resolved_why": incident.resolved_why,
        "acknowledged_by": incident.acknowledged_by,
        "cost": encoded(incident.cost),
        "advice": list(incident.advice),
        "also": list(incident.also),
        "rules": list(incident.rules),
        "attempt": incident.attempt,
        "sent_number": incident.messages,
        "created": iso_time(message.created_wall_ns),
        "link": message.link,
    }
