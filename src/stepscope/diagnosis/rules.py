"""Ask every family of rules and put the answers in order."""

from __future__ import annotations

from stepscope.diagnosis.bounds import find_input_bound
from stepscope.diagnosis.crashes import find_crashes
from stepscope.diagnosis.healthy import find_healthy, find_insufficient
from stepscope.diagnosis.stragglers import find_stragglers
from stepscope.diagnosis.view import view_of
from stepscope.diagnosis.window import Window
from stepscope.records.finding import SEVERITIES, Finding
from stepscope.records.series import RunData

__all__ = ["diagnose"]


def diagnose(run: RunData, window: Window, *, reached: bool = False) -> list[Finding]:
    """All findings, the most severe and most costly first; never empty, never an exception for what a run lacks.

    ``reached``: whether the recorder is known to have got into any process, recorded or not.
    """
    view = view_of(window)
    crashes = find_crashes(run)
    slow = [*find_stragglers(view), *find_input_bound(run, view)]
    slow.sort(key=_weight, reverse=True)
    # A death is never a matter of its price, and after one nobody asks for more steps.
    findings = [*crashes, *slow, *([] if crashes else find_insufficient(run, window, view, reached=reached))]
    return findings or find_healthy(view)


def _weight(finding: Finding) -> tuple[int, float]:
    return SEVERITIES.index(finding.severity), float(finding.cost.get("share", 0.0))
