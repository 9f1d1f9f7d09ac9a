"""Hangs: those the watchdog found, and ranks that died because they disagreed on a collective.

A hang that never ended comes first, and what happened to the ranks afterwards (a user or a timeout ended them) only
follows.  A hang that recovered is a stall, which the steps show too: it is reported once, with the figures of the steps
and the watchdog's line of code.  On several hosts each watchdog reports what it saw; the one that knows the culprit
counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepscope.diagnosis.engine.attempts import attempts_of
from stepscope.diagnosis.rules.crashes import Failure, call_mismatch, failures_of, ranks_of
from stepscope.flight.wording import ranks_text
from stepscope.hangs.report import finding_of
from stepscope.judge import thresholds
from stepscope.records.finding import Finding, as_remark, highest
from stepscope.records.hang import Culprit, Frame, HangKind, HangRecord, RankThere, WaitingIn
from stepscope.records.series import RunData

__all__ = ["find_disagreement", "find_hangs", "has_ended", "led_by_hangs", "with_stalls"]


# -- hangs and stalls -------------------------------------------------------------------------------------------------


def find_hangs(run: RunData) -> list[Finding]:
    """Hangs of the last attempt that the job did not recover from."""
    left = [
        hang
        for hang in _without_duplicates(run.hangs)
        if not _came_back(run, hang) and not _in_earlier_attempt(run, hang)
    ]
    return [finding_of(hang, over=has_ended(run)) for hang in left]


def led_by_hangs(hangs: Sequence[Finding], crashes: Sequence[Finding]) -> list[Finding]:
    """Both in the order in which they are reported."""
    crashed = {rank for crash in crashes for rank in crash.ranks}
    # For a rank that is gone the crash knows more: its exception, its step, what was lost.
    reported = [hang for hang in hangs if not (hang.kind == "rank_crashed" and crashed & set(hang.ranks))]
    if not reported:
        return [*crashes]
    before = [crash for crash in crashes if _before(crash, reported)]
    if any(hang.evidence.get("over") == "aborted" for hang in reported):
        return [*before, *reported]  # the ranks were ended on request
    after = [as_remark(crash) for crash in crashes if crash not in before]
    return [*before, *reported, *after]


def with_stalls(run: RunData, slow: Sequence[Finding]) -> list[Finding]:
    """``slow``, including the hangs that recovered."""
    findings = list(slow)
    for hang in _without_duplicates(run.hangs):
        if _in_earlier_attempt(run, hang):
            past = finding_of(hang, over=True)
            findings.append(replace(past, severity="warning", title=f"In an earlier attempt: {past.title}"))
        elif _came_back(run, hang):
            _join(findings, finding_of(replace(hang, over="recovered")))
    return findings


def has_ended(run: RunData) -> bool:
    """Whether the launcher recorded the end of the job: then no hang continues, even one whose end was not recorded."""
    return isinstance(run.meta.get("end"), dict)


def _join(findings: list[Finding], stall: Finding) -> None:
    """Merge into the finding about the same steps, if there is one."""
    for place, found in enumerate(findings):
        if found.kind == "stall" and _same_stretch(found, stall):
            findings[place] = replace(
                stall,
                severity=highest(found.severity, stall.severity),
                steps=found.steps,
                cost=found.cost,
                evidence={**found.evidence, "hang": stall.evidence},
            )
            return
    findings.append(replace(stall, evidence={"hang": stall.evidence}))


def _same_stretch(found: Finding, stall: Finding) -> bool:
    """Whether any of its steps is one of the stall's, or next to one."""
    if found.steps is None or stall.steps is None:
        return False
    steps = found.evidence.get("steps_longer") or range(found.steps[0], found.steps[1] + 1)
    return any(
        stall.steps[0] - thresholds.STALL_NEAR_STEPS <= step <= stall.steps[1] + thresholds.STALL_NEAR_STEPS
        for step in steps
    )


