"""Ranks that died because they did not agree on a collective.

gloo raises when the sizes of a collective differ, NCCL's watchdog when somebody does not come; then everybody has an
error of the network, and none says whose fault it is.  What the Flight Recorders of those ranks knew when they died
says it (``flight/``), if it can be said: it is told like a hang, because that is what it is on other backends.
"""

from __future__ import annotations

from typing import Any

from stepscope.diagnosis.crashes import Failure, failures_of
from stepscope.hangs.finding import finding_of
from stepscope.records.finding import Finding
from stepscope.records.hang import Culprit, Frame, HangRecord, RankThere, WaitingIn
from stepscope.records.series import RunData

__all__ = ["find_disagreement"]

SURE = ("hang_mismatch",)
"""Kinds that the death of a rank cannot look like."""
GAVE_UP = ("SIGABRT",)
"""gloo ends a rank that is sent more than it expects, NCCL's watchdog one whose collective does not end."""


def find_disagreement(run: RunData) -> list[Finding]:
    verdict = run.flight
    kind = str(verdict.get("kind") or "")
    failures = failures_of(run)
    if not kind.startswith("hang_") or not verdict["culprits"] or not _nobody_else(failures, kind):
        return []
    died_ns = min((failure.wall_ns for failure in failures if failure.wall_ns), default=1)
    steps = {failure.rank: failure.last_step for failure in failures}
    record = HangRecord(
        number=0,
        host="",
        kind=verdict["kind"],
        title=verdict["title"],
        declared_wall_ns=died_ns,
        stopped_wall_ns=died_ns - 1,  # before the deaths, which follow from it
        threshold_s=0.0,
        culprits=tuple(
            Culprit(rank=one["rank"], reason=one["reason"], at=_frame(one["at"])) for one in verdict["reasons"]
        ),
        victims=tuple(verdict["victims"]),
        undecidable=verdict["undecidable"],
        collective=WaitingIn(**verdict["waiting_in"]) if verdict["waiting_in"] else None,
        cycle=tuple(verdict["cycle"]),
        evidence=tuple(verdict["evidence"]),
        ranks=tuple(
            RankThere(rank=rank, pid=0, alive=False, step=None if step is None else step + 1)
            for rank, step in sorted(steps.items())
        ),
        over="ended",
        over_wall_ns=died_ns,
    )
    return [finding_of(record)]


def _nobody_else(failures: list[Failure], kind: str) -> bool:
    """Whether all that died were taken along, by their own words; who said nothing, or gave up in C, may have been."""
    others = [failure for failure in failures if not failure.taken]
    if not any(failure.type for failure in failures):
        return False
    return not others or (kind in SURE and all(f.cause == "vanished" or f.signal in GAVE_UP for f in others))


def _frame(raw: dict[str, Any] | None) -> Frame | None:
    return Frame(**raw) if raw else None
