"""The same rules while a job runs, without flicker: a finding is shown when it holds on, and kept until it is gone.

One window over the last ``LIVE_STEPS`` steps is judged at each look.  A finding that holds at two looks at least
``CONFIRM_STEPS`` apart is shown; it is withdrawn after ``RELEASE_STEPS`` steps in which no look found it.  Its severity
rises at once and falls only after as many steps.  A death or a hang is shown at once, and withdrawn as soon as it is
over.

    watch = ()
    while running:
        run = open_run(path)
        watch, changes = look(run, watch)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.rules import diagnose
from stepscope.diagnosis.window import Window, build_window
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.hang import HangKind
from stepscope.records.series import RunData

__all__ = ["AT_ONCE", "Change", "Watched", "follow", "live_window", "look"]

AT_ONCE = frozenset(get_args(HangKind))
"""A death among them."""
NO_ALARM = frozenset({"healthy", "insufficient_data", "compute_bound"})
"""What is said when there is nothing to say."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    finding: Finding
    """As last found, with the severity that is shown."""
    first_step: int
    """Of the first look in this row."""
    last_step: int
    """Of the last look that found it."""
    severe_step: int
    """Of the last look that found it as severe as it is shown."""
    shown: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    what: Literal["shown", "worse", "withdrawn"]
    step: int
    finding: Finding


def live_window(run: RunData) -> Window:
    return build_window(run, last=_steps_back(run))


def look(
    run: RunData, watched: Sequence[Watched] = (), window: Window | None = None
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """Judge the last steps of a run; what is watched from now on, and what changed for somebody who looks on.

    ``window``: what ``live_window`` made of it, for who needs it besides.
    """
    window = live_window(run) if window is None else window
    step = int(window.steps[-1]) if len(window.steps) else 0
    return follow(watched, diagnose(run, window, alive=run.meta.get("end") is None), step)


def _steps_back(run: RunData) -> int:
    """So many steps that, where a device is timed now and then, enough of them are timed."""
    timed = [series.device_steps["step"] for series in run.ranks if len(series.device_steps)]
    if not timed:
        return thresholds.LIVE_STEPS
    reach = max(int(own[-1]) - int(own[-thresholds.LIVE_TIMED_STEPS :][0]) + 1 for own in timed)
    return min(max(reach, thresholds.LIVE_STEPS), thresholds.LIVE_STEPS_AT_MOST)


def follow(
    watched: Sequence[Watched], findings: Sequence[Finding], step: int
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """The hysteresis alone: the findings of a look at ``step`` against those watched so far."""
    held = {_key(finding): finding for finding in findings if finding.kind not in NO_ALARM}
    kept: list[Watched] = []
    changes: list[Change] = []
    for one in watched:
        finding = held.pop(_key(one.finding), None)
        if finding is not None:
            after, change = _found_again(one, finding, step)
            kept.append(after)
            changes += change
        elif step - one.last_step < _release_steps(one):
            kept.append(one)
        elif one.shown:
            changes.append(Change(what="withdrawn", step=step, finding=one.finding))
    for finding in held.values():
        shown = finding.kind in AT_ONCE
        kept.append(Watched(finding=finding, first_step=step, last_step=step, severe_step=step, shown=shown))
        changes += [Change(what="shown", step=step, finding=finding)] if shown else []
    return tuple(kept), tuple(changes)


def _found_again(one: Watched, finding: Finding, step: int) -> tuple[Watched, list[Change]]:
    was, now = SEVERITIES.index(one.finding.severity), SEVERITIES.index(finding.severity)
    severe_step = step if now >= was else one.severe_step
    if now < was and step - one.severe_step < thresholds.RELEASE_STEPS:
        finding = replace(finding, severity=one.finding.severity)
    confirmed = one.shown or step - one.first_step >= thresholds.CONFIRM_STEPS
    after = replace(one, finding=finding, last_step=step, severe_step=severe_step, shown=confirmed)
    if confirmed and not one.shown:
        return after, [Change(what="shown", step=step, finding=finding)]
    return after, [Change(what="worse", step=step, finding=finding)] if one.shown and now > was else []


def _release_steps(one: Watched) -> int:
    if one.finding.kind in AT_ONCE:
        return 0
    return thresholds.RELEASE_STEPS if one.shown else 1


def _key(finding: Finding) -> tuple[str, tuple[int, ...], str | None]:
    return finding.kind, finding.ranks, finding.phase
