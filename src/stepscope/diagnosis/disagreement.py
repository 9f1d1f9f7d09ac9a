"""Ranks that died because they did not agree on a collective.

gloo raises when the sizes of a collective differ, NCCL's watchdog when somebody does not come; then everybody has an
error of the network, and none says whose fault it is.  What the Flight Recorders of those ranks knew when they died
says it (``flight/``), or what they called last (``last_calls.py``), if it can be said: it is told like a hang, because
that is what it is on other backends.

NCCL's watchdog ends a rank whose collective does not end in time (SIGABRT), and its heartbeat monitor one whose
watchdog is stuck; both have all ranks write down their Flight Recorders first.  The rank that is aborted waited; who it
waited for is to blame.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepscope.diagnosis.attempts import attempts_of
from stepscope.diagnosis.crashes import Failure, failures_of, ranks_of
from stepscope.diagnosis.last_calls import unlike_calls
from stepscope.flight.wording import ranks_text
from stepscope.hangs.finding import finding_of
from stepscope.records.finding import Finding
from stepscope.records.hang import Culprit, Frame, HangKind, HangRecord, RankThere, WaitingIn
from stepscope.records.series import RunData

__all__ = ["find_disagreement"]

SURE = ("hang_mismatch",)
"""Kinds that the death of a rank cannot look like."""
GAVE_UP = ("SIGABRT",)
"""gloo ends a rank that is sent more than it expects, NCCL's watchdog one whose collective does not end."""


def find_disagreement(run: RunData) -> list[Finding]:
    failures = [failure for failure in failures_of(run) if failure.rank is not None]  # of ranks, not of the script
    record = _by_recorders(run, failures) or _by_last_calls(run, failures)
    return [finding_of(record)] if record is not None else []


def _by_recorders(run: RunData, failures: list[Failure]) -> HangRecord | None:
    verdict = run.flight
    kind = str(verdict.get("kind") or "")
    aborted = ranks_of([one for one in failures if one.signal in GAVE_UP or one.cause == "vanished"])
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
        _record(failures, kind=verdict["kind"], title=title),
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
    """Whether all that died gave up in C, vanished or were taken along: nobody failed by itself."""
    return bool(failures) and all(one.taken or one.signal in GAVE_UP or one.cause == "vanished" for one in failures)


def _by_last_calls(run: RunData, failures: list[Failure]) -> HangRecord | None:
    """Of a rank that was aborted no recorder answers any more; its ring has the size it called with."""
    aborted = [failure for failure in failures if failure.signal in GAVE_UP]
    calls = unlike_calls(run, attempts_of(run)[-1]) if aborted and _nobody_else(failures, "hang_mismatch") else None
    if calls is None:
        return None
    lead = aborted[0]
    at = f" in step {lead.last_step + 1}" if lead.last_step is not None else ""
    ranks = {rank: call for call, side in calls.sides.items() for rank in side}
    guilty = calls.odd or tuple(sorted(ranks))
    return replace(
        _record(failures, kind="hang_mismatch", title=f"{calls.text}; the library aborted rank {lead.rank}{at}."),
        culprits=tuple(
            Culprit(rank=rank, reason=f"called {ranks[rank].op} with {ranks[rank].bytes:,} bytes") for rank in guilty
        ),
        victims=tuple(sorted(set(ranks) - set(guilty))),
        undecidable=not calls.odd,
        collective=WaitingIn(group=ranks[guilty[0]].group, op=ranks[guilty[0]].op),
        evidence=(f"By the last calls in the rings of {ranks_text(sorted(ranks))}.",),
    )


def _record(failures: list[Failure], *, kind: HangKind, title: str) -> HangRecord:
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
    """Whether all that died were taken along, by their own words; who said nothing, or gave up in C, may have been."""
    others = [failure for failure in failures if not failure.taken]
    if not any(failure.type for failure in failures):
        return False
    return not others or (kind in SURE and all(f.cause == "vanished" or f.signal in GAVE_UP for f in others))


def _frame(raw: dict[str, Any] | None) -> Frame | None:
    return Frame(**raw) if raw else None
