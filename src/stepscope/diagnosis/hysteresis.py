"""The same rules while a job runs, without flicker: a finding is shown once it persists, and kept until it is gone.

Each evaluation judges one window over the last ``LIVE_STEPS`` steps.  A finding that holds in two evaluations at least
``CONFIRM_STEPS`` apart is shown; it is withdrawn after ``RELEASE_STEPS`` steps in which none found it.  Its severity
rises at once and falls only after as many steps.  A crash or a hang is shown at once, and withdrawn as soon as it is
over.

    watched = ()
    while running:
        run = open_run(path)
        watched, changes = evaluate(run, watched)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from stepscope.diagnosis.engine.window import Window, build_window
from stepscope.diagnosis.findings import diagnose
from stepscope.judge import thresholds
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.hang import HangKind
from stepscope.records.series import RunData

__all__ = ["AT_ONCE", "Change", "Watched", "evaluate", "follow", "live_window"]

AT_ONCE = frozenset(get_args(HangKind))
"""Includes crashes."""
NO_ALARM = frozenset({"healthy", "insufficient_data", "compute_bound"})
"""Kinds for when there is nothing to report."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    finding: Finding
    """As last found, with the severity that is shown."""
    first_step: int
    """Step of the evaluation that first found it."""
    last_step: int
    """Step of the last evaluation that found it."""
    severe_step: int
    """Step of the last evaluation that found it as severe as it is shown."""
    shown: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    what: Literal["shown", "worse", "withdrawn"]
    step: int
    finding: Finding


def live_window(run: RunData) -> Window:
    return build_window(run, last=_steps_back(run))


def evaluate(
    run: RunData, watched: Sequence[Watched] = (), window: Window | None = None
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """Judge the last steps of a run; return what to watch from now on, and what changed for a viewer.

    ``window``: the result of ``live_window``, for callers that need it too.
    """
    window = live_window(run) if window is None else window
    step = int(window.steps[-1]) if len(window.steps) else 0
    return follow(watched, diagnose(run, window, alive=run.meta.get("end") is None), step)


def _steps_back(run: RunData) -> int:
    """Enough steps to include enough timed ones where the device is timed only now and then."""
    timed = [series.steps["step"][series.steps.timed] for series in run.ranks if series.steps.timed.any()]
    if not timed:
        return thresholds.LIVE_STEPS
    reach = max(int(own[-1]) - int(own[-thresholds.LIVE_TIMED_STEPS :][0]) + 1 for own in timed)
    return min(max(reach, thresholds.LIVE_STEPS), thresholds.LIVE_STEPS_AT_MOST)


def follow(
    watched: Sequence[Watched], findings: Sequence[Finding], step: int
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """The hysteresis alone: compare the findings of an evaluation at ``step`` with those watched so far."""
    found = {_key(finding): finding for finding in findings if finding.kind not in NO_ALARM}
    next_watched: list[Watched] = []
    changes: list[Change] = []
    for entry in watched:
        finding = found.pop(_key(entry.finding), None)
        if finding is not None:
            after, change = _found_again(entry, finding, step)
            next_watched.append(after)
            changes += change
        elif step - entry.last_step < _release_steps(entry):
            next_watched.append(entry)
        elif entry.shown:
            changes.append(Change(what="withdrawn", step=step, finding=entry.finding))
    for finding in found.values():
        shown = finding.kind in AT_ONCE
        next_watched.append(Watched(finding=finding, first_step=step, last_step=step, severe_step=step, shown=shown))
        changes += [Change(what="shown", step=step, finding=finding)] if shown else []
    return tuple(next_watched), tuple(changes)


def _found_again(entry: Watched, finding: Finding, step: int) -> tuple[Watched, list[Change]]:
    was, now = SEVERITIES.index(entry.finding.severity), SEVERITIES.index(finding.severity)
    severe_step = step if now >= was else entry.severe_step
    if now < was and step - entry.severe_step < thresholds.RELEASE_STEPS:
        finding = replace(finding, severity=entry.finding.severity)
    confirmed = entry.shown or step - entry.first_step >= thresholds.CONFIRM_STEPS
    after = replace(entry, finding=finding, last_step=step, severe_step=severe_step, shown=confirmed)
    if confirmed and not entry.shown:
        return after, [Change(what="shown", step=step, finding=finding)]
    return after, [Change(what="worse", step=step, finding=finding)] if entry.shown and now > was else []


def _release_steps(entry: Watched) -> int:
    if entry.finding.kind in AT_ONCE:
        return 0
    return thresholds.RELEASE_STEPS if entry.shown else 1


def _key(finding: Finding) -> tuple[str, tuple[int, ...], str | None]:
    return finding.kind, finding.ranks, finding.phase
