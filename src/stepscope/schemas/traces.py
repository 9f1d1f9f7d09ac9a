"""``stepscope trace --json``, and ``stepscope gate --json`` on traces."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from stepscope.schemas.runs import IfFixed, Severity

__all__ = ["TraceGate", "TraceReport"]


class Table(TypedDict):
    """Rows with the keys that ``columns`` lists, and others; which tables there are is in docs/traces.md."""

    title: str
    columns: list[str]
    rows: list[dict[str, Any]]
    left_out: int
    note: str


class TraceCost(TypedDict, total=False):
    share: float | None
    seconds: float | None
    rank_hours: float | None
    if_fixed: IfFixed | None
    most_share: float | None
    most_seconds: float | None


class TraceFinding(TypedDict):
    kind: str
    severity: Severity
    title: str
    ranks: list[int]
    phase: str | None
    steps: list[int] | None
    cost: TraceCost
    evidence: dict[str, Any]
    advice: list[str]
    confidence: float


class TraceVerdict(TypedDict):
    kind: str
    severity: str
    title: str
    price: str | None
    ranks: list[int]
    advice: list[str]
    confidence: float | None


class TraceFile(TypedDict):
    path: str
    format: str
    rank: int
    rank_in_file: int
    world_size: int | None
    backend: str | None
    host: str | None
    pid: int | None
    devices: list[str]
    events: int
    origin_ns: int
    with_stack: bool
    record_shapes: bool
    profile_memory: bool
    truncated: Any
    problems: list[str]


class TraceSteps(TypedDict):
    count: int
    first: int | None
    last: int | None
    marked: bool
    left_out: list[int]
    median_ns: float | None
    max_ns: int | None
    total_ns: int | None
    pace_ns: float | None
    by_device: bool


class TraceStep(TypedDict):
    number: int
    name: str
    start_ns: int
    end_ns: int
    dur_ns: int


class TraceRank(TypedDict):
    steps: list[TraceStep]
    left_out: TraceStep | None
    pace: dict[str, Any] | None
    temporal: dict[str, Any] | None
    idle: dict[str, dict[str, Any]]
    device: dict[str, Any]
    host: dict[str, Any]
    path: dict[str, Any] | None
    tables: dict[str, Table]


class TraceCollectives(TypedDict):
    count: int
    last_counts: dict[str, int]
    wait_ns: dict[str, float]
    own_transfer_ns: dict[str, float]
    cost_by_rank_ns: dict[str, float]
    alone_by_rank_ns: dict[str, float]
    transfer_ns: float | None
    least_ns: float | None
    cost_ns: float | None
    tables: dict[str, Table]


class TraceClock(TypedDict):
    rank: int
    host: str | None
    reference: int
    offset_ns: float | None
    uncertainty_ns: float | None
    drift_ppm: float | None
    shared: int
    shift_ns: float | None
    doubt_ns: float | None


class TracePhases(TypedDict):
    names: list[str]
    sources: dict[str, Any]
    rows: list[dict[str, Any]]
    means: list[dict[str, Any]]


class TraceReport(TypedDict):
    schema: Literal[1]
    verdict: TraceVerdict
    findings: list[TraceFinding]
    files: list[TraceFile]
    steps: TraceSteps
    ranks: dict[str, TraceRank]
    collectives: TraceCollectives | None
    clocks: dict[str, TraceClock]
    phases: TracePhases
    distributed: Table | None
    path: dict[str, Any] | None
    what_if: Any
    diff: dict[str, Any] | None
    notices: list[str]
    mixed: str | None


class TraceCheck(TypedDict):
    name: str
    kernel: str | None
    result: Literal["pass", "fail", "cannot_tell"]
    limit: float | None
    value: float | None
    rank: int | None
    text: str


class TraceGate(TypedDict):
    schema: Literal[1]
    kind: Literal["trace_gate"]
    result: Literal["pass", "fail", "cannot_tell"]
    exit_code: int
    text: str
    checks: list[TraceCheck]
    verdict: str
    ranks: list[int]
    steps: int
    notices: list[str]
