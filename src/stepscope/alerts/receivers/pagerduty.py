"""PagerDuty, Events API v2: a trigger when an incident begins or changes, an acknowledgment, and a resolve.

All events of an incident have one ``dedup_key``: PagerDuty adds a repeated trigger to the alert that is open, and drops
a repeated resolve, so that sending one twice changes nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any

from stepscope.alerts.message_text import fact_rows, iso_time, message_document
from stepscope.alerts.model import Message
from stepscope.alerts.receivers.exchange import (
    Context,
    Delivered,
    Destination,
    Exchange,
    clipped,
    json_request,
    outcome_of_status,
    web_link,
)

__all__ = ["API", "LONGEST_DEDUP_KEY", "LONGEST_SUMMARY", "dedup_key", "event_body", "exchange"]

LONGEST_SUMMARY = 1024
LONGEST_DEDUP_KEY = 255
"""PagerDuty's limits, as documented for ``payload.summary`` and ``dedup_key``; an event may have 512 KB."""
_LONGEST_FIELD = 255
_MOST_RANKS = 256
API = "https://events.pagerduty.com"
_PATH = "/v2/enqueue"
_DETAILS = ("state", "kind", "incident", "phase", "hosts", "line", "since_step", "advice", "also", "rules")
_EVENT_SEVERITIES = {"critical": "critical", "warning": "warning", "info": "info"}


def exchange(destination: Destination, message: Message, context: Context) -> Exchange:
    action = event_action(message, acknowledged=context.receipt.get("acknowledged") is True)
    api = destination.option("api", API).rstrip("/")
    url = api if api.endswith(_PATH) else api + _PATH
    answer = yield json_request(url, event_body(message, action, destination.secrets["routing_key"]))
    outcome = outcome_of_status(answer)
    if isinstance(outcome, Delivered) and action == "acknowledge":
        return Delivered(receipt={"acknowledged": True})
    return outcome


def event_action(message: Message, *, acknowledged: bool) -> str:
    """``trigger``, ``acknowledge`` or ``resolve``; ``acknowledged``: PagerDuty knows that already."""
    if message.status == "resolved":
        return "resolve"
    return "acknowledge" if message.incident.state == "acknowledged" and not acknowledged else "trigger"


def event_body(message: Message, action: str, routing_key: str) -> dict[str, Any]:
    incident = message.incident
    source = ", ".join(incident.hosts) or message.run
    body: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": action,
        "dedup_key": dedup_key(message),
        "client": "Stepscope",
        "payload": {
            "summary": clipped(f"{message.run}: {incident.title}", LONGEST_SUMMARY),
            "source": clipped(source, _LONGEST_FIELD),
            "severity": _EVENT_SEVERITIES[incident.severity],
            "timestamp": iso_time(incident.since_wall_ns or message.created_wall_ns),
            "component": clipped(_component(message), _LONGEST_FIELD),
            "group": clipped(message.run, _LONGEST_FIELD),
            "class": incident.kind,
            "custom_details": _details(message),
        },
    }
    if link := web_link(message.link):
        body["client_url"] = link
        body["links"] = [{"href": link, "text": "The incident in Stepscope"}]
    return body


def dedup_key(message: Message) -> str:
    """The incident's key, shortened if it is longer than PagerDuty accepts."""
    key = message.dedup_key
    if len(key) <= LONGEST_DEDUP_KEY:
        return key
    digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
    return f"{key[: LONGEST_DEDUP_KEY - len(digest) - 1]}-{digest}"


def _component(message: Message) -> str:
    ranks = message.incident.ranks
    return f"rank {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}" if ranks else "job"


def _details(message: Message) -> dict[str, Any]:
    """Facts as text for people, and the same as data for rules in PagerDuty."""
    document = message_document(message)
    facts = {label.lower().replace(" ", "_"): text for label, text in fact_rows(message)}
    return {
        **facts,
        **{key: document[key] for key in _DETAILS},
        "ranks": document["ranks"][:_MOST_RANKS],
        "cost_figures": document["cost"],
    }
