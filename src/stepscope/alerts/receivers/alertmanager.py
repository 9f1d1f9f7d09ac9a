"""Alertmanager: ``POST /api/v2/alerts``.

Labels identify an alert, so they contain only what stays the same during most incidents.  If the severity or the kind
changes nevertheless, the alert with the old labels ends in the same request.  An alert that nobody renews ends after
``ENDS_AFTER_S``: the sender renews those that are open every ``RENEW_S``, as Prometheus does.  Sending one twice
changes nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.alerts.message_text import fact_rows, iso_time, plain_text
from stepscope.alerts.model import Message
from stepscope.alerts.receivers.exchange import (
    Context,
    Delivered,
    Destination,
    Exchange,
    HttpRequest,
    clipped,
    json_request,
    outcome_of_status,
    web_link,
)

__all__ = ["ENDS_AFTER_S", "RENEW_S", "alert_of", "exchange", "probe", "renewal"]

RENEW_S = 60.0
ENDS_AFTER_S = 300.0
"""Alertmanager's own default (``resolve_timeout``): four renewals may fail."""
_PATH = "/api/v2/alerts"
_STATUS_PATH = "/api/v2/status"
_ALERT_NAME = "StepscopeIncident"
_LONGEST_VALUE = 2000
_MOST_OPEN = 100


def exchange(destination: Destination, message: Message, context: Context) -> Exchange:
    alert = alert_of(destination, message, context.wall_ns)
    alerts = [alert]
    before = context.receipt.get("labels")
    if (
        isinstance(before, dict)
        and before != alert["labels"]
        and all(isinstance(text, str) for text in before.values())
    ):
        alerts.append({**alert, "labels": before, "endsAt": _ended_at(message, context.wall_ns)})
    answer = yield _request(destination, alerts)
    outcome = outcome_of_status(answer)
    return Delivered(receipt={"labels": alert["labels"]}) if isinstance(outcome, Delivered) else outcome


def renewal(destination: Destination, messages: Sequence[Message], wall_ns: int) -> HttpRequest:
    """Keep the alerts of these messages open."""
    return _request(destination, [alert_of(destination, message, wall_ns) for message in messages[-_MOST_OPEN:]])


def probe(destination: Destination) -> Exchange:
    """Whether an Alertmanager answers there, and accepts us."""
    url = f"{_address(destination)}{_STATUS_PATH}"
    answer = yield HttpRequest(method="GET", url=url, headers=_authorization(destination))
    return outcome_of_status(answer)


def alert_of(destination: Destination, message: Message, wall_ns: int) -> dict[str, Any]:
    incident = message.incident
    over = message.status == "resolved"
    alert = {
        "labels": _labels(destination, message),
        "annotations": {
            "summary": clipped(incident.title, _LONGEST_VALUE),
            "description": clipped(plain_text(message), 2 * _LONGEST_VALUE),
            **{label.lower().replace(" ", "_"): clipped(text, _LONGEST_VALUE) for label, text in fact_rows(message)},
        },
        "startsAt": iso_time(_began_ns(message)),
        "endsAt": _ended_at(message, wall_ns) if over else iso_time(wall_ns + int(ENDS_AFTER_S * 1e9)),
    }
    if link := web_link(message.link):
        alert["generatorURL"] = link
    return alert


def _began_ns(message: Message) -> int:
    return message.incident.since_wall_ns or message.incident.opened_wall_ns or message.created_wall_ns


def _ended_at(message: Message, wall_ns: int) -> str:
    """Alertmanager refuses an alert that ends before it begins, which clocks of two machines could do."""
    ended_ns = message.incident.resolved_wall_ns or wall_ns
    return iso_time(max(min(ended_ns, wall_ns), _began_ns(message)))


def _labels(destination: Destination, message: Message) -> dict[str, str]:
    more = destination.options.get("labels")
    return {
        "alertname": _ALERT_NAME,
        "run": clipped(message.run, _LONGEST_VALUE),
        "incident": str(message.incident.number),
        "kind": message.incident.kind,
        "severity": message.incident.severity,
        "topic": message.incident.topic,
        **({str(name): str(value) for name, value in more.items()} if isinstance(more, Mapping) else {}),
    }


def _request(destination: Destination, alerts: list[dict[str, Any]]) -> HttpRequest:
    return json_request(_address(destination) + _PATH, alerts, _authorization(destination))


def _address(destination: Destination) -> str:
    return destination.secrets["url"].rstrip("/").removesuffix(_PATH)


def _authorization(destination: Destination) -> dict[str, str]:
    headers = {}
    if token := destination.secrets.get("token"):
        headers["Authorization"] = f"Bearer {token}"
    elif password := destination.secrets.get("password"):
        pair = f"{destination.option('username')}:{password}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return headers
