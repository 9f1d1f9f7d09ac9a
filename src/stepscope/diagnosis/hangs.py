"""Hangs that the watchdog found, among the other findings of a run.

One that never ended leads all else, and what happened to the ranks afterwards (somebody ended them, or a timeout did)
only follows.  One that came back is a stall, and the steps tell of it too: said once, with the figures of the steps and
the line of code of the watchdog.  On several hosts each watchdog tells what it saw; the one that knows the culprit
speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepscope.diagnosis.attempts import attempts_of
from stepscope.hangs.finding import finding_of
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.hang import HangRecord
from stepscope.records.series import RunData

__all__ = ["find_hangs", "has_ended", "led_by_hangs", "with_stalls"]

NEAR_STEPS = 1
"""A stall shows in the step that was under way, or in the one after it."""


def find_hangs(run: RunData) -> list[Finding]:
    """Those that the job did not come back from, of the last attempt."""
    left = [hang for hang in _told_once(run.hangs) if not _came_back(run, hang) and not _earlier(run, hang)]
    return [finding_of(hang, over=has_ended(run)) for hang in left]


def led_by_hangs(hangs: Sequence[Finding], crashes: Sequence[Finding]) -> list[Finding]:
    """Both in the order in which they are to be told."""
    crashed = {rank for crash in crashes for rank in crash.ranks}
    # Of a rank that is gone the crash knows more: its exception, its step, what was lost.
    told = [hang for hang in hangs if not (hang.kind == "rank_crashed" and crashed & set(hang.ranks))]
    if not told:
        return [*crashes]
    before = [crash for crash in crashes if _before(crash, told)]
    if any(hang.evidence.get("over") == "aborted" for hang in told):
        return [*before, *told]  # that the ranks are gone is what was asked for
    after = [replace(crash, severity="info") for crash in crashes if crash not in before]
    return [*before, *told, *after]


def with_stalls(run: RunData, slow: Sequence[Finding]) -> list[Finding]:
    """``slow``, and in it the hangs that were over again."""
    findings = list(slow)
    for hang in _told_once(run.hangs):
        if _earlier(run, hang):
            past = finding_of(hang, over=True)
            findings.append(replace(past, severity="warning", title=f"In an earlier attempt: {past.title}"))
        elif _came_back(run, hang):
            _join(findings, finding_of(replace(hang, over="recovered")))
    return findings


def has_ended(run: RunData) -> bool:
    """Whether its launcher saw its end: then no standstill goes on, also one whose end nobody saw."""
    return isinstance(run.meta.get("end"), dict)


def _join(findings: list[Finding], stall: Finding) -> None:
    """Into the finding that tells of the same steps, if there is one."""
    for place, found in enumerate(findings):
        if found.kind == "stall" and _same_stretch(found, stall):
            findings[place] = replace(
                stall,
                severity=max(found.severity, stall.severity, key=SEVERITIES.index),
                steps=found.steps,
                cost=found.cost,
                evidence={**found.evidence, "hang": stall.evidence},
            )
            return
    findings.append(replace(stall, evidence={"hang": stall.evidence}))


def _same_stretch(found: Finding, stall: Finding) -> bool:
    if found.steps is None or stall.steps is None:
        return False
    return found.steps[0] - NEAR_STEPS <= stall.steps[1] and stall.steps[0] <= found.steps[1] + NEAR_STEPS


def _came_back(run: RunData, hang: HangRecord) -> bool:
    """It was seen to, or the job ended well after all."""
    end = run.meta.get("end")
    finished = isinstance(end, dict) and end.get("status") == "finished"
    return hang.over == "recovered" or (finished and hang.over == "ended")


def _earlier(run: RunData, hang: HangRecord) -> bool:
    """Whether the job was started anew since."""
    last = attempts_of(run)[-1]
    begun_ns = min((series.anchor_wall_ns for series in last.series), default=0)
    return last.number > 0 and begun_ns > hang.declared_wall_ns


def _told_once(hangs: Sequence[HangRecord]) -> list[HangRecord]:
    """Without what other hosts only saw the outside of."""
    known = [hang for hang in hangs if not hang.undecidable]
    return [hang for hang in hangs if not (hang.undecidable and any(_overlap(hang, other) for other in known))]


def _overlap(one: HangRecord, other: HangRecord) -> bool:
    ends = [hang.over_wall_ns or float("inf") for hang in (one, other)]
    return one.host != other.host and max(one.stopped_wall_ns, other.stopped_wall_ns) <= min(ends)


def _before(crash: Finding, hangs: Sequence[Finding]) -> bool:
    """Whether a rank died of itself before anything stood still, so that the hang follows from it."""
    when = crash.evidence.get("wall_ns")
    began_ns = min(hang.evidence["stopped_wall_ns"] for hang in hangs)
    return isinstance(when, int) and 0 < when <= began_ns