def _came_back(run: RunData, hang: HangRecord) -> bool:
    """Whether it was seen to recover, or went on unseen, or the job ended well after all."""
    end = run.meta.get("end")
    finished = isinstance(end, dict) and end.get("status") == "finished"
    if hang.over in ("recovered", "aborted"):
        return hang.over == "recovered"
    return (finished and hang.over == "ended") or _went_on(run, hang)


def _went_on(run: RunData, hang: HangRecord) -> bool:
    """Whether all its ranks have made later steps: its end was not recorded if the agent was gone at that time."""
    last = {series.rank: series.steps["step"][-1] for series in attempts_of(run)[-1].series if len(series.steps)}
    there = [(rank.rank, rank.step) for rank in hang.ranks if rank.alive]
    passed = [step is not None and last.get(rank, -1) > step for rank, step in there]
    return len(there) == len(hang.ranks) > 0 and all(passed)


def _in_earlier_attempt(run: RunData, hang: HangRecord) -> bool:
    """Whether the job was restarted since."""
    last = attempts_of(run)[-1]
    begun_ns = min((series.anchor_wall_ns for series in last.series), default=0)
    return last.number > 0 and begun_ns > hang.declared_wall_ns


def _without_duplicates(hangs: Sequence[HangRecord]) -> list[HangRecord]:
    """Drop undecided hangs that another host explains."""
    known = [hang for hang in hangs if not hang.undecidable]
    return [hang for hang in hangs if not (hang.undecidable and any(_overlap(hang, other) for other in known))]


def _overlap(one: HangRecord, other: HangRecord) -> bool:
    ends = [hang.over_wall_ns or float("inf") for hang in (one, other)]
    return one.host != other.host and max(one.stopped_wall_ns, other.stopped_wall_ns) <= min(ends)


def _before(crash: Finding, hangs: Sequence[Finding]) -> bool:
    """Whether a rank died before progress stopped, so that the hang follows from it."""
    when = crash.evidence.get("wall_ns")
    began_ns = min(hang.evidence["stopped_wall_ns"] for hang in hangs)
    return isinstance(when, int) and 0 < when <= began_ns


# -- disagreement on a collective -------------------------------------------------------------------------------------
# gloo raises when the sizes of a collective differ, NCCL's watchdog when a rank does not arrive; then every rank has a
# network error, and none names the culprit.  The Flight Recorders of those ranks at their death (``flight/``) or their
# last calls (``rules/crashes.py``) may.  It is reported like a hang, because that is what it is on other backends.
#
# NCCL's watchdog ends a rank whose collective does not end in time (SIGABRT), and its heartbeat monitor one whose
# watchdog is stuck; both make all ranks dump their Flight Recorders first.  The aborted rank waited; the rank it waited
# for is to blame.

SURE_KINDS = ("hang_mismatch",)
"""Kinds that cannot be mistaken for the death of a rank."""
ABORT_SIGNALS = ("SIGABRT",)
"""gloo ends a rank that is sent more than it expects, NCCL's watchdog one whose collective does not end."""


def find_disagreement(run: RunData) -> list[Finding]:
    failures = [failure for failure in failures_of(run) if failure.rank is not None]  # of ranks, not of the script
    if any(failure.at_exit for failure in failures):
        return []  # it had no more collectives to call
    record = _by_recorders(run, failures) or _by_last_calls(run, failures)
    return [finding_of(record)] if record is not None else []


