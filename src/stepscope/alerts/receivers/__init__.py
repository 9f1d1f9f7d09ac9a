"""Receivers: one file each turns a message into requests and their answers into an outcome (``exchange.py``).

    slack          an incoming webhook, or a bot with one thread per incident
    pagerduty      Events API v2
    alertmanager   ``POST /api/v2/alerts``, renewed while the incident is open
    webhook        signed JSON to an address of the user, or to a command's standard input
    apprise        e-mail, Teams, Discord and the rest, if the extra ``apprise`` is installed

The table below is the only place that knows the types.  Their modules are loaded when there is something to send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.alerts.model import Message
from stepscope.alerts.receivers.exchange import (
    AppriseRequest,
    Context,
    Destination,
    Exchange,
    Renewal,
    clipped,
    outcome_of_status,
)
from stepscope.alerts.settings import ReceiverType

__all__ = ["TYPES", "ReceiverFunctions", "receiver_functions"]

LONGEST_APPRISE_TITLE = 200
LONGEST_APPRISE_BODY = 1800
"""Discord takes 2,000 characters with the title; apprise splits what another service takes in smaller pieces."""

TYPES: tuple[ReceiverType, ...] = ("slack", "slack_bot", "pagerduty", "alertmanager", "webhook", "command", "apprise")


@dataclass(frozen=True, kw_only=True)
class ReceiverFunctions:
    exchange: Callable[[Destination, Message, Context], Exchange]
    renewal: Renewal | None = None
    renew_s: float = 0.0
    probe: Callable[[Destination], Exchange] | None = None
    """Finds out whether the receiver accepts us, without any effect; None if it has no such request."""
    address: Callable[[Destination], str] = lambda destination: destination.secrets.get("url", "")


def receiver_functions(kind: str) -> ReceiverFunctions:
    """The functions of a type of receiver; ValueError if the type is unknown."""
    from stepscope.alerts.receivers import alertmanager, pagerduty, slack, webhook

    table = {
        "slack": ReceiverFunctions(exchange=slack.webhook),
        "slack_bot": ReceiverFunctions(exchange=slack.bot, probe=slack.probe),
        "pagerduty": ReceiverFunctions(
            exchange=pagerduty.exchange, address=lambda destination: destination.option("api", pagerduty.API)
        ),
        "alertmanager": ReceiverFunctions(
            exchange=alertmanager.exchange,
            renewal=alertmanager.renewal,
            renew_s=alertmanager.RENEW_S,
            probe=alertmanager.probe,
        ),
        "webhook": ReceiverFunctions(exchange=webhook.exchange),
        "command": ReceiverFunctions(exchange=webhook.command),
        "apprise": ReceiverFunctions(exchange=_apprise),
    }
    if kind not in table:
        raise ValueError(f"there is no receiver of type {kind!r}")
    return table[kind]


def _apprise(destination: Destination, message: Message, context: Context) -> Exchange:
    from stepscope.alerts.message_text import headline, plain_text

    answer = yield AppriseRequest(
        url=destination.secrets["url"],
        title=clipped(headline(message), LONGEST_APPRISE_TITLE),
        body=clipped(plain_text(message), LONGEST_APPRISE_BODY),
        severity="resolved" if message.status == "resolved" else message.incident.severity,
    )
    return outcome_of_status(answer)
