"""A capture: a few steps of some ranks, recorded by torch.profiler while the job runs.

Who says what to whom:

    person, page, judge   CaptureRequest    a line of ``captures/requests.jsonl``: which ranks, how many steps, why
    hub                   CaptureOrder      to the agents of all nodes: these ranks, from this step on
    agent                 the same order    next to the ring of each of its ranks (``records/paths.py``); the ring's
                                            request word tells the rank to read it after its current step
    rank                  CaptureReport     how far it is; next to it the trace, once it is written
    hub                   CaptureRecord     ``captures/ID/capture.json``: everything about it, with what was found

All ranks of the job get the order: those that are not profiled wait for those that are, so the steps are marked
(``FLAG_CAPTURED``) on all of them and no rule judges how long they take.  The traces are ``captures/ID/rank-R.…``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = [
    "BACKWARD_END",
    "BASELINE",
    "CAPTURE_STEPS",
    "CAPTURE_WARMUP",
    "LAYER_LABEL",
    "PHASE_LABEL",
    "PROFILER_STEP",
    "REASONS",
    "STATES",
    "STEP_LABEL",
    "CaptureOrder",
    "CaptureReason",
    "CaptureRecord",
    "CaptureReport",
    "CaptureRequest",
    "CaptureSchedule",
    "CaptureSeverity",
    "CaptureState",
    "Difference",
    "RankChoice",
    "parse_schedule",
]

CAPTURE_STEPS = 6
"""Steps that are profiled unless something else was requested."""
CAPTURE_WARMUP = 2
"""Steps before them in which the profiler runs and its data is discarded."""
STEP_LABEL, PHASE_LABEL = "stepscope.step ", "stepscope."
"""In a trace, the names of our ranges: ``stepscope.step 123`` and, within it, ``stepscope.forward``."""
LAYER_LABEL = "stepscope.layer "
"""Followed by the name of a module, ``layers.0.attention``: its forward in a step whose layers are sampled."""
BACKWARD_END = " backward"
"""What follows that name where the label is of the module's backward."""
PROFILER_STEP = "ProfilerStep#"
"""How torch's profiler names steps; in our captures followed by our number of the step."""
CaptureReason = Literal["request", "finding", "schedule", "baseline"]
"""A person or program requested it; a finding appeared; ``--profile``; the first steps, to compare with later."""
REASONS: tuple[CaptureReason, ...] = get_args(CaptureReason)
CaptureState = Literal["waiting", "profiling", "written", "delivered", "failed"]
"""Of a rank.  ``written``: the rank has written its trace; ``delivered``: it is in the run's folder on node 0."""
RankChoice = Literal["worst", "all", "listed"]
"""``worst``: the rank that a finding names, or else the one that works longest, and a median rank."""
RecordState = Literal["ordered", "profiling", "delivering", "analyzing", "done", "failed"]
STATES: tuple[RecordState, ...] = get_args(RecordState)
CaptureSeverity = Literal["", "info", "warning", "critical"]
"""Of the verdict of the traces; "": they were not analyzed."""


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    id: str
    """Chosen by whoever requests it, to recognize the answer; not the capture's own id."""
    wall_ns: int
    choose: RankChoice = "worst"
    ranks: tuple[int, ...] = ()
    """With ``listed``."""
    steps: int = CAPTURE_STEPS
    warmup: int = CAPTURE_WARMUP
    memory: bool = False
    stacks: bool = True
    shapes: bool = False
    reason: CaptureReason = "request"
    finding: str = ""
    """The kind of the finding that it is for."""
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class CaptureOrder:
    id: str
    """Names its folder: ``step-340``; letters, digits and dashes."""
    ranks: tuple[int, ...]
    """Those that are profiled."""
    at_step: int
    """The first profiled step; a rank that is already past it begins as soon as it can."""
    steps: int = CAPTURE_STEPS
    warmup: int = CAPTURE_WARMUP
    memory: bool = False
    stacks: bool = True
    shapes: bool = False
    reason: CaptureReason = "request"
    most_s: float = 60.0
    """A rank that takes longer from its first warm-up step on gives the capture up."""
    most_bytes: int = 1 << 30
    """A larger trace is given up."""


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """Of one rank, profiled or not."""

    id: str
    rank: int
    pid: int
    state: CaptureState
    problem: str = ""
    """Why it failed, as a sentence."""
    first_step: int = -1
    last_step: int = -1
    start_ms: float = 0.0
    """How long starting the profiler took, CUPTI included; not part of any step."""
    stop_ms: float = 0.0
    write_ms: float = 0.0
    trace_bytes: int = 0
    """Of the trace as it was written, not compressed."""
    reason: CaptureReason = "request"
    """``schedule`` or ``baseline`` if the process ordered it itself; the hub knows the reason of its own orders."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What one rank does longer than another, in each captured step."""

    what: Literal["operator", "kernel", "layer", "line", "phase", "wait"]
    """``phase``: nothing inside it explains enough; ``wait``: for other ranks, while they work longer."""
    name: str
    """``aten::mm``; of a line the function, ``sleep`` or ``augment``."""
    rank: int
    peer: int
    extra_ns: int
    """In a step."""
    shown: str = ""
    """The name in sentences: without what is dispensable in the name of a kernel."""
    phase: str = ""
    line: str = ""
    """``FILE:LINE`` of the script, if the traces have stacks."""
    layer: str = ""
    """Of an operator or kernel: the module or compiled region with most of the difference, if the traces show it."""
    text: str = ""
    """As a sentence."""


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    order: CaptureOrder
    state: RecordState
    requested_wall_ns: int
    reason: CaptureReason
    request: str = ""
    """The id of its request."""
    finding: str = ""
    by: str = ""
    problem: str = ""
    done_wall_ns: int = 0
    reports: tuple[CaptureReport, ...] = ()
    """Of the profiled ranks."""
    files: tuple[str, ...] = ()
    """The traces in its folder."""
    size_bytes: int = 0
    verdict: str = ""
    """The sentence that leads the analysis of the traces."""
    severity: CaptureSeverity = ""
    findings: tuple[dict[str, Any], ...] = ()
    """Of the analysis: ``kind``, ``severity``, ``title``, ``ranks``, ``share``, ``advice``."""
    differences: tuple[Difference, ...] = ()
    """The largest first."""
    changes: tuple[Difference, ...] = ()
    """What takes longer than in the baseline of the run, an earlier capture; ``peer`` is the rank that it has."""
    figures: dict[str, Any] = field(default_factory=dict)
    """``step_ms`` while it was profiled, and ``usual_step_ms`` before: what the capture itself cost;
    ``usual_optimizer_ms``: the optimizer's part of that; ``baseline``: the ``id`` and ``steps`` of the capture that it
    was compared with."""


