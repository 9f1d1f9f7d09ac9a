"""Alerts, incidents, dumps of Flight Recorders, and a job without its stragglers."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from stepscope.schemas.runs import IfFixed, Severity

__all__ = ["AlertMessage", "FlightReport", "IncidentReport", "WhatIf"]


# -- alerts -----------------------------------------------------------------------------------------------------------


class AlertCost(TypedDict, total=False):
    share: float | None
    seconds: float | None
    rank_hours: float | None
    if_fixed: IfFixed | None


class AlertMessage(TypedDict):
    schema: Literal[1]
    id: str
    status: str
    state: str
    kind: str
    topic: str
    severity: Severity
    title: str
    text: str
    run: str
    incident: int
    dedup_key: str
    ranks: list[int]
    phase: str | None
    hosts: list[str]
    line: str
    since_step: int | None
    since: str
    resolved_step: int | None
    resolved: str
    resolved_why: str
    acknowledged_by: str
    cost: AlertCost
    advice: list[str]
    also: list[str]
    rules: list[str]
    attempt: int
    sent_number: int
    created: str
    link: str


# -- incidents --------------------------------------------------------------------------------------------------------


class IncidentSourceRequired(TypedDict):
    text: str


class IncidentSource(IncidentSourceRequired, total=False):
    """What a statement rests on: a file of the run, a command, a rule."""

    file: str
    line: int | None
    last_line: int | None
    command: str
    rule: str


class StatementRequired(TypedDict):
    text: str
    source: IncidentSource


class Statement(StatementRequired, total=False):
    wall_ns: int | None
    step: int | None
    capture: str


class IncidentRun(TypedDict):
    name: str
    over: bool
    status_text: str
    created_wall_ns: int | None
    ended_wall_ns: int | None
    world_size: int | None
    host: str | None
    command: list[str]
    source: IncidentSource


class IncidentRow(TypedDict):
    number: int
    topic: str
    state: str
    state_text: str
    kind: str
    kind_text: str
    severity: Severity
    title: str
    ranks: list[int]
    hosts: list[str]
    line: str
    phase: str | None
    attempt: int
    since_step: int | None
    since_wall_ns: int | None
    opened_wall_ns: int | None
    resolved_wall_ns: int | None
    resolved_step: int | None
    resolved_why: str
    acknowledged_by: str
    cost: dict[str, Any]
    cost_text: str
    rules: list[str]
    also: list[str]
    source: IncidentSource


class IncidentOnset(TypedDict):
    step: int | None
    wall_ns: int | None
    ranks: list[int]
    hosts: list[str]
    line: str
    phase: str | None
    attempt: int
    statements: list[Statement]


class IncidentImpact(TypedDict):
    share: float | None
    seconds: float | None
    rank_hours: float | None
    since_onset_s: float | None
    statements: list[Statement]


class TimelineEntryRequired(TypedDict):
    text: str
    source: IncidentSource
    wall_ns: int
    what: str
    severity: Severity


class TimelineEntry(TimelineEntryRequired, total=False):
    step: int | None


class IncidentReportRequired(TypedDict):
    schema: Literal[1]
    kind: Literal["incident"]
    run: IncidentRun
    count: int
    made_from: str
    notice: str
    incident: IncidentRow
    onset: IncidentOnset
    impact: IncidentImpact


class IncidentReport(IncidentReportRequired, total=False):
    """The sections of which something is known; docs/incidents.md says what they contain."""

    finding: dict[str, Any]
    logs: dict[str, Any]
    samples: dict[str, Any]
    changes: dict[str, Any]
    earlier: dict[str, Any]
    timeline: list[TimelineEntry]
    errors: dict[str, Any]
    stacks: dict[str, Any]
    captures: dict[str, Any]
    shortened: bool


# -- dumps ------------------------------------------------------------------------------------------------------------


class FlightReport(TypedDict):
    schema: Literal[1]
    healthy: bool
    kind: str | None
    title: str
    culprits: list[int]
    victims: list[int]
    undecidable: bool
    suspects: list[int]
    group: str | None
    description: str
    sequence: int | None
    waiting_in: dict[str, Any] | None
    first_divergence: dict[str, Any] | None
    reasons: list[dict[str, Any]]
    wait_for: list[dict[str, Any]]
    cycle: list[str]
    missing: list[dict[str, Any]]
    grid: dict[str, Any] | None
    stacks: list[dict[str, Any]]
    evidence: list[str]
    groups: list[dict[str, Any]]
    problems: list[str]
    ranks: list[int]
    world: int


# -- what if ----------------------------------------------------------------------------------------------------------


class WhatIf(TypedDict):
    schema: Literal[1]
    slowdown: float | None
    by_worker: dict[str, float | None]
    by_stage: dict[str, float | None]
    by_dp_rank: dict[str, float | None]
    by_operation: dict[str, float | None]
    mw: dict[str, float | None]
    ms: dict[str, float | None]
    worst_workers: list[int]
    steps: int
    notes: list[str]
