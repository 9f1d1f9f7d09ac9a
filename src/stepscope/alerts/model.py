"""What passes between rules, incidents, the outbox and receivers, as plain data.

``Signal``: a rule that the user set holds now.  ``Incident``: one cause, from its first signal until it is over; each
change of one is a line of ``incidents.jsonl``.  ``Message``: what one receiver is sent about one change of an incident,
a line of ``alerts/outbox.jsonl``.  No secret is in any of them: a message names its receiver, and only the sender knows
where that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.records.finding import Severity

__all__ = ["Incident", "IncidentState", "Message", "MessageStatus", "Signal", "Topic"]

Topic = Literal["speed", "stopped", "numbers", "memory", "checkpoint", "run", "delivery"]
"""What a signal is about.  Signals of one topic in one run at one time are one incident: they have one cause.
``delivery``: messages that were left out because a receiver got too many."""
IncidentState = Literal["open", "acknowledged", "resolved"]
MessageStatus = Literal["firing", "updated", "resolved"]
"""An acknowledgment is an ``updated`` of an incident in that state."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    rule: str
    """The name of the user's rule, or of a default."""
    kind: str
    """The kind of a finding, or the name of a measure (``no_step``, ``step_time`` …)."""
    topic: Topic
    severity: Severity
    title: str
    """One sentence: subject, number, place, consequence."""
    receivers: tuple[str, ...] = ()
    """The names of the receivers that get it."""
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    hosts: tuple[str, ...] = ()
    line: str = ""
    """``file:line`` of the code at fault, if known."""
    since_step: int | None = None
    since_wall_ns: int = 0
    cost: dict[str, Any] = field(default_factory=dict)
    """As ``Finding.cost``."""
    advice: tuple[str, ...] = ()
    finding: int | None = None
    """The number of the finding in the run's history; None for measures."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Of a measure: its values, and what the condition needs to know if the hub is started again."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    number: int
    """Counts from 1 in each run."""
    topic: Topic
    state: IncidentState
    kind: str
    """Of the signal that leads."""
    severity: Severity
    title: str
    rules: tuple[str, ...] = ()
    receivers: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    hosts: tuple[str, ...] = ()
    line: str = ""
    since_step: int | None = None
    since_wall_ns: int = 0
    opened_wall_ns: int = 0
    changed_wall_ns: int = 0
    resolved_wall_ns: int | None = None
    resolved_step: int | None = None
    resolved_why: str = ""
    """Why it is over: it recovered, the run ended …"""
    acknowledged_by: str = ""
    cost: dict[str, Any] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    findings: tuple[int, ...] = ()
    """Numbers in the run's history of findings; the one that leads is first."""
    also: tuple[str, ...] = ()
    """Titles of further signals of the same topic."""
    attempt: int = 0
    messages: int = 0
    """How many changes of it were sent: the last number in the ids of its messages."""
    notified: tuple[str, ...] = ()
    """The receivers that know of it: they get its end.  Empty while it is silenced."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """By rule on a measure: ``Signal.evidence``."""


@dataclass(frozen=True, kw_only=True)
class Message:
    id: str
    """``RUN-ID/incident/number/receiver``: the same change sent again to the same receiver has the same id."""
    receiver: str
    status: MessageStatus
    run: str
    dedup_key: str
    """The same for all messages about one incident; at most 255 characters."""
    created_wall_ns: int
    incident: Incident
    link: str = ""
    """To the page of the incident, if the hub has one; without a token."""
