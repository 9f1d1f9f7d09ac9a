"""What Stepscope says about a run: ``run.json``, ``summary.json``, findings, goodput and layers."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

__all__ = [
    "Clock",
    "Decision",
    "Finding",
    "Findings",
    "Goodput",
    "IfFixed",
    "Layers",
    "LostBy",
    "RunMeta",
    "Severity",
    "Status",
    "Summary",
    "Verdict",
]

Severity = Literal["info", "warning", "critical"]
Status = Literal["finished", "failed", "crashed", "interrupted", "running"]
Clock = Literal["device", "host"]
LostBy = Literal["counter", "checkpoint", "no_checkpoint", ""]
Decision = Literal["restart", "restart_without_host", "stop", "none", "unknown"]


# -- run.json ---------------------------------------------------------------------------------------------------------


class GitRequired(TypedDict):
    commit: str
    branch: str | None
    dirty: bool


class Git(GitRequired, total=False):
    diff_stat: str


class Launcher(TypedDict):
    pid: int
    start_ticks: int


class RunEnd(TypedDict):
    exit_code: int | None
    status: str
    wall_ns: int


class RunMetaRequired(TypedDict):
    schema: Literal[1]
    name: str
    command: list[str]
    cwd: str
    created_wall_ns: int
    created_mono_ns: int
    host: str
    user: str
    python: str
    executable: str
    platform: str
    stepscope: str
    environment: dict[str, str]
    session: str
    launcher: Launcher | None
    sealed: bool
    git: Git | None
    end: RunEnd | None


class RunMeta(RunMetaRequired, total=False):
    max_disk: int
    driver: str | None
    file_system: str | None
    place: dict[str, str]
    spool: str


# -- summary.json -----------------------------------------------------------------------------------------------------


class RunFacts(TypedDict):
    name: str
    path: str
    command: list[str]
    cwd: str | None
    host: str | None
    user: str | None
    python: str | None
    platform: str | None
    stepscope: str | None
    git: Git | None
    created_wall_ns: int | None
    ended_wall_ns: int | None
    duration_s: float | None
    attempt: int
    attempts: int
    hosts: list[str]


class RankRow(TypedDict):
    rank: int
    host: str
    pid: int | None
    local_rank: int | None
    state: str
    standing: str | None
    device: str
    device_name: str
    device_index: int | None
    device_timed: bool
    backend: str
    torch: str
    steps: int
    last_step: int | None
    step_ms: float | None
    comm_ms: float | None
    lost: int
    torn: int
    hook_failures: int


class TimeParts(TypedDict):
    earlier_attempts: float | None
    start_up: float | None
    warm_up: float | None
    training: float | None
    evaluation: float | None
    checkpoints: float | None
    stalls: float | None
    not_recorded: float | None
    last_evaluation: float | None
    hung: float | None
    end: float | None


class TimeAccount(TypedDict):
    seconds: float | None
    training_time_s: float | None
    until_ranks_s: float | None
    parts: TimeParts
    text: dict[str, list[str]]


class GoodputParts(TypedDict):
    start_up: float | None
    imports: float | None
    process_group: float | None
    compile: float | None
    training: float | None
    evaluation: float | None
    checkpoint: float | None
    stalls: float | None
    hang: float | None
    lost: float | None
    restart: float | None
    shutdown: float | None
    unknown: float | None


class UntilFirstStep(TypedDict):
    launch: float | None
    imports: float | None
    process_group: float | None
    setup: float | None


class GoodputAttempt(TypedDict):
    attempt: int
    began_wall_ns: int | None
    ended_wall_ns: int | None
    seconds: float | None
    goodput: float | None
    ranks: int
    parts: GoodputParts
    until_first_step: UntilFirstStep
    steps: int
    step_s: float | None
    resumed_at: int | None
    count_per_step: float | None
    unsaved_steps: int | None
    lost_steps: int
    lost_by: LostBy


class Goodput(TypedDict):
    seconds: float | None
    goodput: float | None
    parts: GoodputParts
    restarts: int
    lost_steps: int
    estimated: bool
    active: bool
    attempts: list[GoodputAttempt]


class EndEvidence(TypedDict):
    source: str
    text: str


class AttemptEnd(TypedDict):
    attempt: int
    cause: str
    rank: int | None
    host: str
    hosts: int
    type: str
    message: str
    step: int | None
    steps: int
    evidence: list[EndEvidence]


class AdviceAfterFailure(TypedDict):
    decision: Decision
    cause: str
    reason: str
    text: str
    hosts: list[str]
    exit_code: int | None
    evidence: list[EndEvidence]
    end: AttemptEnd | None


class Warmup(TypedDict):
    count: int
    seconds: float | None
    reasons: dict[str, int]
    steps: list[int]


class StepCounts(TypedDict):
    total: int
    compared: int
    steady: int
    left_out: int
    first: int | None
    last: int | None
    per_second: float | None
    seconds: float | None
    warmup: Warmup


class StepTimes(TypedDict):
    mean_ms: float | None
    min_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    max_step: int | None


class PerStep(TypedDict):
    flops: float | None
    samples: float | None
    tokens: float | None


class Throughput(TypedDict):
    samples_per_second: float | None
    tokens_per_second: float | None
    tflops: float | None
    mfu: float | None
    per_step: PerStep | None
    step_ms: float | None
    samples: int
    all_sampled: bool
    peak_tflops: float | None
    peak_dtype: str | None
    logged: dict[str, str]
    curve: dict[str, list[float | None]]


class PhaseTimes(TypedDict):
    share: float | None
    mean_ms: float | None
    median_ms: float | None
    worst_ms: float | None
    worst_rank: int | None
    steps: int


class PhaseRow(PhaseTimes):
    device: PhaseTimes | None


class CommunicationClock(TypedDict):
    clock: str
    steps: int
    of: int
    missed: int
    last_unread: int | None
    exposed_ms: float | None


class Operation(TypedDict):
    op: str
    count: float | None
    bytes: float | None
    exposed_ms: float | None
    overlapped_ms: float | None
    device: bool
    transfer_ms: float | None
    wait_ms: float | None
    skew_ms: float | None
    algorithm_bytes_per_s: float | None
    bus_bytes_per_s: float | None


class LateRank(TypedDict):
    rank: int | None
    wait_ms: float | None
    last: int
    late_ms: float | None


class Arrivals(TypedDict):
    steps: int
    collectives: int
    transfer_ms: float | None
    skew_ms: float | None
    ranks: list[LateRank]


class GroupTraffic(TypedDict):
    name: str
    kind: str
    description: str
    backend: str
    size: int
    ranks: list[int]
    timed: bool
    ops: list[Operation]
    arrivals: Arrivals | None


class Communication(TypedDict):
    measured: CommunicationClock | None
    groups: list[GroupTraffic]
    groups_left_out: int


class DevicePeak(TypedDict):
    bytes: int | None
    rank: int | None
    steps: list[int | None]


class Peak(TypedDict):
    bytes: int | None
    rank: int | None


class RankMemory(TypedDict):
    rank: int | None
    device_allocated: int | None
    device_reserved: int | None
    device_reserved_max: int | None
    device_peak: int | None
    device_peak_steps: list[int | None] | None
    device_total: int | None
    device_free: int | None
    device_free_from: str | None
    rss_first: int | None
    rss_last: int | None
    rss_peak: int | None
    own_peak: int | None


class MemoryUse(TypedDict):
    device_peak: DevicePeak | None
    rss_peak: Peak | None
    own_peak: Peak | None
    ranks: list[RankMemory]


class Level(TypedDict):
    median: float | None
    max: float | None


class HostLevels(TypedDict):
    node: str
    samples: int
    cpu_count: int | None
    cpu_percent: Level | None
    load1: Level | None
    mem_total: int | None
    mem_available_min: int | None
    swap_used_max: int | None
    net_rx_bps: Level | None
    net_tx_bps: Level | None
    net_errors_ps: Level | None
    net_drops_ps: Level | None
    disk_read_bps: Level | None
    disk_write_bps: Level | None
    net_speed_bps: float | None
    retransmit_share: float | None
    rtt_us: dict[str, Any] | None
    probe_loss_share: float | None


class GpuLevels(TypedDict):
    node: str | None
    index: int | None
    uuid: str | None
    name: str | None
    in_use: bool
    ranks: list[int]
    samples: int
    util_percent: Level | None
    mem_util_percent: Level | None
    temperature_c: Level | None
    power_w: Level | None
    sm_clock_mhz: Level | None
    mem_clock_mhz: Level | None
    power_limit_w: float | None
    mem_used_max: int | None
    mem_total: int | None
    throttle_reasons: list[str]
    throttled_share: float | None


class Hosts(TypedDict):
    nodes: list[HostLevels]
    gpus: list[GpuLevels]
    samples: int


class Metric(TypedDict):
    last: float | None
    step: int | None


class Verdict(TypedDict):
    kind: str
    severity: Severity
    title: str
    price: str | None
    ranks: list[int]
    phase: str | None
    advice: list[str]
    confidence: float | None


class IfFixed(TypedDict):
    step_ms: float | None
    speedup: float | None


class LeastCost(TypedDict):
    share: float | None
    seconds: float | None
    rank_hours: float | None
    if_fixed: IfFixed | None


class Cost(LeastCost, total=False):
    up_to: bool
    least: LeastCost


class Finding(TypedDict):
    kind: str
    severity: Severity
    title: str
    ranks: list[int]
    phase: str | None
    steps: list[int] | None
    cost: Cost
    evidence: dict[str, Any]
    advice: list[str]
    confidence: float | None


class RunError(TypedDict):
    rank: int | None
    attempt: int
    pid: int | None
    type: str
    message: str
    step: int | None
    wall_ns: int | None
    script: bool
    victim: bool
    exit_codes: dict[str, int]
    traceback: str
    traceback_short: str


class AttemptRow(TypedDict):
    attempt: int
    world_size: int | None
    ranks: int
    hosts: list[str]
    host_count: int
    first_step: int | None
    last_step: int | None
    began_wall_ns: int | None
    ended_wall_ns: int | None
    seconds: float | None
    pause_s: float | None
    end: str


class NodeRow(TypedDict):
    node: int | None
    host: str
    address: str | None
    ranks: int
    first_rank: int | None
    last_rank: int | None
    steps: int
    clock_offset_ms: float | None
    clock_error_ms: float | None
    joined_wall_ns: int | None
    heard_wall_ns: int | None
    status: str | None
    lost: bool
    replaced_by: str | None
    duplicates: int
    refused: int


class FindingHistoryRow(TypedDict):
    number: int
    kind: str
    name: str
    severity: Severity
    title: str
    ranks: list[int]
    phase: str | None
    attempt: int
    open: bool
    first_step: int | None
    first_wall_ns: int | None
    last_step: int | None
    last_wall_ns: int | None
    why: str
    changes: list[dict[str, Any]]
    text: str


class WithdrawnFinding(TypedDict):
    kind: str
    ranks: list[int]
    phase: str | None
    title: str
    steps: list[int]
    shown_steps: int
    reason: str
    text: str


class Summary(TypedDict):
    schema: Literal[1]
    run: RunFacts
    status: Status
    status_text: str
    status_severity: Severity
    exit_code: int | None
    world_size: int | None
    ranks: list[RankRow]
    time_account: TimeAccount | None
    goodput: Goodput | None
    attempt_ends: list[AttemptEnd]
    advice_after_failure: AdviceAfterFailure | None
    steps: StepCounts
    step_time: StepTimes
    throughput: Throughput | None
    clock: Clock
    phases: dict[str, PhaseRow]
    communication: Communication | None
    memory: MemoryUse
    host: Hosts
    facts: dict[str, Any]
    facts_differ: list[str]
    settings: list[str]
    metrics: dict[str, Metric]
    training_log: dict[str, Any] | None
    verdict: Verdict
    findings: list[Finding]
    errors: list[RunError]
    hangs: list[dict[str, Any]]
    attempts: list[AttemptRow]
    nodes: list[NodeRow]
    history: list[FindingHistoryRow]
    withdrawn: list[WithdrawnFinding]
    notices: list[str]
    logs: list[str]


class Findings(TypedDict):
    schema: Literal[1]
    findings: list[Finding]


# -- layers -----------------------------------------------------------------------------------------------------------


class Spread(TypedDict):
    min: int
    median: int
    max: int


class MemoryKind(TypedDict):
    kind: str
    title: str
    bytes: int
    share: float
    over_ranks: Spread
    text: dict[str, str]


class RankSpread(TypedDict):
    ranks: int
    min: int
    median: int
    max: int
    min_rank: int
    max_rank: int
    text: str


class DeviceMemory(TypedDict):
    peak_bytes: int | None
    bytes: int | None
    held_bytes: int | None
    peak_rest_bytes: int | None
    rest_bytes: int | None
    over_ranks: RankSpread | None
    text: str


class PhasePeak(TypedDict):
    phase: str
    bytes: int
    module: str | None
    text: str


class StepPeak(PhasePeak):
    phases: list[PhasePeak]


class LayerTimeline(TypedDict):
    step: list[int]
    bytes: dict[str, list[int]]
    total_bytes: list[int]
    device_bytes: list[int | None]
    device_peak: list[int | None]
    peak_bytes: list[int | None]
    peak_phase: list[str | None]


class Module(TypedDict):
    name: str
    type: str
    parent: int
    elements: int
    left_out: int
    own_bytes: dict[str, int]
    bytes: dict[str, int]
    total_bytes: int
    share: float
    forward_us: float | None
    own_forward_us: float | None
    backward_us: float | None
    own_backward_us: float | None
    host_forward_us: float | None
    host_backward_us: float | None
    grad_norm: float | str | None
    weight_norm: float | str | None
    update_ratio: float | str | None
    zero_share: float | str | None
    text: dict[str, Any]


class Layers(TypedDict):
    schema: Literal[1]
    kind: Literal["layers"]
    attempt: int
    rank: int
    step: int
    wall_ns: int
    clock: Clock
    compiled: bool
    replicated: bool
    skipped: bool
    out_of_memory: bool
    group: str
    ranks: list[int]
    steps: list[int]
    samples: int
    total_bytes: int
    kinds: list[MemoryKind]
    over_ranks: RankSpread
    device: DeviceMemory | None
    peak: StepPeak | None
    timeline: LayerTimeline
    nonfinite_forward: str | None
    nonfinite_backward: str | None
    modules: list[Module]
    modules_total: int
    modules_left_out: int
    sentences: list[str]
    notes: list[str]
    unseen: list[str]
    text: dict[str, str]
