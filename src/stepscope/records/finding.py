"""Findings and hangs as plain data, and how they are read from files.

A finding is one thing that is wrong (or worth knowing), with its numbers, its cost and what to do.

A hang record says which rank blocks the job, which ranks wait, and where each of them is.  The watchdog writes one file
per hang in ``hangs/`` of the run directory, and rewrites it when something changes (the job recovered, it was ended).
``finding_of`` (``hangs/report.py``) turns it into a finding.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stepscope.records.text import for_two_ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CRITICAL_SHARE",
    "SEVERITIES",
    "WARNING_FLOOR_NS",
    "WARNING_SHARE",
    "Claim",
    "Culprit",
    "Finding",
    "Frame",
    "HangKind",
    "HangPart",
    "HangRecord",
    "RankThere",
    "Severity",
    "StackGroup",
    "ThreadStack",
    "WaitingIn",
    "as_remark",
    "cost_document",
    "decoded",
    "encoded",
    "finding_order",
    "highest",
    "lowest",
    "memory_cause",
    "severity_by_cost",
    "status_severity",
    "unexplained",
    "with_current_kinds",
    "worded_for",
]


# -- Causes -----------------------------------------------------------------------------------------------------------

DEVICE_MEMORY = ("outofmemoryerror", "out of memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed")
HOST_MEMORY = ("defaultcpuallocator", "cannot allocate memory", "std::bad_alloc")
"""Texts that mean out of memory; the host's are checked first."""


def memory_cause(type_name: str, message: str) -> Literal["oom_host", "oom_cuda"] | None:
    """Which memory an exception says has run out."""
    text = f"{type_name} {message}".lower()
    if type_name == "MemoryError" or any(words in text for words in HOST_MEMORY):
        return "oom_host"
    return "oom_cuda" if any(words in text for words in DEVICE_MEMORY) else None


# -- Findings ---------------------------------------------------------------------------------------------------------

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""From least to most."""
OLD_KINDS = {"low_gpu_utilisation": "low_gpu_utilization"}
"""What kinds were called in the files of earlier versions."""
STATUS_SEVERITIES: dict[str, Severity] = {
    "running": "info",
    "finished": "info",
    "interrupted": "warning",
    "unfinished": "warning",
}


def worded_for(finding: Finding, ranks: int) -> Finding:
    """The finding in the words for a job of so many ranks."""
    if ranks != 2:
        return finding
    return replace(finding, title=for_two_ranks(finding.title), advice=tuple(map(for_two_ranks, finding.advice)))


def status_severity(status: str) -> Severity:
    """How bad a run's ``status`` is; one that is not known counts as a failure."""
    return STATUS_SEVERITIES.get(status, "critical")