def _by_recorders(run: RunData, failures: list[Failure]) -> HangRecord | None:
    verdict = run.flight
    kind = str(verdict.get("kind") or "")
    aborted = ranks_of(
        [failure for failure in failures if failure.signal in ABORT_SIGNALS or failure.cause == "vanished"]
    )
    by_watchdog = bool(verdict.get("nccl_dumps")) and _only_aborted(failures)
    if not kind.startswith("hang_") or not verdict["culprits"] or not (by_watchdog or _nobody_else(failures, kind)):
        return None
    ended: tuple[str, ...] = ()
    title = verdict["title"]
    if by_watchdog:
        who = ranks_text(aborted) if aborted else "the job"
        title = f"{title} NCCL's watchdog aborted {who}."
        wrote = f"NCCL's watchdog, or its heartbeat monitor, wrote the dumps of {ranks_text(verdict['nccl_dumps'])}"
        ended = (f"{wrote} and aborted {who}.",)
    return replace(
        _hang_record(failures, kind=verdict["kind"], title=title),
        culprits=tuple(
            Culprit(rank=one["rank"], reason=one["reason"], at=_frame(one["at"])) for one in verdict["reasons"]
        ),
        victims=tuple(verdict["victims"]),
        undecidable=verdict["undecidable"],
        collective=WaitingIn(**verdict["waiting_in"]) if verdict["waiting_in"] else None,
        cycle=tuple(verdict["cycle"]),
        evidence=(*ended, *verdict["evidence"]),
    )


def _only_aborted(failures: list[Failure]) -> bool:
    """Whether all that died were aborted, vanished or followed another rank: none failed on its own."""
    return bool(failures) and all(
        failure.taken or failure.signal in ABORT_SIGNALS or failure.cause == "vanished" for failure in failures
    )


def _by_last_calls(run: RunData, failures: list[Failure]) -> HangRecord | None:
    """The Flight Recorder of an aborted rank no longer answers, but its ring has the size it called with."""
    aborted = [failure for failure in failures if failure.signal in ABORT_SIGNALS]
    calls = call_mismatch(run, attempts_of(run)[-1]) if aborted and _nobody_else(failures, "hang_mismatch") else None
    if calls is None:
        return None
    lead = aborted[0]
    at = f" in step {lead.last_step + 1}" if lead.last_step is not None else ""
    ranks = {rank: call for call, side in calls.sides.items() for rank in side}
    guilty = calls.odd or tuple(sorted(ranks))
    return replace(
        _hang_record(failures, kind="hang_mismatch", title=f"{calls.text}; the library aborted rank {lead.rank}{at}."),
        culprits=tuple(
            Culprit(rank=rank, reason=f"called {ranks[rank].op} with {ranks[rank].bytes:,} bytes") for rank in guilty
        ),
        victims=tuple(sorted(set(ranks) - set(guilty))),
        undecidable=not calls.odd,
        collective=WaitingIn(group=ranks[guilty[0]].group, op=ranks[guilty[0]].op),
        evidence=(f"By the last calls in the rings of {ranks_text(sorted(ranks))}.",),
    )


def _hang_record(failures: list[Failure], *, kind: HangKind, title: str) -> HangRecord:
    died_ns = min((failure.wall_ns for failure in failures if failure.wall_ns), default=1)
    steps = {failure.rank: failure.last_step for failure in failures if failure.rank is not None}
    return HangRecord(
        number=0,
        host="",
        kind=kind,
        title=title,
        declared_wall_ns=died_ns,
        stopped_wall_ns=died_ns - 1,  # before the deaths, which follow from it
        threshold_s=0.0,
        ranks=tuple(
            RankThere(rank=rank, pid=0, alive=False, step=None if step is None else step + 1)
            for rank, step in sorted(steps.items())
        ),
        over="ended",
        over_wall_ns=died_ns,
    )


def _nobody_else(failures: list[Failure], kind: str) -> bool:
    """Whether all that died say that they followed others; those that said nothing, or were aborted, may have."""
    others = [failure for failure in failures if not failure.taken]
    if not any(failure.type for failure in failures):
        return False
    return not others or (
        kind in SURE_KINDS and all(f.cause == "vanished" or f.signal in ABORT_SIGNALS for f in others)
    )


def _frame(raw: dict[str, Any] | None) -> Frame | None:
    return Frame(**raw) if raw else None
