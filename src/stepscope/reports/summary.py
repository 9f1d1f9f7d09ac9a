"""The document of ``summary.json``: what ran, how long a step takes, where the time goes, what was found.

The format is part of the interface and described in docs/schema.md; a test keeps the two in sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from stepscope.diagnosis import Window, build_window, diagnose
from stepscope.diagnosis.engine.attempts import Attempt, attempts_of, from_launcher
from stepscope.diagnosis.engine.samples import number, of_kind
from stepscope.diagnosis.engine.settings import remarks_on
from stepscope.diagnosis.engine.view import view_of
from stepscope.diagnosis.engine.window import last_attempt
from stepscope.diagnosis.rules.crashes import STOPPED_BY_HAND, Failure, failures_in, failures_of, message_shown
from stepscope.diagnosis.rules.hangs import has_ended
from stepscope.diagnosis.withdrawn_findings import find_withdrawn
from stepscope.flight.stacks import short_traceback
from stepscope.goodput import advise, ledger_of
from stepscope.goodput.restart_advice import ends_of
from stepscope.records.finding import Finding, Severity, status_severity
from stepscope.records.series import (
    NOTED,
    RankError,
    RankSeries,
    RunData,
    logged_by_script,
    noted_names,
    noted_numbers,
)
from stepscope.records.steps import FLAG_REPLAYED, GRAPH_PHASE
from stepscope.records.text import count_text, duration_text, named_ranks
from stepscope.reports.finding_history import history_rows
from stepscope.reports.finding_text import finding_price
from stepscope.reports.sections import (
    attempts_table,
    differing_facts,
    facts_of_run,
    hangs_table,
    nodes_table,
    settings_of,
)
from stepscope.reports.tables import (
    communication_table,
    finite,
    host_table,
    memory_table,
    phases_table,
    ranks_table,
    step_time_table,
    steps_table,
    throughput_table,
)
from stepscope.reports.time_account import time_account

__all__ = ["status_of", "status_text_of", "summarize"]


# -- notices ----------------------------------------------------------------------------------------------------------
# Sentences about missing data, and other facts worth knowing besides the findings.

HOST_ONLY = ("mps", "xpu")
WARNINGS_SHOWN = 20
GAP_S = 3.0
"""Samples come once a second; a longer interval means that some are missing."""
GAPS_SHOWN = 3


def notices_of(run: RunData, window: Window) -> list[str]:
    current = last_attempt(run.ranks)
    messages = [
        str(event["message"]) for event in run.events if event.get("event") == "warning" and event.get("message")
    ]
    notices = [_sentence(text) for text in (*run.notices, *list(dict.fromkeys(messages))[:WARNINGS_SHOWN])]
    attempts = attempts_of(run)
    if current and attempts[-1].number > window.attempt:
        notices.append(
            f"Nothing was recorded in attempt {attempts[-1].number}; all figures are from attempt {window.attempt}."
        )
    notices += _missing(current, window)
    notices += _gaps(run)
    died = sum(event.get("event") == "hub_start" for event in run.events) - 1
    if died > 0:
        notices.append(f"The hub died {count_text(died, 'time')} and was restarted; no data was lost.")
    failures = sum(series.hook_failures for series in current)
    if failures:
        notices.append(f"A Stepscope hook failed {count_text(failures, 'time')} and was skipped; times may be missing.")
    devices = {series.identity.device for series in current if series.identity.device in HOST_ONLY}
    notices += [f"On {device} only host times are recorded, no device times." for device in sorted(devices)]
    return [*notices, *_replays(window), *remarks_on(window)]


def _replays(window: Window) -> Iterable[str]:
    count = int(((window.flags & FLAG_REPLAYED) > 0).any(axis=0).sum())
    if count:
        were = "was a replay" if count == 1 else "were replays"
        yield (
            f"{count:,} of {count_text(len(window.steps), 'step')} {were} of a CUDA graph: "
            f"what was captured (forward, backward, optimizer) is one phase there, {GRAPH_PHASE!r}."
        )


def _missing(current: Sequence[RankSeries], window: Window) -> Iterable[str]:
    idle = [series.rank for series in current if not len(series.steps)]
    if idle and len(idle) < len(current):
        verb = "is" if len(idle) == 1 else "are"
        yield f"{named_ranks(idle)} recorded no step and {verb} not compared."
    world = max((series.identity.world_size for series in current), default=0)
    if 0 < len(current) < world:
        yield f"Only {len(current)} of {count_text(world, 'rank')} were recorded here."
    running = any(series.state in ("starting", "running") for series in current)
    if window.left_out and not running:
        yield f"Comparisons leave out {count_text(window.left_out, 'step')} that not every live rank completed."


def _gaps(run: RunData) -> list[str]:
    """Intervals without samples between the first and the last of a host."""
    times: dict[str, list[tuple[float, float]]] = {}
    for line in of_kind(run.samples, "host"):
        wall_ns = number(line, "wall_ns")
        if wall_ns is not None:
            times.setdefault(str(line.get("node")), []).append((wall_ns, number(line, "span_s") or 0.0))
    starts = [number(event, "wall_ns") or 0.0 for event in run.events if event.get("event") == "agent_start"]
    found = []
    for node, at in sorted(times.items()):
        for (before, span_s), (after, _) in pairwise(sorted(at)):
            # A sample that represents a minute may lie anywhere in that minute.
            if after - before > (GAP_S + 2 * span_s) * 1e9:
                restarted = any(before < start <= after for start in starts)
                why = "the agent stopped and was restarted" if restarted else "the agent was delayed"
                seconds = duration_text((after - before) / 1e9, whole=True)
                found.append(f"For {seconds} there are no samples of host {node}: {why}.")
    more = len(found) - GAPS_SHOWN
    return [*found[:GAPS_SHOWN], f"{count_text(more, 'further gap')} in the samples."] if more > 0 else found


def _sentence(text: str) -> str:
    """Add a capital, unless it begins with a name, and a full stop."""
    text = " ".join(text.split())
    if text and text.split()[0].isalpha():
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


# -- summary ----------------------------------------------------------------------------------------------------------

SCHEMA = 1
METRICS_LISTED = 32
Status = Literal["finished", "failed", "crashed", "interrupted", "running"]
_ENDINGS: tuple[Status, ...] = ("finished", "crashed", "interrupted")


def summarize(
    run: RunData, *, alive: bool = False, logs: Sequence[str] = (), status: Status | None = None
) -> dict[str, Any]:
    """Everything that is known about a run, JSON-safe.

    ``alive``: whether processes of the run still exist; ``logs``: paths of the ranks' output; ``status``: overrides the
    inferred status.
    """
    window = build_window(run)
    current = last_attempt(run.ranks)
    # Logs show that the recorder reached the processes, because it keeps their output.
    findings = diagnose(run, window, reached=bool(logs), alive=alive)
    end = run.meta.get("end")
    exit_code = end.get("exit_code") if isinstance(end, dict) else None
    status = status or status_of(run, alive=alive)
    withdrawn = [] if status == "running" else find_withdrawn(run, window, findings)
    text, severity = status_text_of(run, status, findings, alive=alive)
    host = host_table(window, run.samples)
    facts = facts_of_run(current)
    ranks, steps = ranks_table(run, window), steps_table(current, window)
    last_step = max((row["last_step"] for row in ranks if row["last_step"] is not None), default=None)
    about = _run_table(run, window, current)
    return {
        "schema": SCHEMA,
        "run": about,
        "status": status,
        "status_text": text,
        "status_severity": severity,
        "exit_code": exit_code if isinstance(exit_code, int) else None,
        "world_size": _world_size(run, current),
        "ranks": ranks,
        "time_account": time_account(
            run, window, findings, created_ns=about["created_wall_ns"], ended_ns=about["ended_wall_ns"]
        ),
        **_goodput(run, alive=status == "running"),
        "steps": steps,
        "step_time": step_time_table(window),
        "throughput": throughput_table(run, window, current),
        "clock": view_of(window).clock,
        "phases": phases_table(window),
        "communication": communication_table(window),
        "memory": memory_table(current, run.samples, host["gpus"]),
        "host": host,
        "facts": facts,
        "facts_differ": differing_facts(current),
        "settings": settings_of(facts, steps["first"], last_step),
        "metrics": _metrics_table(run, current),
        "training_log": run.training_log or None,
        "verdict": _verdict(findings[0], over=status != "running"),
        "findings": [finding.to_dict() for finding in findings],
        "errors": _errors_table(run),
        "hangs": hangs_table(run.hangs, over=has_ended(run)),
        "attempts": attempts_table(run),
        "nodes": nodes_table(run, alive=status == "running"),
        "history": history_rows(run.history, over=status != "running"),
        "withdrawn": [each.document for each in withdrawn],
        "notices": [*(each.text for each in withdrawn), *notices_of(run, window)],
        "logs": list(logs),
    }


def _goodput(run: RunData, *, alive: bool) -> dict[str, Any]:
    """The ledger of all attempts, how each of them ended, and whether to start the job again."""
    ledger = ledger_of(run)
    ends = ends_of(run, alive=alive)
    advice = advise(run, alive=alive)
    return {
        "goodput": None if ledger is None else ledger.to_dict(),
        "attempt_ends": [end.to_dict() for end in ends],
        "advice_after_failure": None if advice.cause in ("active", "finished") else advice.to_dict(),
    }


def _world_size(run: RunData, current: Sequence[RankSeries]) -> int:
    """As the ranks report it; if all of them failed before they were recorded, the number that left an error."""
    if current:
        return max(series.identity.world_size for series in current)
    return len({error.rank for error in run.errors if error.rank is not None and not from_launcher(error)})


def _metrics_table(run: RunData, current: Sequence[RankSeries]) -> dict[str, Any]:
    """What was noted or seen in the last attempt: by name, the last step with a value and its mean over the ranks."""
    pids = {series.identity.pid for series in current}
    lasts: dict[str, tuple[int, list[float]]] = {}
    own = logged_by_script(noted_names(event for event in run.events if event.get("pid") in pids))
    for event in run.events:
        step = event.get("step")
        if event.get("event") not in NOTED or event.get("pid") not in pids or type(step) is not int:
            continue
        for name, value in noted_numbers(event, own).items():
            if name not in lasts and len(lasts) >= METRICS_LISTED:
                continue
            last, values = lasts.get(name, (-1, []))
            if step >= last:
                lasts[name] = (step, [*values, value] if step == last else [value])
    return {name: {"last": float(f"{sum(each) / len(each):.6g}"), "step": step} for name, (step, each) in lasts.items()}


def status_of(run: RunData, *, alive: bool = False) -> Status:
    """How the run ended: as the launcher reported, except that a rank killed by a signal makes a failure a crash."""
    end = run.meta.get("end")
    status = end.get("status") if isinstance(end, dict) else None
    current = last_attempt(run.ranks)
    failures = failures_of(run, alive=alive)
    culprits = [failure for failure in failures if not failure.victim]
    died = bool(culprits) and not culprits[0].type and (bool(culprits[0].signal) or culprits[0].exit_code is None)
    for word in _ENDINGS:
        if status == word:
            return word
    if status == "failed":
        return "crashed" if died else "failed"
    if not culprits and any(error.type in STOPPED_BY_HAND for error in run.errors):
        return "interrupted"
    states = {series.state for series in current}
    if died or ("vanished" in states and (failures or not alive)):
        return "crashed"
    if culprits or "exception" in states:
        return "failed"
    if alive or states & {"starting", "running"}:
        return "running"
    return "finished" if states else "crashed"


def status_text_of(
    run: RunData, status: Status, findings: Sequence[Finding], *, alive: bool = False
) -> tuple[str, Severity]:
    """How the run ended, in the words that every screen shows, and how bad that is.

    ``running``, ``hung``, ``finished``, ``interrupted``, ``hung (aborted)``, ``out of memory``, ``exception``,
    ``killed (SIGKILL)``, ``exit code 3``, ``vanished``.
    """
    hang = findings[0] if findings[0].kind.startswith("hang_") else None
    if status == "running":
        return ("hung", "critical") if hang is not None and hang.evidence["over"] is None else (status, "info")
    failures = failures_of(run, alive=alive)
    lead = next((failure for failure in failures if not failure.victim), failures[0] if failures else None)
    if hang is not None and (hang.evidence["threshold_s"] or run.flight.get("nccl_dumps")):
        return f"hung{_ended_by(hang, status, lead)}", "critical"
    if status == "interrupted" or lead is None:
        end = run.meta.get("end")
        code = end.get("exit_code") if status == "failed" and isinstance(end, dict) else None
        return f"exit code {code}" if code else status, status_severity(status)
    if status == "finished":
        raised = findings[0].kind == "rank_crashed" and findings[0].severity == "critical"
        return (f"{_failure_words(lead)}, exit code 0", "critical") if raised else (status, "info")
    if lead.at_exit and findings[0].severity == "warning":
        return f"finished, then {lead.signal}", "warning"
    return _failure_words(lead), "critical"


def _ended_by(hang: Finding, status: Status, lead: Failure | None) -> str:
    """What ended a hung job."""
    if hang.evidence["over"] == "aborted" or (lead is not None and lead.signal == "SIGABRT"):
        return " (aborted)"
    if status == "interrupted":
        return " (interrupted)"
    return f", {_failure_words(lead)}" if lead is not None else ""


def _failure_words(failure: Failure) -> str:
    if failure.cause in ("oom_kernel", "oom_cuda", "oom_host"):
        return "out of memory"
    if failure.type and failure.type != "SystemExit":
        return "exception"
    if failure.signal:
        return f"killed ({failure.signal})"
    return f"exit code {failure.exit_code}" if failure.exit_code else "exception" if failure.type else "vanished"


def _run_table(run: RunData, window: Window, current: Sequence[RankSeries]) -> dict[str, Any]:
    meta = run.meta
    created = meta.get("created_wall_ns")
    created_ns = created if isinstance(created, int) else None
    ended_ns = _ended_wall_ns(run, current)
    duration_s = None
    if created_ns is not None and ended_ns is not None:
        duration_s = finite(max(ended_ns - created_ns, 0) / 1e9, 3)
    command = meta.get("command")
    return {
        "name": run.name,
        "path": run.path,
        "command": [str(word) for word in command] if isinstance(command, list) else [],
        "cwd": meta.get("cwd"),
        "host": meta.get("host"),
        "user": meta.get("user"),
        "python": meta.get("python"),
        "platform": meta.get("platform"),
        "stepscope": meta.get("stepscope"),
        "git": meta.get("git"),
        "created_wall_ns": created_ns,
        "ended_wall_ns": ended_ns,
        "duration_s": duration_s,
        "attempt": window.attempt,
        "attempts": len({series.identity.attempt for series in run.ranks}) or 1,
        "hosts": sorted({series.identity.host for series in current}),
    }


def _ended_wall_ns(run: RunData, current: Sequence[RankSeries]) -> int | None:
    """When it ended; for a run that is live or was cut off, the time of its last record."""
    end = run.meta.get("end")
    if isinstance(end, dict) and isinstance(end.get("wall_ns"), int):
        return int(end["wall_ns"])
    heard = [error.wall_ns for error in run.errors if error.wall_ns]
    for series in current:
        if series.ended_wall_ns:
            heard.append(series.ended_wall_ns)
        if len(series.steps):
            ended_mono_ns = int(series.steps["start_ns"][-1]) + int(series.steps["wall_ns"][-1])
            heard.append(ended_mono_ns - series.anchor_mono_ns + series.anchor_wall_ns)
    return max(heard, default=None)


def _verdict(finding: Finding, *, over: bool) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "title": finding.title,
        "price": finding_price(finding.kind, finding.cost, finding.evidence, over=over),
        "ranks": list(finding.ranks),
        "phase": finding.phase,
        "advice": list(finding.advice),
        "confidence": round(finding.confidence, 3),
    }


def _errors_table(run: RunData) -> list[dict[str, Any]]:
    """Exceptions, last attempt first; within one, the cause, its victims by time, then the launchers."""
    rows = []
    for attempt in reversed(attempts_of(run)):
        failures = failures_in(run, attempt)
        place = {failure.rank: index for index, failure in enumerate(failures)}
        victims = {failure.rank for failure in failures if failure.victim}
        texts = [
            (None if from_launcher(error) or _of_script(attempt, error) else error.rank, error)
            for error in attempt.errors
        ]
        texts.sort(key=lambda pair: (from_launcher(pair[1]), place.get(pair[0], 0), pair[1].wall_ns))
        rows += [
            {
                "rank": rank,
                "attempt": attempt.number,
                "pid": error.pid,
                "type": error.type,
                "message": error.message,
                "step": error.step,
                "wall_ns": error.wall_ns or None,
                "script": _of_script(attempt, error),
                "victim": rank in victims and not from_launcher(error),
                "exit_codes": {str(whose): code for whose, code in sorted(error.exit_codes.items())},
                "traceback": error.traceback,
                "traceback_short": short_traceback(error.traceback, _last_words(error)),
            }
            for rank, error in texts
        ]
    return rows


def _last_words(error: RankError) -> str:
    """The message, if titles show it whole."""
    return error.message if message_shown(error.message) == error.message else ""


def _of_script(attempt: Attempt, error: RankError) -> bool:
    """Whether the script that started the ranks raised it; without training ranks, the script is the rank."""
    return error.script and bool(attempt.series) and not from_launcher(error)