def with_current_kinds(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with findings (``summary.json``, ``findings.json``, a baseline) with today's names of kinds."""
    findings = document.get("findings")
    lists = findings if isinstance(findings, list) else []
    for row in (*lists, document.get("verdict")):
        if isinstance(row, dict) and isinstance(row.get("kind"), str):
            row["kind"] = OLD_KINDS.get(row["kind"], row["kind"])
    return document


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: str
    """snake_case; part of the interface."""
    severity: Severity
    title: str
    """The one sentence that people read first."""
    ranks: tuple[int, ...] = ()
    """The culprits; empty when all ranks are alike."""
    phase: str | None = None
    steps: tuple[int, int] | None = None
    """First and last step the finding covers."""
    cost: dict[str, Any] = field(default_factory=dict)
    """``share`` of step time, ``seconds`` and ``rank_hours`` lost so far, ``if_fixed``."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the verdict."""
    advice: tuple[str, ...] = ()
    confidence: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """The form in ``summary.json`` (docs/schema.md)."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "title": self.title,
            "ranks": list(self.ranks),
            "phase": self.phase,
            "steps": list(self.steps) if self.steps else None,
            "cost": self.cost,
            "evidence": self.evidence,
            "advice": list(self.advice),
            "confidence": round(self.confidence, 3),
        }


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The result of a rule, for live runs and traces alike: a finding, and the time that it explains.

    Rules run in order, the most specific first, and each works on what the earlier ones left.
    """

    finding: Finding
    explained_ns: NDArray[Any]
    """By how much the time would be shorter without it, at most: each step of a live run, or the time for which each
    rank's device waits for the host in a trace.  Zeros: it explains no time."""


def unexplained(time_ns: NDArray[Any], claims: Iterable[Claim]) -> NDArray[np.float64]:
    """What the claims leave of the time of each step or each rank; together they take no more than there is."""
    left = time_ns.astype(float)
    for claim in claims:
        left -= claim.explained_ns.clip(0, left.clip(0))
    return left


# -- Order ------------------------------------------------------------------------------------------------------------

UPPER_BOUND_COUNTS = 0.5
"""Share of a gain that is known as "at most" which findings are ordered by: the real gain is somewhere below it."""
LATE_FOR_CERTAIN = 0.75
"""The confidence from which a late rank counts with the time for which others wait for it: while they wait, making
anything else faster gains nothing."""
WRONG_NUMBERS = frozenset({"loss_nan", "nan_gradients", "replica_desync", "no_gradient_exchange"})
"""Kinds that say that training computes something other than it should: however fast, it is in vain."""
ENDS_THE_JOB = frozenset({"memory_creep", "ram_pressure"})
"""Kinds that say that the job will end before it is done.  Device memory that is full but does not grow is none."""


def finding_order(finding: Finding) -> tuple[int, int, float]:
    """Sort by this, the largest first: severity; within one, what ruins the result, what ends the job, what slows it.

    Of several that end the job the one that does so first; of several that slow it the one that costs most time.
    """
    severity = SEVERITIES.index(finding.severity)
    if severity > 0 and finding.kind in WRONG_NUMBERS:
        return severity, 2, _expected_gain(finding)
    if severity > 0 and finding.kind in ENDS_THE_JOB:
        ends_in_s = finding.evidence.get("runs_out_in_s")
        return severity, 1, -math.inf if ends_in_s is None else -float(ends_in_s)
    return severity, 0, _expected_gain(finding)


def _expected_gain(finding: Finding) -> float:
    """The share of the time that a remedy saves, times how sure we are."""
    share = float(finding.cost.get("share", 0.0))
    if finding.confidence >= LATE_FOR_CERTAIN:  # only findings of traces have it; live ones cost what peers wait
        share = max(share, float(finding.evidence.get("waited_share", 0.0)))
    return share * finding.confidence * (UPPER_BOUND_COUNTS if finding.cost.get("up_to") else 1.0)


# -- Cost -------------------------------------------------------------------------------------------------------------


def cost_document(
    *, share: float, seconds: float, ranks: int, step_ns: float | None, digits: int = 3
) -> dict[str, Any]:
    """``Finding.cost``, for live runs and traces alike.

    ``share`` of the time that a remedy saves; ``seconds`` in all, with so many digits; ``step_ns``: the length of a
    step now, None without steps.
    """
    left = 1 - share
    return {
        "share": round(share, 4),
        "seconds": round(seconds, digits),
        "rank_hours": round(seconds * ranks / 3600, 4),
        "if_fixed": {
            "step_ms": None if step_ns is None else round(step_ns * left / 1e6, 3),
            "speedup": round(1 / left, 3) if left > 0 and step_ns else None,
        },
    }


WARNING_SHARE = 0.05
"""Share of the step time that a finding must cost to deserve attention."""
CRITICAL_SHARE = 0.20
"""A fifth of the machines' time: to be fixed before anything else."""
WARNING_FLOOR_NS = 200_000
"""Below a fifth of a millisecond per step there is nothing to fix in Python: reported, but not as a warning."""


def severity_by_cost(share: float, per_step_ns: float = float("inf")) -> Severity:
    """Severity by cost: share of all time, and time per affected step (tiny costs cannot be fixed)."""
    if share < WARNING_SHARE or per_step_ns < WARNING_FLOOR_NS:
        return "info"
    return "critical" if share >= CRITICAL_SHARE else "warning"


def highest(severity: Severity, *others: Severity) -> Severity:
    """The most severe of them."""
    return max(severity, *others, key=SEVERITIES.index)


def lowest(severity: Severity, *others: Severity) -> Severity:
    """The least severe of them."""
    return min(severity, *others, key=SEVERITIES.index)


def as_remark(finding: Finding) -> Finding:
    """The same finding as ``info``: it follows from another one, or is not certain."""
    return replace(finding, severity="info")


# -- Dataclasses as JSON ----------------------------------------------------------------------------------------------
# Turns frozen dataclasses into plain JSON values and back, checking each field against its annotation.
#
# A field may be ``int``, ``float``, ``bool``, ``str``, a ``Literal``, ``X | None``, ``tuple[X, ...]``, another such
# dataclass, or ``dict[str, Any]`` (any JSON whose numbers every reader can represent).

T = TypeVar("T")

_LARGEST = (1 << 63) - 1
_HIDDEN = dict.fromkeys([*range(32), *range(127, 160)], " ")
"""Control characters: displayed text must not control the terminal."""
_KNOWN: dict[type, dict[str, tuple[Any, bool]]] = {}
"""Evaluated annotations: they are text at first, and evaluating them takes long for a thousand ranks."""


def encoded(value: Any) -> Any:
    """A dataclass as a dict, a tuple as a list, recursively."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: encoded(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple | list):
        return [encoded(one) for one in value]
    return {key: encoded(one) for key, one in value.items()} if isinstance(value, dict) else value


def decoded(kind: type[T], raw: object) -> T:
    """Build a ``kind`` from ``raw``; ValueError if it is not one.  Unknown keys are ignored."""
    if not isinstance(raw, dict):
        raise ValueError(f"not a {kind.__name__}")  # noqa: TRY004  # like every other error in the data
    values = {}
    for name, (hint, needed) in _fields(kind).items():
        if name in raw:
            values[name] = _value(hint, raw[name], name)
        elif needed:
            raise ValueError(f"a {kind.__name__} without {name}")
    return kind(**values)


def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it is required."""
    if kind not in _KNOWN:
        hints = get_type_hints(kind)
        needed = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(kind)}
        _KNOWN[kind] = {name: (hints[name], must) for name, must in needed.items()}
    return _KNOWN[kind]


