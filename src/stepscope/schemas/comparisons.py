"""Runs compared: ``stepscope compare``, ``gate``, ``history`` and ``sweep`` with ``--json``."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from stepscope.schemas.runs import Severity

__all__ = ["Comparison", "GatedComparison", "History", "Sweep"]


class BeforeAfter(TypedDict):
    before: float | None
    after: float | None


class BeforeAfterChange(BeforeAfter):
    change: float | None


class Cause(TypedDict):
    phase: str | None
    ranks: list[int]
    change_ms: float | None
    share: float | None
    text: str


class ComparedPhase(TypedDict):
    phase: str
    before_ms: float | None
    after_ms: float | None
    change_ms: float | None
    change: float | None
    interval_ms: list[float | None] | None
    real: bool


class ComparedRank(TypedDict):
    rank: int
    change_ms: float | None
    real: bool
    phase: str | None


class ComparedRanks(TypedDict):
    compared: bool
    skew_ms: BeforeAfter | None
    rows: list[ComparedRank]
    moved: list[int]


class ComparedFinding(TypedDict):
    kind: str
    severity: Severity
    title: str
    phase: str | None
    ranks: list[int]
    share: BeforeAfter


class ComparedFindings(TypedDict):
    new: list[ComparedFinding]
    gone: list[ComparedFinding]
    kept: list[ComparedFinding]


class ContextChange(TypedDict):
    name: str
    label: str
    kind: str
    matters: bool
    before: Any
    after: Any


class ComparisonNoise(TypedDict):
    within: float | None
    between: float | None
    between_from: Literal["baselines", "assumption"]
    visible: float | None


class NeededToDecide(TypedDict):
    steps: int | None
    runs: int | None
    both: bool


class ComparedSteps(TypedDict):
    steps: int
    by_number: bool
    ordinary: bool


class AllSteps(TypedDict):
    change: float | None
    interval: list[float | None]


class ComparedInput(TypedDict):
    name: str
    path: str
    kind: Literal["run", "summary", "baseline", "numbers"]
    status: str | None
    steps: int
    warmup: int
    unusual: int
    mean_ms: float | None
    created_wall_ns: int | None


class Comparison(TypedDict):
    schema: Literal[1]
    kind: Literal["comparison"]
    verdict: Literal["slower", "faster", "same", "cannot_tell"]
    title: str
    like_for_like: bool
    change: float | None
    interval: list[float | None]
    confidence: float
    margin: float
    unit: Literal["time", "throughput"]
    step_ms: BeforeAfter
    throughput: BeforeAfter | None
    percentiles_ms: dict[str, BeforeAfter]
    clock: Literal["device", "host", "given"]
    cause: Cause | None
    phases: list[ComparedPhase]
    ranks: ComparedRanks
    communication: list[dict[str, Any]]
    memory: dict[str, BeforeAfterChange]
    findings: ComparedFindings | None
    context: list[ContextChange]
    noise: ComparisonNoise
    needed: NeededToDecide | None
    compared: ComparedSteps
    all_steps: AllSteps | None
    baselines: list[ComparedInput]
    candidate: ComparedInput
    notices: list[str]


class GateCheck(TypedDict):
    name: str
    result: Literal["pass", "regression", "cannot_tell"]
    limit: float | None
    text: str


class Gate(TypedDict):
    result: Literal["pass", "regression", "cannot_tell"]
    exit_code: int
    text: str
    checks: list[GateCheck]


class GatedComparison(Comparison):
    gate: Gate


# -- many runs --------------------------------------------------------------------------------------------------------


class HistoryNoise(TypedDict):
    between: float | None
    seen: float | None
    visible: float | None


class HistoryRun(TypedDict):
    run: str
    name: str
    path: str
    created_wall_ns: int
    commit: str
    branch: str
    dirty: bool
    tags: list[str]
    steps: int
    step_ms: float | None
    interval_ms: list[float | None]


class HistoryRequired(TypedDict):
    schema: Literal[1]
    kind: Literal["history"]
    verdict: str
    shape: str | None
    change: float | None
    interval: list[float | None] | None
    confidence: float
    noise: HistoryNoise | None
    changes: list[dict[str, Any]]
    unusual: list[str]
    last: float | None
    runs: list[HistoryRun]
    left_out: list[dict[str, str]]
    needed: int | None


class History(HistoryRequired, total=False):
    """What the command line adds: the command of these runs, and how many runs have another."""

    command: list[str] | None
    other_commands: int


class SweepTrial(TypedDict):
    round: int
    run: str
    status: str
    step_ms: float | None
    memory: int | None


class SweepVariant(TypedDict):
    variant: str
    status: str
    front: str
    better: str | None
    speed: float | None
    speed_interval: list[float | None] | None
    step_ms: float | None
    memory: int | None
    memory_of: str | None
    settings: dict[str, Any]
    trials: list[SweepTrial]


class Sweep(TypedDict):
    schema: Literal[1]
    kind: Literal["sweep"]
    name: str
    unit: str
    rounds: int
    complete: bool
    confidence: float
    noise: float | None
    variants: list[SweepVariant]
    front: list[str]