# -- Schedule ---------------------------------------------------------------------------------------------------------
# ``run --profile``: captures that each rank orders itself, at steps that are known from the start.

BASELINE = "baseline"
"""``--profile baseline``: the steps below, for comparison with captures later in the run."""
BASELINE_STEP, BASELINE_STEPS = 20, 10


@dataclass(frozen=True, kw_only=True)
class CaptureSchedule:
    """Like ``torch.profiler.schedule``: leave out ``wait`` steps, warm up, capture ``active`` steps, and repeat."""

    wait: int = 0
    warmup: int = CAPTURE_WARMUP
    active: int = CAPTURE_STEPS
    repeat: int = 1
    """0: until the job ends."""
    ranks: tuple[int, ...] | None = (0,)
    """None: all of them."""
    memory: bool = False
    stacks: bool = True
    shapes: bool = False
    reason: CaptureReason = "schedule"

    def first_step(self, number: int) -> int | None:
        """The first profiled step of the capture with this number, counted from 0; None: there are not so many."""
        if self.repeat and number >= self.repeat:
            return None
        return number * (self.wait + self.warmup + self.active) + self.wait + self.warmup

    def order(self, at_step: int, world_size: int) -> CaptureOrder:
        """The capture whose first profiled step this is."""
        ranks = tuple(range(max(world_size, 1))) if self.ranks is None else self.ranks
        return CaptureOrder(
            id=f"step-{at_step}",
            ranks=ranks,
            at_step=at_step,
            steps=self.active,
            warmup=self.warmup,
            memory=self.memory,
            stacks=self.stacks,
            shapes=self.shapes,
            reason=self.reason,
        )


_COUNTS = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0}
"""The settings that are numbers, and the least that each may be."""
_MOST = {"wait": 1 << 40, "warmup": 100, "active": 1000, "repeat": 1 << 40}
_SWITCHES = {"memory": ("memory", True), "shapes": ("shapes", True), "no-stacks": ("stacks", False)}


def parse_schedule(text: str) -> CaptureSchedule:
    """Read ``wait=100,warmup=2,active=6,repeat=3,ranks=0+3,memory,shapes``; ValueError says what is wrong with it."""
    values: dict[str, Any] = {}
    words = [word.strip() for word in text.split(",")]
    if words[0] == BASELINE:
        values = {"wait": BASELINE_STEP - CAPTURE_WARMUP, "active": BASELINE_STEPS, "reason": BASELINE}
        words = words[1:]
    for word in words:
        name, equals, value = word.partition("=")
        if name in _SWITCHES and not equals:
            field_name, values[field_name] = _SWITCHES[name]
        elif name == "ranks" and value:
            values["ranks"] = None if value == "all" else _ranks(value)
        elif name in _COUNTS and equals:
            if not (value.isascii() and value.isdigit() and _COUNTS[name] <= int(value[:20]) <= _MOST[name]):
                raise ValueError(f"{name} must be a whole number of at least {_COUNTS[name]}, not {value!r}")
            values[name] = int(value)
        else:
            known = ", ".join([BASELINE, *(f"{each}=N" for each in _COUNTS), "ranks=0+3", *_SWITCHES])
            raise ValueError(f"unknown setting {word!r} (known: {known})")
    return CaptureSchedule(**values)


def _ranks(value: str) -> tuple[int, ...]:
    parts = value.split("+")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ValueError(f"ranks must be all or numbers joined by +, not {value!r}")
    return tuple(sorted({int(part) for part in parts}))
