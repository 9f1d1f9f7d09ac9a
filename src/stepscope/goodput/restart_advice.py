"""After a failure: restart, restart without a host, or stop because the code or the data is at fault.

The advice is a pure function of what is known about the end of each attempt.  First the *cause* of an end is
determined (``_cause``: what the first rank to fail died of).  ``DECISIONS`` says what to do about each cause.  Then
repetition is considered: a cause that usually passes does not if it comes back (``REPETITIONS``).

docs/restart-advice.md has both tables; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stepscope.diagnosis.engine.attempts import Attempt, attempts_of
from stepscope.diagnosis.rules.crashes import Failure, failures_in, memory_low, message_shown
from stepscope.flight.stacks import TRACEBACK_FRAME
from stepscope.records.hang import HangRecord
from stepscope.records.series import RankError, RunData
from stepscope.records.text import count_text, named_ranks

__all__ = [
    "DECISIONS",
    "EXIT_CODES",
    "HARDWARE",
    "REPETITIONS",
    "Advice",
    "AttemptEnd",
    "Decision",
    "advise",
    "ends_of",
]

Decision = Literal["restart", "restart_without_host", "stop", "none", "unknown"]

EXIT_CODES: Mapping[Decision, int] = {
    "restart": 0,
    "restart_without_host": 10,
    "stop": 20,
    "none": 30,
    "unknown": 3,
}
"""Of ``stepscope advise``."""

DECISIONS: Mapping[str, tuple[Decision, str]] = {
    "active": ("unknown", "The run is still active."),
    "finished": ("none", "The run finished."),
    "complete": ("none", "The training was complete; a process failed while it shut down."),
    "ended_early": (
        "stop",
        "The script ended with exit code 0 before its training was complete; it would end there again.",
    ),
    "stopped_by_hand": ("stop", "A person stopped it."),
    "preempted": ("restart", "It was asked to end (SIGTERM), as a scheduler does."),
    "node_lost": ("restart_without_host", "The node stopped responding."),
    "device_error": ("restart_without_host", "The device reported a hardware error."),
    "disk_full": ("stop", "The disk, or the user's quota, is full; free space first."),
    "out_of_device_memory": ("stop", "The device ran out of memory; the same settings need as much again."),
    "out_of_host_memory": ("restart", "The host ran out of memory, which other processes may have caused."),
    "import_error": ("stop", "The script could not import what it needs."),
    "not_finite": ("stop", "A value was not finite; the same data and settings lead there again."),
    "data_error": ("stop", "Reading the data failed; the same sample fails again."),
    "temporary_error": ("restart", "Storage or the network failed, which usually passes."),
    "code_error": ("stop", "The script raised an exception; the same code raises it again."),
    "exit_code": ("stop", "The script itself ended with this exit code."),
    "collective_mismatch": (
        "stop",
        "Ranks disagree about a collective: a branch in the code that not all of them take.",
    ),
    "blocked_rank": (
        "restart",
        "A rank waited at a line outside the collectives, as for a thread, a lock or a server; see that line.",
    ),
    "blocked_host": ("restart_without_host", "One rank blocks the job from outside its Python code."),
    "hang": ("restart", "The job hung without a rank or line that is to blame."),
    "communication_error": ("restart", "Communication failed, and no rank failed before it."),
    "native_crash": ("restart", "Native code crashed, which may be chance."),
    "killed": ("restart", "It was killed from outside."),
    "vanished": ("restart", "The process is gone and left no message."),
    "unknown": ("unknown", "How the run ended is not known."),
}
"""By cause: what to do, and why."""

REPETITIONS: Mapping[str, tuple[Decision, str]] = {
    "same_failure": (
        "stop",
        "The same failure at the same step as in an earlier attempt: the code or the data is at fault.",
    ),
    "no_step": ("stop", "Several attempts in a row failed before their first step."),
    "same_host": ("restart_without_host", "Several attempts failed first on the same host."),
}
"""What replaces ``restart`` if attempts fail again and again; the first that applies."""

ATTEMPTS_WITHOUT_STEP = 3
"""So many attempts in a row without any step are no coincidence."""
FAILURES_OF_HOST = 2
SILENT_S = 60.0
"""A node that the hub heard from for so much shorter than from others is lost; the hub itself may have been killed."""
NODE_EVENTS = ("node_lost", "node_back", "node_joined", "node_replaced", "node_bye")
UNEVEN = 0.1
"""Ranks of a finished job may differ by this share of the steps: some have fewer batches."""

IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError")
DISK_FULL = re.compile(r"no space left on device|\[errno 28\]|disk quota exceeded|\[errno 122\]", re.IGNORECASE)
NOT_FINITE = re.compile(r"\bnan\b|\binf\b|not finite|non-?finite|infinite|diverge", re.IGNORECASE)
HARDWARE = re.compile(
    r"uncorrectable|\becc\b|nvlink|fallen off the bus|\bxid\b|no cuda-capable device|hardware stack error"
    r"|devices? (?:is|are|\(s\) is/are) busy or unavailable|unspecified launch failure|misaligned pc|system not yet "
    r"initialized|driver/library version mismatch|cuda unknown error",
    re.IGNORECASE,
)
TEMPORARY_TYPES = (
    *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "TimeoutError"),
    *("ReadTimeout", "ConnectTimeout", "HTTPError", "URLError", "BrokenPipeError", "ClientError", "IncompleteRead"),
)
TEMPORARY = re.compile(
    r"\[errno (?:5|103|104|110|111|113|116|121)\]|stale file handle|input/output error|read timed out|timed out"
    r"|temporarily unavailable|connection reset|remote i/o error|transport endpoint",
    re.IGNORECASE,
)
FROM_DATA = re.compile(r"^Caught \w+ in DataLoader worker|[/\\]torch[/\\]utils[/\\]data[/\\]")
NATIVE_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
NCCL_WATCHDOG = re.compile(
    r"watchdog caught collective operation timeout|nccl.*timeout|timed out.*collective", re.IGNORECASE
)
DISAGREEMENTS = ("hang_missing_collective", "hang_mismatch", "hang_deadlock")
BLOCKED = ("hang_device", "rank_lost")
IDLE = 0.1
"""Share of a core that a process uses at most while it waits."""
BLOCKED_STATES = ("D", "T")
"""Of a process that waits for a disk or a device, or was stopped: not the work of its Python code."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended."""

    attempt: int
    cause: str
    """A key of ``DECISIONS``."""
    rank: int | None = None
    host: str = ""
    """Where it began, if that was one host."""
    hosts: int = 1
    """How many hosts the attempt had."""
    type: str = ""
    message: str = ""
    step: int | None = None
    """The last step that was completed, by the script's own count if it has one; None: there was none."""
    steps: int = 0
    evidence: tuple[tuple[str, str], ...] = ()
    """Source, and what it says."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": [{"source": source, "text": text} for source, text in self.evidence]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> AttemptEnd:
        """Read what ``to_dict`` wrote; ValueError for anything else."""
        kinds = {"attempt": int, "cause": str, "host": str, "hosts": int, "type": str, "message": str, "steps": int}
        if any(type(raw.get(name)) is not kind for name, kind in kinds.items()) or raw["cause"] not in DECISIONS:
            raise ValueError("not the end of an attempt")
        rank, step = (raw.get(name) if type(raw.get(name)) is int else None for name in ("rank", "step"))
        return cls(**{name: raw[name] for name in kinds}, rank=rank, step=step)


@dataclass(frozen=True, kw_only=True)
class Advice:
    decision: Decision
    cause: str
    reason: str
    hosts: tuple[str, ...] = ()
    """To leave out, for ``restart_without_host``."""
    evidence: tuple[tuple[str, str], ...] = ()
    end: AttemptEnd | None = field(default=None)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]

    @property
    def text(self) -> str:
        """``restart without host node1: The node stopped responding.``"""
        words = self.decision.replace("_", " ")
        what = {"none": "nothing to restart", "unknown": "no advice"}.get(self.decision, words)
        return f"{' '.join((what, *self.hosts))}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "decision": self.decision,
            "cause": self.cause,
            "reason": self.reason,
            "text": self.text,
            "hosts": list(self.hosts),
            "exit_code": self.exit_code,
            "evidence": [{"source": source, "text": text} for source, text in self.evidence],
            "end": None if self.end is None else self.end.to_dict(),
        }


def advise(
    run: RunData, *, alive: bool = False, expected_steps: int | None = None, earlier: Sequence[AttemptEnd] = ()
) -> Advice:
    """What to do about the end of a run.

    ``alive``: it is still active.  ``expected_steps``: how many steps the training has in all, if the user says so.
    ``earlier``: how the earlier runs of the same job ended, the last one last.
    """
    *before, end = (*earlier, *ends_of(run, alive=alive, expected_steps=expected_steps))
    decision, reason = DECISIONS[end.cause]
    cause, evidence = end.cause, end.evidence
    if decision == "restart" and end.cause != "preempted":
        repetition = _repetition(before, end)
        if repetition is not None:
            cause, why = repetition
            decision, reason = REPETITIONS[cause]
            evidence = (*evidence, ("attempts", why))
    if decision == "restart_without_host" and not end.host:
        decision = "restart"
    hosts = (end.host,) if decision == "restart_without_host" else ()
    return Advice(decision=decision, cause=cause, reason=reason, hosts=hosts, evidence=evidence, end=end)


def _repetition(before: Sequence[AttemptEnd], end: AttemptEnd) -> tuple[str, str] | None:
    """The key of ``REPETITIONS`` that applies, and what was seen."""
    failed = [each for each in before if each.cause not in ("preempted", "stopped_by_hand", "finished")]
    same = [each for each in failed if _same(each, end)]
    if same:
        return "same_failure", f"attempt {same[-1].attempt} ended in the same way after step {end.step}"
    idle = 0
    for each in reversed((*failed, end)):
        if each.steps:
            break
        idle += 1
    if idle >= ATTEMPTS_WITHOUT_STEP:
        return "no_step", f"{count_text(idle, 'attempt')} in a row made no step"
    if end.host and end.hosts > 1:
        count = 1 + sum(each.host == end.host for each in failed)
        if count >= FAILURES_OF_HOST:
            return "same_host", f"{count_text(count, 'attempt')} failed first on {end.host}"
    return None


def _same(before: AttemptEnd, end: AttemptEnd) -> bool:
    """The same cause and exception at the same step.  What usually passes may well come twice before the first step."""
    known = end.step is not None
    return known and (before.cause, before.type, before.step) == (end.cause, end.type, end.step)


# -- ends -------------------------------------------------------------------------------------------------------------


def ends_of(run: RunData, *, alive: bool = False, expected_steps: int | None = None) -> tuple[AttemptEnd, ...]:
    """How each attempt of a run ended, the last one last."""
    attempts = attempts_of(run)
    return tuple(
        _end_of(run, attempt, alive=alive and attempt.is_last, expected_steps=expected_steps) for attempt in attempts
    )


def _end_of(run: RunData, attempt: Attempt, *, alive: bool, expected_steps: int | None) -> AttemptEnd:
    if alive:
        return AttemptEnd(attempt=attempt.number, cause="active")
    failures = failures_in(run, attempt)
    lead = next((failure for failure in failures if not failure.victim), failures[0] if failures else None)
    error = _error_of(attempt, lead)
    cause, evidence, host = _cause(run, attempt, lead, error, expected_steps)
    places = {series.rank: series.identity.host for series in attempt.series}
    if host is None:
        begun = {places[f.rank] for f in failures if not f.victim and f.rank in places}
        host = next(iter(begun)) if len(begun) == 1 else ""
    made = max((len(series.steps) for series in attempt.series), default=0)
    return AttemptEnd(
        attempt=attempt.number,
        cause=cause,
        rank=None if lead is None else lead.rank,
        host=host,
        hosts=len(set(places.values()) | {str(node.get("host")) for node in run.nodes}),
        type="" if lead is None else lead.type,
        message="" if lead is None else message_shown(lead.message),
        step=_counted(attempt, None if lead is None else lead.last_step),
        steps=made,
        evidence=evidence,
    )


Evidence = tuple[tuple[str, str], ...]


def _cause(
    run: RunData,
    attempt: Attempt,
    lead: Failure | None,
    error: RankError | None,
    expected_steps: int | None,
) -> tuple[str, Evidence, str | None]:
    """The cause of an end, its evidence, and the host that is to blame (None: that of the rank)."""
    end = run.meta.get("end") if attempt.is_last else None
    status = end.get("status") if isinstance(end, Mapping) else None
    code = end.get("exit_code") if isinstance(end, Mapping) else None
    ended: Evidence = (("run.json", f"{status}, exit code {code}"),) if status else ()
    lost = _lost_host(run, attempt, lead, status) if attempt.is_last else None
    if lost is not None:
        return "node_lost", (lost[1], *ended), lost[0]
    if status == "finished":
        return _finished(attempt, lead, ended, expected_steps)
    if status == "interrupted" and (lead is None or lead.victim or not lead.type or lead.type in STOPPED):
        return _interrupted(run, attempt, lead, code, ended)
    hang = _hang(run, attempt, lead)
    if hang is not None and (lead is None or not lead.type or lead.victim or lead.taken or lead.signal == "SIGABRT"):
        return hang
    if lead is None:
        if status is None or attempt.series:
            evidence = ended or (("run.json", "no end was recorded"),)
            return ("vanished" if attempt.series else "unknown"), evidence, None
        return "exit_code", ended, None
    text = (_source(error), _sentence(lead))
    if lead.at_exit and all(series.state == "exited" for series in attempt.series):
        return "complete", (text, *ended), None
    return _cause_of(run, attempt, lead, error, (text, *ended))


STOPPED = ("KeyboardInterrupt", "SignalException")
GRACE_S = 120.0
"""Schedulers kill a job that still runs so long after SIGTERM, or sooner."""


def _finished(
    attempt: Attempt, lead: Failure | None, ended: Evidence, expected_steps: int | None
) -> tuple[str, Evidence, str | None]:
    made = {
        series.rank: int(series.steps["step"][-1]) + 1
        for series in attempt.series
        if len(series.steps) and series.identity.world_size > 1 and not series.lost
    }
    most = max((int(series.steps["step"][-1]) + 1 for series in attempt.series if len(series.steps)), default=0)
    counted = _counted(attempt, most - 1) if most else None
    if expected_steps is not None and (0 if counted is None else counted + 1) < expected_steps:
        done = 0 if counted is None else counted + 1
        return "ended_early", (("steps", f"{done:,} of {count_text(expected_steps, 'step')}"), *ended), ""
    fewer = sorted(rank for rank, steps in made.items() if steps < (1 - UNEVEN) * most)
    if fewer and lead is None:
        text = f"{named_ranks(fewer)} made {made[fewer[0]]:,} of {count_text(most, 'step')}"
        return "ended_early", (("steps", text), *ended), ""
    return "finished", ended, ""


def _interrupted(
    run: RunData, attempt: Attempt, lead: Failure | None, code: object, ended: Evidence
) -> tuple[str, Evidence, str | None]:
    texts = [error.message for error in attempt.errors if error.type == "SignalException"]
    by_hand = code == 130 or any(error.type == "KeyboardInterrupt" for error in attempt.errors)
    by_hand = by_hand or any("signal: 2" in text for text in texts)
    termed = code == 143 or any("signal: 15" in text for text in texts)
    slurm = run.meta.get("slurm")
    where: Evidence = (("run.json", f"Slurm job {slurm.get('job')}"),) if isinstance(slurm, Mapping) else ()
    if by_hand and not termed:
        return "stopped_by_hand", (*ended, *where), ""
    hang = _hang(run, attempt, lead)
    if hang is not None and _hung_before_the_end(run, attempt):
        cause, evidence, host = hang
        return cause, (*evidence, *ended), host
    return "preempted", (*ended, *where), ""


def _hung_before_the_end(run: RunData, attempt: Attempt) -> bool:
    """Whether the job hung before it was asked to end; ranks that wait while one saves a checkpoint do not hang."""
    signals = [error.wall_ns for error in attempt.errors if error.type in STOPPED and error.wall_ns]
    signaled_ns = min(signals, default=None)
    if signaled_ns is None:
        end = run.meta.get("end")
        ended_ns = end.get("wall_ns") if isinstance(end, Mapping) else None
        if type(ended_ns) is not int:
            return False
        signaled_ns = ended_ns - round(GRACE_S * 1e9)
    return any(hang.declared_wall_ns < signaled_ns for hang in _hangs_of(run, attempt))


def _cause_of(
    run: RunData,
    attempt: Attempt,
    lead: Failure,
    error: RankError | None,
    evidence: Evidence,
) -> tuple[str, Evidence, str | None]:
    traceback = error.traceback if error is not None else ""
    if lead.cause == "oom_cuda":
        return "out_of_device_memory", evidence, None
    if lead.cause in ("oom_host", "oom_kernel"):
        source = (("events.jsonl", "the kernel's out-of-memory killer"),) if lead.oom_killed else ()
        return "out_of_host_memory", (*evidence, *source), None
    if lead.type:
        return _cause_of_exception(lead, traceback), evidence, None
    if lead.signal == "SIGTERM":
        return "preempted", evidence, ""
    if lead.signal in ("SIGINT", "SIGHUP"):
        return "stopped_by_hand", evidence, ""
    native = [line for lines in run.native.values() for line in lines]
    if lead.signal in NATIVE_CRASHES:
        timeout = next((line for line in native if NCCL_WATCHDOG.search(line)), None)
        if timeout is not None or (lead.taken and lead.signal == "SIGABRT"):
            return "communication_error", (*evidence, *((("log", timeout[:200]),) if timeout else ())), ""
        return "native_crash", evidence, None
    if lead.signal == "SIGKILL":
        low = memory_low(run, attempt, lead)
        more = (("samples", "the host had hardly any memory left"),) if low else ()
        return ("out_of_host_memory" if low else "killed"), (*evidence, *more), None
    if lead.signal:
        return "killed", evidence, None
    return ("exit_code" if lead.exit_code else "vanished"), evidence, None


def _cause_of_exception(lead: Failure, traceback: str) -> str:
    text = f"{lead.type}: {lead.message}"
    if DISK_FULL.search(text):
        return "disk_full"
    if HARDWARE.search(text):
        return "device_error"
    if lead.taken:
        return "communication_error"
    if lead.type in IMPORT_ERRORS:
        return "import_error"
    if lead.type in TEMPORARY_TYPES or TEMPORARY.search(text):
        return "temporary_error"
    if lead.type == "FloatingPointError" or NOT_FINITE.search(lead.message):
        return "not_finite"
    if FROM_DATA.search(lead.message) or any(map(FROM_DATA.search, TRACEBACK_FRAME.findall(traceback))):
        return "data_error"
    if lead.type == "SystemExit":
        return "exit_code"
    return "code_error"


def _hang(run: RunData, attempt: Attempt, lead: Failure | None) -> tuple[str, Evidence, str | None] | None:
    """The cause if the attempt ended in a hang, as the watchdog or the Flight Recorders judged it."""
    hangs = _hangs_of(run, attempt)
    if not hangs:
        return _flight(run) if attempt.is_last and run.flight.get("nccl_dumps") else None
    hang = hangs[-1]
    evidence: Evidence = ((f"hangs/{hang.host}-{hang.number}.json", hang.title),)
    culprits = {culprit.rank for culprit in hang.culprits}
    places = {series.rank: series.identity.host for series in attempt.series}
    hosts = {places[rank] for rank in culprits if rank in places}
    host = next(iter(hosts)) if len(hosts) == 1 else ""
    blocked = any(there.rank in culprits and there.process_state[:1] in BLOCKED_STATES for there in hang.ranks)
    if hang.kind in BLOCKED or blocked:
        return "blocked_host", evidence, host
    if hang.kind == "hang_missing_collective" and culprits and culprits <= _idle_ranks(hang):
        return "blocked_rank", evidence, host
    if hang.kind in DISAGREEMENTS and not hang.undecidable:
        return "collective_mismatch", evidence, host
    return "hang", evidence, host


def _idle_ranks(hang: HangRecord) -> set[int]:
    """Those that slept at a line of their own code, outside all collectives."""
    return {
        there.rank
        for there in hang.ranks
        if there.alive and there.process_state[:1] == "S" and there.at is not None and there.waiting_in is None
        and there.cpu_share is not None and there.cpu_share < IDLE
    }  # fmt: skip


def _hangs_of(run: RunData, attempt: Attempt) -> list[HangRecord]:
    """Those of an attempt that it did not recover from."""
    begun_ns = min((series.anchor_wall_ns for series in attempt.series), default=0)
    until_ns = max((series.ended_wall_ns or 0 for series in attempt.series), default=0)
    return [
        hang
        for hang in run.hangs
        if hang.over != "recovered" and hang.threshold_s and begun_ns <= hang.stopped_wall_ns <= (until_ns or 1 << 62)
    ]


def _flight(run: RunData) -> tuple[str, Evidence, str | None] | None:
    kind = next((f.get("kind") for f in run.flight.get("findings", ()) if isinstance(f, Mapping)), None)
    title = next((str(f.get("title")) for f in run.flight.get("findings", ()) if isinstance(f, Mapping)), "")
    evidence: Evidence = (("flight/", title),) if title else (("flight/", "NCCL's watchdog wrote dumps"),)
    return ("collective_mismatch" if kind in DISAGREEMENTS else "communication_error"), evidence, ""


def _lost_host(
    run: RunData, attempt: Attempt, lead: Failure | None, status: object
) -> tuple[str, tuple[str, str]] | None:
    """The host of a node that was lost while the job ran.

    A node without a last word is not lost: a job that ends is often killed on all hosts at once.  Either the run's hub
    called it lost, or the others were heard of for much longer; and nothing else had ended the job before.
    """
    if status == "finished":
        return None
    places = {series.rank: series.identity.host for series in attempt.series}
    begun_ns = min((series.anchor_wall_ns for series in attempt.series), default=0)
    hung_ns = min((hang.declared_wall_ns for hang in _hangs_of(run, attempt)), default=1 << 62)
    newest_ns = max((_heard_ns(node) for node in run.nodes), default=0)
    for node in run.nodes:
        host, heard_ns = str(node.get("host")), _heard_ns(node)
        if node.get("here") or node.get("bye") is not None or node.get("replaced_by"):
            continue
        if heard_ns and not begun_ns <= heard_ns <= hung_ns:
            continue  # it was lost in an earlier attempt, or after the job hung
        elsewhere = lead is not None and (lead.rank is None or places.get(lead.rank, host) != host)
        if lead is not None and elsewhere and _explains_itself(lead):
            continue
        lost_ns = _lost_wall_ns(run, node)
        if status == "interrupted":
            others = (series.ended_wall_ns or 0 for series in attempt.series if series.identity.host != host)
            lost = lost_ns is not None and lost_ns <= max(others, default=0)
        else:
            lost = lost_ns is not None or (heard_ns > 0 and newest_ns - heard_ns >= SILENT_S * 1e9)
        if lost:
            return host, ("nodes.json", f"node {node.get('node')} ({host}) stopped sending and never reported its end")
    return None


def _heard_ns(node: Mapping[str, Any]) -> int:
    """When the hub last heard from a node; 0 if that is not known."""
    heard_ns = node.get("heard_wall_ns")
    return heard_ns if type(heard_ns) is int else 0


def _lost_wall_ns(run: RunData, node: Mapping[str, Any]) -> int | None:
    """When the hub called a node lost; None if it did not, or if the node came back."""
    own = [event for event in run.events if event.get("host") == node.get("host") and event.get("event") in NODE_EVENTS]
    if not own or own[-1]["event"] != "node_lost":
        return None
    wall_ns = own[-1].get("wall_ns")
    return wall_ns if type(wall_ns) is int else 0


def _explains_itself(lead: Failure) -> bool:
    """Whether a rank failed of an exception that the loss of another host does not cause."""
    if lead.victim or lead.taken or not lead.type:
        return False
    return _cause_of_exception(lead, "") not in ("communication_error", "temporary_error")


def _error_of(attempt: Attempt, lead: Failure | None) -> RankError | None:
    if lead is None:
        return None
    own = [error for error in attempt.errors if error.rank == lead.rank and error.type == lead.type]
    return own[0] if own else None


def _source(error: RankError | None) -> str:
    return "events.jsonl" if error is None else f"errors/{error.pid}.json"


def _sentence(lead: Failure) -> str:
    who = "the script" if lead.rank is None else f"rank {lead.rank}"
    if lead.type:
        shown = message_shown(lead.message)
        return f"{who} raised {lead.type}{f': {shown}' if shown else ''}"
    if lead.signal:
        return f"{who} was killed by {lead.signal}"
    return f"{who} exited with code {lead.exit_code}" if lead.exit_code else f"{who} vanished"


def _counted(attempt: Attempt, step: int | None) -> int | None:
    """The script's own number of a Stepscope step; its count continues over restarts."""
    if step is None:
        return None
    counters = (series.facts.get("global_step") for series in attempt.series)
    first = next(
        (each["first"] for each in counters if isinstance(each, Mapping) and type(each.get("first")) is int), 0
    )
    return step + int(first)