def _value(hint: Any, raw: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = next(one for one in get_args(hint) if one is not type(None))
        return None if raw is None else _value(inner, raw, name)
    if origin is tuple and isinstance(raw, list):
        return tuple(_value(get_args(hint)[0], one, name) for one in raw)
    if origin is Literal and isinstance(raw, str) and raw in get_args(hint):
        return raw
    if origin is dict and isinstance(raw, dict):
        return _plain(raw, name)
    if isinstance(hint, type) and is_dataclass(hint):
        return decoded(hint, raw)
    if hint is float and type(raw) in (int, float):
        return float(_plain(raw, name))
    if hint in (int, bool, str) and type(raw) is hint:
        return _plain(raw, name)
    raise ValueError(f"{name} cannot be {str(raw)[:40]!r}")


def _plain(raw: Any, name: str) -> Any:
    """JSON as it is, if its numbers are finite and fit in 64 bits; text without terminal control characters."""
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace").decode().translate(_HIDDEN)
    if isinstance(raw, dict):
        return {_plain(key, name): _plain(value, name) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_plain(value, name) for value in raw]
    odd = (type(raw) is int and abs(raw) > _LARGEST) or (type(raw) is float and not math.isfinite(raw))
    if odd or not (raw is None or type(raw) in (int, float, bool)):
        raise ValueError(f"{name} has an invalid number")
    return raw


# -- Hangs ------------------------------------------------------------------------------------------------------------

SCHEMA = 1

HangKind = Literal[
    "hang_missing_collective",
    "hang_mismatch",
    "hang_deadlock",
    "hang_input",
    "hang_host",
    "hang_device",
    "hang_unknown",
    "rank_crashed",
    "rank_lost",
]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of Python, as in a traceback."""

    file: str
    line: int
    """0 if unknown."""
    function: str


@dataclass(frozen=True, kw_only=True)
class ThreadStack:
    main: bool
    name: str = ""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """The stacks of processes that are at the same place."""

    ranks: tuple[int, ...]
    threads: tuple[ThreadStack, ...] = ()
    workers_of: bool = False
    """Whether these are DataLoader workers of the ranks instead of the ranks themselves."""


@dataclass(frozen=True, kw_only=True)
class WaitingIn:
    """The collective a rank waits in."""

    group: str
    """Its name in torch."""
    description: str = ""
    sequence: int | None = None
    op: str = ""
    sizes: str = ""
    """As people write them: ``[512]``, ``[4, 128] [128]``."""
    dtypes: str = ""
    peer: int | None = None
    """For a send or recv."""


@dataclass(frozen=True, kw_only=True)
class RankThere:
    """What was found about one rank."""

    rank: int
    pid: int
    alive: bool = True
    step: int | None = None
    """The step in progress."""
    phase: str = ""
    since_s: float = 0.0
    """Time since the last sign of activity."""
    process_state: str = ""
    """The kernel's letter: R, S, D (waits for a disk), T (stopped), Z."""
    cpu_share: float | None = None
    """Share of one core while it was watched."""
    gil_held: bool | None = None
    waiting_in: WaitingIn | None = None
    at: Frame | None = None
    """The innermost line of the user's own code."""
    workers: tuple[dict[str, Any], ...] = ()
    """Relevant child processes: pid, state, what they are and where."""
    host: str = ""
    """Its host, if several hosts were judged together; else empty."""


@dataclass(frozen=True, kw_only=True)
class Culprit:
    rank: int
    reason: str
    """A sentence without rank and period: ``has not called all_reduce; it sleeps in train.py:41``."""
    at: Frame | None = None


@dataclass(frozen=True, kw_only=True)
class HangPart:
    """What the watchdog of one host reported on a hang that was later judged across several hosts."""

    host: str
    number: int
    kind: HangKind
    title: str


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    number: int
    """1 for the first of the run on this host."""
    host: str
    kind: HangKind
    title: str
    """One sentence with its period: who, what, where."""
    declared_wall_ns: int
    stopped_wall_ns: int
    """Time of the last activity of any rank."""
    threshold_s: float
    step_s: float | None = None
    """The usual length of a step before the hang."""
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    collective: WaitingIn | None = None
    """What the victims wait in."""
    cycle: tuple[str, ...] = ()
    """For a deadlock: ``rank 3 waits for rank 1 in tp (all_reduce 4)`` …, ending where it began."""
    evidence: tuple[str, ...] = ()
    """Sentences: what led to the verdict, and what rules out the alternatives."""
    ranks: tuple[RankThere, ...] = ()
    stacks: tuple[StackGroup, ...] = ()
    flight: dict[str, Any] = field(default_factory=dict)
    """The Flight Recorders' data, from ``flight/``: the verdict, and the progress of the ranks per group."""
    over: Literal["recovered", "ended", "aborted"] | None = None
    over_wall_ns: int | None = None
    action: str = ""
    """What ``--on-hang`` did."""
    hosts: tuple[str, ...] = ()
    """All hosts, if their evidence was judged together (``hangs/multi_host.py``) or one of them is lost; else empty."""
    parts: tuple[HangPart, ...] = ()
    """… and what the watchdog of each of these had reported on its own."""

    def to_dict(self) -> dict[str, Any]:
        """The form in its file (docs/schema.md)."""
        return {"schema": SCHEMA, **encoded(self)}

    @classmethod
    def from_dict(cls, raw: object) -> HangRecord:
        """Read the parsed JSON of ``to_dict``; ValueError for anything else.  Unknown keys are ignored."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError("not the record of a hang")
        return decoded(cls, raw)
